package bringup

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

const (
	// maxObservations is how many wait to be told: some seconds of a busy stage. Of more the oldest go.
	maxObservations = 4096
	// maxTold is how many are told at once: some 40 KiB.
	maxTold = 512
	// tellEvery bounds how often the coordinator is told, and how late it learns.
	tellEvery = 200 * time.Millisecond
)

// observations are what a peer's stage did and the coordinator has not been told yet. It is the stage's Observer, and never
// makes it wait.
type observations struct {
	some chan struct{} // there are some; holds one token

	mu       sync.Mutex
	ring     []pipeline.Observation // the one that came as number i lies at i modulo its length
	from, to uint64                 // those that wait, by number
	dropped  uint64                 // since the last were taken
}

func newObservations() *observations {
	return &observations{some: make(chan struct{}, 1), ring: make([]pipeline.Observation, maxObservations)}
}

func (o *observations) at(i uint64) *pipeline.Observation { return &o.ring[i%uint64(len(o.ring))] }

// Observe is pipeline.Observer's.
func (o *observations) Observe(x pipeline.Observation) {
	o.mu.Lock()
	if o.to-o.from == uint64(len(o.ring)) {
		o.from++
		o.dropped++
	}
	*o.at(o.to) = x
	o.to++
	o.mu.Unlock()
	select {
	case o.some <- struct{}{}:
	default:
	}
}

// tell hands what there is to whoever takes it from to, until ctx ends.
func (o *observations) tell(ctx context.Context, to chan<- *pb.Observations) {
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.some:
		}
		select { // gather
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for m := o.take(); m != nil; m = o.take() {
			select {
			case <-ctx.Done():
				return
			case to <- m:
			}
		}
	}
}

// take takes the oldest off, nil where there are none.
func (o *observations) take() *pb.Observations {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := min(o.to-o.from, maxTold)
	if n == 0 {
		return nil
	}
	m := &pb.Observations{Dropped: o.dropped, Observations: make([]*pb.Observation, n)}
	for i := range m.Observations {
		m.Observations[i] = observationMessage(*o.at(o.from))
		o.from++
	}
	o.dropped = 0
	return m
}

func observationMessage(o pipeline.Observation) *pb.Observation {
	return &pb.Observation{
		Stage: int64(o.Place.Stage), Rank: int64(o.Place.Rank), Epoch: o.Epoch, Step: o.Step, MicroBatch: int64(o.MicroBatch), Trace: o.Trace[:],
		Received: unixNanos(o.Received), Began: unixNanos(o.Began), Ended: unixNanos(o.Ended), Sent: unixNanos(o.Sent),
		ComputeNanos: int64(o.Compute), QueueNanos: int64(o.Queue), Failed: o.Failed,
	}
}

func observationFrom(m *pb.Observation) (pipeline.Observation, error) {
	o := pipeline.Observation{
		Place:    sdk.Place{Stage: int(m.GetStage()), Rank: int(m.GetRank())},
		Tag:      pipeline.Tag{Epoch: m.GetEpoch(), Step: m.GetStep(), MicroBatch: int(m.GetMicroBatch())},
		Received: fromUnixNanos(m.GetReceived()), Began: fromUnixNanos(m.GetBegan()), Ended: fromUnixNanos(m.GetEnded()),
		Sent: fromUnixNanos(m.GetSent()), Compute: time.Duration(m.GetComputeNanos()), Queue: time.Duration(m.GetQueueNanos()),
		Failed: m.GetFailed(),
	}
	if n := copy(o.Trace[:], m.GetTrace()); n != len(o.Trace) || n != len(m.GetTrace()) {
		return o, fmt.Errorf("a trace of %d bytes, want %d", len(m.GetTrace()), len(o.Trace))
	}
	return o, nil
}

func unixNanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromUnixNanos(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}
