package batch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mlxcel/mlxcel/host/kvledger"
)

// Submit queues a request; it is SubmitChoices of one.
func (s *Scheduler) Submit(ctx context.Context, req Request) (*Stream, error) {
	streams, err := s.SubmitChoices(ctx, req, 1)
	if err != nil {
		return nil, err
	}
	return streams[0], nil
}

// SubmitChoices queues n answers to a request, all or none. They differ in the sampler's choice, which counts up from the
// request's, and prefill the prompt together. The errors that need no waiting come at once: *kvledger.TooLongError, *TokenRangeError,
// ErrEmptyPrompt, *QueueFullError, *UnavailableError, ErrDraining, ErrClosed. The end of ctx cancels them, also later.
func (s *Scheduler) SubmitChoices(ctx context.Context, req Request, n int) ([]*Stream, error) {
	if err := s.check(&req, n); err != nil {
		return nil, err
	}
	jobs, streams := make([]*job, n), make([]*Stream, n)
	for i := range jobs {
		r := req
		r.Sampler.Choice += uint32(i)
		j := &job{req: &r}
		j.stream = newStream(s, j)
		j.stream.detach = context.AfterFunc(ctx, func() { s.cancelJob(j, context.Cause(ctx)) })
		jobs[i], streams[i] = j, j.stream
	}
	var refused error
	s.update(func(now time.Time) {
		if refused = s.refusal(ctx); refused != nil {
			return
		}
		for _, j := range jobs {
			s.lastID++
			j.id = s.lastID
			s.jobs[j] = struct{}{}
		}
		if refused = s.core.submit(now, jobs...); refused != nil {
			for _, j := range jobs {
				delete(s.jobs, j)
			}
		}
	})
	if refused != nil {
		for _, j := range jobs {
			j.stream.detach()
		}
		return nil, refused
	}
	return streams, nil
}

// check refuses what could never be served.
func (s *Scheduler) check(req *Request, n int) error {
	if n < 1 {
		return fmt.Errorf("%d choices: want at least 1", n)
	}
	if len(req.Prompt) == 0 {
		return ErrEmptyPrompt
	}
	if req.MaxTokens < 0 || req.TopN < 0 {
		return fmt.Errorf("%d tokens with the %d most probable of each: want 0 or more", req.MaxTokens, req.TopN)
	}
	for _, id := range req.Prompt {
		if id < 0 || s.cfg.VocabSize > 0 && int(id) >= s.cfg.VocabSize {
			return &TokenRangeError{Token: id, VocabSize: s.cfg.VocabSize}
		}
	}
	return nil
}

// refusal is why no request is taken now.
func (s *Scheduler) refusal(ctx context.Context) error {
	switch {
	case s.closed:
		return ErrClosed
	case s.draining:
		return ErrDraining
	case s.failure != nil:
		return s.failure
	case s.outage != nil:
		return s.outage
	}
	return context.Cause(ctx)
}

func (s *Scheduler) cancelJob(j *job, cause error) {
	s.update(func(now time.Time) {
		if _, live := s.jobs[j]; live {
			s.core.cancel(now, j, cause)
		}
	})
}

func (s *Scheduler) stopJob(j *job) {
	s.update(func(now time.Time) {
		if _, live := s.jobs[j]; live {
			s.core.stop(now, j)
		}
	})
}

// Limit returns the positions that one sequence can have, prompt and answer together; math.MaxInt where nothing
// limits them.
func (s *Scheduler) Limit() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.ledger.Limit()
}

// Drain takes no new requests and waits until all others have ended, or ctx has.
func (s *Scheduler) Drain(ctx context.Context) error {
	s.update(func(time.Time) { s.draining = true })
	select {
	case <-s.drained:
		return nil
	case <-s.ctx.Done():
		return ErrClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// checkDrained tells Drain when nothing is left.
func (s *Scheduler) checkDrained() {
	if !s.draining || len(s.jobs) > 0 || !s.core.idle() {
		return
	}
	select {
	case <-s.drained:
	default:
		close(s.drained)
	}
}

// Close ends everything in flight with ErrClosed and waits for the scheduler's goroutines. It may be called more than
// once.
func (s *Scheduler) Close() {
	s.update(func(now time.Time) {
		if !s.closed {
			s.closed = true
			s.core.endAll(now, ErrClosed)
			s.core.halted = true
		}
	})
	s.cancel()
	s.work.Wait()
}

// setTimer has update called again when the next request's time is up.
func (s *Scheduler) setTimer(now time.Time) {
	at := s.core.wakeAt()
	if at.Equal(s.wakeAt) {
		return
	}
	if s.unwake != nil {
		s.unwake()
	}
	s.wakeAt, s.unwake = at, nil
	if !at.IsZero() {
		s.unwake = s.cfg.Clock.AfterFunc(at.Sub(now), s.wake)
	}
}

func (s *Scheduler) wake() {
	s.update(func(time.Time) { s.wakeAt, s.unwake = time.Time{}, nil })
}

// lose ends everything in flight with the loss of the runtime, and has it started again.
func (s *Scheduler) lose(now time.Time, err error) {
	s.cfg.Logger.Error("the pipeline is lost", "error", err)
	s.life.cancel()
	s.life = nil
	s.core.lost(now, err)
	switch {
	case s.closed:
	case s.cfg.Relaunch == nil, s.draining && s.cfg.RefuseWhileLost: // then nobody would wait for it
		s.fail(now, &UnavailableError{Err: err})
	default:
		if s.cfg.RefuseWhileLost {
			s.outage = &UnavailableError{Relaunching: true, Err: err}
			s.core.endAll(now, s.outage)
		}
		s.work.Go(s.relaunch)
	}
}

// fail gives up for good.
func (s *Scheduler) fail(now time.Time, err error) {
	s.failure = err
	s.core.endAll(now, err)
}

// relaunch tries to bring the runtime up until it is, the attempts are used up, or the scheduler closes.
func (s *Scheduler) relaunch() {
	backoff := s.cfg.RelaunchBackoff
	for attempt := 1; s.ctx.Err() == nil; attempt++ {
		var rt Runtime
		var books *kvledger.Config
		err := guard(func() (err error) {
			rt, books, err = s.cfg.Relaunch(s.ctx)
			return err
		})
		if err == nil && rt == nil {
			err = errors.New("the relaunch gave no runtime")
		}
		ledger, faulty := s.ledger(books)
		if err = errors.Join(err, faulty); err == nil {
			s.update(func(now time.Time) { s.adopt(now, rt, ledger) })
			return
		}
		s.cfg.Logger.Error("the pipeline did not come up again", "attempt", attempt, "of", s.cfg.RelaunchAttempts, "error", err)
		if attempt == s.cfg.RelaunchAttempts {
			s.update(func(now time.Time) { s.fail(now, &UnavailableError{Attempts: attempt, Err: err}) })
			return
		}
		s.pause(backoff)
		backoff = min(2*backoff, maxRelaunchBackoff)
	}
}

// ledger opens the books of a runtime that was started again, nil to go on with those of the one before.
func (s *Scheduler) ledger(cfg *kvledger.Config) (*kvledger.Ledger, error) {
	if cfg == nil {
		return nil, nil
	}
	books := *cfg
	books.Preemption = s.cfg.Ledger.Preemption
	return kvledger.New(books)
}

func (s *Scheduler) adopt(now time.Time, rt Runtime, ledger *kvledger.Ledger) {
	if s.closed {
		return
	}
	s.outage = nil
	if ledger != nil {
		s.core.refit(now, ledger)
	}
	s.begin(now, rt)
	s.core.counters.Relaunches++
	s.cfg.Logger.Info("the pipeline is back")
}

// pause waits, at most until the scheduler closes.
func (s *Scheduler) pause(d time.Duration) {
	over := make(chan struct{})
	stop := s.cfg.Clock.AfterFunc(d, func() { close(over) })
	select {
	case <-over:
	case <-s.ctx.Done():
		stop()
	}
}
