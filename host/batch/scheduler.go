// Package batch owns continuous batching: which sequences make up each step of the one runtime, and who waits.
//
// Requests join and leave with every step. A core without clock or goroutines decides; a thin monitor around it carries
// its decisions out.
package batch

import (
	"context"
	"runtime/debug"
	"sync"
	"time"

	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/sdk"
)

// Runtime is what requests run on; *pipeline.Pipeline is one.
type Runtime interface {
	NewSeq() sdk.SeqID
	PrefillChunk() int // rows of one sequence in a step at most
	AnyPieces() bool   // results do not depend on how prompts are cut; else prompts go in pieces of PrefillChunk alone
	Reserve(ctx context.Context, r sdk.Reservation) error
	// Release frees a sequence. ctx bounds only the wait: with one that has ended, it gives the order and returns.
	Release(ctx context.Context, seq sdk.SeqID) error
	// Begin orders a step; wait, to be called once, brings its results. It fails with a *pipeline.StepError where those of
	// some sequences are valid. The sequences that failed, and all when ctx ends, must be released. A step of which nothing is
	// wanted for a sequence need not have ended before the sequence's next begins. Where such a one fails, so do its later ones,
	// and those that share one under way with a *pipeline.SpoiledError.
	Begin(ctx context.Context, seqs []sdk.SeqStep) (wait func() ([]sdk.SeqResult, error))
	Done() <-chan struct{} // closed once it takes no more work
	Err() error            // why
}

// Scheduler batches requests continuously over one runtime. It is safe for concurrent use.
//
// It is a monitor: whoever brings an event (a request, the end of a step, a deadline) has the core decide under the
// lock, and sets going what it decided.
type Scheduler struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	noWait context.Context // has ended: releases are ordered, not waited for
	work   sync.WaitGroup

	mu       sync.Mutex
	core     *core
	life     *life             // of the runtime; nil while there is none
	jobs     map[*job]struct{} // not ended
	lastID   uint64
	failure  error // why there will be no runtime any more
	outage   error // why no request is taken while there is none
	draining bool
	closed   bool
	drained  chan struct{} // closed once draining is through
	wakeAt   time.Time
	unwake   func() bool // stops the timer set for wakeAt
}

// life is the time from a runtime's start, or from a fault of the scheduler, to the next. What began in an earlier one
// no longer counts.
type life struct {
	rt     Runtime
	ctx    context.Context
	cancel context.CancelFunc
}

// New starts a scheduler. Close ends it; the runtime stays its owner's.
func New(cfg Config) (s *Scheduler, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s = &Scheduler{cfg: cfg.withDefaults(), jobs: map[*job]struct{}{}, drained: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	var end context.CancelFunc
	s.noWait, end = context.WithCancel(context.Background())
	end()
	if s.core, err = s.freshCore(); err != nil {
		return nil, err
	}
	s.begin(s.cfg.Clock.Now(), cfg.Runtime)
	return s, nil
}

func (s *Scheduler) freshCore() (*core, error) {
	ledger, err := kvledger.New(s.cfg.Ledger)
	if err != nil {
		return nil, err
	}
	return newCore(s.cfg.core(), ledger), nil
}

// begin starts a life of a runtime.
func (s *Scheduler) begin(now time.Time, rt Runtime) {
	s.core.resume(now, rt.PrefillChunk(), rt.AnyPieces(), rt.NewSeq)
	l := &life{rt: rt}
	l.ctx, l.cancel = context.WithCancel(s.ctx)
	s.life = l
	s.work.Go(func() {
		select {
		case <-l.ctx.Done():
		case <-rt.Done():
			s.update(func(now time.Time) {
				if s.life == l {
					s.lose(now, rt.Err())
				}
			})
		}
	})
}

// update lets one event happen, decides what follows, and sets it going.
func (s *Scheduler) update(event func(now time.Time)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.contain()
	now := s.cfg.Clock.Now()
	event(now)
	s.core.expire(now)
	s.core.decide(now)
	s.carryOut(s.core.take())
	s.setTimer(now)
	s.checkDrained()
}

// carryOut does what the core wants. New steps start before anybody is told of the tokens of the last one.
func (s *Scheduler) carryOut(o orders) {
	if s.life != nil {
		for _, seq := range o.release {
			_ = s.life.rt.Release(s.noWait, seq) // ordered; nobody waits
		}
		for _, j := range o.reserve {
			s.startReserve(s.life, j)
		}
		for _, f := range o.steps {
			s.startStep(s.life, f)
		}
	}
	for _, f := range o.abort {
		f.cancel()
	}
	for _, d := range o.tokens {
		d.job.stream.push(d.job, d.token)
	}
	for _, u := range o.unshared {
		s.cfg.Logger.Warn("a choice prefills its prompt itself, which another was to have done for it",
			"request", u.job.id, "rows", len(u.job.req.Prompt), "refused", u.err)
	}
	for _, j := range o.ended {
		delete(s.jobs, j)
		j.stream.finish(j)
	}
}

func (s *Scheduler) startReserve(l *life, j *job) {
	seq := j.seq
	r := sdk.Reservation{Seq: seq, Prompt: j.req.Prompt, Sampler: j.req.Sampler, Snapshots: j.snapshots}
	if j.from != nil {
		r.From, r.Keep = j.from.seq, j.fed
	}
	if s.cfg.Preemption == PreemptNone { // else the stages spare no more than what a sequence has grown to
		r.MaxLen = j.length()
	}
	s.work.Go(func() {
		err := guard(func() error { return l.rt.Reserve(l.ctx, r) })
		s.update(func(now time.Time) {
			switch {
			case s.life != l:
				_ = l.rt.Release(s.noWait, seq)
			case err != nil && l.rt.Err() != nil:
				s.lose(now, l.rt.Err())
			default:
				s.core.reserved(now, j, err)
			}
		})
	})
}

func (s *Scheduler) startStep(l *life, f *flight) {
	ctx, cancel := context.WithCancel(l.ctx)
	f.cancel = cancel
	var wait func() ([]sdk.SeqResult, error)
	err := guard(func() error { // here, as the pieces of a prompt must begin in their order
		wait = l.rt.Begin(ctx, f.steps)
		return nil
	})
	s.work.Go(func() {
		defer cancel()
		var results []sdk.SeqResult
		if err == nil {
			err = guard(func() (err error) {
				results, err = wait()
				return err
			})
		}
		s.update(func(now time.Time) {
			switch {
			case s.life != l:
				for i := range f.steps {
					_ = l.rt.Release(s.noWait, f.steps[i].Seq)
				}
			case err != nil && l.rt.Err() != nil:
				s.lose(now, l.rt.Err())
			default:
				before := s.core.counters.Restarts
				s.core.stepped(now, f, results, err)
				if n := s.core.counters.Restarts - before; n > 0 {
					s.cfg.Logger.Warn("requests begin again that shared a step with a failed one", "requests", n, "error", err)
				}
			}
		})
	})
}

// guard turns a panic of the runtime into an error.
func guard(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

// contain turns a panic of the scheduler into the failure of the requests that it had, and starts afresh.
func (s *Scheduler) contain() {
	v := recover()
	if v == nil {
		return
	}
	err := &PanicError{Value: v, Stack: debug.Stack()}
	s.cfg.Logger.Error("the scheduler failed and starts afresh", "requests", len(s.jobs), "error", err, "stack", string(err.Stack))
	now := s.cfg.Clock.Now()
	for j := range s.jobs {
		j.ended, j.err, j.endedAt = true, err, now
		j.stream.finish(j)
	}
	old, l := s.core, s.life
	s.core, _ = s.freshCore() // it can't fail: New has made one of the same
	s.core.counters = old.counters
	s.core.counters.Panics++
	s.core.counters.Failed += uint64(len(s.jobs))
	clear(s.jobs)
	if l != nil && !s.closed {
		l.cancel() // ends what is in a step or being reserved, and releases it
		for _, j := range old.active {
			if j.place == placeReady {
				_ = guard(func() error { return l.rt.Release(s.noWait, j.seq) })
			}
		}
		s.begin(now, l.rt)
	}
	s.checkDrained()
}
