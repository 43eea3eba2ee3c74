package stage

import (
	"context"
	"runtime"

	"github.com/mlxcel/mlxcel/sdk"
)

// worker is the one OS thread that owns MLX evaluation.
type worker struct {
	jobs chan func()
	done chan struct{}
}

func startWorker() *worker {
	w := &worker{jobs: make(chan func()), done: make(chan struct{})}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(w.done)
		for f := range w.jobs {
			f()
		}
	}()
	return w
}

// do runs f on the worker and returns what it returned. A ctx that ends before f begins gives CodeCanceled; once f runs
// it must watch ctx itself.
func (w *worker) do(ctx context.Context, f func() error) error {
	result := make(chan error, 1)
	select {
	case w.jobs <- func() { result <- f() }:
		return <-result
	case <-ctx.Done():
		return canceled(ctx)
	}
}

// stop ends the worker and waits for it. Nothing may call do any more.
func (w *worker) stop() {
	close(w.jobs)
	<-w.done
}

func canceled(ctx context.Context) error {
	return sdk.Errorf(sdk.CodeCanceled, "canceled: %v", context.Cause(ctx))
}
