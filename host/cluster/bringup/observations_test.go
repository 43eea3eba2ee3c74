package bringup

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/internal/filltest"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// noted is an Observer that hands on what it is told.
type noted chan pipeline.Observation

func (n noted) Observe(o pipeline.Observation) { n <- o }

// A coordinator with an observer learns what every peer's stage did, with the order's trace.
func TestPeersTellWhatTheyDo(t *testing.T) {
	model := testModel(t)
	var at []string
	for _, p := range startPeers(t, model, 2) {
		at = append(at, p.address)
	}
	seen := make(noted, 1000)
	c := newTestCoordinator(t, at, func(cfg *CoordinatorConfig) { cfg.Observer = seen })
	running := bringUp(t, c)
	trace := pipeline.TraceID{1, 2, 3}
	const n = 3
	if _, err := greedy(pipeline.WithTrace(t.Context(), trace), running.Pipeline, testPrompt, n); err != nil {
		t.Fatal(err)
	}
	steps := map[int]int{}
	last := map[int]uint64{}
	for steps[0] < n || steps[1] < n {
		o := <-seen
		if o.Trace != trace { // the canary's
			continue
		}
		at := o.Place.Stage
		steps[at]++
		if o.Step <= last[at] {
			t.Errorf("stage %d tells of step %d after step %d", at, o.Step, last[at])
		}
		last[at] = o.Step
		if o.Received.After(o.Began) || o.Began.After(o.Ended) || o.Ended.After(o.Sent) || o.Received.IsZero() || o.Failed {
			t.Errorf("times out of order: %+v", o)
		}
	}
}

func TestObservationsLoseNothing(t *testing.T) {
	o := filltest.Of[pipeline.Observation]()
	for i, at := range []*time.Time{&o.Received, &o.Began, &o.Ended, &o.Sent} {
		*at = time.Unix(7, int64(i+1))
	}
	got, err := observationFrom(overTheWire[pb.Observation](t, observationMessage(o)))
	if err != nil || !reflect.DeepEqual(got, o) {
		t.Errorf("observation\n%+v, %v, want\n%+v", got, err, o)
	}
	none := pipeline.Observation{Place: sdk.Place{Stage: 1}}
	if got, err := observationFrom(overTheWire[pb.Observation](t, observationMessage(none))); err != nil || got != none {
		t.Errorf("observation %+v, %v, want %+v", got, err, none)
	}
	if _, err := observationFrom(&pb.Observation{Trace: make([]byte, 15)}); err == nil {
		t.Error("a trace that is too short came through")
	}
}

// A coordinator that does not take them costs the oldest, and is told how many.
func TestOldObservationsAreDropped(t *testing.T) {
	o := newObservations()
	const more = 10
	for i := range maxObservations + more {
		o.Observe(pipeline.Observation{Tag: pipeline.Tag{Step: uint64(i)}})
	}
	ctx, cancel := context.WithCancel(t.Context())
	to, done := make(chan *pb.Observations), make(chan struct{})
	go func() { o.tell(ctx, to); close(done) }()
	next := uint64(more)
	for first := true; next < maxObservations+more; first = false {
		m := <-to
		if dropped := m.GetDropped(); first != (dropped == more) {
			t.Errorf("%d are said to be dropped, want %d once", dropped, more)
		}
		if n := len(m.GetObservations()); n == 0 || n > maxTold {
			t.Errorf("%d are told at once, want at most %d", n, maxTold)
		}
		for _, one := range m.GetObservations() {
			if one.GetStep() != next {
				t.Fatalf("step %d is told where step %d should be", one.GetStep(), next)
			}
			next++
		}
	}
	cancel()
	<-done
}

// What a stage pays for each micro-batch, also where the coordinator takes nothing.
func BenchmarkObserveWithoutATaker(b *testing.B) {
	o := newObservations()
	for range maxObservations {
		o.Observe(pipeline.Observation{})
	}
	for b.Loop() {
		o.Observe(pipeline.Observation{})
	}
}
