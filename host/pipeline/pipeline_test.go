package pipeline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/host/partition"
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

// faultAt makes one stage misbehave at the first operation that matches.
func faultAt(stage int, match func(sdk.Op) bool, err error) *toyLauncher {
	return &toyLauncher{prepare: func(e *toyExecutor) {
		if e.stage == stage {
			e.before = func(op sdk.Op) error {
				if match(op) {
					return err
				}
				return nil
			}
		}
	}}
}

func isReserve(op sdk.Op) bool { _, ok := op.(sdk.Reservation); return ok }
func isRelease(op sdk.Op) bool { _, ok := op.(sdk.Release); return ok }
func isPrefill(op sdk.Op) bool { s, ok := op.(*sdk.Step); return ok && s.Seqs[0].Prompt }
func isDecode(op sdk.Op) bool  { s, ok := op.(*sdk.Step); return ok && !s.Seqs[0].Prompt }

// An executor that dies, whenever and on whatever stage, ends every call in flight with the stage, the plugin, the
// phase and the process's own last words; so do all calls after it.
func TestExecutorDeath(t *testing.T) {
	for _, c := range []struct {
		phase Phase
		match func(sdk.Op) bool
	}{{PhaseReserve, isReserve}, {PhasePrefill, isPrefill}, {PhaseDecode, isDecode}, {PhaseRelease, isRelease}} {
		for stage := range 3 {
			t.Run(fmt.Sprintf("%s on stage %d", c.phase, stage), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := startToy(t, toyConfig(t, 3, faultAt(stage, c.match, errDie)))
					defer closeToy(t, p)
					err := wholeLife(t, p)
					checkLost(t, err, stage, c.phase)
					<-p.Done()
					checkLost(t, p.Err(), stage, c.phase)
					checkLost(t, p.Reserve(t.Context(), sdk.Reservation{Seq: p.NewSeq()}), stage, c.phase)
				})
			})
		}
	}
}

// wholeLife takes a request from reserve to release and returns the first error.
func wholeLife(t *testing.T, p *Pipeline) error {
	r := newRequest(p, rand.New(rand.NewPCG(3, 3)), 20)
	if err := r.reserve(t.Context(), p); err != nil {
		return err
	}
	for len(r.tokens) < 3 {
		if err := advance(t.Context(), p, 16, r); err != nil {
			return errors.Join(err, p.Release(t.Context(), r.id))
		}
	}
	return p.Release(t.Context(), r.id)
}

func checkLost(t *testing.T, err error, stage int, phase Phase) {
	t.Helper()
	e, ok := errors.AsType[*StageError](err)
	if !ok {
		t.Fatalf("got %v, want a *StageError", err)
	}
	if e.Place.Stage != stage || e.Plugin != "toy" || e.Phase != phase || !strings.Contains(e.Error(), "boom") {
		t.Errorf("got %+v, want stage %d, plugin toy, phase %s, and the last log lines", e, stage, phase)
	}
}

func TestDeathFailsEverythingInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan error)
		l := &toyLauncher{prepare: func(e *toyExecutor) {
			if e.stage == 1 {
				e.before = func(op sdk.Op) error {
					if isDecode(op) {
						return <-hold
					}
					return nil
				}
			}
		}}
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		errs := make(chan error, 5)
		for i := range uint64(5) {
			go func() {
				r := newRequest(p, rand.New(rand.NewPCG(i, 3)), 3)
				if err := r.reserve(t.Context(), p); err != nil {
					errs <- err
					return
				}
				err := advance(t.Context(), p, 16, r)
				if err == nil {
					err = advance(t.Context(), p, 16, r)
				}
				errs <- err
			}()
		}
		synctest.Wait() // all wait for stage 1
		hold <- errDie
		for range 5 {
			checkLost(t, <-errs, 1, PhaseDecode)
		}
	})
}

// An executor that dies with nothing to do is noticed too.
func TestDeathWhileIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		l.executor(1).die()
		<-p.Done()
		checkLost(t, p.Err(), 1, PhaseIdle)
	})
}

// A connection that breaks while the process lives on is a loss as well.
func TestBrokenConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		l.executor(0).hangUp()
		err := wholeLife(t, p)
		if !errors.Is(err, sdk.ErrExecutorGone) || !strings.Contains(err.Error(), "still runs") {
			t.Errorf("got %v, want the broken connection", err)
		}
	})
}

// A process that ends by itself with no error of its own is a loss too.
func TestEndWithoutError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		p := startToy(t, toyConfig(t, 1, l))
		defer closeToy(t, p)
		l.executor(0).end(nil)
		<-p.Done()
		if err := p.Err(); !errors.Is(err, sdk.ErrExecutorGone) {
			t.Errorf("got %v, want ErrExecutorGone", err)
		}
	})
}

// A step that fails on any stage costs only its micro-batch; its sequences are released everywhere, and the others
// go on as if alone.
func TestFailedMicroBatchCostsOnlyItsOwn(t *testing.T) {
	for stage := range 3 {
		t.Run(fmt.Sprintf("stage %d", stage), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const victim = 3
				refuse := sdk.Errorf(sdk.CodeOutOfMemory, "cache is full")
				l := faultAt(stage, func(op sdk.Op) bool {
					s, ok := op.(*sdk.Step)
					return ok && s.Seqs[0].Seq == victim && s.Seqs[0].Pos == 11
				}, refuse)
				cfg := toyConfig(t, 3, l)
				p := startToy(t, cfg)
				defer closeToy(t, p)
				rng := rand.New(rand.NewPCG(4, 4))
				var requests []*request
				for range 5 {
					r := newRequest(p, rng, 10)
					if err := r.reserve(t.Context(), p); err != nil {
						t.Fatal(err)
					}
					requests = append(requests, r)
				}
				var failure error
				for i := range 6 {
					if err := advance(t.Context(), p, 16, requests...); err != nil {
						if failure != nil || i != 2 {
							t.Fatalf("step %d: %v", i, err)
						}
						failure = err
						requests = slices.DeleteFunc(requests, func(r *request) bool { return r.id == victim })
					}
				}
				checkFailure(t, failure, victim, stage)
				_, err := p.Step(t.Context(), []sdk.SeqStep{{Seq: victim, Pos: 11, Rows: 1, Tokens: []int32{1}}})
				checkFailure(t, err, victim, stage)
				for _, r := range requests {
					if len(r.tokens) != 6 {
						t.Errorf("sequence %d has %d tokens", r.id, len(r.tokens))
					}
					r.check(t)
					if err := p.Release(t.Context(), r.id); err != nil {
						t.Fatal(err)
					}
				}
				if err := p.Release(t.Context(), victim); err != nil {
					t.Errorf("releasing the failed sequence again: %v", err)
				}
				checkEmpty(t, p, l)
			})
		})
	}
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

// A reservation that one stage refuses is undone on the others.
func TestRefusedReservationIsRolledBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := sdk.Errorf(sdk.CodeOutOfMemory, "no room for the cache")
		l := faultAt(1, func(op sdk.Op) bool { r, ok := op.(sdk.Reservation); return ok && r.MaxLen > 100 }, full)
		p := startToy(t, toyConfig(t, 3, l))
		defer closeToy(t, p)
		err := p.Reserve(t.Context(), sdk.Reservation{Seq: p.NewSeq(), MaxLen: 101})
		e, ok := errors.AsType[*StageError](err)
		if !ok || e.Place.Stage != 1 || e.Phase != PhaseReserve || sdk.CodeOf(err) != sdk.CodeOutOfMemory {
			t.Fatalf("got %v, want stage 1's refusal", err)
		}
		if err := wholeLife(t, p); err != nil { // also waits for what was queued before
			t.Fatal(err)
		}
		checkEmpty(t, p, l)
	})
}

// A caller that gives up gets its answer at once; no stage begins anything of it any more, what runs is called off,
// and its sequences are released.
func TestCancelReachesEveryStage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		l := &toyLauncher{prepare: func(e *toyExecutor) {
			if e.stage == 1 {
				e.before = func(op sdk.Op) error {
					if isPrefill(op) && op.(*sdk.Step).Seqs[0].Seq == 1 {
						<-hold
					}
					return nil
				}
			}
		}}
		p := startToy(t, toyConfig(t, 3, l))
		defer closeToy(t, p)
		rng := rand.New(rand.NewPCG(5, 5))
		requests := []*request{newRequest(p, rng, 10), newRequest(p, rng, 10), newRequest(p, rng, 10)}
		for _, r := range requests {
			if err := r.reserve(t.Context(), p); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		ended := make(chan error)
		go func() { ended <- advance(ctx, p, 16, requests...) }()
		synctest.Wait() // stage 1 works on the first
		gone := errors.New("client left")
		cancel(gone)
		if err := <-ended; !errors.Is(err, gone) {
			t.Errorf("got %v, want the context's cause", err)
		}
		synctest.Wait()
		l.executor(1).locked(func() {
			// The second micro-batch was queued in the executor behind the first.
			if got := l.executor(1).canceled; !slices.Equal(got, []uint64{1, 2}) {
				t.Errorf("stage 1 was told to give up steps %v, want 1 and 2", got)
			}
		})
		close(hold)
		for _, r := range requests {
			if err := p.Release(t.Context(), r.id); err != nil {
				t.Fatal(err)
			}
		}
		if err := wholeLife(t, p); err != nil {
			t.Fatal(err)
		}
		checkEmpty(t, p, l)
		l.executor(2).locked(func() {
			if got := l.executor(2).steps; got != 4 { // of the request after
				t.Errorf("stage 2 ran %d steps, want none of the canceled ones", got)
			}
		})
	})
}

func TestCallsOnAnEndedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		r := newRequest(p, rand.New(rand.NewPCG(6, 6)), 3)
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for name, err := range map[string]error{
			"reserve": p.Reserve(ctx, sdk.Reservation{Seq: p.NewSeq()}),
			"step":    advance(ctx, p, 16, r),
		} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := advance(t.Context(), p, 16, r); err != nil { // untouched
			t.Fatal(err)
		}
		r.check(t)
		// A release is carried out whatever the context.
		if err := p.Release(ctx, r.id); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		synctest.Wait()
		checkEmpty(t, p, l)
	})
}

// While a stage is slow, the stages before it go on until their slots are taken, and no further.
func TestSlowStageHoldsBackTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		l := &toyLauncher{prepare: func(e *toyExecutor) {
			if e.stage == 1 {
				e.before = func(op sdk.Op) error {
					if isPrefill(op) {
						<-hold
					}
					return nil
				}
			}
		}}
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

// startHeld starts a pipeline, one of whose executors waits with what matches until hold is closed.
func startHeld(t testing.TB, stages, stage int, match func(sdk.Op) bool) (p *Pipeline, held *toyExecutor, hold chan struct{}) {
	t.Helper()
	hold = make(chan struct{})
	l := &toyLauncher{prepare: onStage(stage, func(e *toyExecutor) {
		e.before = func(op sdk.Op) error {
			if match(op) {
				<-hold
			}
			return nil
		}
	})}
	p = startToy(t, toyConfig(t, stages, l))
	return p, l.executor(stage), hold
}

// An executor that lives but stands still is ended, and its stage is lost, within 2.5 s in every phase.
func TestFrozenExecutorIsLost(t *testing.T) {
	for _, phase := range []Phase{PhaseIdle, PhasePrefill} {
		synctest.Test(t, func(t *testing.T) {
			p, toy, hold := startHeld(t, 2, 1, isPrefill)
			defer closeToy(t, p)
			ended := make(chan error, 1)
			if phase != PhaseIdle {
				go func() { ended <- wholeLife(t, p) }()
				synctest.Wait()
			}
			begin := time.Now()
			toy.locked(func() { toy.frozen = true })
			<-p.Done()
			if took := time.Since(begin); took > 2500*time.Millisecond {
				t.Errorf("in %s: lost after %v", phase, took)
			}
			if phase != PhaseIdle {
				close(hold)
				if err := <-ended; !errors.Is(err, p.Err()) {
					t.Errorf("the caller got %v, want %v", err, p.Err())
				}
			}
			e, ok := errors.AsType[*StageError](p.Err())
			if !ok || e.Place.Stage != 1 || e.Phase != phase || !strings.Contains(e.Error(), "does not answer") {
				t.Errorf("in %s: got %v", phase, p.Err())
			}
			synctest.Wait()
			toy.locked(func() {
				if !toy.killed {
					t.Errorf("in %s: the executor still stands there", phase)
				}
			})
		})
	}
}

// A host that stood still itself, so that all its deadlines passed at once, does not take its executors for dead.
func TestOneMissedAnswerIsNoLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		p := startToy(t, toyConfig(t, 1, l))
		defer closeToy(t, p)
		toy := l.executor(0)
		toy.locked(func() { toy.frozen = true })
		time.Sleep(1400 * time.Millisecond) // within the first question, which is asked at 500 ms
		toy.locked(func() { toy.frozen = false })
		time.Sleep(10 * time.Second)
		if err := p.Err(); err != nil {
			t.Error(err)
		}
	})
}

// An executor that answers but does not come forward is lost in the end; one with nothing to do may wait for ever.
func TestStalledExecutorIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, _, hold := startHeld(t, 1, 0, isDecode)
		defer closeToy(t, p)
		time.Sleep(time.Hour)
		begin := time.Now()
		err := wholeLife(t, p)
		if e, ok := errors.AsType[*StageError](err); !ok || e.Phase != PhaseDecode || !strings.Contains(e.Error(), "has not ended what it does for 10m") {
			t.Errorf("got %v", err)
		}
		if took := time.Since(begin); took < 10*time.Minute || took > 11*time.Minute {
			t.Errorf("lost after %v", took)
		}
		close(hold)
	})
}

// A load is watched as well.
func TestFrozenLoadIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{prepare: onStage(1, func(e *toyExecutor) { e.frozen, e.stuckLoad = true, true })}
		begin := time.Now()
		_, err := Start(t.Context(), toyConfig(t, 2, l))
		e, ok := errors.AsType[*StageError](err)
		if !ok || e.Place.Stage != 1 || e.Phase != PhaseLoad || !strings.Contains(e.Error(), "does not answer") {
			t.Errorf("got %v", err)
		}
		if took := time.Since(begin); took > 2500*time.Millisecond {
			t.Errorf("given up after %v", took)
		}
		for _, toy := range l.made {
			if !toy.stopped || toy.killed != (toy.stage == 1) {
				t.Errorf("stage %d: stopped %v, killed %v", toy.stage, toy.stopped, toy.killed)
			}
		}
	})
}

// A stage that dies while another still loads ends the start.
func TestDeathBeforeTheStartEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		loading := make(chan struct{})
		l.prepare = onStage(1, func(e *toyExecutor) { e.loading = loading })
		ended := make(chan error)
		go func() {
			_, err := Start(t.Context(), toyConfig(t, 2, l))
			ended <- err
		}()
		synctest.Wait() // stage 0 is loaded
		l.executor(0).die()
		synctest.Wait()
		close(loading)
		checkLost(t, <-ended, 0, PhaseIdle)
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

func TestWrongCallsAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		l := &toyLauncher{prepare: func(e *toyExecutor) {
			e.before = func(op sdk.Op) error {
				if isPrefill(op) {
					<-hold
				}
				return nil
			}
		}}
		p := startToy(t, toyConfig(t, 1, l))
		defer closeToy(t, p)
		r := newRequest(p, rand.New(rand.NewPCG(1, 9)), 4)
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		step := func(seqs ...sdk.SeqStep) error {
			_, err := p.Step(t.Context(), seqs)
			return err
		}
		one := []int32{1}
		for name, c := range map[string]struct {
			err  error
			code sdk.Code
		}{
			"unknown":           {step(sdk.SeqStep{Seq: 99, Rows: 1, Tokens: one}), sdk.CodeUnknownSequence},
			"unknown in batch":  {step(sdk.SeqStep{Seq: r.id, Rows: 1, Tokens: one}, sdk.SeqStep{Seq: 99, Rows: 1, Tokens: one}), sdk.CodeUnknownSequence},
			"twice in a step":   {step(sdk.SeqStep{Seq: r.id, Rows: 1, Tokens: one}, sdk.SeqStep{Seq: r.id, Rows: 1, Tokens: one}), sdk.CodeInvalid},
			"no rows":           {step(sdk.SeqStep{Seq: r.id}), sdk.CodeInvalid},
			"more than a chunk": {step(sdk.SeqStep{Seq: r.id, Rows: 17, Tokens: make([]int32, 17)}), sdk.CodeInvalid},
			"reserve twice":     {r.reserve(t.Context(), p), sdk.CodeInvalid},
			"share of unknown":  {p.Reserve(t.Context(), sdk.Reservation{Seq: 100, From: 99, Keep: 1}), sdk.CodeUnknownSequence},
		} {
			if c.err == nil || sdk.CodeOf(c.err) != c.code {
				t.Errorf("%s: got %v, want code %v", name, c.err, c.code)
			}
		}
		if results, err := p.Step(t.Context(), nil); results != nil || err != nil {
			t.Errorf("an empty step: %v, %v", results, err)
		}
		ended := make(chan error)
		go func() { ended <- advance(t.Context(), p, 16, r) }()
		synctest.Wait()
		if err := step(sdk.SeqStep{Seq: r.id, Rows: 1, Tokens: one}); sdk.CodeOf(err) != sdk.CodeInvalid || !strings.Contains(err.Error(), "already") {
			t.Errorf("a sequence whose token is not back can be stepped: %v", err)
		}
		close(hold)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		r.check(t)
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

// An executor that answers something else than it was asked is caught.
func TestWrongAnswersAreCaught(t *testing.T) {
	for name, c := range map[string]struct {
		stage  int
		tamper func(*sdk.StepResult)
	}{
		"no results":     {1, func(r *sdk.StepResult) { r.Seqs = nil }},
		"other sequence": {1, func(r *sdk.StepResult) { r.Seqs[0].Seq++ }},
		"fewer rows":     {0, func(r *sdk.StepResult) { r.Hidden.Rows-- }},
		"cut data":       {0, func(r *sdk.StepResult) { r.Hidden.Data = r.Hidden.Data[1:] }},
		"other dtype":    {0, func(r *sdk.StepResult) { r.Hidden.Dtype = sdk.DtypeBFloat16 }},
		"nothing":        {0, func(r *sdk.StepResult) { *r = sdk.StepResult{} }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &toyLauncher{prepare: func(e *toyExecutor) {
					if e.stage == c.stage {
						e.tamper = c.tamper
					}
				}}
				p := startToy(t, toyConfig(t, 2, l))
				defer closeToy(t, p)
				err := wholeLife(t, p)
				if e, ok := errors.AsType[*StageError](err); !ok || e.Place.Stage != c.stage || e.Phase != PhasePrefill {
					t.Errorf("got %v, want a failure of stage %d in prefill", err, c.stage)
				}
				if p.Err() != nil {
					t.Errorf("the pipeline went down: %v", p.Err())
				}
				checkEmpty(t, p, l)
			})
		})
	}
}

func TestCloseEndsWhatIsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		l := &toyLauncher{prepare: func(e *toyExecutor) {
			if e.stage == 1 {
				e.before = func(op sdk.Op) error {
					if isPrefill(op) {
						<-hold
					}
					return nil
				}
			}
		}}
		p := startToy(t, toyConfig(t, 2, l))
		rng := rand.New(rand.NewPCG(1, 1))
		var requests []*request
		for range 6 {
			r := newRequest(p, rng, 4)
			if err := r.reserve(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			requests = append(requests, r)
		}
		ended := make(chan error)
		for _, r := range requests {
			go func() { ended <- advance(t.Context(), p, 16, r) }()
		}
		synctest.Wait()
		closed := make(chan error)
		go func() { closed <- p.Close(t.Context()) }()
		for range 6 {
			if err := <-ended; !errors.Is(err, ErrClosed) {
				t.Errorf("got %v, want ErrClosed", err)
			}
		}
		close(hold)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := p.Reserve(t.Context(), sdk.Reservation{Seq: p.NewSeq()}); !errors.Is(err, ErrClosed) {
			t.Errorf("a reserve after close: %v", err)
		}
		if err := p.Release(t.Context(), 1); !errors.Is(err, ErrClosed) {
			t.Errorf("a release after close: %v", err)
		}
	})
}

func TestStartReportsWhatEachStageHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		cfg := toyConfig(t, 2, l)
		cfg.MicroBatch, cfg.Threads, cfg.KVBudgets, cfg.Dtype = 3, 4, []int64{1000, 500}, sdk.DtypeFloat32
		var mu sync.Mutex
		told := map[int]int64{}
		cfg.Progress = func(stage int, p sdk.LoadProgress) {
			mu.Lock()
			defer mu.Unlock()
			told[stage] = p.Loaded
		}
		p := startToy(t, cfg)
		defer closeToy(t, p)
		if told[0] != 1 || told[1] != 1 {
			t.Errorf("progress told: %v", told)
		}
		infos := p.Stages()
		if len(infos) != 2 || infos[1].Plugin != "toy" || infos[1].LayerRange.End != toyLayers || infos[0].Loaded.WeightBytes != 305 {
			t.Errorf("stages: %+v", infos)
		}
		if got, want := p.Report(), "actual=305"; !strings.Contains(got, want) {
			t.Errorf("report %q lacks %q", got, want)
		}
		if p.PrefillChunk() != 16 {
			t.Errorf("prefill chunk %d", p.PrefillChunk())
		}
		hidden := 16 * toyWidth * 4
		wants := []sdk.LoadRequest{
			{Dir: "toy", Family: "toy", Layers: sdk.LayerRange{Start: 0, End: 3}, HasEmbedding: true, Dtype: sdk.DtypeFloat32, Threads: 4, KVBudget: 1000, Region: sdk.RegionLayout{Slots: 2, OutBytes: hidden}},
			{Dir: "toy", Family: "toy", Layers: sdk.LayerRange{Start: 3, End: 7}, HasHead: true, Dtype: sdk.DtypeFloat32, Threads: 4, KVBudget: 500, Region: sdk.RegionLayout{Slots: 2, InBytes: hidden, OutBytes: 1216, MaskBytes: 64}},
		}
		for i, want := range wants {
			if got := l.executor(i).req; got != want {
				t.Errorf("stage %d was loaded with\n%+v, want\n%+v", i, got, want)
			}
		}
	})
}

// When one stage does not come up, none does, and all that came up is stopped.
func TestStartIsAllOrNothing(t *testing.T) {
	corrupt := &sdk.Error{Code: sdk.CodeCorrupt, Message: "model.safetensors is cut short", File: "model.safetensors"}
	for name, c := range map[string]struct {
		launcher *toyLauncher
		phase    Phase
		text     string
	}{
		"launch":      {&toyLauncher{launchErr: map[int]error{1: errors.New("exec format error")}}, PhaseLaunch, "exec format error"},
		"load":        {&toyLauncher{prepare: onStage(1, func(e *toyExecutor) { e.loadErr = corrupt })}, PhaseLoad, "cut short"},
		"death":       {&toyLauncher{prepare: onStage(1, func(e *toyExecutor) { e.loadErr = errDie })}, PhaseLoad, "boom"},
		"step stream": {&toyLauncher{prepare: onStage(1, func(e *toyExecutor) { e.openErr = errors.New("no stream") })}, PhaseLoad, "no stream"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, err := Start(t.Context(), toyConfig(t, 3, c.launcher))
				if p != nil || err == nil {
					t.Fatal("it started")
				}
				if e, ok := errors.AsType[*StageError](err); !ok || e.Place.Stage != 1 || e.Phase != c.phase || !strings.Contains(e.Error(), c.text) {
					t.Errorf("got %v, want stage 1 failing in %s with %q", err, c.phase, c.text)
				}
				for _, e := range c.launcher.made {
					if !e.stopped {
						t.Errorf("stage %d runs on", e.stage)
					}
				}
			})
		})
	}
}

func onStage(stage int, f func(*toyExecutor)) func(*toyExecutor) {
	return func(e *toyExecutor) {
		if e.stage == stage {
			f(e)
		}
	}
}

// An executor that holds something else than its profile said would read and write beyond its areas.
func TestStartRefusesAnotherShape(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*sdk.ModelProfile)
		want   []string
	}{
		"width": {func(p *sdk.ModelProfile) { p.Boundary.Width++ }, []string{"width 4", "width 5"}},
		"dtype": {func(p *sdk.ModelProfile) { p.Boundary.Dtype = sdk.DtypeFloat16 }, []string{"float32", "float16"}},
		"vocab": {func(p *sdk.ModelProfile) { p.VocabSize = 100 }, []string{"101", "100"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := toyConfig(t, 2, &toyLauncher{})
				c.change(cfg.Profile)
				_, err := Start(t.Context(), cfg)
				for _, want := range c.want {
					if err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("got %v, want %q in it", err, want)
					}
				}
			})
		})
	}
}

func TestStartOnAnEndedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		l := &toyLauncher{}
		if _, err := Start(ctx, toyConfig(t, 2, l)); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

func TestConfigFaultsComeTogether(t *testing.T) {
	_, err := Start(t.Context(), Config{Profile: &sdk.ModelProfile{}, PrefillChunk: -1, MicroBatch: -2, Threads: -3, Slots: -4})
	for _, want := range []string{"launcher", "plan", "boundary", "--prefill-chunk-size -1", "--pp-micro-batch-size -2", "--threads -3", "slots -4"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
	if err := (Config{Launcher: &toyLauncher{}, Plan: &partition.Plan{Stages: make([]partition.StageAssignment, 1)}}).Validate(); err == nil || !strings.Contains(err.Error(), "profile") {
		t.Errorf("no profile: %v", err)
	}
}
