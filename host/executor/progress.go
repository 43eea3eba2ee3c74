package executor

import (
	"fmt"
	"time"
)

// Progress tells a stage that stands still with work queued from one that is idle or busy. It is pure: the
// caller brings the time and the numbers, e.g. from Process.Health.
type Progress struct {
	Limit time.Duration // how long a step may take

	steps uint64
	since time.Time // of the last progress, or of the first sight of work
}

// Observe takes in the number of steps finished so far and the number waiting or running. It returns a
// *StalledError when work has been there for longer than Limit without a step finishing.
func (p *Progress) Observe(now time.Time, steps uint64, queued int) error {
	if queued == 0 || steps != p.steps || p.since.IsZero() {
		p.steps, p.since = steps, now
		return nil
	}
	if still := now.Sub(p.since); still > p.Limit {
		return &StalledError{For: still, Limit: p.Limit, Steps: steps, Queued: queued}
	}
	return nil
}

// StalledError is a stage that answers, yet finishes no step.
type StalledError struct {
	For, Limit time.Duration
	Steps      uint64 // finished since its start
	Queued     int    // waiting or running
}

func (e *StalledError) Error() string {
	return fmt.Sprintf("no step finished for %v with %d queued (limit %v, %d finished before)", e.For, e.Queued, e.Limit, e.Steps)
}
