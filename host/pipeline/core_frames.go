package pipeline

import (
	"fmt"
	"slices"
	"time"

	"github.com/mlxcel/mlxcel/host/schedule"
	"github.com/mlxcel/mlxcel/sdk"
)

// heldFrame is a frame that waits for its plan.
type heldFrame struct {
	Frame
	since time.Time
}

// frame takes a frame of the stage before.
func (c *core) frame(now time.Time, f Frame) {
	switch {
	case c.closed || f.Epoch != c.cfg.epoch:
		c.drop(f)
	case c.early(f) && len(c.held) < c.cfg.slots:
		c.held = append(c.held, heldFrame{f, now})
	case c.early(f):
		c.refuse(f, fmt.Errorf("a frame of step %d came before its plan, when %d such frames were held already", f.Step, len(c.held)))
	default:
		if e := c.plan(f.Step); e != nil {
			c.arrive(now, e, f)
			c.advance(now)
		} else { // finished or given up
			c.drop(f)
		}
	}
}

// early tells that a frame came before its plan.
func (c *core) early(f Frame) bool { return f.Step > c.lastOrder }

// adoptHeld gives a plan the frames that came before it.
func (c *core) adoptHeld(now time.Time, e *entry) {
	c.held = slices.DeleteFunc(c.held, func(f heldFrame) bool {
		if f.Step == e.order.ID {
			c.arrive(now, e, f.Frame)
			return true
		}
		return false
	})
}

// overdue refuses the frames held too long and tells how long the oldest of the others may stay.
func (c *core) overdue(now time.Time) (next time.Duration, any bool) {
	for len(c.held) > 0 {
		f := c.held[0]
		if next = f.since.Add(planPatience).Sub(now); next > 0 {
			return next, true
		}
		c.held = slices.Delete(c.held, 0, 1)
		c.refuse(f.Frame, fmt.Errorf("a frame of step %d came, but not its plan within %v", f.Step, planPatience))
	}
	return 0, false
}

// arrive takes a frame of a known plan.
func (c *core) arrive(now time.Time, e *entry, f Frame) {
	if f.MicroBatch >= 0 && f.MicroBatch < e.order.Plan.MicroBatches() && e.machine.Aborted(f.MicroBatch) {
		c.drop(f)
		return
	}
	if err := e.machine.Arrive(f.MicroBatch); err != nil {
		c.refuse(f, err)
		return
	}
	if err := c.checkFrame(e.order.Plan, f); err != nil {
		c.must(e.machine.Abort(f.MicroBatch))
		c.refuse(f, err)
		return
	}
	e.frames[f.MicroBatch] = f
	if e.received != nil {
		e.received[f.MicroBatch] = now
	}
}

// checkFrame compares a frame with its plan.
func (c *core) checkFrame(plan *StepPlan, f Frame) error {
	if want := plan.ids(f.MicroBatch); !slices.Equal(f.Seqs, want) {
		return sdk.Errorf(sdk.CodeUnknownSequence, "a frame of sequences %d came where the plan has %d", f.Seqs, want)
	}
	return c.checkHidden(plan, f.MicroBatch, f.Hidden, "the stage before sent")
}

// checkHidden compares hidden rows with the plan.
func (c *core) checkHidden(plan *StepPlan, mb int, h sdk.Tensor, who string) error {
	rows := 0
	for _, seq := range plan.seqs(mb) {
		rows += seq.Rows
	}
	b := c.cfg.boundary
	if h.Rows != rows || h.Width != b.Width || h.Dtype != b.Dtype || len(h.Data) != rows*b.Width*b.Dtype.Size() {
		return sdk.Errorf(sdk.CodeInvalid, "%s hidden rows [%d, %d] in %s (%d bytes), want [%d, %d] in %s",
			who, h.Rows, h.Width, h.Dtype, len(h.Data), rows, b.Width, b.Dtype)
	}
	return nil
}

// receive copies a micro-batch's activations into a slot, the only copy between two stages, unless they were read
// into one.
func (c *core) receive(e *entry, a schedule.Action) {
	f := e.frames[a.MicroBatch]
	e.frames[a.MicroBatch] = Frame{}
	sl := c.claimed(f)
	if sl != nil {
		c.endLoan(sl)
		sl.step.Hidden = f.Hidden
	} else {
		sl = c.takeSlot()
		sl.step.Hidden = f.Hidden
		sl.step.Hidden.Data = sl.in[:copy(sl.in, f.Hidden.Data)]
		c.drop(f)
	}
	e.ready = sl
	c.must(e.machine.Finish(a))
}

// claim lends the slot that a frame would be copied to, where it would be taken in at once; else it returns nil.
func (c *core) claim(t Tag, bytes int) *slot {
	if c.stopped() || t.Epoch != c.cfg.epoch || c.queue.len() == 0 || len(c.free) == 0 {
		return nil
	}
	e := *c.queue.front()
	if e.order.ID != t.Step || e.order.Plan == nil || e.ready != nil || e.next() != t.MicroBatch || bytes > len(c.free[len(c.free)-1].in) {
		return nil
	}
	sl := c.takeSlot()
	sl.lent = true
	c.lent++
	return sl
}

// claimed returns the slot that a frame was read into; nil for a frame that lies elsewhere.
func (c *core) claimed(f Frame) *slot {
	if sl, ok := f.Owner.(*slot); ok && sl.core == c {
		return sl
	}
	return nil
}

// endLoan notes that no link writes into the slot any more.
func (c *core) endLoan(sl *slot) {
	if sl.lent {
		sl.lent = false
		c.lent--
	}
}

// released takes a slot back whose output was read, or into which no frame came.
func (c *core) released(now time.Time, sl *slot) {
	c.endLoan(sl)
	c.returnSlot(sl)
	c.advance(now)
}

func (c *core) takeSlot() *slot {
	sl := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	return sl
}

func (c *core) returnSlot(sl *slot) { c.free = append(c.free, sl) }

// drop gives a frame back unread.
func (c *core) drop(f Frame) {
	if f.Owner != nil {
		c.effects = append(c.effects, effect{release: f.Owner})
	}
}

// refuse drops a frame and tells the coordinator why.
func (c *core) refuse(f Frame, err error) {
	c.drop(f)
	c.effects = append(c.effects, effect{failed: c.stageError(PhaseReceive, err), tag: f.Tag})
}
