package pipeline

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/mlxcel/mlxcel/sdk"
)

// faultAt makes one stage misbehave at the first operation that matches.
func faultAt(stage int, match func(sdk.Op) bool, err error) *toyLauncher {
	return launcherBefore(stage, func(op sdk.Op) error {
		if match(op) {
			return err
		}
		return nil
	})
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
		l := launcherBefore(1, func(op sdk.Op) error {
			if isDecode(op) {
				return <-hold
			}
			return nil
		})
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
		l := launcherBefore(1, func(op sdk.Op) error {
			if isPrefill(op) && op.(*sdk.Step).Seqs[0].Seq == 1 {
				<-hold
			}
			return nil
		})
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
				l := &toyLauncher{prepare: onStage(c.stage, func(e *toyExecutor) { e.tamper = c.tamper })}
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
		l := launcherBefore(1, func(op sdk.Op) error {
			if isPrefill(op) {
				<-hold
			}
			return nil
		})
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
