package stagelink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// What belongs to the contract is encoded by package sdk, and ends a message or follows its length. All else is numbers as
// varints, flags of a byte, and lists and texts behind their length.

// message is anything that crosses a data connection; kind says which fields count.
type message struct {
	kind    uint8
	order   pipeline.Order  // of kindOp, kindPlan
	tag     pipeline.Tag    // of kindAbort, kindFinished, kindFailed
	place   sdk.Place       // of kindAnswered
	epoch   uint64          // of kindAnswered, kindLost
	id      uint64          // of kindAnswered
	err     error           // of kindAnswered (may be nil), kindFailed, kindLost
	results []sdk.SeqResult // of kindFinished
}

// orderMessage wraps an order.
func orderMessage(o pipeline.Order) message {
	if o.Plan != nil {
		return message{kind: kindPlan, order: o}
	}
	return message{kind: kindOp, order: o}
}

// appendMessage appends what the message says. An error of the contract's encoding leaves part of it.
func appendMessage(b []byte, m *message) ([]byte, error) {
	switch m.kind {
	case kindAbort:
		return appendTag(b, m.tag), nil
	case kindAnswered:
		b = binary.AppendUvarint(b, m.epoch)
		b = binary.AppendUvarint(b, m.id)
		return appendStageError(appendPlace(b, m.place), m.err)
	case kindFinished:
		return sdk.AppendResults(appendTag(b, m.tag), m.results)
	case kindFailed:
		return appendStageError(appendTag(b, m.tag), m.err)
	case kindLost:
		return appendStageError(binary.AppendUvarint(b, m.epoch), m.err)
	case kindOp:
		return sdk.AppendOp(appendOrder(b, &m.order), m.order.Op)
	case kindPlan:
		return appendPlan(appendOrder(b, &m.order), m.order.Plan)
	}
	return b, nil
}

// appendOrder appends what every order has.
func appendOrder(b []byte, o *pipeline.Order) []byte {
	b = binary.AppendUvarint(b, o.Epoch)
	b = binary.AppendUvarint(b, o.ID)
	return appendTrace(b, o.Trace)
}

func appendInt(b []byte, v int) []byte { return binary.AppendVarint(b, int64(v)) }

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func appendTag(b []byte, t pipeline.Tag) []byte {
	b = binary.AppendUvarint(b, t.Epoch)
	b = binary.AppendUvarint(b, t.Step)
	return appendInt(b, t.MicroBatch)
}

func appendPlace(b []byte, p sdk.Place) []byte { return appendInt(appendInt(b, p.Stage), p.Rank) }

// appendTrace appends a flag, and the trace where there is one.
func appendTrace(b []byte, t pipeline.TraceID) []byte {
	if t == (pipeline.TraceID{}) {
		return appendBool(b, false)
	}
	return append(appendBool(b, true), t[:]...)
}

// appendPlan appends the number of micro-batches, the sequences of each but the last, and the sequences.
func appendPlan(b []byte, p *pipeline.StepPlan) ([]byte, error) {
	n := p.MicroBatches()
	b = binary.AppendUvarint(b, uint64(n))
	for i := range n - 1 {
		b = binary.AppendUvarint(b, uint64(p.Cuts[i+1]-p.Cuts[i]))
	}
	return sdk.AppendSteps(b, p.Seqs)
}

const (
	// maxText is the most of an error's text that is sent: log lines of an executor included.
	maxText = 64 << 10
	// maxCauseText is the most of each text within an executor's own error, which must fit sdk.MaxEncoding.
	maxCauseText = sdk.MaxEncoding / 4
)

// clip returns at most max bytes of a text, in UTF-8.
func clip(s string, max int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > max {
		return strings.ToValidUTF8(s[:max-len("…")], "") + "…"
	}
	return s
}

// appendStageError appends what is to be known of a *StageError elsewhere; err may be nil.
func appendStageError(b []byte, err error) ([]byte, error) {
	b = appendBool(b, err != nil)
	if err == nil {
		return b, nil
	}
	e, ok := errors.AsType[*pipeline.StageError](err)
	if !ok {
		panic(fmt.Sprintf("stagelink: %T in place of a *pipeline.StageError", err))
	}
	b = appendPlace(b, e.Place)
	r := remoteError(e.Err)
	for _, s := range []string{e.Node, e.Plugin, string(e.Phase), r.Text} {
		b = appendText(b, clip(s, maxText))
	}
	b = appendBool(b, r.Gone)
	b = appendBool(b, r.Cause != nil)
	if r.Cause == nil {
		return b, nil
	}
	cause := *r.Cause
	for _, s := range []*string{&cause.Message, &cause.File, &cause.Tensor} {
		*s = clip(*s, maxCauseText)
	}
	raw, err := cause.MarshalBinary()
	return append(b, raw...), err
}

// appendActivation appends the metadata of a frame of hidden rows.
func appendActivation(b []byte, t pipeline.Tag, seqs []sdk.SeqID) []byte {
	b = appendTag(b, t)
	b = binary.AppendUvarint(b, uint64(len(seqs)))
	for _, seq := range seqs {
		b = binary.AppendUvarint(b, uint64(seq))
	}
	return b
}
