package batch

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// core decides what happens next. It is a state machine without clock, goroutines or locks: every method is an event,
// and leaves in out what is to be done about it.
type core struct {
	cfg    coreConfig
	ledger *kvledger.Ledger
	newSeq func() sdk.SeqID
	chunk  int  // rows of one sequence in a step at most
	whole  bool // prompts are cut at multiples of chunk only

	queue      []*job // by priority, then by arrival
	active     []*job // that have a sequence, in the order in which they got it
	flights    []*flight
	lastFlight uint64
	turn       uint64 // counts who went to the back of the line
	freed      uint64 // counts sequences released
	pace       pace
	rounds     rounds
	service    mean // of the time that a request is active

	halted   bool // there is no runtime
	lastStep time.Duration
	progress time.Time
	counters Counters
	out      orders
}

// coreConfig is the part of Config that the core decides by.
type coreConfig struct {
	stages        int
	maxActive     int
	maxBatch      int
	maxQueue      int
	microBatch    int
	decodeChunk   int
	maxStall      float64
	admissionWait time.Duration
	speeds        *Speeds
	preemption    PreemptionPolicy
}

// orders is what the core wants done, in this order.
type orders struct {
	release  []sdk.SeqID
	reserve  []*job
	steps    []*flight
	abort    []*flight
	tokens   []delivery
	ended    []*job
	unshared []unshared // to be logged
}

type delivery struct {
	job   *job
	token Token
}

// job is a request on its way.
type job struct {
	id     uint64
	req    *Request
	stream *Stream

	place     place
	seq       sdk.SeqID
	history   []int32 // the prompt and what was generated; only ever appended to
	fed       int     // positions given to the stages
	held      int     // positions that they are known to hold: all but those of steps under way
	steps     int     // steps under way
	scores    []float32
	generated int
	since     int // tokens generated since it joined, or joined again
	choices   *choices
	from      *job   // whose positions it is being reserved with
	lending   int    // sequences that are being reserved with its positions
	snapshots int    // that its sequence may hold
	turn      uint64 // when it went to the back of the line
	lap       int    // prompt rows that it had since

	submitted  time.Time
	waiting    time.Time // for memory, since
	joined     time.Time
	preempted  int
	refused    *kvledger.AdmissionDiagnostic // why it could not join when it last tried
	refusedAt  uint64                        // core.freed when a stage refused it
	ended      bool
	reason     FinishReason
	err        error
	endedAt    time.Time
	everJoined bool
}

// place is where a job is.
type place int

const (
	placeQueue   place = iota
	placeWaiting       // admitted; it will begin with what another choice has prefilled
	placeJoining       // its sequence is being reserved
	placeReady         // for a step; pieces of its prompt may be under way
	placeFlight        // in a step whose result must come first
	placeSpoiled       // its state was lost with another's: it begins again once its steps have ended
	placeGone
)

// flight is a step under way.
type flight struct {
	id       uint64
	pieces   []piece
	steps    []sdk.SeqStep
	began    time.Time
	decodes  int
	prefill  int  // rows of prompts
	mixed    bool // prompt rows were under way at the same time, here or in another flight
	company  bool // another flight was under way at the same time
	streams  int  // that there were, in so many groups
	groups   int
	expected time.Duration
	aborted  bool
	cancel   func() // of the step's context; the loop's
}

// piece is one job's share of a flight.
type piece struct {
	job  *job
	rows int
	want sdk.Want
}

// exclusive tells whether the job's next step waits for the result of this one.
func (p piece) exclusive() bool { return p.want != sdk.WantNothing }

// newCore makes one that has no runtime yet.
func newCore(cfg coreConfig, ledger *kvledger.Ledger) *core {
	return &core{
		cfg: cfg, ledger: ledger, halted: true, pace: newPace(cfg.speeds), counters: Counters{Rejections: map[Rejection]uint64{}},
		rounds: rounds{speeds: cfg.speeds, stages: cfg.stages, sizes: map[int]*contest{}},
	}
}

// decoding tells whether the job's next step yields a token from one row.
func (j *job) decoding() bool { return j.generated > 0 && len(j.history)-j.fed == 1 }

// streaming tells whether the job is past its prompt, its next step under way or not.
func (j *job) streaming() bool { return j.generated > 0 && len(j.history)-j.fed <= 1 }

// length is the positions that the job may have in the end.
func (j *job) length() int { return len(j.req.Prompt) + j.req.MaxTokens }

// take returns what is to be done.
func (c *core) take() orders {
	out := c.out
	c.out = orders{}
	return out
}

// submit queues the choices of a request, or refuses them all.
func (c *core) submit(now time.Time, jobs ...*job) error {
	req := jobs[0].req
	if err := c.ledger.Check(len(req.Prompt), req.MaxTokens); err != nil {
		return err
	}
	if len(jobs) > c.queueRoom() {
		c.counters.QueueFull++
		return &QueueFullError{Depth: len(c.queue), Choices: len(jobs), RetryAfter: c.retryAfter()}
	}
	newChoices(jobs)
	for _, j := range jobs {
		c.accepted(now, j)
	}
	return nil
}

func (c *core) accepted(now time.Time, j *job) {
	c.counters.Requests++
	j.history = slices.Clip(j.req.Prompt)
	j.submitted = now
	if j.complete() {
		c.end(now, j, FinishLength, nil)
		return
	}
	if len(c.queue) == 0 && len(c.active) == 0 {
		c.progress = now
	}
	c.enqueue(j)
}

// queueRoom is how many more jobs may come: that wait, and that would not have to, as far as the queue knows.
func (c *core) queueRoom() int {
	room := c.cfg.maxQueue - len(c.queue)
	if len(c.queue) == 0 && !c.halted {
		room += c.cfg.maxActive - len(c.active)
	}
	return room
}

// retryAfter is when the next place is likely to become free.
func (c *core) retryAfter() time.Duration {
	next := c.service.value() / time.Duration(max(1, len(c.active)))
	return min(max(next.Round(time.Second), time.Second), time.Minute)
}

func (c *core) enqueue(j *job) {
	j.place = placeQueue
	i, _ := slices.BinarySearchFunc(c.queue, j, func(a, b *job) int {
		return cmp.Or(cmp.Compare(b.req.Priority, a.req.Priority), cmp.Compare(a.id, b.id))
	})
	c.queue = slices.Insert(c.queue, i, j)
}

// cancel ends a job because nobody waits for it any more; one that has ended already stays as it is.
func (c *core) cancel(now time.Time, j *job, err error) {
	if !j.ended {
		c.counters.Cancelled++
		c.end(now, j, FinishCancelled, err)
	}
}

// stop ends a job because its reader has seen enough.
func (c *core) stop(now time.Time, j *job) { c.end(now, j, FinishStop, nil) }

// end takes a job out. A sequence that is in a step is released when the step returns: within one step, and without
// disturbing the step's other sequences.
func (c *core) end(now time.Time, j *job, reason FinishReason, err error) {
	if j.ended {
		return
	}
	j.ended, j.reason, j.err, j.endedAt = true, reason, err, now
	switch {
	case err == nil:
		c.counters.Finished++
	case reason != FinishCancelled:
		c.counters.Failed++
	}
	c.out.ended = append(c.out.ended, j)
	switch j.place {
	case placeQueue:
		c.queue = slices.DeleteFunc(c.queue, func(o *job) bool { return o == j })
		j.place = placeGone
	case placeWaiting:
		c.drop(j)
	case placeReady, placeFlight, placeSpoiled:
		c.leave(now, j)
	}
}

// leave releases an ended job's sequence as soon as no step has it, and nobody begins with it.
func (c *core) leave(now time.Time, j *job) {
	switch {
	case j.lending > 0:
	case j.steps == 0:
		c.release(now, j)
	default:
		c.abortIdle()
	}
}

// release gives a job's sequence up on every stage.
func (c *core) release(now time.Time, j *job) {
	c.drop(j)
	c.out.release = append(c.out.release, j.seq)
	c.service.add(now.Sub(j.joined))
}

// drop takes a job's sequence off the books.
func (c *core) drop(j *job) {
	c.ledger.Release(j.seq)
	c.freed++
	c.active = slices.DeleteFunc(c.active, func(o *job) bool { return o == j })
	j.place = placeGone
}

// abortIdle gives up steps in which nobody is interested any more. What is left of a sequence can't be in a later step, and
// would take the step's other sequences with it: a job's steps are given up all or none.
func (c *core) abortIdle() {
	idle := slices.DeleteFunc(slices.Clone(c.flights), func(f *flight) bool {
		return slices.ContainsFunc(f.pieces, func(p piece) bool { return !p.job.ended })
	})
	for n := -1; n != len(idle); {
		n = len(idle)
		within := map[*job]int{}
		for _, f := range idle {
			for _, p := range f.pieces {
				within[p.job]++
			}
		}
		idle = slices.DeleteFunc(idle, func(f *flight) bool {
			return slices.ContainsFunc(f.pieces, func(p piece) bool { return within[p.job] < p.job.steps })
		})
	}
	for _, f := range idle {
		if !f.aborted {
			f.aborted = true
			c.out.abort = append(c.out.abort, f)
		}
	}
}

// expire ends the jobs whose time is up.
func (c *core) expire(now time.Time) {
	for _, j := range slices.Concat(c.queue, c.active) {
		if limit := c.limitOf(j); !j.ended && !limit.IsZero() && !now.Before(limit) {
			c.end(now, j, "", c.lateError(now, j))
		}
	}
}

// limitOf is when a job's time is up; zero for never.
func (c *core) limitOf(j *job) time.Time {
	limit := j.req.Deadline
	if c.cfg.admissionWait > 0 && j.place == placeQueue && !j.waiting.IsZero() {
		if patience := j.waiting.Add(c.cfg.admissionWait); limit.IsZero() || patience.Before(limit) {
			limit = patience
		}
	}
	return limit
}

func (c *core) lateError(now time.Time, j *job) error {
	late := !j.req.Deadline.IsZero() && !now.Before(j.req.Deadline)
	if !late {
		return j.refused
	}
	e := &DeadlineError{Waited: now.Sub(j.submitted), Queued: !j.everJoined, Generated: j.generated}
	if j.place == placeQueue {
		e.Admission = j.refused
	}
	return e
}

// wakeAt is when expire has something to do again; zero for never.
func (c *core) wakeAt() time.Time {
	var first time.Time
	for _, list := range [][]*job{c.queue, c.active} {
		for _, j := range list {
			if limit := c.limitOf(j); !j.ended && !limit.IsZero() && (first.IsZero() || limit.Before(first)) {
				first = limit
			}
		}
	}
	return first
}

// decide orders everything that can be done now.
func (c *core) decide(now time.Time) {
	if c.halted {
		return
	}
	c.relieve(now)
	c.join(now)
	c.share()
	for c.compose(now) {
	}
}

// join lets the jobs at the head of the queue in, as long as there is room. None overtakes one that waits for
// memory: a large request would never have its turn.
func (c *core) join(now time.Time) {
	for len(c.queue) > 0 && len(c.active) < c.cfg.maxActive {
		j := c.queue[0]
		if j.refused != nil && j.refused.Reason == kvledger.ReasonRejectedByStage && j.refusedAt == c.freed {
			return // nothing has been released since
		}
		from := c.source(j)
		if err := c.admit(j, from); err != nil {
			c.refuse(now, j, err)
			return
		}
		c.queue = slices.Delete(c.queue, 0, 1)
		j.fed, j.held, j.since, j.from, j.lending = 0, 0, 0, nil, 0
		j.scores = c.restartScores(j)
		j.refused, j.waiting = nil, time.Time{}
		c.toTheBack(j)
		c.active = append(c.active, j)
		if from == nil {
			c.reserve(j)
		} else {
			j.place = placeWaiting
		}
	}
}

// restartScores keeps the scores of a prompt that were complete before a preemption.
func (c *core) restartScores(j *job) []float32 {
	if len(j.scores) == len(j.req.Prompt)-1 {
		return j.scores
	}
	return nil
}

// refuse notes why a job can't join. It waits: what it needs fits once others have left.
func (c *core) refuse(now time.Time, j *job, err error) {
	d, ok := errors.AsType[*kvledger.AdmissionDiagnostic](err)
	if !ok {
		c.end(now, j, "", err)
		return
	}
	if j.waiting.IsZero() {
		j.waiting = now
		c.counters.Rejections[Rejection{d.Stage, d.Reason}]++
	}
	j.refused = d
}

// reserved tells how a job's reservation ended.
func (c *core) reserved(now time.Time, j *job, err error) {
	c.progress = now
	shared := j.from != nil
	if shared {
		defer c.lent(now, j) // first of all it is known what became of j
	}
	if err == nil {
		j.place = placeReady
		if !j.everJoined {
			j.everJoined, j.joined = true, now
		}
		if j.ended {
			c.release(now, j)
		}
		return
	}
	if sdk.CodeOf(err) == sdk.CodeOutOfMemory && !j.ended {
		c.rejected(now, j, err)
		return
	}
	if shared && canDoAlone(err) && !j.ended {
		c.part(j, err)
		return
	}
	c.drop(j)
	c.end(now, j, "", c.failure(j, err))
}

// rejected puts a job back that a stage had no memory for, contrary to the ledger. Alone it would wait for nothing.
func (c *core) rejected(now time.Time, j *job, err error) {
	stage := 0
	if e, ok := errors.AsType[*pipeline.StageError](err); ok {
		stage = e.Place.Stage
	}
	d := c.ledger.Rejected(j.seq, stage, err)
	c.drop(j)
	if len(c.active) == 0 {
		c.counters.Rejections[Rejection{d.Stage, d.Reason}]++
		c.end(now, j, "", d)
		return
	}
	c.refuse(now, j, d)
	j.refusedAt = c.freed
	c.enqueue(j)
}

func (c *core) failure(j *job, err error) error {
	return &FailedError{Generated: j.generated, Err: err}
}

// stepped takes what a flight came to.
func (c *core) stepped(now time.Time, f *flight, results []sdk.SeqResult, err error) {
	i := slices.Index(c.flights, f)
	if i < 0 {
		return
	}
	c.flights = slices.Delete(c.flights, i, i+1)
	c.progress, c.lastStep = now, now.Sub(f.began)
	c.counters.Steps++
	failed := func(sdk.SeqID) error { return nil }
	switch e := (*pipeline.StepError)(nil); {
	case errors.As(err, &e):
		failed = e.Of
	case err != nil:
		failed = func(sdk.SeqID) error { return err }
	case len(results) != len(f.pieces):
		failed = func(sdk.SeqID) error {
			return fmt.Errorf("the runtime answered for %d of %d sequences", len(results), len(f.pieces))
		}
	default:
		c.pace.learn(f, c.lastStep)
		if f.decodes > 0 && !f.aborted {
			c.rounds.learn(f.streams, f.groups, c.lastStep, !f.mixed && f.prefill == 0)
		}
	}
	for k, p := range f.pieces {
		j := p.job
		j.steps--
		if p.exclusive() && j.place != placeSpoiled {
			j.place = placeReady
		}
		switch err := failed(j.seq); {
		case j.ended:
			c.leave(now, j)
		case j.place == placeSpoiled || isSpoiled(err):
			c.spoil(now, j)
		case err != nil:
			c.end(now, j, "", c.failure(j, err))
		default:
			c.advance(now, p, results[k])
		}
	}
}

func isSpoiled(err error) bool {
	_, ok := errors.AsType[*pipeline.SpoiledError](err)
	return ok
}

// spoil has a job begin again that lost its state because it was in a step with one that failed: nothing is wrong with it.
func (c *core) spoil(now time.Time, j *job) {
	j.place = placeSpoiled
	if j.steps == 0 {
		c.counters.Restarts++
		c.putBack(now, j)
	}
}

// advance takes one sequence's result.
func (c *core) advance(now time.Time, p piece, r sdk.SeqResult) {
	j := p.job
	prompt := min(j.held+p.rows, len(j.req.Prompt)) - min(j.held, len(j.req.Prompt))
	c.counters.PromptTokens += uint64(prompt)
	j.held += p.rows
	switch p.want {
	case sdk.WantScores:
		if len(r.Scores) != p.rows {
			c.end(now, j, "", c.failure(j, fmt.Errorf("the runtime gave %d scores for %d rows", len(r.Scores), p.rows)))
			return
		}
		j.scores = append(j.scores, r.Scores...)
		if j.complete() {
			c.end(now, j, FinishLength, nil)
		}
	case sdk.WantToken:
		if r.Token < 0 {
			c.end(now, j, "", c.failure(j, errors.New("the runtime gave no token")))
			return
		}
		c.accept(now, j, r)
	}
}

// complete tells whether a job that generates nothing has all that it wants.
func (j *job) complete() bool {
	return j.req.MaxTokens == 0 && (!j.req.WantScores || len(j.scores) == len(j.req.Prompt)-1)
}

// accept appends a token to the answer, and decides whether that ends it.
func (c *core) accept(now time.Time, j *job, r sdk.SeqResult) {
	eos := !j.req.IgnoreEOS && slices.Contains(j.req.EOS, r.Token)
	j.history = append(j.history, r.Token)
	j.generated++
	j.since++
	c.counters.GeneratedTokens++
	c.out.tokens = append(c.out.tokens, delivery{j, Token{ID: r.Token, Logprob: r.Logprob, Top: r.Top, EOS: eos, At: now}})
	switch {
	case eos:
		c.end(now, j, FinishStop, nil)
	case j.generated == j.req.MaxTokens:
		c.end(now, j, FinishLength, nil)
	}
}

// lost ends everything in flight: the runtime is gone, and with it all its sequences. What waits keeps waiting.
func (c *core) lost(now time.Time, err error) {
	c.halted, c.progress, c.flights = true, now, nil
	for _, j := range slices.Clone(c.active) {
		c.drop(j)
		if !j.ended {
			c.end(now, j, "", &FailedError{Generated: j.generated, Lost: true, Err: err})
		}
	}
}

// resume goes on with a runtime that holds no sequences.
func (c *core) resume(now time.Time, chunk int, anyPieces bool, newSeq func() sdk.SeqID) {
	c.halted, c.progress, c.chunk, c.whole, c.newSeq = false, now, chunk, !anyPieces, newSeq
}

// refit goes on with the books of stages that are cut differently. Nothing is active; what waits and can never fit ends.
func (c *core) refit(now time.Time, ledger *kvledger.Ledger) {
	c.ledger = ledger
	for _, j := range slices.Clone(c.queue) {
		if err := ledger.Check(len(j.req.Prompt), j.req.MaxTokens); err != nil {
			c.end(now, j, "", err)
		}
	}
}

// endAll ends every job with err.
func (c *core) endAll(now time.Time, err error) {
	for _, j := range slices.Concat(c.queue, c.active) {
		c.end(now, j, "", err)
	}
}

// idle tells whether there is nothing left to do.
func (c *core) idle() bool { return len(c.queue) == 0 && len(c.active) == 0 }
