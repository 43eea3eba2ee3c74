package pipeline

import (
	"context"
	"time"
)

const (
	healthInterval = 500 * time.Millisecond
	healthTimeout  = time.Second // of one question

	// stepPatience is how long an executor may work on one thing. It is beyond what the largest prefill chunk takes on the
	// slowest device that makes sense.
	stepPatience = 10 * time.Minute
)

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
