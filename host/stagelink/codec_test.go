package stagelink

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/wire"
	"github.com/mlxcel/mlxcel/sdk"
)

func somePlan() *pipeline.StepPlan {
	p := &pipeline.StepPlan{
		Cuts: []int{0, 2, 4},
		Seqs: []sdk.SeqStep{
			{Seq: 1, Pos: 0, Rows: 3, Tokens: []int32{1, 2, 300}, Prompt: true},
			{Seq: math.MaxUint64, Pos: 1 << 40, Rows: 1, Tokens: []int32{7}, Want: sdk.WantToken, TopN: 5, Allowed: []byte{1, 0, 255}},
			{Seq: 3, Pos: 4, Rows: 2, Tokens: []int32{9, 8}, Prompt: true, Want: sdk.WantScores, Targets: []int32{8, math.MaxInt32}},
			{Seq: 4, Pos: 7, Rows: 1, Tokens: []int32{6}, Want: sdk.WantToken, Logprob: true},
		},
	}
	for _, s := range p.Seqs {
		p.IDs = append(p.IDs, s.Seq)
	}
	return p
}

func stageErr(err error) *pipeline.StageError {
	return &pipeline.StageError{Place: sdk.Place{Stage: 2}, Node: "node-2", Plugin: "llama", Phase: pipeline.PhaseDecode, Err: err}
}

// someMessages is one of everything that crosses a data connection.
func someMessages() map[string]message {
	order := func(op sdk.Op) message { return orderMessage(pipeline.Order{Epoch: 3, ID: 77, Op: op}) }
	tag := pipeline.Tag{Epoch: 3, Step: 78, MicroBatch: 1}
	return map[string]message{
		"reserve": order(sdk.Reservation{
			Seq: 5, Prompt: []int32{1, -2, math.MaxInt32, math.MinInt32}, MaxLen: 4096, Adapter: "tuned",
			Sampler: sdk.Sampler{
				Temperature: 0.7, TopP: 0.9, TopK: 40, MinP: 0.05, RepetitionPenalty: 1.1, PresencePenalty: 0.2, FrequencyPenalty: 0.3,
				Seed: math.MaxUint64, Choice: 3, LogitBias: map[int32]float32{5: -100, 0: 1.5, 70000: 0.25},
			},
		}),
		"reserve greedy": order(sdk.Reservation{Seq: 5}),
		"release":        order(sdk.Release{Seq: 1 << 63}),
		"plan":           orderMessage(pipeline.Order{Epoch: 3, ID: 78, Plan: somePlan()}),
		"abort":          {kind: kindAbort, tag: tag},
		"answered":       {kind: kindAnswered, place: sdk.Place{Stage: 2}, epoch: 3, id: 77},
		"answered with an error": {kind: kindAnswered, place: sdk.Place{Stage: 2}, epoch: 3, id: 77,
			err: stageErr(&RemoteError{Text: "no room", Cause: &sdk.Error{Code: sdk.CodeOutOfMemory, Message: "no room", File: "f", Tensor: "t"}})},
		"finished": {kind: kindFinished, tag: tag, results: []sdk.SeqResult{
			{Seq: 5, Token: 11, Logprob: -0.5, Top: []sdk.TokenScore{{Token: 11, Logit: 3, Logprob: -0.5}, {Token: 2, Logit: 1, Logprob: -2.5}}},
			{Seq: 6, Token: -1, Scores: []float32{-1, -2.25}},
			{Seq: 7, Token: -1, Logits: sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: 1, Width: 2, Data: []byte{1, 2, 3, 4, 5, 6, 7, 8}}},
		}},
		"failed": {kind: kindFailed, tag: tag, err: stageErr(&RemoteError{Text: "boom"})},
		"lost":   {kind: kindLost, epoch: 3, err: stageErr(&RemoteError{Text: "died\nlast words", Gone: true})},
	}
}

func TestMessagesArriveAsSent(t *testing.T) {
	for name, m := range someMessages() {
		t.Run(name, func(t *testing.T) {
			b := appendFrame([]byte("before"), &m)[len("before"):]
			h, err := wire.ParseHeader(b)
			if err != nil || h.Kind != m.kind || h.Meta != len(b)-wire.HeaderBytes || h.Data != 0 {
				t.Fatalf("header %+v of %d bytes: %v", h, len(b), err)
			}
			got, err := decode(h.Kind, b[wire.HeaderBytes:])
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, m) {
				t.Errorf("got  %+v\nwant %+v", got, m)
			}
		})
	}
}

// Whatever is left out of a message, or added to it, is noticed.
func TestMessagesOfAnotherLength(t *testing.T) {
	for name, m := range someMessages() {
		b := appendMessage(nil, &m)
		for n := range b {
			if _, err := decode(m.kind, b[:n]); err == nil {
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
	plan := func(body ...byte) []byte { return append([]byte{1, 1}, body...) }
	seq := func(tokens ...byte) []byte {
		return append([]byte{5, 0, 0, 0, 0, 0, byte(len(tokens))}, append(tokens, 0, 0)...)
	}
	for name, c := range map[string]struct {
		kind uint8
		b    []byte
		text string
	}{
		"unknown kind":        {kindActivation, nil, "no such kind"},
		"no kind":             {0, nil, "no such kind"},
		"no micro-batches":    {kindPlan, plan(0), "no micro-batches"},
		"empty micro-batch":   {kindPlan, append(plan(1, 0), seq(2)...), "empty"},
		"too many sequences":  {kindPlan, append(plan(1, 200, 1), seq(2)...), "larger than the message"},
		"no rows":             {kindPlan, append(append(plan(1, 1), seq()...), 0, 0, 0), "no rows"},
		"list past the end":   {kindReserve, []byte{1, 1, 5, 100}, "longer than the message"},
		"number past 64 bits": {kindRelease, []byte{1, 1, 255, 255, 255, 255, 255, 255, 255, 255, 255, 2}, "too large"},
		"token past 32 bits":  {kindReserve, []byte{1, 1, 5, 1, 128, 128, 128, 128, 128, 1}, "32 bits"},
		"flag of 2":           {kindAnswered, []byte{1, 1, 0, 2}, "neither 0 nor 1"},
		"failed with nothing": {kindFailed, []byte{1, 1, 0, 0}, "no error"},
		"lost with nothing":   {kindLost, []byte{1, 0}, "no error"},
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
		got, err := decode(kindLost, appendMessage(nil, &m))
		if err != nil {
			t.Fatal(err)
		}
		if got.err.Error() != m.err.Error() || sdk.CodeOf(got.err) != sdk.CodeOf(cause) || errors.Is(got.err, sdk.ErrExecutorGone) != errors.Is(cause, sdk.ErrExecutorGone) {
			t.Errorf("%q arrived as %q, code %v", m.err, got.err, sdk.CodeOf(got.err))
		}
	}
	long := message{kind: kindLost, err: stageErr(errors.New(strings.Repeat("log line\n", 100000)))}
	got, err := decode(kindLost, appendMessage(nil, &long))
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
		f.Add(m.kind, appendMessage(nil, &m))
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
		again := appendMessage(nil, &m)
		m2, err := decode(kind, again)
		if err != nil {
			t.Fatalf("the message's own bytes are refused: %v", err)
		}
		if third := appendMessage(nil, &m2); string(third) != string(again) {
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
