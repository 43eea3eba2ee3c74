package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mlxcel/mlxcel/host/schedule"
	"github.com/mlxcel/mlxcel/sdk"
)

// stage drives one executor through the orders of a coordinator.
//
// It is a monitor: orders, frames and answers come in on whatever goroutine brings them, change the state under
// the lock, and set going what has become possible. Nothing outside the stage but its executor's step stream is
// called under the lock; what must be called, waits in effects for the unlock.
type stage struct {
	cfg    stageConfig
	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup

	answers chan struct{} // something was sent to the executor; holds one token
	cancels chan uint64   // steps to give up
	holding chan struct{} // a frame is held; holds one token
	stuck   chan error    // the executor does not answer; holds one
	busy    atomic.Int64  // nanoseconds that the executor has computed

	mu        sync.Mutex
	closed    bool
	lastOrder uint64
	queue     fifo[*entry]   // orders with something left to begin
	plans     []*entry       // plans not finished, also those past the queue
	held      []heldFrame    // frames that came before their plan
	sent      fifo[sentItem] // what the executor owes an answer to
	progress  time.Time      // when the executor began what it is at
	free      []*slot
	spare     []*entry // to be used again
	known     map[sdk.SeqID]struct{}
	nextStep  uint64 // IDs on the step stream
	phase     Phase  // last told to the executor's supervisor
	effects   []effect
	gone      chan struct{} // closed when the executor's connection is gone
	goneErr   error         // set before
	loans     sync.WaitGroup
	lost      *StageError   // how the stage was lost
	lostDone  chan struct{} // closed once lost is set
}

// heldFrame is a frame that waits for its plan.
type heldFrame struct {
	Frame
	since time.Time
}

// planPatience is how long a frame waits for its plan.
const planPatience = 3 * time.Second

// stageConfig is what a stage is made of.
type stageConfig struct {
	epoch    uint64
	index    int
	node     string
	stages   int
	boundary sdk.Boundary
	slots    int
	executor Executor
	steps    sdk.StepClient
	next     Link     // nil on the last stage
	reporter Reporter // nil until the stage joins its pipeline
}

// entry is an order on its way through the stage.
type entry struct {
	order   Order
	queued  bool           // in the queue: something of it has not begun
	machine schedule.Stage // of a plan
	begun   int            // micro-batches before this one have begun or were given up
	frames  []Frame        // by micro-batch: arrived and not taken in
	ready   *slot          // holds the activations of the micro-batch to forward next
}

// sentItem is something that the executor owes an answer to.
type sentItem struct {
	pending *sdk.Pending
	phase   Phase
	entry   *entry // of a step; nil for an operation
	action  schedule.Action
	slot    *slot
	order   uint64 // of an operation
	op      sdk.Op
}

// effect is a call to make once the lock is free.
type effect struct {
	release Releaser
	failed  *StageError // of tag, or of the operation of answered
	tag     Tag
	answer  uint64 // the order of an operation that could not be sent
}

// newStage starts a stage on a loaded executor whose region is mapped.
func newStage(ctx context.Context, cfg stageConfig) *stage {
	ctx, cancel := context.WithCancel(ctx)
	s := &stage{
		cfg: cfg, ctx: ctx, cancel: cancel,
		answers: make(chan struct{}, 1),
		cancels: make(chan uint64, cfg.slots),
		holding: make(chan struct{}, 1),
		stuck:   make(chan error, 1),
		known:   map[sdk.SeqID]struct{}{},
		gone:    make(chan struct{}),
		phase:   PhaseIdle,

		lostDone: make(chan struct{}),
	}
	region := cfg.executor.Region()
	for i := range cfg.slots {
		s.free = append(s.free, &slot{stage: s, index: i, in: region.In(i), out: region.Out(i)})
	}
	s.wait.Go(s.collectAnswers)
	s.wait.Go(s.giveUpSteps)
	s.wait.Go(s.refuseOverdue)
	s.wait.Go(s.superviseHealth)
	s.wait.Go(s.watch)
	return s
}

// join says where the stage's output goes. It comes before the first order and the first frame.
func (s *stage) join(next Link, reporter Reporter) {
	s.mu.Lock()
	s.cfg.next, s.cfg.reporter = next, reporter
	lost := s.lost
	s.mu.Unlock()
	if lost != nil {
		reporter.Lost(s.cfg.epoch, lost)
	}
}

// close ends the stage's goroutines. After it nothing of the stage touches a region, its own or a neighbour's, so
// that the executors may be stopped once every stage is closed.
func (s *stage) close() error {
	s.cancel()
	err := s.cfg.steps.Close() // also frees whoever is in Send, and so the lock
	s.mu.Lock()
	s.closed = true
	for _, f := range s.held {
		s.drop(f.Frame)
	}
	s.held = nil
	for _, e := range s.plans {
		for mb, f := range e.frames {
			s.drop(f)
			e.frames[mb] = Frame{}
		}
	}
	s.unlock()
	s.wait.Wait()
	s.loans.Wait()
	return err
}

// Order is StagePort's.
func (s *stage) Order(o Order) {
	s.mu.Lock()
	defer s.unlock()
	if s.closed || o.Epoch != s.cfg.epoch || o.ID <= s.lastOrder {
		return
	}
	s.lastOrder = o.ID
	e := s.newEntry(o)
	if o.Plan != nil {
		s.plans = append(s.plans, e)
		s.adoptHeld(e)
	}
	e.queued = true
	s.queue.push(e)
	s.advance()
}

// adoptHeld gives a plan the frames that came before it.
func (s *stage) adoptHeld(e *entry) {
	s.held = slices.DeleteFunc(s.held, func(f heldFrame) bool {
		if f.Step == e.order.ID {
			s.arrive(e, f.Frame)
			return true
		}
		return false
	})
}

// refuseOverdue refuses frames whose plan does not come.
func (s *stage) refuseOverdue() {
	timer := time.NewTimer(planPatience)
	defer timer.Stop()
	for {
		select {
		case <-s.holding:
		case <-timer.C:
		case <-s.ctx.Done():
			return
		}
		if next, any := s.overdue(time.Now()); any {
			timer.Reset(next)
		}
	}
}

// overdue refuses the frames held too long and tells how long the oldest of the others may stay.
func (s *stage) overdue(now time.Time) (next time.Duration, any bool) {
	s.mu.Lock()
	defer s.unlock()
	for len(s.held) > 0 {
		f := s.held[0]
		if next = f.since.Add(planPatience).Sub(now); next > 0 {
			return next, true
		}
		s.held = slices.Delete(s.held, 0, 1)
		s.refuse(f.Frame, fmt.Errorf("a frame of step %d came, but not its plan within %v", f.Step, planPatience))
	}
	return 0, false
}

// claim is Stage's.
func (s *stage) claim(t Tag, bytes int) ([]byte, Releaser) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || t.Epoch != s.cfg.epoch || s.goneErr != nil || s.queue.len() == 0 || len(s.free) == 0 {
		return nil, nil
	}
	e := *s.queue.front()
	if e.order.ID != t.Step || e.order.Plan == nil || e.ready != nil || e.next() != t.MicroBatch || bytes > len(s.free[len(s.free)-1].in) {
		return nil, nil
	}
	sl := s.takeSlot()
	sl.lent = true
	s.loans.Add(1)
	return sl.in[:bytes:bytes], sl
}

// endLoan notes that no link writes into the slot any more.
func (s *stage) endLoan(sl *slot) {
	if sl.lent {
		sl.lent = false
		s.loans.Done()
	}
}

// Send is Link's, for a stage before this one in the same process.
func (s *stage) Send(f Frame) {
	s.mu.Lock()
	defer s.unlock()
	switch {
	case s.closed || f.Epoch != s.cfg.epoch:
		s.drop(f)
	case f.Step > s.lastOrder && len(s.held) < s.cfg.slots:
		s.held = append(s.held, heldFrame{f, time.Now()})
		select {
		case s.holding <- struct{}{}:
		default:
		}
	case f.Step > s.lastOrder:
		s.refuse(f, fmt.Errorf("a frame of step %d came before its plan, when %d such frames were held already", f.Step, len(s.held)))
	default:
		if e := s.plan(f.Step); e != nil {
			s.arrive(e, f)
			s.advance()
		} else { // finished or given up
			s.drop(f)
		}
	}
}

// arrive takes a frame of a known plan.
func (s *stage) arrive(e *entry, f Frame) {
	if f.MicroBatch >= 0 && f.MicroBatch < e.order.Plan.MicroBatches() && e.machine.Aborted(f.MicroBatch) {
		s.drop(f)
		return
	}
	if err := e.machine.Arrive(f.MicroBatch); err != nil {
		s.refuse(f, err)
		return
	}
	if err := s.checkFrame(e.order.Plan, f); err != nil {
		s.must(e.machine.Abort(f.MicroBatch))
		s.refuse(f, err)
		return
	}
	e.frames[f.MicroBatch] = f
}

// checkFrame compares a frame with its plan.
func (s *stage) checkFrame(plan *StepPlan, f Frame) error {
	if want := plan.ids(f.MicroBatch); !slices.Equal(f.Seqs, want) {
		return sdk.Errorf(sdk.CodeUnknownSequence, "a frame of sequences %d came where the plan has %d", f.Seqs, want)
	}
	return s.checkHidden(plan, f.MicroBatch, f.Hidden, "the stage before sent")
}

// checkHidden compares hidden rows with the plan.
func (s *stage) checkHidden(plan *StepPlan, mb int, h sdk.Tensor, who string) error {
	rows := 0
	for _, seq := range plan.seqs(mb) {
		rows += len(seq.Tokens)
	}
	b := s.cfg.boundary
	if h.Rows != rows || h.Width != b.Width || h.Dtype != b.Dtype || len(h.Data) != rows*b.Width*b.Dtype.Size() {
		return sdk.Errorf(sdk.CodeInvalid, "%s hidden rows [%d, %d] in %s (%d bytes), want [%d, %d] in %s",
			who, h.Rows, h.Width, h.Dtype, len(h.Data), rows, b.Width, b.Dtype)
	}
	return nil
}

// Abort is StagePort's.
func (s *stage) Abort(t Tag) {
	s.mu.Lock()
	defer s.unlock()
	if s.closed || t.Epoch != s.cfg.epoch {
		return
	}
	e := s.plan(t.Step)
	if e == nil || t.MicroBatch < 0 || t.MicroBatch >= e.order.Plan.MicroBatches() {
		return
	}
	s.must(e.machine.Abort(t.MicroBatch))
	s.drop(e.frames[t.MicroBatch])
	e.frames[t.MicroBatch] = Frame{}
	for _, item := range s.sent.items[s.sent.head:] {
		if item.entry == e && item.action.MicroBatch == t.MicroBatch {
			select {
			case s.cancels <- item.slot.step.ID:
			default: // that many are being given up already; this one ends by itself
			}
		}
	}
	s.retire(e)
	s.advance()
}

// advance begins everything that can begin, in the order of the queue.
func (s *stage) advance() {
	for s.queue.len() > 0 && !s.closed && s.goneErr == nil {
		e := *s.queue.front()
		if e.order.Plan == nil {
			s.sendOp(e)
		} else if !s.advancePlan(e) {
			return
		}
		s.queue.pop()
		e.queued = false
		s.retire(e)
	}
}

// advancePlan begins what a plan allows and reports whether everything of it has begun.
func (s *stage) advancePlan(e *entry) bool {
	for !e.machine.AllBegun() {
		if e.ready == nil && len(s.free) == 0 && s.claimed(e.frames[e.next()]) == nil || s.goneErr != nil {
			return false
		}
		switch a := e.machine.Next(); a.Kind {
		case schedule.Receive:
			s.receive(e, a)
		case schedule.Forward:
			s.forward(e, a)
		default:
			return false
		}
	}
	return true
}

// next returns the first micro-batch that has not begun. There is one unless all have.
func (e *entry) next() int {
	for e.begun < len(e.frames)-1 && e.machine.Aborted(e.begun) {
		e.begun++
	}
	return e.begun
}

// receive copies a micro-batch's activations into a slot, the only copy between two stages, unless they were read
// into one.
func (s *stage) receive(e *entry, a schedule.Action) {
	f := e.frames[a.MicroBatch]
	e.frames[a.MicroBatch] = Frame{}
	sl := s.claimed(f)
	if sl != nil {
		s.endLoan(sl)
		sl.step.Hidden = f.Hidden
	} else {
		sl = s.takeSlot()
		sl.step.Hidden = f.Hidden
		sl.step.Hidden.Data = sl.in[:copy(sl.in, f.Hidden.Data)]
		s.drop(f)
	}
	e.ready = sl
	s.must(e.machine.Finish(a))
}

// claimed returns the slot that a frame was read into; nil for a frame that lies elsewhere.
func (s *stage) claimed(f Frame) *slot {
	if sl, ok := f.Owner.(*slot); ok && sl.stage == s {
		return sl
	}
	return nil
}

// forward sends a micro-batch to the executor.
func (s *stage) forward(e *entry, a schedule.Action) {
	sl := e.ready
	if sl == nil { // stage 0 has no activations to take in
		sl = s.takeSlot()
	}
	e.ready = nil
	e.begun = a.MicroBatch + 1
	phase := e.order.Plan.phase(a.MicroBatch)
	s.nextStep++
	sl.step = sdk.Step{ID: s.nextStep, Slot: sl.index, Seqs: e.order.Plan.seqs(a.MicroBatch), Hidden: sl.step.Hidden}
	err := s.checkKnown(e.order.Plan.ids(a.MicroBatch))
	if err == nil {
		err = s.send(&sl.step, sentItem{phase: phase, entry: e, action: a, slot: sl})
	}
	if err != nil && s.goneErr == nil { // else the stage is lost, and everything on it with it
		s.fail(e, a, phase, err)
		s.returnSlot(sl)
	}
}

// checkKnown refuses sequences that were never reserved here, or released.
func (s *stage) checkKnown(seqs []sdk.SeqID) error {
	for _, seq := range seqs {
		if _, ok := s.known[seq]; !ok {
			return sdk.Errorf(sdk.CodeUnknownSequence, "sequence %d is not reserved", seq)
		}
	}
	return nil
}

// sendOp sends an operation to the executor. What it does to the set of known sequences counts from here on, as
// the executor carries everything out in this order.
func (s *stage) sendOp(e *entry) {
	switch op := e.order.Op.(type) {
	case sdk.Reservation:
		s.known[op.Seq] = struct{}{}
	case sdk.ForkOp:
		s.known[op.To] = struct{}{}
	case sdk.Release:
		delete(s.known, op.Seq)
	}
	phase := opPhase(e.order.Op)
	if err := s.send(e.order.Op, sentItem{phase: phase, order: e.order.ID, op: e.order.Op}); err != nil && s.goneErr == nil {
		s.forget(e.order.Op)
		s.effects = append(s.effects, effect{answer: e.order.ID, failed: s.stageError(phase, err)})
	}
}

// forget undoes what a failed operation was to create.
func (s *stage) forget(op sdk.Op) {
	switch op := op.(type) {
	case sdk.Reservation:
		delete(s.known, op.Seq)
	case sdk.ForkOp:
		delete(s.known, op.To)
	}
}

func (s *stage) send(op sdk.Op, item sentItem) error {
	if s.sent.len() == 0 {
		s.enter(item.phase)
		s.progress = time.Now()
	}
	pending, err := s.cfg.steps.Send(op)
	if err != nil {
		if errors.Is(err, sdk.ErrExecutorGone) {
			s.markGone(err)
		}
		return err
	}
	item.pending = pending
	s.sent.push(item)
	select {
	case s.answers <- struct{}{}:
	default:
	}
	return nil
}

// received takes the oldest sent item off the books.
func (s *stage) received() {
	s.sent.pop()
	s.progress = time.Now()
	if s.sent.len() > 0 {
		s.enter(s.sent.front().phase)
	} else {
		s.enter(PhaseIdle)
	}
}

// enter tells the executor's supervisor what the executor is at, for the error should it die there.
func (s *stage) enter(phase Phase) {
	if s.phase != phase {
		s.phase = phase
		s.cfg.executor.Enter(phase)
	}
}

// collectAnswers takes the executor's answers in the order in which they were asked for.
func (s *stage) collectAnswers() {
	for {
		item, ok := s.nextSent()
		if !ok {
			return
		}
		result, err := item.pending.Wait(s.ctx)
		if s.ctx.Err() != nil {
			return
		}
		if errors.Is(err, sdk.ErrExecutorGone) {
			s.mu.Lock()
			s.markGone(err)
			s.unlock()
			return
		}
		s.answered(item, result, err)
	}
}

// nextSent waits for something that an answer is owed to. It stays at the front until answered.
func (s *stage) nextSent() (sentItem, bool) {
	for {
		s.mu.Lock()
		if s.sent.len() > 0 {
			item := *s.sent.front()
			s.mu.Unlock()
			return item, true
		}
		s.mu.Unlock()
		select {
		case <-s.answers:
		case <-s.ctx.Done():
			return sentItem{}, false
		}
	}
}

func (s *stage) answered(item sentItem, result *sdk.StepResult, err error) {
	if item.entry == nil {
		s.opAnswered(item, err)
		return
	}
	tag := s.tag(item.entry, item.action.MicroBatch)
	ids := item.entry.order.Plan.ids(item.action.MicroBatch)
	results, forward := s.stepAnswered(item, result, err)
	switch {
	case !forward:
	case s.isLast():
		s.cfg.reporter.Finished(tag, results)
	default:
		s.cfg.next.Send(Frame{Tag: tag, Seqs: ids, Hidden: result.Hidden, Owner: item.slot})
	}
}

func (s *stage) opAnswered(item sentItem, err error) {
	s.mu.Lock()
	s.received()
	var failure error
	if err != nil {
		s.forget(item.op)
		failure = s.stageError(item.phase, err)
	}
	s.advance()
	s.unlock()
	s.cfg.reporter.Answered(s.cfg.index, s.cfg.epoch, item.order, failure)
}

// stepAnswered ends a micro-batch's forward pass. forward tells whether its output is to go on: to the next stage,
// where the slot stays taken until the output has been read, or as results to the coordinator.
func (s *stage) stepAnswered(item sentItem, result *sdk.StepResult, err error) (results []sdk.SeqResult, forward bool) {
	s.mu.Lock()
	defer s.unlock()
	s.received()
	if s.closed {
		return nil, false
	}
	if result != nil {
		s.busy.Add(result.ComputeNanos)
	}
	e, mb := item.entry, item.action.MicroBatch
	aborted := e.machine.Aborted(mb)
	if err == nil && !aborted {
		results, err = s.checkResult(e.order.Plan, mb, result)
	}
	if err != nil && !aborted {
		s.fail(e, item.action, item.phase, err)
	} else {
		s.must(e.machine.Finish(item.action))
		forward = !aborted
	}
	if forward && s.isLast() {
		s.must(e.machine.Finish(e.machine.Next())) // the Flush
	}
	s.retire(e)
	if !forward || s.isLast() {
		s.returnSlot(item.slot)
	}
	s.advance()
	return results, forward
}

// checkResult refuses an answer that is not to the question. Logits are copied out of the slot.
func (s *stage) checkResult(plan *StepPlan, mb int, r *sdk.StepResult) ([]sdk.SeqResult, error) {
	if !s.isLast() {
		return nil, s.checkHidden(plan, mb, r.Hidden, "the executor gave out")
	}
	ids := plan.ids(mb)
	if len(r.Seqs) != len(ids) {
		return nil, sdk.Errorf(sdk.CodeInternal, "executor answered for %d sequences, want %d", len(r.Seqs), len(ids))
	}
	for i := range r.Seqs {
		if r.Seqs[i].Seq != ids[i] {
			return nil, sdk.Errorf(sdk.CodeInternal, "executor answered for sequence %d, want %d", r.Seqs[i].Seq, ids[i])
		}
		r.Seqs[i].Logits.Data = slices.Clone(r.Seqs[i].Logits.Data)
	}
	return r.Seqs, nil
}

// fail ends a begun forward pass without output and reports it.
func (s *stage) fail(e *entry, a schedule.Action, phase Phase, err error) {
	s.must(e.machine.Abort(a.MicroBatch))
	s.must(e.machine.Finish(a))
	s.effects = append(s.effects, effect{failed: s.stageError(phase, err), tag: s.tag(e, a.MicroBatch)})
}

// giveUpSteps passes aborts on to the executor; a goroutine of its own, as the call may take its time.
func (s *stage) giveUpSteps() {
	for {
		select {
		case id := <-s.cancels:
			_ = s.cfg.steps.Cancel(s.ctx, id) // if it can't be reached, its step fails by itself
		case <-s.ctx.Done():
			return
		}
	}
}

// superviseHealth watches for an executor that lives but stands still.
func (s *stage) superviseHealth() {
	if err := superviseHealth(s.ctx, s.cfg.executor, s.stalled); err != nil {
		s.stuck <- err
	}
}

// stalled is an error once the executor has worked on the same thing for too long.
func (s *stage) stalled() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent.len() == 0 || time.Since(s.progress) < stepPatience {
		return nil
	}
	return fmt.Errorf("executor answers, but has not ended what it does for %v", stepPatience)
}

// watch waits for the end of the executor and reports it. An executor that stands still is ended.
func (s *stage) watch() {
	var err error
	stuck := false
	select {
	case <-s.ctx.Done():
		return
	case <-s.cfg.executor.Done():
		err = s.cfg.executor.Err()
	case <-s.gone:
		err = s.cfg.executor.Explain(s.goneErr)
	case err = <-s.stuck:
		stuck = true
	}
	if err == nil {
		err = fmt.Errorf("%w: it ended without being asked to", sdk.ErrExecutorGone)
	}
	s.lose(err)
	if stuck {
		_ = s.cfg.executor.Kill() // Stop, which must follow, tells of one that can't be killed
	}
}

// lose ends the stage and reports why.
func (s *stage) lose(err error) {
	s.mu.Lock()
	s.markGone(err)
	s.lost = s.stageError(s.phase, err)
	reporter := s.cfg.reporter
	s.mu.Unlock()
	close(s.lostDone)
	if reporter != nil && s.ctx.Err() == nil {
		reporter.Lost(s.cfg.epoch, s.lost)
	}
}

// markGone stops everything that would go to the executor.
func (s *stage) markGone(err error) {
	if s.goneErr == nil {
		s.goneErr = err
		close(s.gone)
	}
}

// unlock frees the lock and makes the calls that waited for that.
func (s *stage) unlock() {
	var buf [4]effect
	effects := append(buf[:0], s.effects...)
	clear(s.effects)
	s.effects = s.effects[:0]
	s.mu.Unlock()
	for _, e := range effects {
		switch {
		case e.release != nil:
			e.release.Release()
		case e.answer != 0:
			s.cfg.reporter.Answered(s.cfg.index, s.cfg.epoch, e.answer, e.failed)
		default:
			s.cfg.reporter.Failed(e.tag, e.failed)
		}
	}
}

func (s *stage) newEntry(o Order) *entry {
	e := &entry{}
	if n := len(s.spare); n > 0 {
		e = s.spare[n-1]
		s.spare = s.spare[:n-1]
	}
	e.order = o
	if o.Plan != nil {
		n := o.Plan.MicroBatches()
		at := sdk.Place{Stage: s.cfg.index}
		e.machine.Reset(at, sdk.RoleOf(at, s.cfg.stages), n, s.cfg.slots)
		e.begun = 0
		e.frames = slices.Grow(e.frames[:0], n)[:n]
		clear(e.frames)
	}
	return e
}

// retire takes an entry out of use once it is neither queued nor under way.
func (s *stage) retire(e *entry) {
	if e.queued {
		return
	}
	if e.order.Plan != nil {
		if !e.machine.Finished() {
			return
		}
		i := slices.Index(s.plans, e)
		s.plans = slices.Delete(s.plans, i, i+1)
	}
	e.order = Order{}
	s.spare = append(s.spare, e)
}

func (s *stage) plan(step uint64) *entry {
	for _, e := range s.plans {
		if e.order.ID == step {
			return e
		}
	}
	return nil
}

func (s *stage) takeSlot() *slot {
	sl := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	return sl
}

func (s *stage) returnSlot(sl *slot) { s.free = append(s.free, sl) }

// drop gives a frame back unread.
func (s *stage) drop(f Frame) {
	if f.Owner != nil {
		s.effects = append(s.effects, effect{release: f.Owner})
	}
}

// refuse drops a frame and tells the coordinator why.
func (s *stage) refuse(f Frame, err error) {
	s.drop(f)
	s.effects = append(s.effects, effect{failed: s.stageError(PhaseReceive, err), tag: f.Tag})
}

func (s *stage) tag(e *entry, mb int) Tag {
	return Tag{Epoch: s.cfg.epoch, Step: e.order.ID, MicroBatch: mb}
}

func (s *stage) stageError(phase Phase, err error) *StageError {
	return &StageError{Stage: s.cfg.index, Node: s.cfg.node, Plugin: s.cfg.executor.Plugin(), Phase: phase, Err: err}
}

func (s *stage) isLast() bool { return s.cfg.index == s.cfg.stages-1 }

// must stops at a state that the stage itself would have had to make impossible.
func (s *stage) must(err error) {
	if err != nil {
		panic(fmt.Sprintf("pipeline: stage %d: %v", s.cfg.index, err))
	}
}
