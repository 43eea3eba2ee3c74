package stagelink

import (
	"encoding/binary"
	"fmt"

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

// decode reads a message of a data connection.
func decode(kind uint8, b []byte) (message, error) {
	d := &decoder{b: b}
	m := message{kind: kind}
	switch kind {
	case kindOp, kindPlan:
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
		m.results = rest(d, sdk.DecodeResults)
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

func (d *decoder) seq() sdk.SeqID { return sdk.SeqID(d.uvarint()) }

// rest reads all that is left by the contract's encoding.
func rest[T any](d *decoder, read func([]byte) (T, error)) (v T) {
	if d.fault != "" {
		return v
	}
	v, err := read(d.b)
	if d.b = nil; err != nil {
		d.fail(err.Error())
	}
	return v
}

func (d *decoder) place() sdk.Place { return sdk.Place{Stage: d.int(), Rank: d.int()} }

func (d *decoder) trace() (t pipeline.TraceID) {
	if d.bool() {
		copy(t[:], d.take(len(t)))
		if t == (pipeline.TraceID{}) {
			d.fail("a trace is announced and names nothing")
		}
	}
	return t
}

func (d *decoder) order(kind uint8) pipeline.Order {
	o := pipeline.Order{Epoch: d.uvarint(), ID: d.uvarint(), Trace: d.trace()}
	if kind == kindPlan {
		o.Plan = d.plan()
		return o
	}
	o.Op = rest(d, sdk.DecodeOp)
	switch o.Op.(type) {
	case sdk.Reservation, sdk.Release:
	default:
		d.fail(fmt.Sprintf("%T is no order", o.Op))
	}
	return o
}

func (d *decoder) plan() *pipeline.StepPlan {
	n := d.count(1)
	if n == 0 || n > sdk.MaxStepSequences {
		d.fail("a plan has no micro-batches, or too many")
		return &pipeline.StepPlan{Cuts: []int{0}}
	}
	p := &pipeline.StepPlan{Cuts: make([]int, n+1)}
	for i := 1; i < n; i++ {
		size := d.uvarint()
		if size < 1 || size > sdk.MaxStepSequences {
			d.fail("a micro-batch is empty or too large")
			return p
		}
		p.Cuts[i] = p.Cuts[i-1] + int(size)
	}
	p.Seqs = rest(d, sdk.DecodeSteps)
	p.Cuts[n] = len(p.Seqs)
	if p.Cuts[n-1] >= p.Cuts[n] {
		d.fail("the micro-batches have more sequences than the step")
	}
	p.IDs = make([]sdk.SeqID, len(p.Seqs))
	for i := range p.Seqs {
		p.IDs[i] = p.Seqs[i].Seq
	}
	return p
}

func (d *decoder) stageError() *pipeline.StageError {
	if !d.bool() {
		return nil
	}
	e := &pipeline.StageError{Place: d.place(), Node: d.text(), Plugin: d.text(), Phase: pipeline.Phase(d.text())}
	cause := &RemoteError{Text: d.text(), Gone: d.bool()}
	if d.bool() {
		cause.Cause = rest(d, func(b []byte) (*sdk.Error, error) {
			e := &sdk.Error{}
			return e, e.UnmarshalBinary(b)
		})
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
