package stage

import (
	"context"
	"runtime"
	"sync"

	"github.com/mlxcel/mlxcel/sdk"
)

// worker is the one OS thread that owns MLX evaluation. While a step stream is served the thread reads it: then the stream's
// operations run at once, and what others want done waits until the thread is between two of them.
type worker struct {
	mu      sync.Mutex
	queue   []func()
	loop    *sdk.StepLoop // being served, or nil
	stopped bool
	more    chan struct{} // something is queued, or stopped; holds one token
	done    chan struct{}
}

func startWorker() *worker {
	w := &worker{more: make(chan struct{}, 1), done: make(chan struct{})}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(w.done)
		for w.runQueued() {
			<-w.more
		}
	}()
	return w
}

// runQueued runs what is queued; false once the worker is stopped.
func (w *worker) runQueued() bool {
	for {
		w.mu.Lock()
		if len(w.queue) == 0 {
			stopped := w.stopped
			w.mu.Unlock()
			return !stopped
		}
		f := w.queue[0]
		w.queue = w.queue[1:]
		w.mu.Unlock()
		f()
	}
}

// push queues f and sees to it that the thread looks.
func (w *worker) push(f func()) {
	w.mu.Lock()
	w.queue = append(w.queue, f)
	loop := w.loop
	w.mu.Unlock()
	if loop != nil {
		loop.Wake()
	}
	select {
	case w.more <- struct{}{}:
	default:
	}
}

// do runs f on the worker and returns what it returned. A ctx that ends before f begins gives CodeCanceled; once f runs
// it must watch ctx itself.
func (w *worker) do(ctx context.Context, f func() error) error {
	if sdk.OnStepThread(ctx) {
		return f()
	}
	begun := make(chan struct{})
	result := make(chan error, 1)
	w.push(func() {
		select {
		case begun <- struct{}{}:
			result <- f()
		case <-ctx.Done():
		}
	})
	select {
	case <-begun:
		return <-result
	case <-ctx.Done():
		return canceled(ctx)
	}
}

// serve has the thread read a step stream until it ends.
func (w *worker) serve(loop *sdk.StepLoop) {
	ended := make(chan struct{})
	w.push(func() {
		defer close(ended)
		w.reads(loop)
		loop.Run(func() { w.runQueued() })
		w.reads(nil)
	})
	<-ended
}

// reads notes which stream the thread reads: whoever queues something wakes it from there.
func (w *worker) reads(loop *sdk.StepLoop) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loop = loop
}

// stop ends the worker and waits for it. Nothing may call do any more.
func (w *worker) stop() {
	w.mu.Lock()
	w.stopped = true
	w.mu.Unlock()
	w.push(func() {})
	<-w.done
}

func canceled(ctx context.Context) error {
	return sdk.Errorf(sdk.CodeCanceled, "canceled: %v", context.Cause(ctx))
}
