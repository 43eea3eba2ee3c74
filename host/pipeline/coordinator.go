package pipeline

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/mlxcel/mlxcel/host/schedule"
	"github.com/mlxcel/mlxcel/sdk"
)

// coordinator gives the stages their orders and gathers what comes of them. It starts no goroutines: everything
// runs on its callers' and its reporters'. It is safe for concurrent use; steps over different sequences overlap.
type coordinator struct {
	epoch      uint64
	ports      []port          // one for each place
	roles      []sdk.StageRole // that places have, each once
	microBatch int             // sequences per micro-batch at most
	maxRows    int             // rows per micro-batch at most
	maskBytes  int             // of a mask, where a sequence has one

	// order is full while an order goes to every stage, so that all stages see the same order. It is no mutex so that who
	// waits for it while a stage's client, against its contract, waits for an executor can go when the pipeline is down.
	order  chan struct{}
	lastID uint64  // guarded by order
	cut    []Order // for each of roles; guarded by order

	mu    sync.Mutex // never held while a stage is called
	calls map[uint64]*call
	seqs  map[sdk.SeqID]*sequence
	down  error // why nothing goes any more

	isDown chan struct{} // closed once down is set
}

// port is the way to one place.
type port struct {
	StagePort
	place sdk.Place
	role  int // in roles
}

// addPort adds a place of a pipeline of that many stages, before the first order.
func (c *coordinator) addPort(p StagePort, at sdk.Place, stages int) {
	role := sdk.RoleOf(at, stages)
	i := slices.Index(c.roles, role)
	if i < 0 {
		i = len(c.roles)
		c.roles = append(c.roles, role)
	}
	c.ports = append(c.ports, port{StagePort: p, place: at, role: i})
}

// portOf returns the index of a place's port, -1 where there is none.
func (c *coordinator) portOf(at sdk.Place) int {
	return slices.IndexFunc(c.ports, func(p port) bool { return p.place == at })
}

// sequence is what the coordinator knows of a reserved sequence.
type sequence struct {
	counts bool // its sampler counts tokens
	busy   bool // an order that must end before the next is under way
	pieces int  // steps under way that want nothing of it: the next may follow them through the stages

	failed error // why it has been released on every stage; its owner has yet to release it
}

// call is an order whose end somebody waits for.
type call struct {
	signal  chan struct{} // something changed; holds one token
	left    int           // reports to come
	op      sdk.Op        // of an operation
	errs    []error       // of operations, by arrival
	heard   []bool        // of an operation: the ports whose answer came
	plan    *StepPlan
	counted []bool // of the plan's sequences: the sampler counts tokens
	done    []bool // micro-batches finished or failed
	failed  []int  // micro-batches failed and not yet given up
	causes  []failedMicroBatch
	results []sdk.SeqResult // of the plan's sequences
	absent  []StepFailure   // of sequences that had failed before: the plan is without them
}

// phase tells what a stage that works on the call does.
func (c *call) phase() Phase {
	if c.plan == nil {
		return opPhase(c.op)
	}
	for mb, done := range c.done {
		if !done {
			return c.plan.phase(mb)
		}
	}
	return PhaseDecode
}

type failedMicroBatch struct {
	mb       int
	failures []StepFailure // of its sequences
}

func newCoordinator(epoch uint64, microBatch, maxRows, maskBytes int) *coordinator {
	return &coordinator{
		epoch: epoch, microBatch: microBatch, maxRows: maxRows, maskBytes: maskBytes,
		calls: map[uint64]*call{}, seqs: map[sdk.SeqID]*sequence{},
		order: make(chan struct{}, 1), isDown: make(chan struct{}),
	}
}

// Reserve is Pipeline's.
func (c *coordinator) Reserve(ctx context.Context, r sdk.Reservation) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := c.addSequence(r); err != nil {
		return err
	}
	if err := c.operate(ctx, r); err != nil { // a stage refuses, or the caller gives up
		c.discard(r.Seq)
		return err
	}
	c.giveBack(r.Seq)
	return nil
}

// Release is Pipeline's.
func (c *coordinator) Release(ctx context.Context, seq sdk.SeqID) error {
	c.mu.Lock()
	s := c.seqs[seq]
	delete(c.seqs, seq)
	c.mu.Unlock()
	if s == nil || s.failed != nil {
		return nil
	}
	return c.operate(ctx, sdk.Release{Seq: seq})
}

// Begin is Pipeline's.
func (c *coordinator) Begin(ctx context.Context, seqs []sdk.SeqStep) (wait func() ([]sdk.SeqResult, error)) {
	id, call, err := c.begin(ctx, seqs)
	if err != nil || call == nil {
		return func() ([]sdk.SeqResult, error) { return nil, err }
	}
	return func() ([]sdk.SeqResult, error) {
		if err := c.finish(ctx, id, call); err != nil {
			return nil, err
		}
		return call.resultsOf(seqs), call.stepError()
	}
}

// begin orders a step; the call is nil for one of no sequences. What of the step has failed before is left out.
func (c *coordinator) begin(ctx context.Context, seqs []sdk.SeqStep) (uint64, *call, error) {
	if ctx.Err() != nil {
		return 0, nil, context.Cause(ctx)
	}
	if err := c.checkSteps(seqs); err != nil || len(seqs) == 0 {
		return 0, nil, err
	}
	present, absent, counted, err := c.acquireSteps(seqs)
	if err != nil {
		return 0, nil, err
	}
	call := newStepCall(c.plan(present))
	call.absent, call.counted = absent, counted
	if len(present) == 0 {
		call.wake()
		return 0, call, nil
	}
	id, err := c.give(Order{Plan: call.plan, Trace: traceOf(ctx)}, call)
	if err != nil {
		c.giveBackSteps(present)
		return 0, nil, err
	}
	return id, call, nil
}

// finish waits for a step's end, or that of ctx.
func (c *coordinator) finish(ctx context.Context, id uint64, call *call) error {
	for {
		select {
		case <-call.signal:
		case <-ctx.Done():
			c.abandon(id, call.plan, context.Cause(ctx))
			return context.Cause(ctx)
		}
		failed, ended := c.progress(id, call)
		for _, mb := range failed {
			c.giveUp(id, call.plan, mb)
		}
		if ended {
			c.giveBackSteps(call.plan.Seqs)
			return nil
		}
	}
}

// checkSteps refuses a sequence that brings no rows, or more than a micro-batch takes, and one whose mask is of another
// vocabulary.
func (c *coordinator) checkSteps(seqs []sdk.SeqStep) error {
	for i := range seqs {
		if n := seqs[i].Rows; n < 1 || n > c.maxRows {
			return sdk.Errorf(sdk.CodeInvalid, "a step of %d rows for sequence %d: want 1 to %d, the prefill chunk", n, seqs[i].Seq, c.maxRows)
		}
		if n := len(seqs[i].Allowed); n != 0 && n != c.maskBytes {
			return sdk.Errorf(sdk.CodeInvalid, "a mask of %d bytes for sequence %d: want %d, a bit for each token of the vocabulary", n, seqs[i].Seq, c.maskBytes)
		}
	}
	return nil
}

// plan cuts a batch into micro-batches.
func (c *coordinator) plan(seqs []sdk.SeqStep) *StepPlan {
	p := &StepPlan{Seqs: seqs, IDs: make([]sdk.SeqID, len(seqs)), Cuts: make([]int, 1, 2+len(seqs)/c.microBatch)}
	for i := range seqs {
		p.IDs[i] = seqs[i].Seq
	}
	for _, end := range schedule.Split(len(seqs), c.microBatch, c.maxRows, func(i int) int { return seqs[i].Rows }) {
		p.Cuts = append(p.Cuts, end)
	}
	return p
}

// operate carries out an operation on every stage.
func (c *coordinator) operate(ctx context.Context, op sdk.Op) error {
	call := &call{signal: make(chan struct{}, 1), left: len(c.ports), heard: make([]bool, len(c.ports)), op: op}
	id, err := c.give(Order{Op: op, Trace: traceOf(ctx)}, call)
	if err != nil {
		return err
	}
	for {
		select {
		case <-call.signal:
		case <-ctx.Done():
			c.forget(id)
			return context.Cause(ctx)
		}
		if _, ended := c.progress(id, call); ended {
			return call.opError()
		}
	}
}

// give hands an order to every place, cut to its role. call is nil when nobody waits for its end.
func (c *coordinator) give(o Order, call *call) (uint64, error) {
	select {
	case c.order <- struct{}{}:
		defer func() { <-c.order }()
	case <-c.isDown:
		return 0, c.reason()
	}
	o.Epoch, o.ID = c.epoch, c.lastID+1
	if err := c.register(o.ID, call); err != nil {
		return 0, err
	}
	c.lastID = o.ID
	var counted []bool
	if call != nil {
		counted = call.counted
	}
	c.cut = c.cut[:0]
	for _, role := range c.roles {
		c.cut = append(c.cut, o.For(role, counted))
	}
	for _, p := range c.ports {
		p.Order(c.cut[p.role])
	}
	clear(c.cut)
	return o.ID, nil
}

// reason tells why the pipeline takes no more work; nil while it does.
func (c *coordinator) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.down
}

func (c *coordinator) register(id uint64, call *call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down != nil {
		return c.down
	}
	if call != nil {
		c.calls[id] = call
	}
	return nil
}

func (c *coordinator) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.calls, id)
}

// progress takes what has happened to a call since it was last asked. An ended call is no longer reported to.
func (c *coordinator) progress(id uint64, call *call) (failed []int, ended bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	failed, call.failed = call.failed, nil
	if call.left == 0 {
		delete(c.calls, id)
	}
	return failed, call.left == 0
}

// giveUp ends a micro-batch whose sequences have failed: no stage waits for it any more, and they are released.
func (c *coordinator) giveUp(step uint64, plan *StepPlan, mb int) {
	for _, p := range c.ports {
		p.Abort(Tag{Epoch: c.epoch, Step: step, MicroBatch: mb})
	}
	c.release(plan.ids(mb)...)
}

// abandon ends a step that its caller gave up.
func (c *coordinator) abandon(step uint64, plan *StepPlan, cause error) {
	c.mu.Lock()
	delete(c.calls, step)
	for mb := range plan.MicroBatches() {
		c.blame(plan.ids(mb), cause)
	}
	c.mu.Unlock()
	for mb := range plan.MicroBatches() {
		c.giveUp(step, plan, mb)
	}
}

// blame marks the sequences of a micro-batch that failed with err, and returns what each of them failed with: the one that
// had failed before with what it failed with then, the others because of it. c.mu is held.
func (c *coordinator) blame(seqs []sdk.SeqID, err error) []StepFailure {
	var failures []StepFailure
	rest := StepFailure{Err: err}
	for _, seq := range seqs {
		s := c.seqs[seq]
		if s == nil || s.failed == nil {
			rest.Seqs = append(rest.Seqs, seq)
			continue
		}
		if len(failures) == 0 {
			rest.Err = &SpoiledError{By: seq, Err: s.failed}
		}
		failures = append(failures, StepFailure{Seqs: []sdk.SeqID{seq}, Err: s.failed})
	}
	for _, seq := range rest.Seqs {
		if s := c.seqs[seq]; s != nil {
			s.failed = rest.Err
		}
	}
	if len(rest.Seqs) > 0 {
		failures = append(failures, rest)
	}
	return failures
}

// discard forgets a sequence and releases it everywhere.
func (c *coordinator) discard(seq sdk.SeqID) {
	c.mu.Lock()
	delete(c.seqs, seq)
	c.mu.Unlock()
	c.release(seq)
}

// release releases sequences everywhere without waiting for it.
func (c *coordinator) release(seqs ...sdk.SeqID) {
	for _, seq := range seqs {
		// It fails only when the pipeline is down, and then nothing is left to release.
		_, _ = c.give(Order{Op: sdk.Release{Seq: seq}}, nil)
	}
}

// addSequence makes a new sequence known, busy until its creation ends.
func (c *coordinator) addSequence(r sdk.Reservation) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seqs[r.Seq] != nil {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is reserved already", r.Seq)
	}
	if from := c.seqs[r.From]; r.Keep > 0 && (from == nil || from.failed != nil) {
		return sdk.Errorf(sdk.CodeUnknownSequence, "sequence %d, which sequence %d is to begin with, is not reserved", r.From, r.Seq)
	}
	c.seqs[r.Seq] = &sequence{counts: r.Sampler.CountsTokens(), busy: true}
	return nil
}

// free returns a sequence that may be in a step; c.mu is held.
func (c *coordinator) free(seq sdk.SeqID) (*sequence, error) {
	switch s := c.seqs[seq]; {
	case s == nil, s.failed != nil:
		return nil, sdk.Errorf(sdk.CodeUnknownSequence, "sequence %d is not reserved", seq)
	case s.busy:
		return nil, sdk.Errorf(sdk.CodeInvalid, "sequence %d is in a step already", seq)
	default:
		return s, nil
	}
}

// acquireSteps marks the sequences of a step, all or none, but for those that have failed before. A sequence of which something
// is wanted may not be in another step before this one has ended: its next token is not known. The pieces of a prompt follow
// each other, as every stage takes orders in the order in which they were given. counted tells of each whether its sampler counts
// tokens.
func (c *coordinator) acquireSteps(steps []sdk.SeqStep) (present []sdk.SeqStep, absent []StepFailure, counted []bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	present, absent = c.leaveOut(steps)
	for i := range present {
		s, err := c.free(present[i].Seq)
		if err != nil {
			for _, taken := range present[:i] {
				c.seqs[taken.Seq].busy = false
			}
			return nil, nil, nil, err
		}
		s.busy = true // also finds one that is twice in the step
	}
	counted = make([]bool, len(present))
	for i := range present {
		s := c.seqs[present[i].Seq]
		counted[i] = s.counts
		if present[i].Want == sdk.WantNothing {
			s.busy, s.pieces = false, s.pieces+1
		}
	}
	return present, absent, counted, nil
}

// leaveOut takes the sequences out of a step that have failed; c.mu is held. A caller that has yet to hear of a failed piece
// may have begun the next, and whose steps the others are in.
func (c *coordinator) leaveOut(steps []sdk.SeqStep) (present []sdk.SeqStep, absent []StepFailure) {
	failed := func(step sdk.SeqStep) bool {
		s := c.seqs[step.Seq]
		return s != nil && s.failed != nil
	}
	if !slices.ContainsFunc(steps, failed) {
		return steps, nil
	}
	for _, step := range steps {
		if failed(step) {
			absent = append(absent, StepFailure{Seqs: []sdk.SeqID{step.Seq}, Err: c.seqs[step.Seq].failed})
		} else {
			present = append(present, step)
		}
	}
	return present, absent
}

// end notes that a step has ended for the sequence.
func (s *sequence) end(step *sdk.SeqStep) {
	if step.Want == sdk.WantNothing {
		s.pieces--
	} else {
		s.busy = false
	}
}

// giveBack marks a sequence as idle, if it was not released meanwhile.
func (c *coordinator) giveBack(seq sdk.SeqID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.seqs[seq]; s != nil {
		s.busy = false
	}
}

// giveBackSteps ends a step for its sequences; those released meanwhile are unknown.
func (c *coordinator) giveBackSteps(steps []sdk.SeqStep) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range steps {
		if s := c.seqs[steps[i].Seq]; s != nil {
			s.end(&steps[i])
		}
	}
}

// shutDown ends every call with err and refuses all that come later. Only the first counts.
func (c *coordinator) shutDown(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down != nil {
		return
	}
	c.down = err
	close(c.isDown)
	for _, call := range c.calls {
		if call.plan == nil {
			call.errs = append(call.errs, err)
		} else {
			for mb, done := range call.done {
				if !done {
					call.causes = append(call.causes, failedMicroBatch{mb, []StepFailure{{Seqs: call.plan.ids(mb), Err: err}}})
				}
			}
		}
		call.left = 0
		call.wake()
	}
	clear(c.calls)
}

// Answered is Reporter's.
func (c *coordinator) Answered(at sdk.Place, epoch, order uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	call := c.calls[order]
	i := c.portOf(at)
	if epoch != c.epoch || call == nil || call.plan != nil || call.left == 0 || i < 0 || call.heard[i] {
		return
	}
	call.heard[i] = true
	if err != nil {
		call.errs = append(call.errs, err)
	}
	if call.left--; call.left == 0 {
		call.wake()
	}
}

// Finished is Reporter's.
func (c *coordinator) Finished(t Tag, results []sdk.SeqResult) {
	c.mu.Lock()
	defer c.mu.Unlock()
	call := c.callOf(t)
	if call == nil {
		return
	}
	copy(call.results[call.plan.Cuts[t.MicroBatch]:call.plan.Cuts[t.MicroBatch+1]], results)
	call.end(t.MicroBatch)
	if call.left == 0 {
		call.wake()
	}
}

// Failed is Reporter's.
func (c *coordinator) Failed(t Tag, err *StageError) {
	c.mu.Lock()
	defer c.mu.Unlock()
	call := c.callOf(t)
	if call == nil {
		return
	}
	call.end(t.MicroBatch)
	call.failed = append(call.failed, t.MicroBatch)
	call.causes = append(call.causes, failedMicroBatch{t.MicroBatch, c.blame(call.plan.ids(t.MicroBatch), err)})
	call.wake()
}

// Lost is Reporter's: everything in flight ends at once.
func (c *coordinator) Lost(epoch uint64, err *StageError) {
	if epoch == c.epoch {
		c.shutDown(err)
	}
}

// phase tells what is under way.
func (c *coordinator) phase() Phase {
	c.mu.Lock()
	defer c.mu.Unlock()
	phase := PhaseIdle
	for _, call := range c.calls {
		switch p := call.phase(); p {
		case PhaseDecode, PhasePrefill:
			return p
		default:
			phase = p
		}
	}
	return phase
}

// callOf returns the call that still waits for a micro-batch; nil for late and stray reports, which are dropped.
func (c *coordinator) callOf(t Tag) *call {
	call := c.calls[t.Step]
	if t.Epoch != c.epoch || call == nil || call.plan == nil || t.MicroBatch < 0 || t.MicroBatch >= len(call.done) || call.done[t.MicroBatch] {
		return nil
	}
	return call
}

func newStepCall(plan *StepPlan) *call {
	n := plan.MicroBatches()
	c := &call{signal: make(chan struct{}, 1), left: n, plan: plan, done: make([]bool, n), results: make([]sdk.SeqResult, len(plan.Seqs))}
	for i, seq := range plan.IDs {
		c.results[i] = sdk.SeqResult{Seq: seq, Token: -1}
	}
	return c
}

func (c *call) end(mb int) {
	c.done[mb] = true
	c.left--
}

func (c *call) wake() {
	select {
	case c.signal <- struct{}{}:
	default:
	}
}

// opError returns what stages made of an operation: nil, the one error, or all of them.
func (c *call) opError() error {
	if len(c.errs) == 1 {
		return c.errs[0]
	}
	return errors.Join(c.errs...)
}

// resultsOf returns a result for each sequence that the step was asked for.
func (c *call) resultsOf(seqs []sdk.SeqStep) []sdk.SeqResult {
	if len(c.absent) == 0 {
		return c.results
	}
	all, present := make([]sdk.SeqResult, len(seqs)), c.results
	for i := range seqs {
		if len(present) > 0 && present[0].Seq == seqs[i].Seq {
			all[i], present = present[0], present[1:]
		} else {
			all[i] = sdk.SeqResult{Seq: seqs[i].Seq, Token: -1}
		}
	}
	return all
}

func (c *call) stepError() error {
	if len(c.causes) == 0 && len(c.absent) == 0 {
		return nil
	}
	slices.SortFunc(c.causes, func(a, b failedMicroBatch) int { return cmp.Compare(a.mb, b.mb) })
	e := &StepError{}
	for _, f := range c.causes {
		e.Failures = append(e.Failures, f.failures...)
	}
	e.Failures = append(e.Failures, c.absent...)
	return e
}
