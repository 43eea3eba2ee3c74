package batch

import (
	"cmp"
	"slices"
	"time"
)

// relieve takes sequences off the stages that are past their threshold.
func (c *core) relieve(now time.Time) {
	for c.cfg.preemption != PreemptNone && len(c.active) > 1 && c.ledger.Pressure() {
		v := c.victim()
		if v == nil {
			return
		}
		c.preempt(now, v)
	}
}

// grow makes sure that a stream has memory for its next row, where need be at the cost of another, or of itself.
func (c *core) grow(now time.Time, j *job) bool {
	for {
		err := c.ledger.Grow(j.seq, j.fed+1)
		if err == nil {
			return true
		}
		if c.cfg.preemption == PreemptNone { // all that it needs was reserved: the books are wrong
			c.end(now, j, "", c.failure(j, err))
			return false
		}
		v := c.victim()
		if v == nil || v == j && len(c.flights) > 0 {
			return false // what is in a step now can make room later
		}
		c.preempt(now, v)
		if v == j {
			return false
		}
	}
}

// victim picks the stream that loses its place; nil where none can. One that got no token since it joined keeps its
// place, so that every turn brings each request further.
func (c *core) victim() *job {
	var candidates []*job
	for _, j := range c.active {
		if j.place == placeReady && j.steps == 0 && j.lending == 0 && !j.ended && j.decoding() && j.since > 0 {
			candidates = append(candidates, j)
		}
	}
	if len(candidates) == 0 {
		return nil
	}
	return slices.MinFunc(candidates, c.compareVictims)
}

// compareVictims orders by the policy; of equals, the one that joined last goes first.
func (c *core) compareVictims(a, b *job) int {
	var order int
	switch c.cfg.preemption {
	case PreemptLRU:
		order = cmp.Compare(a.turn, b.turn)
	case PreemptLongest:
		order = cmp.Compare(len(b.history), len(a.history))
	case PreemptLowestPriority:
		order = cmp.Compare(a.req.Priority, b.req.Priority)
	}
	return cmp.Or(order, cmp.Compare(b.seq, a.seq))
}

// preempt has a job lose its place for want of memory.
func (c *core) preempt(now time.Time, j *job) {
	j.preempted++
	c.counters.Preemptions++
	c.putBack(now, j)
}

// putBack takes a job off every stage and puts it back in the queue, where it keeps its order of arrival. Later its
// prompt and what it has generated are prefilled again; its next tokens are the same, as the position decides them.
func (c *core) putBack(now time.Time, j *job) {
	c.release(now, j)
	c.enqueue(j)
}
