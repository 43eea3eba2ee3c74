package pipeline

import (
	"fmt"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
)

const toyMask = (toyVocab + 7) / 8

// Only the stage that answers has room for masks, one for each sequence of a micro-batch, in whole cache lines.
func TestRoomForMasks(t *testing.T) {
	cfg := toyConfig(t, 2, &toyLauncher{})
	for microBatch, want := range map[int]int{1: 64, 4: 64, 5: 128, 64: 64 * toyMask} {
		cfg.MicroBatch = microBatch
		if first, last := cfg.LoadRequest(0).Region.MaskBytes, cfg.LoadRequest(1).Region.MaskBytes; first != 0 || last != want {
			t.Errorf("micro-batches of %d: %d and %d bytes, want none and %d", microBatch, first, last, want)
		}
	}
}

// Masks of allowed tokens come through to the executor that answers, over the real contract and its shared memory, each with
// its own sequence; the other stages get none.
func TestMasksReachThePlaceThatAnswers(t *testing.T) {
	got := map[string][]byte{} // by stage and sequence
	l := &servedLauncher{prepare: func(e *toyExecutor) {
		e.before = func(op sdk.Op) error {
			if s, ok := op.(*sdk.Step); ok {
				e.mu.Lock()
				defer e.mu.Unlock()
				for _, q := range s.Seqs {
					if len(q.Allowed) > 0 {
						got[fmt.Sprint(e.stage, " ", q.Seq)] = slices.Clone(q.Allowed)
					}
				}
			}
			return nil
		}
	}}
	cfg := toyConfig(t, 3, &toyLauncher{})
	cfg.Launcher, cfg.MicroBatch = l, 3
	p := startToy(t, cfg)
	requests := reserveAll(t, p, 6)
	var steps []sdk.SeqStep
	for i, r := range requests {
		s := r.next(16)
		s.Allowed = slices.Repeat([]byte{byte(i + 1)}, toyMask)
		steps = append(steps, s)
	}
	if _, err := p.Step(t.Context(), steps); err != nil {
		t.Fatal(err)
	}
	closeToy(t, p)
	for i, r := range requests {
		if mask := got[fmt.Sprint("2 ", r.id)]; !slices.Equal(mask, steps[i].Allowed) {
			t.Errorf("the mask of sequence %d came as %v, want %v", r.id, mask, steps[i].Allowed)
		}
	}
	if len(got) != len(requests) {
		t.Errorf("masks came to %v, want stage 2 alone", got)
	}
}

// A mask of another vocabulary is refused before anything is sent; the sequence lives on.
func TestMaskOfAnotherLengthIsRefused(t *testing.T) {
	l := &toyLauncher{}
	p := startToy(t, toyConfig(t, 2, l))
	defer closeToy(t, p)
	r := reserveAll(t, p, 1)[0]
	for _, bytes := range []int{1, toyMask - 1, toyMask + 1} {
		s := r.next(16)
		s.Allowed = make([]byte, bytes)
		if _, err := p.Step(t.Context(), []sdk.SeqStep{s}); sdk.CodeOf(err) != sdk.CodeInvalid {
			t.Errorf("a mask of %d bytes: got %v, want %s", bytes, err, sdk.CodeInvalid)
		}
	}
	for stage := range 2 {
		e := l.executor(stage)
		e.locked(func() {
			if e.steps != 0 {
				t.Errorf("stage %d got %d steps", stage, e.steps)
			}
		})
	}
	if err := advance(t.Context(), p, 16, r); err != nil {
		t.Error(err)
	}
	r.check(t)
}
