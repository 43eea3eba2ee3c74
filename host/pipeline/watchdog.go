package pipeline

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// The watchdog of a place takes no lock before it has set going the end of an executor that stands still: whatever waits
// for that executor, and whatever lock it waits under, is freed by its end.

// superviseHealth watches for an executor that lives but stands still.
func (m *monitor) superviseHealth() {
	if err := superviseHealth(m.ctx, m.cfg.executor, m.stalled); err != nil {
		m.stuck <- err
	}
}

// stalled is an error once the executor has worked on the same thing for too long.
func (m *monitor) stalled() error {
	began := m.began.Load()
	if began == 0 || m.cfg.clock().Sub(m.start)-time.Duration(began) < stepPatience {
		return nil
	}
	return fmt.Errorf("executor answers, but has not ended what it does for %v", stepPatience)
}

// watch waits for the end of the executor, or of all hope for it, and reports that. One that lives on is ended.
func (m *monitor) watch() {
	var err error
	select {
	case <-m.ctx.Done():
		return
	case <-m.cfg.executor.Done():
		err = m.cfg.executor.Err()
	case cause := <-m.gone:
		err = m.explain(cause)
	case err = <-m.stuck:
	}
	if err == nil {
		err = fmt.Errorf("%w: it ended without being asked to", sdk.ErrExecutorGone)
	}
	if !ended(m.cfg.executor) { // beside what follows, as one that can't be killed takes its time
		m.wait.Go(func() { _ = m.cfg.executor.Kill() }) // Stop, which must follow, tells of it
	}
	m.lose(err)
}

// explain says why nothing goes to the executor any more. Only an error of a call may have the end of the process behind it:
// an executor that takes nothing lives, and to wait for its end would be in vain.
func (m *monitor) explain(cause error) error {
	if _, ok := errors.AsType[*BacklogError](cause); ok {
		return cause
	}
	return m.cfg.executor.Explain(cause)
}

// lose ends the place and reports why.
func (m *monitor) lose(err error) {
	m.mu.Lock()
	m.core.fall(err)
	m.lost = m.core.stageError(m.core.phase, err)
	reporter := m.reporter
	m.settle()
	close(m.lostDone)
	if reporter != nil && m.ctx.Err() == nil {
		reporter.Lost(m.core.cfg.epoch, m.lost)
	}
}

// superviseHealth asks an executor for signs of life until ctx or the process ends, which is nil. Two questions in a
// row without an answer, at the latest 2.5 s after the last one that had one, are an error. One is not enough: had
// this host stood still, its clock would tell the same. An executor that answers but does not come forward is an error
// of stalled, which may be nil.
func superviseHealth(ctx context.Context, e Executor, stalled func() error) error {
	tick := time.NewTicker(healthInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-e.Done():
			return nil
		case <-tick.C:
		}
		err := askHealth(ctx, e)
		if err != nil {
			err = askHealth(ctx, e)
		} else if stalled != nil {
			err = stalled()
		}
		if err != nil && ctx.Err() == nil && !ended(e) {
			return err
		}
	}
}

func askHealth(ctx context.Context, e Executor) error {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	return e.Health(ctx)
}

func ended(e Executor) bool {
	select {
	case <-e.Done():
		return true
	default:
		return false
	}
}
