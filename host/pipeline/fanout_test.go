package pipeline

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/mlxcel/mlxcel/sdk"
)

// ranked is a pipeline of two stages in one process, the second with two ranks.
type ranked struct {
	*Pipeline
	places map[sdk.Place]*toyExecutor
}

// startRanked starts it; prepare, where set, gets each place's toy before it is used.
func startRanked(t *testing.T, prepare func(sdk.Place, *toyExecutor)) *ranked {
	t.Helper()
	r := &ranked{places: map[sdk.Place]*toyExecutor{}}
	l := &toyLauncher{}
	cfg := toyConfig(t, 2, l).withDefaults()
	var stages []*Stage
	for _, at := range []sdk.Place{{Stage: 0}, {Stage: 1}, {Stage: 1, Rank: 1}} {
		l.prepare = func(e *toyExecutor) {
			r.places[at] = e
			if prepare != nil {
				prepare(at, e)
			}
		}
		sc := cfg.stageConfig(at.Stage)
		sc.Rank = at.Rank
		s, err := StartStage(t.Context(), sc)
		if err != nil {
			t.Fatal(err)
		}
		stages = append(stages, s)
	}
	var remote []RemoteStage
	for _, s := range stages {
		remote = append(remote, RemoteStage{Port: s, Info: s.Info()})
	}
	remote[0].Close = func(ctx context.Context) (err error) {
		for _, s := range stages {
			err = errors.Join(err, s.halt())
		}
		for _, s := range stages {
			err = errors.Join(err, s.executor.Stop(ctx))
		}
		return err
	}
	var err error
	if r.Pipeline, err = Connect(cfg, remote); err != nil {
		t.Fatal(err)
	}
	stages[2].Join(nil, r.Reporter())
	stages[1].Join(nil, r.Reporter())
	stages[0].Join([]Link{stages[1], stages[2]}, r.Reporter())
	return r
}

// Every rank gets every order and every frame, and comes to the same state; the first answers.
func TestRanksGetEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startRanked(t, nil)
		defer closeToy(t, r.Pipeline)
		requests := reserveAll(t, r.Pipeline, 5)
		for range 6 {
			if err := advance(t.Context(), r.Pipeline, 16, requests...); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait() // the rank that does not answer may be behind
		first, second := r.places[sdk.Place{Stage: 1}], r.places[sdk.Place{Stage: 1, Rank: 1}]
		for _, q := range requests {
			q.check(t)
			for i := range first.seqs[q.id].history {
				a, b := first.seqs[q.id].history[i], second.seqs[q.id].history[i]
				if len(a) != q.fed || len(b) != q.fed || a[q.fed-1] != b[q.fed-1] {
					t.Errorf("sequence %d: ranks have %d and %d positions of %d in layer %d, or differ", q.id, len(a), len(b), q.fed, i)
				}
			}
			if err := r.Release(t.Context(), q.id); err != nil {
				t.Error(err)
			}
		}
		for at, e := range r.places {
			e.locked(func() {
				if e.steps != 30 || len(e.seqs) != 0 {
					t.Errorf("place %s carried out %d steps and holds %d sequences, want 30 and none", at, e.steps, len(e.seqs))
				}
			})
		}
	})
}

// An operation has ended once every place has answered.
func TestOperationsWaitForEveryRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		r := startRanked(t, func(at sdk.Place, e *toyExecutor) {
			if at.Rank == 1 {
				e.before = func(sdk.Op) error {
					<-hold
					return nil
				}
			}
		})
		defer closeToy(t, r.Pipeline)
		ended := make(chan error, 1)
		go func() { ended <- r.Reserve(t.Context(), sdk.Reservation{Seq: 1}) }()
		synctest.Wait()
		if len(ended) != 0 {
			t.Error("reserved before every place had answered")
		}
		close(hold)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// What fails at a rank names it.
func TestErrorsNameTheRank(t *testing.T) {
	at := sdk.Place{Stage: 1, Rank: 1}
	broken := sdk.Errorf(sdk.CodeOutOfMemory, "no room")
	check := func(t *testing.T, err error) {
		t.Helper()
		if e, ok := errors.AsType[*StageError](err); !ok || e.Place != at || !strings.Contains(err.Error(), "stage 1.1 (local-stage-1, toy) failed") {
			t.Errorf("got %v, want stage 1.1", err)
		}
	}
	for _, c := range []struct {
		name string
		err  error
	}{{"refused", broken}, {"dead", errDie}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := startRanked(t, func(place sdk.Place, e *toyExecutor) {
					if place == at {
						e.before = func(sdk.Op) error { return c.err }
					}
				})
				defer closeToy(t, r.Pipeline)
				check(t, r.Reserve(t.Context(), sdk.Reservation{Seq: 1}))
			})
		})
	}
	t.Run("a step", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			failed := make(chan struct{})
			r := startRanked(t, func(place sdk.Place, e *toyExecutor) {
				e.before = func(op sdk.Op) error {
					switch {
					case !isPrefill(op):
					case place == at:
						return broken
					case place.Stage == 1:
						<-failed // else the step would have ended before
					}
					return nil
				}
			})
			defer closeToy(t, r.Pipeline)
			requests := reserveAll(t, r.Pipeline, 1)
			check(t, advance(t.Context(), r.Pipeline, 16, requests...))
			close(failed)
		})
	})
}

// heldFrames is a Link that keeps its frames.
type heldFrames []Frame

func (h *heldFrames) Send(f Frame) { *h = append(*h, f) }

type countedOwner int

func (o *countedOwner) Release() { *o++ }

// A frame's bytes come back once, from the last that needs them; one without an owner needs none.
func TestFannedOutFrameComesBackOnce(t *testing.T) {
	for n := range 4 {
		links, held := make([]Link, n), make([]heldFrames, n)
		for i := range links {
			links[i] = &held[i]
		}
		link := linkTo(links)
		if n == 0 {
			if link != nil {
				t.Error("a link to nowhere")
			}
			continue
		}
		var owner countedOwner
		link.Send(Frame{Tag: benchTag(1, 0), Owner: &owner})
		link.Send(Frame{Tag: benchTag(1, 1)})
		for i := range held {
			if owner != 0 || len(held[i]) != 2 || held[i][1].MicroBatch != 1 || held[i][1].Owner != nil {
				t.Fatalf("to %d: link %d got %+v, and %d have come back", n, i, held[i], owner)
			}
			held[i][0].Owner.Release()
		}
		if owner != 1 {
			t.Errorf("to %d: came back %d times", n, owner)
		}
	}
}
