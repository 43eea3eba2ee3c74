package stagelink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/wire"
	"github.com/mlxcel/mlxcel/sdk"
)

// Numbers in messages are varints, but for seeds (8 bytes) and floats (4 or their bits), little-endian. Lists and texts
// begin with their length.

// message is anything that crosses a data connection; kind says which fields count.
type message struct {
	kind    uint8
	order   pipeline.Order  // of the kinds up to kindPlan
	tag     pipeline.Tag    // of kindAbort, kindFinished, kindFailed
	place   sdk.Place       // of kindAnswered
	epoch   uint64          // of kindAnswered, kindLost
	id      uint64          // of kindAnswered
	err     error           // of kindAnswered (may be nil), kindFailed, kindLost
	results []sdk.SeqResult // of kindFinished
}

// orderMessage wraps an order.
func orderMessage(o pipeline.Order) message {
	m := message{kind: kindPlan, order: o}
	switch o.Op.(type) {
	case sdk.Reservation:
		m.kind = kindReserve
	case sdk.Release:
		m.kind = kindRelease
	}
	return m
}

// appendFrame appends the message as a whole frame.
func appendFrame(b []byte, m *message) []byte {
	start := len(b)
	b = append(b, make([]byte, wire.HeaderBytes)...)
	b = appendMessage(b, m)
	h := wire.Header{Kind: m.kind, Meta: len(b) - start - wire.HeaderBytes}
	h.Put(b[start:])
	return b
}

func appendMessage(b []byte, m *message) []byte {
	switch m.kind {
	case kindAbort:
		return appendTag(b, m.tag)
	case kindAnswered:
		b = binary.AppendUvarint(b, m.epoch)
		b = binary.AppendUvarint(b, m.id)
		b = appendPlace(b, m.place)
		return appendStageError(b, m.err)
	case kindFinished:
		return appendResults(appendTag(b, m.tag), m.results)
	case kindFailed:
		return appendStageError(appendTag(b, m.tag), m.err)
	case kindLost:
		return appendStageError(binary.AppendUvarint(b, m.epoch), m.err)
	}
	b = binary.AppendUvarint(b, m.order.Epoch)
	b = binary.AppendUvarint(b, m.order.ID)
	b = appendTrace(b, m.order.Trace)
	switch op := m.order.Op.(type) {
	case sdk.Reservation:
		return appendReservation(b, op)
	case sdk.Release:
		return binary.AppendUvarint(b, uint64(op.Seq))
	}
	return appendPlan(b, m.order.Plan)
}

func appendInt(b []byte, v int) []byte { return binary.AppendVarint(b, int64(v)) }

func appendFloat(b []byte, v float32) []byte {
	return binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendBytes(b, v []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(v))), v...)
}

func appendInts(b []byte, v []int32) []byte {
	b = binary.AppendUvarint(b, uint64(len(v)))
	for _, n := range v {
		b = binary.AppendVarint(b, int64(n))
	}
	return b
}

func appendFloats(b []byte, v []float32) []byte {
	b = binary.AppendUvarint(b, uint64(len(v)))
	for _, f := range v {
		b = appendFloat(b, f)
	}
	return b
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

func appendReservation(b []byte, r sdk.Reservation) []byte {
	b = binary.AppendUvarint(b, uint64(r.Seq))
	b = appendInts(b, r.Prompt)
	b = appendInt(b, r.MaxLen)
	b = appendText(b, r.Adapter)
	s := r.Sampler
	for _, f := range []float32{s.Temperature, s.TopP, s.MinP, s.RepetitionPenalty, s.PresencePenalty, s.FrequencyPenalty} {
		b = appendFloat(b, f)
	}
	b = appendInt(b, s.TopK)
	b = binary.LittleEndian.AppendUint64(b, s.Seed)
	b = binary.AppendUvarint(b, uint64(s.Choice))
	b = binary.AppendUvarint(b, uint64(len(s.LogitBias)))
	for _, token := range slices.Sorted(maps.Keys(s.LogitBias)) {
		b = appendFloat(binary.AppendVarint(b, int64(token)), s.LogitBias[token])
	}
	return b
}

func appendPlan(b []byte, p *pipeline.StepPlan) []byte {
	b = binary.AppendUvarint(b, uint64(p.MicroBatches()))
	for i := range p.MicroBatches() {
		b = binary.AppendUvarint(b, uint64(p.Cuts[i+1]-p.Cuts[i]))
	}
	for i := range p.Seqs {
		b = appendSeqStep(b, &p.Seqs[i])
	}
	return b
}

func appendSeqStep(b []byte, s *sdk.SeqStep) []byte {
	b = binary.AppendUvarint(b, uint64(s.Seq))
	b = appendInt(b, s.Pos)
	b = appendBool(b, s.Prompt)
	b = appendInt(b, int(s.Want))
	b = appendInt(b, s.TopN)
	b = appendBool(b, s.Logprob)
	b = appendInts(b, s.Tokens)
	b = appendInts(b, s.Targets)
	return appendBytes(b, s.Allowed)
}

func appendResults(b []byte, results []sdk.SeqResult) []byte {
	b = binary.AppendUvarint(b, uint64(len(results)))
	for i := range results {
		r := &results[i]
		b = binary.AppendUvarint(b, uint64(r.Seq))
		b = binary.AppendVarint(b, int64(r.Token))
		b = appendFloat(b, r.Logprob)
		b = binary.AppendUvarint(b, uint64(len(r.Top)))
		for _, t := range r.Top {
			b = appendFloat(appendFloat(binary.AppendVarint(b, int64(t.Token)), t.Logit), t.Logprob)
		}
		b = appendFloats(b, r.Scores)
		b = appendInt(b, int(r.Logits.Dtype))
		b = appendInt(b, r.Logits.Rows)
		b = appendInt(b, r.Logits.Width)
		b = appendBytes(b, r.Logits.Data)
	}
	return b
}

// maxText is the most of an error's text that is sent: log lines of an executor included.
const maxText = 64 << 10

func clip(s string) string {
	if len(s) > maxText {
		return s[:maxText-len("…")] + "…"
	}
	return s
}

// appendStageError appends what is to be known of a *StageError elsewhere; err may be nil.
func appendStageError(b []byte, err error) []byte {
	b = appendBool(b, err != nil)
	if err == nil {
		return b
	}
	e, ok := errors.AsType[*pipeline.StageError](err)
	if !ok {
		panic(fmt.Sprintf("stagelink: %T in place of a *pipeline.StageError", err))
	}
	b = appendPlace(b, e.Place)
	for _, s := range []string{e.Node, e.Plugin, string(e.Phase)} {
		b = appendText(b, clip(s))
	}
	r := remoteError(e.Err)
	b = appendText(b, clip(r.Text))
	b = appendBool(b, r.Gone)
	b = appendBool(b, r.Cause != nil)
	if r.Cause == nil {
		return b
	}
	b = appendInt(b, int(r.Cause.Code))
	for _, s := range []string{r.Cause.Message, r.Cause.File, r.Cause.Tensor} {
		b = appendText(b, clip(s))
	}
	return b
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
