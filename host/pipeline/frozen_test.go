package pipeline

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// What a process that stands still does to those who call it: its client queues without end, or has its caller wait, against
// its contract, at once or after some operations.

// lostWithin is how long an executor may stand still unnoticed.
const lostWithin = healthInterval + 2*healthTimeout

var frozenClients = []struct {
	name string
	room int
}{{"queues without end", 1 << 30}, {"waits at once", 0}, {"waits after some", 5}}

// freeze has a process stand still.
func (e *toyExecutor) freeze(room int) {
	e.locked(func() { e.frozen, e.room = true, room })
}

// checkFrozen wants the loss of a stage whose executor does not answer.
func checkFrozen(t *testing.T, err error, stage int) {
	t.Helper()
	e, ok := errors.AsType[*StageError](err)
	if !ok || e.Place != (sdk.Place{Stage: stage}) || !strings.Contains(e.Error(), "does not answer") {
		t.Errorf("got %v, want stage %d, which does not answer", err, stage)
	}
}

// reserveAll reserves n sequences with prompts of one piece.
func reserveAll(t *testing.T, p *Pipeline, n int) (requests []*request) {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 7))
	for range n {
		r := newRequest(p, rng, 4)
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		requests = append(requests, r)
	}
	return requests
}

// 300 callers in a step when an executor stops: the stage is lost in time, whoever waits in its client, and all of them end
// with it.
func TestFrozenExecutorFreesItsCallers(t *testing.T) {
	const callers = 300
	for _, c := range frozenClients {
		for stage := range 2 {
			t.Run(fmt.Sprintf("stage %d %s", stage, c.name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					l := &toyLauncher{}
					p := startToy(t, toyConfig(t, 2, l))
					defer closeToy(t, p)
					requests := reserveAll(t, p, callers)
					time.Sleep(healthInterval / 3)
					l.executor(stage).freeze(c.room)
					began := time.Now()
					ended := make(chan error, callers)
					var wait sync.WaitGroup
					for _, r := range requests {
						wait.Go(func() { ended <- advance(t.Context(), p, 16, r) })
					}
					synctest.Wait()
					if n := waitingAt(p, 0); n < callers-10 && (stage == 1 || c.room > 0) {
						t.Errorf("%d orders wait at stage 0, want nearly %d", n, callers)
					}
					<-p.Done()
					wait.Wait()
					if took := time.Since(began); took > lostWithin {
						t.Errorf("it took %v, want %v at most", took, lostWithin)
					}
					checkFrozen(t, p.Err(), stage)
					for range callers {
						checkFrozen(t, <-ended, stage)
					}
				})
			})
		}
	}
}

// waitingAt returns the steps that have not ended at a stage.
func waitingAt(p *Pipeline, stage int) int {
	m := stagesOf(p)[stage].monitor
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.core.plans)
}

// An operation goes to every place under the coordinator's lock of orders. One that waits in a client holds up those who give
// orders, not those who end it.
func TestFrozenExecutorFreesOperations(t *testing.T) {
	for _, c := range frozenClients {
		for stage := range 2 {
			t.Run(fmt.Sprintf("stage %d %s", stage, c.name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					l := &toyLauncher{}
					p := startToy(t, toyConfig(t, 2, l))
					defer closeToy(t, p)
					requests := reserveAll(t, p, 20)
					l.executor(stage).freeze(c.room)
					began := time.Now()
					ended := make(chan error, 4*len(requests))
					var wait sync.WaitGroup
					for i, r := range requests {
						wait.Go(func() { ended <- p.Reserve(t.Context(), sdk.Reservation{Seq: p.NewSeq()}) })
						if i%2 == 0 {
							wait.Go(func() { ended <- p.Release(t.Context(), r.id) })
						} else {
							wait.Go(func() { ended <- advance(t.Context(), p, 16, r) })
						}
					}
					wait.Wait()
					if took := time.Since(began); took > lostWithin {
						t.Errorf("it took %v, want %v at most", took, lostWithin)
					}
					for range 2 * len(requests) {
						checkFrozen(t, <-ended, stage)
					}
					<-p.Done()
				})
			})
		}
	}
}

// One that can't even be killed holds up the caller that waits in its client, until the pipeline is closed, and nobody else.
func TestImmortalExecutorHoldsOneCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		p := startToy(t, toyConfig(t, 2, l))
		toy := l.executor(0)
		toy.locked(func() { toy.immortal = true })
		toy.freeze(0)
		const callers = 20
		ended := make(chan error, callers)
		for range callers {
			go func() { ended <- p.Reserve(t.Context(), sdk.Reservation{Seq: p.NewSeq()}) }()
		}
		time.Sleep(lostWithin)
		synctest.Wait()
		if len(ended) != callers-1 {
			t.Errorf("%d of %d callers are free, want all but one", len(ended), callers)
		}
		closeToy(t, p)
		for range callers {
			checkFrozen(t, <-ended, 0)
		}
	})
}

// A pipeline closes at once, also while somebody waits in the client of an executor that was not yet found to stand still. Over
// links, which end before their stages, it closes once that is found.
func TestCloseFreesWhoIsInSend(t *testing.T) {
	for _, c := range frozenClients {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &toyLauncher{}
				p := startToy(t, toyConfig(t, 2, l))
				requests := reserveAll(t, p, 20)
				l.executor(1).freeze(c.room)
				ended := make(chan error, len(requests))
				for _, r := range requests {
					go func() { ended <- advance(t.Context(), p, 16, r) }()
				}
				synctest.Wait()
				began := time.Now()
				_ = p.Close(context.Background())
				limit := time.Duration(0)
				if overLinks != nil {
					limit = lostWithin
				}
				if took := time.Since(began); took > limit {
					t.Errorf("it took %v to close, want %v at most", took, limit)
				}
				for range requests {
					if err := <-ended; !errors.Is(err, ErrClosed) {
						t.Errorf("a caller got %v, want %v", err, ErrClosed)
					}
				}
			})
		})
	}
}

// An executor that shows signs of life but takes nothing more is lost once too much waits for it, by number or by size, and
// everybody is told so at once.
func TestBacklogIsLimited(t *testing.T) {
	for _, c := range []struct {
		name   string
		orders int
		prompt int
	}{{"orders", maxOrders + 1, 0}, {"bytes", 65, 1 << 20}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, toy, hold := startHeld(t, 2, 1, isReserve)
				defer closeToy(t, p)
				defer close(hold)
				began := time.Now()
				prompt := make([]int32, c.prompt)
				ended := make(chan error, c.orders)
				for range c.orders {
					go func() {
						ended <- p.Reserve(t.Context(), sdk.Reservation{Seq: p.NewSeq(), Prompt: prompt, Sampler: toySampler(1)})
					}()
				}
				for range c.orders {
					err := <-ended
					stage, ok := errors.AsType[*StageError](err)
					full, isFull := errors.AsType[*BacklogError](err)
					if !ok || !isFull || stage.Place.Stage != 1 || full.Orders != c.orders {
						t.Fatalf("got %v, want a *BacklogError of stage 1 with %d orders", err, c.orders)
					}
				}
				<-p.Done()
				if took := time.Since(began); took > 0 {
					t.Errorf("it took %v", took)
				}
				synctest.Wait()
				toy.locked(func() {
					if !toy.killed {
						t.Error("the executor still stands there")
					}
				})
			})
		})
	}
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
