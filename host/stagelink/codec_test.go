package stagelink

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/mlxcel/mlxcel/host/internal/filltest"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// somePlan has every field set, in one sequence or the other: some exclude each other.
func somePlan() *pipeline.StepPlan {
	p := filltest.Of[*pipeline.StepPlan]()
	p.Cuts = []int{0, 1, 2}
	scored, masked := &p.Seqs[0], &p.Seqs[1]
	scored.Want, scored.Rows, scored.TopN, scored.Logprob, scored.Allowed = sdk.WantScores, 2, 0, false, nil
	masked.Want, masked.Rows, masked.Tokens, masked.Targets = sdk.WantToken, 1, nil, nil
	p.IDs = []sdk.SeqID{scored.Seq, masked.Seq}
	return p
}

func someResults() []sdk.SeqResult {
	r := filltest.Of[[]sdk.SeqResult]()
	r[0].Logits = sdk.Tensor{Dtype: sdk.DtypeFloat16, Rows: 2, Width: 3, Data: []byte("twelve bytes")}
	r[1].Logits = sdk.Tensor{}
	return r
}

// someStageError has every field set that is known elsewhere.
func someStageError() error {
	cause := filltest.Of[*sdk.Error]()
	cause.Code = sdk.CodeOutOfMemory
	e := filltest.Of[*pipeline.StageError](error(&RemoteError{}))
	e.Err = filltest.Of[*RemoteError]()
	e.Err.(*RemoteError).Cause = cause
	return e
}

func stageErr(err error) *pipeline.StageError {
	return &pipeline.StageError{Place: sdk.Place{Stage: 2}, Node: "node-2", Plugin: "llama", Phase: pipeline.PhaseDecode, Err: err}
}

// messageFields are the fields of a message that count, by its kind.
var messageFields = map[uint8][]string{
	kindOp: {"order"}, kindPlan: {"order"}, kindAbort: {"tag"}, kindAnswered: {"place", "epoch", "id", "err"},
	kindFinished: {"tag", "results"}, kindFailed: {"tag", "err"}, kindLost: {"epoch", "err"},
}

// filledMessage sets every field that counts.
func filledMessage(kind uint8, op sdk.Op) message {
	all := filltest.Of[message](someStageError(), op)
	all.results = someResults()
	if all.order.Plan = somePlan(); kind == kindPlan {
		all.order.Op = nil
	} else {
		all.order.Plan = nil
	}
	m := message{kind: kind}
	from, to := reflect.ValueOf(&all).Elem(), reflect.ValueOf(&m).Elem()
	for _, name := range messageFields[kind] {
		f, g := from.FieldByName(name), to.FieldByName(name)
		reflect.NewAt(g.Type(), unsafe.Pointer(g.UnsafeAddr())).Elem().Set(reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem())
	}
	return m
}

// someMessages is one of everything that crosses a data connection.
func someMessages() map[string]message {
	return map[string]message{
		"reserve":                filledMessage(kindOp, filltest.Of[sdk.Reservation]()),
		"reserve greedy":         orderMessage(pipeline.Order{Epoch: 3, ID: 77, Op: sdk.Reservation{Seq: 5}}),
		"release":                filledMessage(kindOp, filltest.Of[sdk.Release]()),
		"plan":                   filledMessage(kindPlan, sdk.Release{}),
		"plan of one":            orderMessage(pipeline.Order{Epoch: 3, ID: 78, Plan: onePlan()}),
		"abort":                  filledMessage(kindAbort, sdk.Release{}),
		"answered":               {kind: kindAnswered, place: sdk.Place{Stage: 2}, epoch: 3, id: 77},
		"answered with an error": filledMessage(kindAnswered, sdk.Release{}),
		"finished":               filledMessage(kindFinished, sdk.Release{}),
		"failed":                 filledMessage(kindFailed, sdk.Release{}),
		"failed without a cause": {kind: kindFailed, err: stageErr(&RemoteError{Text: "boom"})},
		"lost":                   filledMessage(kindLost, sdk.Release{}),
	}
}

func onePlan() *pipeline.StepPlan {
	return &pipeline.StepPlan{Cuts: []int{0, 1}, IDs: []sdk.SeqID{5}, Seqs: []sdk.SeqStep{{Seq: 5, Rows: 7, Pos: 40}}}
}

// mustAppend is for messages that can be sent.
func mustAppend(t testing.TB, m *message) []byte {
	t.Helper()
	b, err := appendMessage(nil, m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestMessagesArriveAsSent(t *testing.T) {
	for name, m := range someMessages() {
		t.Run(name, func(t *testing.T) {
			got, err := decode(m.kind, mustAppend(t, &m))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, m) {
				t.Errorf("got  %+v\nwant %+v", got, m)
			}
		})
	}
}

// Every field of a message is of some kind, so that a new one is filled above.
func TestEveryFieldIsSent(t *testing.T) {
	sent := map[string]bool{"kind": true}
	for _, names := range messageFields {
		for _, name := range names {
			sent[name] = true
		}
	}
	for i := range reflect.TypeFor[message]().NumField() {
		if name := reflect.TypeFor[message]().Field(i).Name; !sent[name] {
			t.Errorf("no kind of message carries the field %s", name)
		}
	}
}

// Whatever is left out of a message, or added to it, is noticed: it is refused, or what the contract's encoding leaves to be
// read is another message.
func TestMessagesOfAnotherLength(t *testing.T) {
	for name, m := range someMessages() {
		b := mustAppend(t, &m)
		for n := range b {
			if got, err := decode(m.kind, b[:n]); err == nil && reflect.DeepEqual(got, m) {
				t.Errorf("%s cut to %d of %d bytes was taken", name, n, len(b))
			}
		}
		_, err := decode(m.kind, append(b, 0))
		if e, ok := errors.AsType[*DecodeError](err); !ok || e.Kind != m.kind {
			t.Errorf("%s with a byte too many: %v", name, err)
		}
	}
}

func TestBadMessages(t *testing.T) {
	plan := func(cuts ...byte) []byte { return append([]byte{1, 1, 0}, cuts...) }
	seqs := func(cuts []byte, seqs ...sdk.SeqStep) []byte {
		b, err := sdk.AppendSteps(cuts, seqs)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	op := func(op sdk.Op) []byte {
		b, err := sdk.AppendOp([]byte{1, 1, 0}, op)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	a, b := sdk.SeqStep{Seq: 1, Rows: 1}, sdk.SeqStep{Seq: 2, Rows: 1}
	for name, c := range map[string]struct {
		kind uint8
		b    []byte
		text string
	}{
		"unknown kind":           {kindActivation, nil, "no such kind"},
		"no kind":                {0, nil, "no such kind"},
		"no micro-batches":       {kindPlan, seqs(plan(0), a), "no micro-batches"},
		"more of them than seqs": {kindPlan, seqs(plan(2, 1), a), "more sequences than the step"},
		"more than they hold":    {kindPlan, seqs(plan(2, 9), a, b), "more sequences than the step"},
		"an endless number":      {kindPlan, seqs(plan(255, 255, 1), a), "longer than the message"},
		"empty micro-batch":      {kindPlan, seqs(plan(2, 0), a, b), "empty"},
		"no sequence":            {kindPlan, seqs(plan(1)), "longer than the message"},
		"a sequence twice":       {kindPlan, seqs(plan(1), a, a), "twice"},
		"no operation":           {kindOp, []byte{1, 1, 0}, "says nothing"},
		"no order":               {kindOp, op(sdk.StateExport{Seq: 1, Layers: sdk.LayerRange{End: 1}}), "no order"},
		"a trace of nothing":     {kindOp, append([]byte{1, 1, 1}, make([]byte, 16)...), "names nothing"},
		"half a trace":           {kindOp, append([]byte{1, 1, 1}, make([]byte, 15)...), "cut short"},
		"number past 64 bits":    {kindAbort, []byte{255, 255, 255, 255, 255, 255, 255, 255, 255, 2}, "too large"},
		"flag of 2":              {kindAnswered, []byte{1, 1, 0, 0, 2}, "neither 0 nor 1"},
		"failed with nothing":    {kindFailed, []byte{1, 1, 0, 0}, "no error"},
		"lost with nothing":      {kindLost, []byte{1, 0}, "no error"},
	} {
		if _, err := decode(c.kind, c.b); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: got %v, want %q", name, err, c.text)
		}
	}
}

// An error keeps what its receiver asks it for: the code, whether the executor is gone, and the whole text.
func TestErrorsKeepTheirMeaning(t *testing.T) {
	gone := fmt.Errorf("step stream: %w: closed", sdk.ErrExecutorGone)
	full := fmt.Errorf("reserve: %w", sdk.Errorf(sdk.CodeOutOfMemory, "no room for 5 tokens"))
	for _, cause := range []error{gone, full, errors.New("plain"), errors.Join(gone, full)} {
		m := message{kind: kindLost, err: stageErr(cause)}
		got, err := decode(kindLost, mustAppend(t, &m))
		if err != nil {
			t.Fatal(err)
		}
		if got.err.Error() != m.err.Error() || sdk.CodeOf(got.err) != sdk.CodeOf(cause) || errors.Is(got.err, sdk.ErrExecutorGone) != errors.Is(cause, sdk.ErrExecutorGone) {
			t.Errorf("%q arrived as %q, code %v", m.err, got.err, sdk.CodeOf(got.err))
		}
	}
	endless := strings.Repeat("log lin\xe9 \xff\n", 100000)
	long := message{kind: kindLost, err: stageErr(&sdk.Error{Message: endless, File: endless, Tensor: endless})}
	got, err := decode(kindLost, mustAppend(t, &long))
	if err != nil || len(got.err.Error()) > maxText+200 {
		t.Errorf("an endless log arrived with %d bytes: %v", len(got.err.Error()), err)
	}
}

func TestActivationMetadata(t *testing.T) {
	tag, seqs := pipeline.Tag{Epoch: 9, Step: 1 << 50, MicroBatch: 3}, []sdk.SeqID{1, 2, math.MaxUint64}
	b := appendActivation(nil, tag, seqs)
	gotTag, gotSeqs, err := decodeActivation(b, nil)
	if err != nil || gotTag != tag || !reflect.DeepEqual(gotSeqs, seqs) {
		t.Errorf("got %+v, %v, %v", gotTag, gotSeqs, err)
	}
	for n := range b {
		if _, _, err := decodeActivation(b[:n], nil); err == nil {
			t.Errorf("%d of %d bytes were taken", n, len(b))
		}
	}
}

// No bytes make a message that a round trip changes. A plan that is taken is one that a stage can run.
func FuzzMessage(f *testing.F) {
	for _, m := range someMessages() {
		f.Add(m.kind, mustAppend(f, &m))
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		m, err := decode(kind, b)
		if err != nil {
			return
		}
		if p := m.order.Plan; p != nil {
			if p.MicroBatches() < 1 || p.Cuts[0] != 0 || p.Cuts[p.MicroBatches()] != len(p.Seqs) || len(p.IDs) != len(p.Seqs) {
				t.Fatalf("a plan of cuts %v for %d sequences", p.Cuts, len(p.Seqs))
			}
		}
		again := mustAppend(t, &m)
		m2, err := decode(kind, again)
		if err != nil {
			t.Fatalf("the message's own bytes are refused: %v", err)
		}
		if third := mustAppend(t, &m2); string(third) != string(again) {
			t.Errorf("two round trips differ:\n%x\n%x", again, third)
		}
	})
}

func FuzzActivation(f *testing.F) {
	f.Add(appendActivation(nil, pipeline.Tag{Epoch: 1, Step: 2, MicroBatch: 3}, []sdk.SeqID{4, 5}))
	f.Add(appendActivation(nil, pipeline.Tag{MicroBatch: -1}, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		tag, seqs, err := decodeActivation(b, nil)
		if err != nil {
			return
		}
		if len(seqs) > len(b) {
			t.Fatalf("%d sequences of %d bytes", len(seqs), len(b))
		}
		tag2, seqs2, err := decodeActivation(appendActivation(nil, tag, seqs), nil)
		if err != nil || tag2 != tag || !reflect.DeepEqual(seqs2, seqs) {
			t.Errorf("%+v %v came back as %+v %v, %v", tag, seqs, tag2, seqs2, err)
		}
	})
}
