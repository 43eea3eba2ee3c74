package pipeline

import (
	"context"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// TraceID names what an order is part of, wherever it goes; zero names nothing.
type TraceID [16]byte

// Observation is what one place did with one micro-batch. It is a plain value, so that a host can gather its places' and
// send them on. Times are of the place's host; those that it did not come to are zero.
type Observation struct {
	Place sdk.Place
	Tag
	Trace    TraceID
	Received time.Time // the order had come, and the hidden rows where it takes such
	Began    time.Time // it was handed to the executor
	Ended    time.Time // the executor's answer came
	Sent     time.Time // the output was handed on, to the next stage or to the coordinator
	Compute  time.Duration
	Queue    time.Duration // that the step waited in the executor; 0 where the executor does not tell
	Failed   bool          // nothing came of it
}

// Observer is told of every micro-batch that an executor has answered for, on the goroutine that brings the answers of
// its place: it must not wait.
type Observer interface {
	Observe(Observation)
}

type traceKey struct{}

// WithTrace has the orders of calls under the context carry a trace.
func WithTrace(ctx context.Context, id TraceID) context.Context {
	return context.WithValue(ctx, traceKey{}, id)
}

func traceOf(ctx context.Context) TraceID {
	id, _ := ctx.Value(traceKey{}).(TraceID)
	return id
}
