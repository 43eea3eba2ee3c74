package pipeline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// Every test runs in a synctest bubble: a goroutine left behind fails it.

// request is a sequence on its way through a test.
type request struct {
	id     sdk.SeqID
	prompt []int32
	seed   uint64
	fed    int // positions that the stages hold
	tokens []int32
}

func newRequest(p *Pipeline, rng *rand.Rand, length int) *request {
	r := &request{id: p.NewSeq(), seed: rng.Uint64()}
	for range length {
		r.prompt = append(r.prompt, rng.Int32N(toyVocab))
	}
	return r
}

func (r *request) reserve(ctx context.Context, p *Pipeline) error {
	return p.Reserve(ctx, sdk.Reservation{Seq: r.id, Prompt: r.prompt, Sampler: toySampler(r.seed)})
}

// next returns the sequence's next rows: at most chunk of the prompt, or the last token.
func (r *request) next(chunk int) sdk.SeqStep {
	if r.fed < len(r.prompt) {
		end := min(r.fed+chunk, len(r.prompt))
		s := sdk.SeqStep{Seq: r.id, Pos: r.fed, Rows: end - r.fed, Tokens: r.prompt[r.fed:end], Prompt: true}
		if end == len(r.prompt) {
			s.Want = sdk.WantToken
		}
		return s
	}
	return sdk.SeqStep{Seq: r.id, Pos: r.fed, Rows: 1, Tokens: r.tokens[len(r.tokens)-1:], Want: sdk.WantToken}
}

func (r *request) take(s sdk.SeqStep, res sdk.SeqResult) {
	r.fed += s.Rows
	if s.Want == sdk.WantToken {
		r.tokens = append(r.tokens, res.Token)
	}
}

// advance runs one step over all the given requests.
func advance(ctx context.Context, p *Pipeline, chunk int, requests ...*request) error {
	var steps []sdk.SeqStep
	for _, r := range requests {
		steps = append(steps, r.next(chunk))
	}
	results, err := p.Step(ctx, steps)
	for i, res := range results {
		if stepErr, ok := errors.AsType[*StepError](err); ok && stepErr.Of(requests[i].id) != nil {
			continue
		}
		requests[i].take(steps[i], res)
	}
	return err
}

func (r *request) check(t *testing.T) {
	t.Helper()
	if want := solo(r.prompt, r.seed, len(r.tokens)); !slices.Equal(r.tokens, want) {
		t.Errorf("sequence %d: got %v, alone it gives %v", r.id, r.tokens, want)
	}
}

// 32 sequences of all lengths, in one batch, over any number of stages, micro-batches and chunks, equal their solo
// runs, and nothing of them is left afterwards.
func TestBatchEqualsSolo(t *testing.T) {
	for _, c := range []struct{ stages, microBatch, chunk, slots int }{
		{1, 1, 16, 2}, {1, 32, 16, 2}, {2, 1, 1, 2}, {2, 8, 7, 2}, {3, 5, 16, 2}, {toyLayers, 3, 4, 2}, {3, 2, 16, 1}, {2, 4, 16, 5},
	} {
		t.Run(fmt.Sprintf("%d stages, micro-batch %d, chunk %d, %d slots", c.stages, c.microBatch, c.chunk, c.slots), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &toyLauncher{}
				cfg := toyConfig(t, c.stages, l)
				cfg.MicroBatch, cfg.PrefillChunk, cfg.Slots = c.microBatch, c.chunk, c.slots
				p := startToy(t, cfg)
				defer closeToy(t, p)
				rng := rand.New(rand.NewPCG(1, 2))
				var requests []*request
				for range 32 {
					r := newRequest(p, rng, 1+rng.IntN(40))
					if err := r.reserve(t.Context(), p); err != nil {
						t.Fatal(err)
					}
					requests = append(requests, r)
				}
				for range 60 {
					if err := advance(t.Context(), p, c.chunk, requests...); err != nil {
						t.Fatal(err)
					}
				}
				for _, r := range requests {
					r.check(t)
					if err := p.Release(t.Context(), r.id); err != nil {
						t.Fatal(err)
					}
				}
				checkEmpty(t, p, l)
			})
		})
	}
}

// checkEmpty: no executor holds a sequence, and no stage anything that is under way.
func checkEmpty(t *testing.T, p *Pipeline, l *toyLauncher) {
	t.Helper()
	synctest.Wait() // what nobody waited for
	p.c.mu.Lock()
	if calls, seqs := len(p.c.calls), len(p.c.seqs); calls+seqs > 0 {
		t.Errorf("the coordinator is left with %d calls and %d sequences", calls, seqs)
	}
	p.c.mu.Unlock()
	for i, m := range stagesOf(p) {
		m := m.monitor
		m.mu.Lock()
		c := m.core
		if c.queue.len()+len(c.plans)+len(c.held)+c.sent.len()+len(c.known)+len(c.effects)+c.lent > 0 || len(c.free) != c.cfg.slots || c.backlog != (backlog{}) {
			t.Errorf("stage %d is left with %d orders (%+v), %d plans, %d frames, %d answers to come, %d sequences and %d of %d slots free",
				i, c.queue.len(), c.backlog, len(c.plans), len(c.held), c.sent.len(), len(c.known), len(c.free), c.cfg.slots)
		}
		m.mu.Unlock()
		e := l.executor(i)
		e.locked(func() {
			if len(e.seqs) > 0 {
				t.Errorf("stage %d still holds %d sequences", i, len(e.seqs))
			}
		})
	}
}

// Callers with a sequence each overlap freely and do not disturb each other.
func TestConcurrentCallersEqualSolo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		p := startToy(t, toyConfig(t, 3, l))
		defer closeToy(t, p)
		var wait sync.WaitGroup
		for i := range uint64(32) {
			wait.Go(func() {
				rng := rand.New(rand.NewPCG(i, 7))
				r := newRequest(p, rng, 1+rng.IntN(50))
				if err := r.reserve(t.Context(), p); err != nil {
					t.Error(err)
				}
				for len(r.tokens) < 20 {
					if err := advance(t.Context(), p, 16, r); err != nil {
						t.Error(err)
						return
					}
				}
				r.check(t)
				if err := p.Release(t.Context(), r.id); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		checkEmpty(t, p, l)
	})
}

func checkFailure(t *testing.T, err error, victim sdk.SeqID, stage int) {
	t.Helper()
	stepErr, ok := errors.AsType[*StepError](err)
	if !ok || len(stepErr.Failures) != 1 || stepErr.Of(victim) == nil || stepErr.Of(victim+1) != nil {
		t.Fatalf("got %v, want a *StepError of sequence %d alone", err, victim)
	}
	e, ok := errors.AsType[*StageError](err)
	if !ok || e.Place.Stage != stage || e.Phase != PhaseDecode || sdk.CodeOf(err) != sdk.CodeOutOfMemory {
		t.Errorf("got %v, want stage %d in decode out of memory", err, stage)
	}
}

// While a stage is slow, the stages before it go on until their slots are taken, and no further.
func TestSlowStageHoldsBackTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		l := launcherBefore(1, func(op sdk.Op) error {
			if isPrefill(op) {
				<-hold
			}
			return nil
		})
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		rng := rand.New(rand.NewPCG(7, 7))
		var requests []*request
		for range 8 {
			r := newRequest(p, rng, 5)
			if err := r.reserve(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			requests = append(requests, r)
		}
		ended := make(chan error)
		go func() { ended <- advance(t.Context(), p, 16, requests...) }()
		stepsOf := func() (n int) {
			synctest.Wait()
			l.executor(0).locked(func() { n = l.executor(0).steps })
			return n
		}
		// Two lie in stage 1's slots, two in stage 0's.
		if got := stepsOf(); got != 4 {
			t.Errorf("stage 0 computed %d micro-batches ahead, want 4", got)
		}
		hold <- struct{}{}
		if got := stepsOf(); got != 5 {
			t.Errorf("stage 0 computed %d micro-batches after one left, want 5", got)
		}
		close(hold)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		for _, r := range requests {
			r.check(t)
		}
	})
}

// Stages work at the same time: stage 1 does not end its first micro-batch before stage 0 has begun the second one.
func TestStagesOverlap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := make(chan struct{})
		l := &toyLauncher{prepare: func(e *toyExecutor) {
			e.before = func(op sdk.Op) error {
				switch step, ok := op.(*sdk.Step); {
				case !ok:
				case e.stage == 0 && step.Seqs[0].Seq == 2:
					close(begun)
				case e.stage == 1 && step.Seqs[0].Seq == 1:
					<-begun
				}
				return nil
			}
		}}
		p := startToy(t, toyConfig(t, 3, l))
		defer closeToy(t, p)
		rng := rand.New(rand.NewPCG(9, 9))
		requests := []*request{newRequest(p, rng, 3), newRequest(p, rng, 3)}
		for _, r := range requests {
			if err := r.reserve(t.Context(), p); err != nil {
				t.Fatal(err)
			}
		}
		if err := advance(t.Context(), p, 16, requests...); err != nil {
			t.Fatal(err)
		}
		for _, r := range requests {
			r.check(t)
		}
	})
}

// slow makes every step of a toy take d, which it reports as computing time.
func slow(l *toyLauncher, d time.Duration) {
	l.prepare = func(e *toyExecutor) {
		e.before = func(op sdk.Op) error {
			if _, ok := op.(*sdk.Step); ok {
				time.Sleep(d)
			}
			return nil
		}
		e.tamper = func(r *sdk.StepResult) { r.ComputeNanos = d.Nanoseconds() }
	}
}

func TestBusyCountsComputing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		slow(l, 10*time.Millisecond)
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		if err := wholeLife(t, p); err != nil { // two steps of prefill, two of decode
			t.Fatal(err)
		}
		if got := p.Busy(); !slices.Equal(got, []time.Duration{40 * time.Millisecond, 40 * time.Millisecond}) {
			t.Errorf("busy %v, want 40 ms each", got)
		}
	})
}

// transcript runs a few sequences and returns all that came back.
func transcript(t *testing.T) (all []sdk.SeqResult) {
	synctest.Test(t, func(t *testing.T) {
		cfg := toyConfig(t, 3, &toyLauncher{})
		cfg.MicroBatch = 2
		p := startToy(t, cfg)
		defer closeToy(t, p)
		rng := rand.New(rand.NewPCG(12, 12))
		var requests []*request
		for range 5 {
			r := newRequest(p, rng, 10)
			if err := r.reserve(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			requests = append(requests, r)
		}
		for round := range 8 {
			var steps []sdk.SeqStep
			for i, r := range requests {
				steps = append(steps, r.next(16))
				if (round+i)%3 == 2 {
					steps[i].Want = sdk.WantLogits
				}
			}
			results, err := p.Step(t.Context(), steps)
			if err != nil {
				t.Fatal(err)
			}
			for i, r := range requests {
				r.fed += len(steps[i].Tokens)
				r.tokens = append(r.tokens, max(0, results[i].Token))
			}
			all = append(all, results...)
		}
	})
	return all
}

// TestShareAndRewind has one sequence begin with what another holds, and the other go back.
func TestShareAndRewind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		p := startToy(t, toyConfig(t, 3, l))
		defer closeToy(t, p)
		rng := rand.New(rand.NewPCG(8, 8))
		r := newRequest(p, rng, 10)
		step := func(r *request) {
			t.Helper()
			if err := advance(t.Context(), p, 16, r); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		step(r)
		step(r)
		twin := &request{id: p.NewSeq(), prompt: r.prompt, seed: r.seed, fed: r.fed, tokens: slices.Clone(r.tokens)}
		other := &request{id: p.NewSeq(), prompt: r.prompt, seed: r.seed + 1, fed: 9}
		for _, begun := range []*request{twin, other} {
			err := p.Reserve(t.Context(), sdk.Reservation{Seq: begun.id, Prompt: begun.prompt, Sampler: toySampler(begun.seed), From: r.id, Keep: begun.fed})
			if err != nil {
				t.Fatal(err)
			}
		}
		step(r)
		step(r)
		step(twin)
		step(other) // a sampler of its own
		step(other)
		r.fed, r.tokens = 11, r.tokens[:2] // the step below goes back to position 11
		step(r)
		for _, q := range []*request{r, twin, other} {
			q.check(t)
		}
		if !slices.Equal(r.tokens, twin.tokens) {
			t.Errorf("%v and %v differ", r.tokens, twin.tokens)
		}
	})
}

// Where one stage can't go back, the stages would disagree: the sequence is gone.
func TestFailedRewindReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rewind := func(op sdk.Op) bool { s, ok := op.(*sdk.Step); return ok && s.Seqs[0].Pos == 2 }
		l := faultAt(1, rewind, sdk.Errorf(sdk.CodeUnsupported, "recurrent state can't go back"))
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		r := newRequest(p, rand.New(rand.NewPCG(9, 9)), 4)
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if err := advance(t.Context(), p, 16, r); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Step(t.Context(), []sdk.SeqStep{{Seq: r.id, Pos: 2, Rows: 1, Tokens: []int32{1}, Want: sdk.WantToken}}); sdk.CodeOf(err) != sdk.CodeUnsupported {
			t.Errorf("got %v, want the stage's refusal", err)
		}
		if err := advance(t.Context(), p, 16, r); err == nil {
			t.Error("the sequence goes on")
		}
		if err := p.Release(t.Context(), r.id); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		checkEmpty(t, p, l)
	})
}

func TestFailedShareIsRolledBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		share := func(op sdk.Op) bool { r, ok := op.(sdk.Reservation); return ok && r.Keep > 0 }
		l := faultAt(1, share, sdk.Errorf(sdk.CodeOutOfMemory, "full"))
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		r := newRequest(p, rand.New(rand.NewPCG(9, 9)), 4)
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if err := advance(t.Context(), p, 16, r); err != nil {
			t.Fatal(err)
		}
		if err := p.Reserve(t.Context(), sdk.Reservation{Seq: 77, From: r.id, Keep: 2}); sdk.CodeOf(err) != sdk.CodeOutOfMemory {
			t.Errorf("got %v, want the stage's refusal", err)
		}
		for len(r.tokens) < 2 { // the source lives on
			if err := advance(t.Context(), p, 16, r); err != nil {
				t.Fatal(err)
			}
		}
		r.check(t)
		if err := p.Release(t.Context(), r.id); err != nil {
			t.Fatal(err)
		}
		checkEmpty(t, p, l)
	})
}

// Logits outlive the slot that they came in.
func TestLogitsAreTheCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := toyConfig(t, 2, &toyLauncher{})
		cfg.MicroBatch, cfg.Slots = 2, 1
		p := startToy(t, cfg)
		defer closeToy(t, p)
		logits := func(seqs ...sdk.SeqID) (data [][]byte) {
			var steps []sdk.SeqStep
			for _, seq := range seqs {
				if err := p.Reserve(t.Context(), sdk.Reservation{Seq: seq}); err != nil {
					t.Fatal(err)
				}
				steps = append(steps, sdk.SeqStep{Seq: seq, Rows: 1, Tokens: []int32{int32(seq) % 10}, Want: sdk.WantLogits})
			}
			results, err := p.Step(t.Context(), steps)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range results {
				data = append(data, r.Logits.Data)
			}
			return data
		}
		first := logits(1, 2)
		kept := [][]byte{bytes.Clone(first[0]), bytes.Clone(first[1])}
		logits(3, 4) // in the same slot
		for i := range first {
			if len(first[i]) != toyVocab*4 || !bytes.Equal(first[i], kept[i]) {
				t.Errorf("logits %d changed", i)
			}
		}
		if bytes.Equal(first[0], first[1]) {
			t.Error("two sequences have the same logits")
		}
	})
}

func onStage(stage int, f func(*toyExecutor)) func(*toyExecutor) {
	return func(e *toyExecutor) {
		if e.stage == stage {
			f(e)
		}
	}
}
