package pipeline

import (
	"slices"
	"time"

	"github.com/mlxcel/mlxcel/host/schedule"
)

// entry is an order on its way through a place.
type entry struct {
	order    Order
	bytes    int64          // of the order, in the backlog
	queued   bool           // in the queue: something of it has not begun
	machine  schedule.Stage // of a plan
	begun    int            // micro-batches before this one have begun or were given up
	frames   []Frame        // by micro-batch: arrived and not taken in
	ready    *slot          // holds the activations of the micro-batch to forward next
	received []time.Time    // by micro-batch, where it is observed
}

func (c *core) newEntry(o Order) *entry {
	var e *entry
	if n := len(c.spare); n > 0 {
		e, c.spare = c.spare[n-1], c.spare[:n-1]
	} else {
		e = &entry{}
	}
	e.order, e.bytes = o, o.bytes()
	if o.Plan != nil {
		n := o.Plan.MicroBatches()
		e.machine.Reset(c.cfg.place, c.cfg.role, n, c.cfg.slots)
		e.begun = 0
		e.frames = slices.Grow(e.frames[:0], n)[:n]
		clear(e.frames)
	}
	return e
}

// next returns the first micro-batch that has not begun. There is one unless all have.
func (e *entry) next() int {
	for e.begun < len(e.frames)-1 && e.machine.Aborted(e.begun) {
		e.begun++
	}
	return e.begun
}

// retire takes an entry out of use once it is neither queued nor under way.
func (c *core) retire(e *entry) {
	if e.queued {
		return
	}
	if e.order.Plan != nil {
		if !e.machine.Finished() {
			return
		}
		i := slices.Index(c.plans, e)
		c.plans = slices.Delete(c.plans, i, i+1)
		c.backlog.remove(e.bytes)
	}
	e.order, e.received = Order{}, nil
	c.spare = append(c.spare, e)
}

func (c *core) plan(step uint64) *entry {
	for _, e := range c.plans {
		if e.order.ID == step {
			return e
		}
	}
	return nil
}
