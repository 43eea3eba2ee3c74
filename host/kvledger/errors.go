package kvledger

import (
	"fmt"

	"github.com/mlxcel/mlxcel/sdk"
)

// Reason is why a stage refuses a sequence. Its value is the label of the metric that counts refusals.
type Reason string

const (
	ReasonMemory          Reason = "memory"            // the stage's KV budget has no room now
	ReasonSequenceCap     Reason = "sequence_cap"      // the stage holds as many sequences as it may
	ReasonAlreadyCached   Reason = "already_cached"    // the stage holds a sequence of that name
	ReasonRejectedByStage Reason = "rejected_by_stage" // the ledger had room, the stage itself refused
)

// AdmissionDiagnostic tells which stage refused a sequence, and what it held at that moment. It is an error; a
// server answers it with 503.
type AdmissionDiagnostic struct {
	Stage           int
	Reason          Reason
	Used            int64 // bytes that the stage's sequences have reserved
	Budget          int64 // bytes that they may reserve together; 0 means no limit
	Required        int64 // bytes that were asked for
	ActiveSequences int   // on the stage
	MaxSequences    int   // 0 means no limit
	Seq             sdk.SeqID
	Err             error // the stage's own, with ReasonRejectedByStage
}

func (d *AdmissionDiagnostic) Error() string {
	switch d.Reason {
	case ReasonSequenceCap:
		return fmt.Sprintf("stage %d holds %d sequences, as many as it may: try again later, or raise --parallel", d.Stage, d.ActiveSequences)
	case ReasonAlreadyCached:
		return fmt.Sprintf("stage %d holds sequence %d already", d.Stage, d.Seq)
	case ReasonRejectedByStage:
		return fmt.Sprintf("stage %d refused a sequence of %d bytes of KV cache, with %d of %d bytes reserved by %d active sequences: %v",
			d.Stage, d.Required, d.Used, d.Budget, d.ActiveSequences, d.Err)
	}
	return fmt.Sprintf("stage %d has no memory for the request: %d bytes of KV cache needed, %d of %d bytes reserved by %d active sequences: try again later, or ask for fewer tokens",
		d.Stage, d.Required, d.Used, d.Budget, d.ActiveSequences)
}

func (d *AdmissionDiagnostic) Unwrap() error { return d.Err }

// TooLongError is a request that can never be served: not even with nothing else running. A server answers it with
// 400 context_length_exceeded.
type TooLongError struct {
	Prompt    int   // tokens
	MaxTokens int   // asked for
	Limit     int   // positions that a sequence can have
	Stage     int   // whose KV budget sets the limit; -1 where the model's context does
	Budget    int64 // of that stage, bytes
}

func (e *TooLongError) Error() string {
	what := fmt.Sprintf("the model's context holds %d tokens", e.Limit)
	if e.Stage >= 0 {
		what = fmt.Sprintf("the KV budget of stage %d, %d bytes, holds %d tokens", e.Stage, e.Budget, e.Limit)
	}
	if e.Prompt >= e.Limit {
		return fmt.Sprintf("the prompt has %d tokens, but %s, answer included: shorten the prompt", e.Prompt, what)
	}
	return fmt.Sprintf("the prompt has %d tokens and %d more were asked for, %d together, but %s: ask for at most %d, or shorten the prompt",
		e.Prompt, e.MaxTokens, e.Prompt+e.MaxTokens, what, e.Limit-e.Prompt)
}

// UnknownSequenceError is a sequence that was not admitted.
type UnknownSequenceError struct {
	Seq sdk.SeqID
}

func (e *UnknownSequenceError) Error() string {
	return fmt.Sprintf("sequence %d was not admitted", e.Seq)
}

// ShareError is a sequence that was to begin with more positions than another, or it itself, has reserved.
type ShareError struct {
	From      sdk.SeqID
	Keep      int
	Positions int // that it could begin with at most
}

func (e *ShareError) Error() string {
	return fmt.Sprintf("a sequence was to begin with %d positions of sequence %d: want at most %d", e.Keep, e.From, e.Positions)
}
