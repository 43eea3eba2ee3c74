package pipeline

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// observed gathers what it is told.
type observed struct {
	mu  sync.Mutex
	all map[string]Observation // by place and micro-batch
	dup []string
}

func (o *observed) Observe(seen Observation) {
	o.mu.Lock()
	defer o.mu.Unlock()
	name := fmt.Sprintf("%s: %d.%d", seen.Place, seen.Step, seen.MicroBatch)
	if _, twice := o.all[name]; twice {
		o.dup = append(o.dup, name)
	}
	o.all[name] = seen
}

// Every place tells of every micro-batch once, with its times in order and the trace of the call, also where it failed.
func TestEveryMicroBatchIsObserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &observed{all: map[string]Observation{}}
		l := &toyLauncher{}
		slow(l, 10*time.Millisecond)
		cfg := toyConfig(t, 2, l)
		cfg.Observer = o
		fail := false
		slowly := l.prepare
		l.prepare = func(e *toyExecutor) {
			slowly(e)
			wait := e.before
			e.before = func(op sdk.Op) error {
				err := wait(op)
				if s, ok := op.(*sdk.Step); ok && e.stage == 1 && s.Seqs[0].Seq == 2 && fail {
					return sdk.Errorf(sdk.CodeInternal, "broken")
				}
				return err
			}
		}
		p := startToy(t, cfg)
		defer closeToy(t, p)
		began := time.Now()
		ctx := WithTrace(t.Context(), TraceID{1, 2})
		requests := reserveAll(t, p, 3) // orders 1 to 3
		if err := advance(ctx, p, 16, requests...); err != nil {
			t.Fatal(err)
		}
		fail = true
		if err := advance(ctx, p, 16, requests...); err == nil {
			t.Fatal("the failure is lost")
		}
		synctest.Wait()
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.all) != 2*2*3 || len(o.dup) > 0 {
			t.Errorf("%d observations, want 12; twice: %v", len(o.all), o.dup)
		}
		for step := uint64(4); step <= 5; step++ {
			for mb := range 3 {
				first, last := o.all[fmt.Sprintf("0: %d.%d", step, mb)], o.all[fmt.Sprintf("1: %d.%d", step, mb)]
				for _, seen := range []Observation{first, last} {
					failed := step == 5 && mb == 1 && seen.Place.Stage == 1
					checkObservation(t, seen, began, failed)
				}
				if last.Received.Before(first.Ended) {
					t.Errorf("micro-batch %d.%d was received %v before it was sent", step, mb, first.Ended.Sub(last.Received))
				}
			}
		}
	})
}

func checkObservation(t *testing.T, o Observation, began time.Time, failed bool) {
	t.Helper()
	if o.Epoch != 0 || o.Trace != (TraceID{1, 2}) || o.Failed != failed || o.Sent.IsZero() != failed {
		t.Errorf("observed %+v, failed %v", o, failed)
	}
	if o.Received.Before(began) || o.Began.Before(o.Received) || o.Ended.Before(o.Began) || !failed && o.Sent.Before(o.Ended) {
		t.Errorf("times of %s %d.%d are out of order: %+v", o.Place, o.Step, o.MicroBatch, o)
	}
	if !failed && (o.Compute != 10*time.Millisecond || o.Ended.Sub(o.Began) < o.Compute) {
		t.Errorf("%s %d.%d computed %v in %v, want 10ms", o.Place, o.Step, o.MicroBatch, o.Compute, o.Ended.Sub(o.Began))
	}
}

// A step costs a place no memory where nobody observes it.
func TestUnobservedStepsAllocateNothing(t *testing.T) {
	cost := func(observed bool) float64 {
		at := sdk.Place{Stage: 1}
		c := newCore(coreConfig{
			epoch: benchEpoch, place: at, role: sdk.RoleOf(at, 2), boundary: sdk.Boundary{Width: toyWidth, Dtype: sdk.DtypeFloat32},
			slots: 1, observed: observed, maxOrders: 10, maxBytes: 1000,
		})
		c.free = []*slot{{core: c, in: make([]byte, 64)}}
		now := time.Unix(0, 0)
		c.order(now, Order{Epoch: benchEpoch, ID: 1, Op: sdk.Reservation{Seq: 10}})
		c.take()
		c.answered(now, nil, nil)
		o := benchPlan(1, 10)
		f := Frame{Tag: benchTag(1, 0), Seqs: []sdk.SeqID{10}, Hidden: sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: 1, Width: toyWidth, Data: make([]byte, 16)}}
		result := &sdk.StepResult{Seqs: []sdk.SeqResult{{Seq: 10, Token: 7}}}
		return testing.AllocsPerRun(100, func() {
			o.ID++
			f.Step++
			c.order(now, o)
			c.frame(now, f)
			if _, ok := c.take(); !ok {
				t.Fatal("the step does not go out")
			}
			c.answered(now, result, nil)
			if len(c.plans) != 0 || len(c.effects) == 0 {
				t.Fatal("the step has not ended")
			}
			c.effects = c.effects[:0]
		})
	}
	if n := cost(false); n != 0 {
		t.Errorf("a step allocates %v times", n)
	}
	if cost(true) == 0 {
		t.Error("an observed step allocates nothing either: the test tells nothing")
	}
}
