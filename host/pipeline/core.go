package pipeline

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mlxcel/mlxcel/host/schedule"
	"github.com/mlxcel/mlxcel/sdk"
)

// core takes one executor through the orders of a coordinator. It is a pure state machine: orders, frames, answers and
// the time come in; what is to be sent to the executor (take) and what is to be done beside (effects) goes out. It has
// no locks, clocks or goroutines: those are the monitor's.
type core struct {
	cfg       coreConfig
	lastOrder uint64
	backlog   backlog
	queue     fifo[*entry]   // orders with something left to begin
	plans     []*entry       // plans not finished, also those past the queue
	held      []heldFrame    // frames that came before their plan
	sent      fifo[sentItem] // what the executor owes an answer to, in the order in which it gets it
	taken     int            // of sent: given out by take
	began     time.Time      // when the executor began what it is at; counts while it owes an answer
	free      []*slot
	lent      int      // slots that links read into
	spare     []*entry // to be used again
	known     map[sdk.SeqID]struct{}
	nextStep  uint64   // IDs on the step stream
	phase     Phase    // that the executor is in
	effects   []effect // to be done
	down      error    // why nothing goes to the executor any more
	closed    bool
}

// coreConfig says what a place is.
type coreConfig struct {
	epoch    uint64
	place    sdk.Place
	role     sdk.StageRole
	node     string
	plugin   string
	boundary sdk.Boundary
	slots    int
	observed bool

	maxOrders int
	maxBytes  int64
}

// sentItem is something that the executor owes an answer to.
type sentItem struct {
	what   sdk.Op
	phase  Phase
	entry  *entry // of a step; nil for an operation
	action schedule.Action
	slot   *slot
	order  uint64 // of an operation
	bytes  int64  // likewise
	began  time.Time
}

// effect is something to do for the core. Exactly one of the fields up to observed is set, but for tag, which goes with
// some.
type effect struct {
	release  Releaser
	frame    *Frame          // to the next stage
	results  []sdk.SeqResult // of tag, to the coordinator
	failed   *StageError     // of tag; with answered of the operation
	answered uint64          // the order of an operation that has ended
	cancel   uint64          // a step to give up
	observed *Observation
	tag      Tag
}

func newCore(cfg coreConfig) *core {
	return &core{cfg: cfg, known: map[sdk.SeqID]struct{}{}, phase: PhaseIdle}
}

// order takes the next order.
func (c *core) order(now time.Time, o Order) {
	if c.closed || o.Epoch != c.cfg.epoch || o.ID <= c.lastOrder {
		return
	}
	c.lastOrder = o.ID
	if c.down != nil {
		return // everything on the place has ended
	}
	e := c.newEntry(o)
	if err := c.backlog.add(e.bytes, c.cfg.maxOrders, c.cfg.maxBytes); err != nil {
		c.fall(err)
		return
	}
	if o.Plan != nil {
		if c.cfg.observed {
			e.received = slices.Repeat([]time.Time{now}, o.Plan.MicroBatches())
		}
		c.plans = append(c.plans, e)
		c.adoptHeld(now, e)
	}
	e.queued = true
	c.queue.push(e)
	c.advance(now)
}

// abort gives a micro-batch up.
func (c *core) abort(now time.Time, t Tag) {
	if c.closed || t.Epoch != c.cfg.epoch {
		return
	}
	e := c.plan(t.Step)
	if e == nil || t.MicroBatch < 0 || t.MicroBatch >= e.order.Plan.MicroBatches() {
		return
	}
	c.must(e.machine.Abort(t.MicroBatch))
	c.drop(e.frames[t.MicroBatch])
	e.frames[t.MicroBatch] = Frame{}
	for _, item := range c.sent.all() {
		if item.entry == e && item.action.MicroBatch == t.MicroBatch {
			c.effects = append(c.effects, effect{cancel: item.slot.step.ID})
		}
	}
	c.retire(e)
	c.advance(now)
}

// close ends everything. Slots that are lent stay so until they are released.
func (c *core) close() {
	c.closed = true
	for _, f := range c.held {
		c.drop(f.Frame)
	}
	c.held = nil
	for _, e := range c.plans {
		for mb, f := range e.frames {
			c.drop(f)
			e.frames[mb] = Frame{}
		}
	}
}

// fall stops everything that would go to the executor. Only the first reason counts.
func (c *core) fall(err error) {
	if c.down == nil {
		c.down = err
	}
}

// stopped tells that nothing goes to the executor any more.
func (c *core) stopped() bool { return c.closed || c.down != nil }

// advance begins everything that can begin, in the order of the queue.
func (c *core) advance(now time.Time) {
	for c.queue.len() > 0 && !c.stopped() {
		e := *c.queue.front()
		if e.order.Plan == nil {
			c.sendOp(now, e)
		} else if !c.advancePlan(now, e) {
			return
		}
		c.queue.pop()
		e.queued = false
		c.retire(e)
	}
}

// advancePlan begins what a plan allows and reports whether everything of it has begun.
func (c *core) advancePlan(now time.Time, e *entry) bool {
	for !e.machine.AllBegun() {
		if e.ready == nil && len(c.free) == 0 && c.claimed(e.frames[e.next()]) == nil {
			return false
		}
		switch a := e.machine.Next(); a.Kind {
		case schedule.Receive:
			c.receive(e, a)
		case schedule.Forward:
			c.forward(now, e, a)
		default:
			return false
		}
	}
	return true
}

// forward sends a micro-batch to the executor.
func (c *core) forward(now time.Time, e *entry, a schedule.Action) {
	sl := e.ready
	if sl == nil { // it has no activations to take in
		sl = c.takeSlot()
	}
	e.ready = nil
	e.begun = a.MicroBatch + 1
	phase := e.order.Plan.phase(a.MicroBatch)
	c.nextStep++
	sl.step = sdk.Step{ID: c.nextStep, Slot: sl.index, Seqs: e.order.Plan.seqs(a.MicroBatch), Hidden: sl.step.Hidden}
	item := sentItem{what: &sl.step, phase: phase, entry: e, action: a, slot: sl}
	if err := c.checkKnown(e.order.Plan.ids(a.MicroBatch)); err != nil {
		c.failItem(now, item, err)
		return
	}
	c.send(now, item)
}

// checkKnown refuses sequences that were never reserved here, or released.
func (c *core) checkKnown(seqs []sdk.SeqID) error {
	for _, seq := range seqs {
		if _, ok := c.known[seq]; !ok {
			return sdk.Errorf(sdk.CodeUnknownSequence, "sequence %d is not reserved", seq)
		}
	}
	return nil
}

// sendOp sends an operation to the executor. What it does to the set of known sequences counts from here on, as
// the executor carries everything out in this order.
func (c *core) sendOp(now time.Time, e *entry) {
	switch op := e.order.Op.(type) {
	case sdk.Reservation:
		c.known[op.Seq] = struct{}{}
	case sdk.Release:
		delete(c.known, op.Seq)
	}
	c.send(now, sentItem{what: e.order.Op, phase: opPhase(e.order.Op), order: e.order.ID, bytes: e.bytes})
}

// forget undoes what a failed operation was to create.
func (c *core) forget(op sdk.Op) {
	if r, ok := op.(sdk.Reservation); ok {
		delete(c.known, r.Seq)
	}
}

func (c *core) send(now time.Time, item sentItem) {
	if c.sent.len() == 0 {
		c.phase, c.began = item.phase, now
	}
	item.began = now
	c.sent.push(item)
}

// take returns the next thing for the executor. It is then on its way: answered or refused tells what became of it.
func (c *core) take() (sdk.Op, bool) {
	if c.stopped() || c.taken == c.sent.len() {
		return nil, false
	}
	c.taken++
	return c.sent.all()[c.taken-1].what, true
}

// busy tells that the executor owes an answer.
func (c *core) busy() bool { return c.sent.len() > 0 }

// pop takes a sent item off the books.
func (c *core) pop(now time.Time) sentItem {
	item := *c.sent.front()
	c.sent.pop()
	c.taken--
	c.turn(now)
	return item
}

// turn notes that the executor turns to the oldest thing it owes an answer to.
func (c *core) turn(now time.Time) {
	c.began, c.phase = now, PhaseIdle
	if c.sent.len() > 0 {
		c.phase = c.sent.front().phase
	}
}

// refused tells that the last thing taken did not go out.
func (c *core) refused(now time.Time, err error) {
	if errors.Is(err, sdk.ErrExecutorGone) {
		c.fall(err)
	}
	if c.stopped() { // the place is lost, and everything on it with it
		return
	}
	c.taken--
	item := c.sent.remove(c.taken)
	if c.taken == 0 {
		c.turn(now)
	}
	c.failItem(now, item, err)
	if item.entry != nil {
		c.retire(item.entry)
	}
	c.advance(now)
}

// answered takes the executor's answer to the oldest thing sent.
func (c *core) answered(now time.Time, result *sdk.StepResult, err error) {
	item := c.pop(now)
	if c.closed {
		return
	}
	switch {
	case item.entry == nil && err == nil:
		c.backlog.remove(item.bytes)
		c.effects = append(c.effects, effect{answered: item.order})
	case item.entry == nil:
		c.failItem(now, item, err)
	default:
		c.stepAnswered(now, item, result, err)
	}
	c.advance(now)
}

// failItem ends a begun forward pass without output, or an operation, and reports it.
func (c *core) failItem(now time.Time, item sentItem, err error) {
	failed := c.stageError(item.phase, err)
	if item.entry == nil {
		c.backlog.remove(item.bytes)
		c.forget(item.what)
		c.effects = append(c.effects, effect{answered: item.order, failed: failed})
		return
	}
	c.must(item.entry.machine.Abort(item.action.MicroBatch))
	c.must(item.entry.machine.Finish(item.action))
	c.effects = append(c.effects, effect{failed: failed, tag: c.tag(item.entry, item.action.MicroBatch)})
	c.returnSlot(item.slot)
}

// stepAnswered ends a micro-batch's forward pass. Its output goes on: to the next stage, where the slot stays taken until
// the output has been read, or as results to the coordinator.
func (c *core) stepAnswered(now time.Time, item sentItem, result *sdk.StepResult, err error) {
	e, mb := item.entry, item.action.MicroBatch
	aborted := e.machine.Aborted(mb)
	var seen *Observation
	if c.cfg.observed {
		seen = c.observation(now, item, result)
	}
	if err == nil && !aborted {
		err = c.checkResult(e.order.Plan, mb, result)
	}
	switch {
	case aborted:
		c.must(e.machine.Finish(item.action))
		c.returnSlot(item.slot)
	case err != nil:
		c.failItem(now, item, err)
	default:
		c.must(e.machine.Finish(item.action))
		c.forwarded(item, result)
	}
	if seen != nil {
		seen.Failed = aborted || err != nil
		c.effects = append(c.effects, effect{observed: seen})
	}
	c.retire(e)
}

// forwarded hands the output of a micro-batch on, where it is this place's to give.
func (c *core) forwarded(item sentItem, result *sdk.StepResult) {
	e, mb := item.entry, item.action.MicroBatch
	tag := c.tag(e, mb)
	switch {
	case c.cfg.role.Answers:
		c.must(e.machine.Finish(e.machine.Next())) // the Flush
		c.effects = append(c.effects, effect{results: result.Seqs, tag: tag})
		c.returnSlot(item.slot)
	case c.cfg.role.GivesHidden:
		frame := &Frame{Tag: tag, Seqs: e.order.Plan.ids(mb), Hidden: result.Hidden, Owner: item.slot}
		c.effects = append(c.effects, effect{frame: frame})
	default:
		c.returnSlot(item.slot)
	}
}

// observation says what is known of a micro-batch when its answer comes.
func (c *core) observation(now time.Time, item sentItem, result *sdk.StepResult) *Observation {
	mb := item.action.MicroBatch
	o := &Observation{
		Place: c.cfg.place, Tag: c.tag(item.entry, mb), Trace: item.entry.order.Trace,
		Received: item.entry.received[mb], Began: item.began, Ended: now,
	}
	if result != nil {
		o.Compute, o.Queue = time.Duration(result.ComputeNanos), time.Duration(result.QueueNanos)
	}
	return o
}

// checkResult refuses an answer that is not to the question. Logits are copied out of the slot.
func (c *core) checkResult(plan *StepPlan, mb int, r *sdk.StepResult) error {
	switch {
	case c.cfg.role.GivesHidden:
		return c.checkHidden(plan, mb, r.Hidden, "the executor gave out")
	case !c.cfg.role.Answers:
		return nil
	}
	ids := plan.ids(mb)
	if len(r.Seqs) != len(ids) {
		return sdk.Errorf(sdk.CodeInternal, "executor answered for %d sequences, want %d", len(r.Seqs), len(ids))
	}
	for i := range r.Seqs {
		if r.Seqs[i].Seq != ids[i] {
			return sdk.Errorf(sdk.CodeInternal, "executor answered for sequence %d, want %d", r.Seqs[i].Seq, ids[i])
		}
		r.Seqs[i].Logits.Data = slices.Clone(r.Seqs[i].Logits.Data)
	}
	return nil
}

func (c *core) tag(e *entry, mb int) Tag {
	return Tag{Epoch: c.cfg.epoch, Step: e.order.ID, MicroBatch: mb}
}

func (c *core) stageError(phase Phase, err error) *StageError {
	return &StageError{Place: c.cfg.place, Node: c.cfg.node, Plugin: c.cfg.plugin, Phase: phase, Err: err}
}

// must stops at a state that the core itself would have had to make impossible.
func (c *core) must(err error) {
	if err != nil {
		panic(fmt.Sprintf("pipeline: stage %s: %v", c.cfg.place, err))
	}
}
