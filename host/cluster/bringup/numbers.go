package bringup

import "time"

// numbers are what a stage counted last.
type numbers struct {
	at             time.Time
	busy           time.Duration // since the stage was loaded
	fraction       float64       // of the interval before at
	sent, received int64
}

// next takes in what is counted now.
func (n numbers) next(now time.Time, busy time.Duration, sent, received int64) numbers {
	out := numbers{at: now, busy: busy, sent: sent, received: received}
	if past := now.Sub(n.at); !n.at.IsZero() && past > 0 {
		out.fraction = min(1, float64(busy-n.busy)/float64(past))
	}
	return out
}
