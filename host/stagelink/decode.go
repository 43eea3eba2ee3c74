package stagelink

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// decoder reads the parts of a message. Its first fault sticks, and all that is read after it is zero. No length is
// believed that the rest of the message could not hold.
type decoder struct {
	b     []byte
	fault string
}

func (d *decoder) fail(fault string) {
	if d.fault == "" {
		d.fault = fault
	}
	d.b = nil
}

// end returns the fault as an error; bytes that are left are one.
func (d *decoder) end(kind uint8) error {
	if d.fault == "" && len(d.b) > 0 {
		d.fail(fmt.Sprintf("%d bytes too many", len(d.b)))
	}
	if d.fault != "" {
		return &DecodeError{Kind: kind, Fault: d.fault}
	}
	return nil
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail("a number is cut short or too large")
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) varint() int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.fail("a number is cut short or too large")
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) int() int { return int(d.varint()) }

func (d *decoder) int32() int32 {
	v := d.varint()
	if v != int64(int32(v)) {
		d.fail("a token does not fit 32 bits")
		return 0
	}
	return int32(v)
}

func (d *decoder) take(n int) []byte {
	if n > len(d.b) {
		d.fail("it is cut short")
		return nil
	}
	v := d.b[:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) bool() bool {
	v := d.take(1)
	if len(v) == 1 && v[0] > 1 {
		d.fail("a flag is neither 0 nor 1")
	}
	return len(v) == 1 && v[0] == 1
}

func (d *decoder) uint64() uint64 {
	if v := d.take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

func (d *decoder) float() float32 {
	if v := d.take(4); v != nil {
		return math.Float32frombits(binary.LittleEndian.Uint32(v))
	}
	return 0
}

// count reads the length of a list whose items have at least size bytes each.
func (d *decoder) count(size int) int {
	n := d.uvarint()
	if n > uint64(len(d.b)/size) {
		d.fail("a list is longer than the message")
		return 0
	}
	return int(n)
}

func (d *decoder) text() string { return string(d.take(d.count(1))) }

func (d *decoder) bytes() []byte {
	if v := d.take(d.count(1)); len(v) > 0 {
		return append([]byte(nil), v...)
	}
	return nil
}

func (d *decoder) ints() []int32 {
	return list(d, 1, (*decoder).int32)
}

func (d *decoder) floats() []float32 {
	return list(d, 4, (*decoder).float)
}

// list reads a list of items of at least size bytes; nil where it is empty.
func list[T any](d *decoder, size int, item func(*decoder) T) []T {
	n := d.count(size)
	if n == 0 {
		return nil
	}
	items := make([]T, n)
	for i := range items {
		items[i] = item(d)
	}
	return items
}

// decode reads a message of a data connection.
func decode(kind uint8, b []byte) (message, error) {
	d := &decoder{b: b}
	m := message{kind: kind}
	switch kind {
	case kindReserve, kindRelease, kindPlan:
		m.order = d.order(kind)
	case kindAbort:
		m.tag = d.tag()
	case kindAnswered:
		m.epoch, m.id, m.place = d.uvarint(), d.uvarint(), d.place()
		if e := d.stageError(); e != nil {
			m.err = e
		}
	case kindFinished:
		m.tag = d.tag()
		m.results = list(d, max(minResult, len(b)/maxSequences), (*decoder).result) // so at most maxSequences
	case kindFailed:
		m.tag = d.tag()
		m.err = d.mustStageError()
	case kindLost:
		m.epoch = d.uvarint()
		m.err = d.mustStageError()
	default:
		d.fail("no such kind on this connection")
	}
	return m, d.end(kind)
}

func (d *decoder) tag() pipeline.Tag {
	return pipeline.Tag{Epoch: d.uvarint(), Step: d.uvarint(), MicroBatch: d.int()}
}

func (d *decoder) place() sdk.Place { return sdk.Place{Stage: d.int(), Rank: d.int()} }

func (d *decoder) trace() (t pipeline.TraceID) {
	if d.bool() {
		copy(t[:], d.take(len(t)))
	}
	return t
}

func (d *decoder) seq() sdk.SeqID { return sdk.SeqID(d.uvarint()) }

func (d *decoder) order(kind uint8) pipeline.Order {
	o := pipeline.Order{Epoch: d.uvarint(), ID: d.uvarint(), Trace: d.trace()}
	switch kind {
	case kindReserve:
		o.Op = d.reservation()
	case kindRelease:
		o.Op = sdk.Release{Seq: d.seq()}
	default:
		o.Plan = d.plan()
	}
	return o
}

func (d *decoder) reservation() sdk.Reservation {
	r := sdk.Reservation{Seq: d.seq(), Prompt: d.ints(), MaxLen: d.int(), Adapter: d.text()}
	s := &r.Sampler
	for _, f := range []*float32{&s.Temperature, &s.TopP, &s.MinP, &s.RepetitionPenalty, &s.PresencePenalty, &s.FrequencyPenalty} {
		*f = d.float()
	}
	s.TopK, s.Seed = d.int(), d.uint64()
	choice := d.uvarint()
	if s.Choice = uint32(choice); choice > math.MaxUint32 {
		d.fail("a choice does not fit 32 bits")
	}
	if n := d.count(5); n > 0 {
		s.LogitBias = make(map[int32]float32, n)
		for range n {
			token := d.int32()
			s.LogitBias[token] = d.float()
		}
	}
	return r
}

const (
	// The fewest bytes of a list's item.
	minSeqStep = 10
	minResult  = 12

	// maxSequences bounds those of a step: in memory each takes many times its bytes in a message.
	maxSequences = 1 << 14
)

func (d *decoder) plan() *pipeline.StepPlan {
	n := d.count(1)
	if n == 0 || n > maxSequences {
		d.fail("a plan has no micro-batches, or too many")
		return &pipeline.StepPlan{Cuts: []int{0}}
	}
	p := &pipeline.StepPlan{Cuts: make([]int, 1, 1+n)}
	total := 0
	for range n {
		size := d.uvarint()
		if size < 1 || size > uint64(min(maxSequences, len(d.b)/minSeqStep)-total) {
			d.fail("a micro-batch is empty, larger than the message, or makes too many sequences")
			return p
		}
		total += int(size)
		p.Cuts = append(p.Cuts, total)
	}
	p.Seqs, p.IDs = make([]sdk.SeqStep, total), make([]sdk.SeqID, total)
	for i := range p.Seqs {
		p.Seqs[i] = d.seqStep()
		p.IDs[i] = p.Seqs[i].Seq
	}
	return p
}

func (d *decoder) seqStep() sdk.SeqStep {
	s := sdk.SeqStep{
		Seq: d.seq(), Pos: d.int(), Prompt: d.bool(), Want: sdk.Want(d.int()), TopN: d.int(), Logprob: d.bool(),
		Tokens: d.ints(), Targets: d.ints(), Allowed: d.bytes(),
	}
	if s.Rows = len(s.Tokens); s.Rows == 0 {
		d.fail("a sequence has no rows")
	}
	return s
}

func (d *decoder) result() sdk.SeqResult {
	return sdk.SeqResult{
		Seq: d.seq(), Token: d.int32(), Logprob: d.float(), Top: list(d, 9, (*decoder).score), Scores: d.floats(),
		Logits: sdk.Tensor{Dtype: sdk.Dtype(d.int()), Rows: d.int(), Width: d.int(), Data: d.bytes()},
	}
}

func (d *decoder) score() sdk.TokenScore {
	return sdk.TokenScore{Token: d.int32(), Logit: d.float(), Logprob: d.float()}
}

func (d *decoder) stageError() *pipeline.StageError {
	if !d.bool() {
		return nil
	}
	e := &pipeline.StageError{Place: d.place(), Node: d.text(), Plugin: d.text(), Phase: pipeline.Phase(d.text())}
	cause := &RemoteError{Text: d.text(), Gone: d.bool()}
	if d.bool() {
		cause.Cause = &sdk.Error{Code: sdk.Code(d.int()), Message: d.text(), File: d.text(), Tensor: d.text()}
	}
	e.Err = cause
	return e
}

func (d *decoder) mustStageError() *pipeline.StageError {
	e := d.stageError()
	if e == nil {
		d.fail("it has no error")
		return &pipeline.StageError{Err: &RemoteError{}}
	}
	return e
}

// decodeActivation reads the metadata of a frame of hidden rows; the sequences are appended to seqs.
func decodeActivation(b []byte, seqs []sdk.SeqID) (pipeline.Tag, []sdk.SeqID, error) {
	d := decoder{b: b}
	t := d.tag()
	for range d.count(1) {
		seqs = append(seqs, d.seq())
	}
	return t, seqs, d.end(kindActivation)
}
