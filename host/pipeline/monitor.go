package pipeline

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// monitor runs the core of a place: it brings orders, frames, answers and the time to it, one at a time under the lock,
// on whatever goroutine they come on, and does what the core asks for once the lock is free. Under the lock nothing is
// called that could wait.
type monitor struct {
	cfg    monitorConfig
	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup
	start  time.Time

	answers chan struct{} // something was sent to the executor; holds one token
	cancels chan uint64   // steps to give up
	holding chan struct{} // a frame is held; holds one token
	stuck   chan error    // the executor does not answer; holds one
	gone    chan error    // nothing goes to the executor any more; holds the reason
	busy    atomic.Int64  // nanoseconds that the executor has computed
	began   atomic.Int64  // nanoseconds from start to when the executor began what it is at; 0 while it is at nothing

	mu       sync.Mutex
	quiet    sync.Cond // with mu: sending ended, or a loan, while the place closes
	core     *core
	sending  bool               // somebody hands to the executor what the core has for it
	pending  fifo[*sdk.Pending] // answers to come
	phase    Phase              // last told to the executor's supervisor
	told     bool               // gone holds the reason
	next     Link               // nil where no hidden rows go on
	reporter Reporter           // nil until the place joins its pipeline
	lost     *StageError        // how the place was lost
	lostDone chan struct{}      // closed once lost is set
}

// monitorConfig is what a monitor is made of.
type monitorConfig struct {
	core     coreConfig // without plugin and limits
	executor Executor
	steps    sdk.StepClient
	observer Observer // nil for none
	clock    func() time.Time
}

// newMonitor starts a place on a loaded executor whose region is mapped.
func newMonitor(ctx context.Context, cfg monitorConfig) *monitor {
	ctx, cancel := context.WithCancel(ctx)
	cfg.core.plugin, cfg.core.observed = cfg.executor.Plugin(), cfg.observer != nil
	cfg.core.maxOrders, cfg.core.maxBytes = maxOrders, maxOrderBytes
	m := &monitor{
		cfg: cfg, ctx: ctx, cancel: cancel, core: newCore(cfg.core),
		start:    cfg.clock().Add(-1), // so that nothing began at 0
		answers:  make(chan struct{}, 1),
		cancels:  make(chan uint64, cfg.core.slots),
		holding:  make(chan struct{}, 1),
		stuck:    make(chan error, 1),
		gone:     make(chan error, 1),
		lostDone: make(chan struct{}),
		phase:    PhaseIdle,
	}
	m.quiet.L = &m.mu
	region := cfg.executor.Region()
	for i := range cfg.core.slots {
		m.core.free = append(m.core.free, &slot{core: m.core, released: m.released, index: i, in: region.In(i), out: region.Out(i)})
	}
	m.wait.Go(m.collectAnswers)
	m.wait.Go(m.giveUpSteps)
	m.wait.Go(m.refuseOverdue)
	m.wait.Go(m.superviseHealth)
	m.wait.Go(m.watch)
	return m
}

// join says where the output goes. It comes before the first order and the first frame.
func (m *monitor) join(next []Link, reporter Reporter) {
	m.mu.Lock()
	m.next, m.reporter = linkTo(next), reporter
	lost := m.lost
	m.mu.Unlock()
	if lost != nil {
		reporter.Lost(m.cfg.core.epoch, lost)
	}
}

// close ends the goroutines. After it nothing of the place touches a region, its own or a neighbour's, so that the
// executors may be stopped once every place is closed.
func (m *monitor) close() error {
	m.cancel()
	err := m.cfg.steps.Close() // also frees whoever is in Send
	m.mu.Lock()
	m.core.close()
	m.settle()
	m.mu.Lock()
	for m.sending || m.core.lent > 0 {
		m.quiet.Wait()
	}
	m.mu.Unlock()
	m.wait.Wait()
	return err
}

// Order is StagePort's.
func (m *monitor) Order(o Order) {
	m.mu.Lock()
	m.core.order(m.now(false), o)
	m.settle()
}

// Abort is StagePort's.
func (m *monitor) Abort(t Tag) {
	m.mu.Lock()
	m.core.abort(m.now(false), t)
	m.settle()
}

// Send is Link's, for a stage before this one in the same process.
func (m *monitor) Send(f Frame) {
	m.mu.Lock()
	held := m.core.early(f)
	m.core.frame(m.now(held), f)
	m.settle()
	if held {
		signal(m.holding)
	}
}

// claim is Stage's.
func (m *monitor) claim(t Tag, bytes int) ([]byte, Releaser) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if sl := m.core.claim(t, bytes); sl != nil {
		return sl.in[:bytes:bytes], sl
	}
	return nil, nil
}

// released is the end of every slot's Release.
func (m *monitor) released(sl *slot) {
	m.mu.Lock()
	m.core.released(m.now(false), sl)
	m.settle()
}

// now reads the clock where the core has a use for it: while the executor is at something, the time is of no account to
// most of what comes in. m.mu is held.
func (m *monitor) now(needed bool) time.Time {
	if needed || m.cfg.observer != nil || !m.core.busy() {
		return m.cfg.clock()
	}
	return time.Time{}
}

// settle frees the lock and does what the core asks for.
func (m *monitor) settle() {
	var buf [4]effect
	effects := m.effects(buf[:0])
	var op sdk.Op
	send := false
	if !m.sending {
		op, send = m.core.take()
		m.sending = send
	}
	m.publish()
	m.mu.Unlock()
	if send {
		m.send(op)
	}
	m.perform(effects)
}

// send hands op to the executor, and what follows it. There is one goroutine at a time in it, so that the order stays; it
// holds no lock, so that nobody else waits should the executor's client, against its contract, wait for the executor.
func (m *monitor) send(op sdk.Op) {
	for more := true; more; {
		pending, err := m.cfg.steps.Send(op)
		m.mu.Lock()
		if err != nil {
			m.core.refused(m.cfg.clock(), err)
		} else {
			m.pending.push(pending)
		}
		var buf [4]effect
		effects := m.effects(buf[:0])
		op, more = m.core.take()
		m.sending = more
		m.publish()
		m.mu.Unlock()
		signal(m.answers)
		m.perform(effects)
	}
}

// effects takes what is to be done; m.mu is held.
func (m *monitor) effects(into []effect) []effect {
	into = append(into, m.core.effects...)
	clear(m.core.effects)
	m.core.effects = m.core.effects[:0]
	return into
}

// publish tells those without the lock how things stand; m.mu is held.
func (m *monitor) publish() {
	began := int64(0)
	if m.core.busy() {
		began = int64(m.core.began.Sub(m.start))
	}
	m.began.Store(began)
	if m.phase != m.core.phase {
		m.phase = m.core.phase
		m.cfg.executor.Enter(m.phase) // for the error should the executor die there
	}
	if m.core.down != nil && !m.told {
		m.told = true
		m.gone <- m.core.down
	}
	if m.core.closed {
		m.quiet.Broadcast()
	}
}

// perform does what the core asked for.
func (m *monitor) perform(effects []effect) {
	for i := range effects {
		switch e := &effects[i]; {
		case e.release != nil:
			e.release.Release()
		case e.frame != nil:
			m.next.Send(*e.frame)
		case e.results != nil:
			m.reporter.Finished(e.tag, e.results)
		case e.answered != 0 && e.failed == nil:
			m.reporter.Answered(m.cfg.core.place, m.cfg.core.epoch, e.answered, nil)
		case e.answered != 0:
			m.reporter.Answered(m.cfg.core.place, m.cfg.core.epoch, e.answered, e.failed)
		case e.failed != nil:
			m.reporter.Failed(e.tag, e.failed)
		case e.cancel != 0:
			select {
			case m.cancels <- e.cancel:
			default: // that many are being given up already; this one ends by itself
			}
		case e.observed != nil:
			if !e.observed.Failed {
				e.observed.Sent = m.cfg.clock()
			}
			m.cfg.observer.Observe(*e.observed)
		}
	}
}

// collectAnswers takes the executor's answers in the order in which they were asked for.
func (m *monitor) collectAnswers() {
	for {
		pending, ok := m.nextPending()
		if !ok {
			return
		}
		result, err := pending.Wait(m.ctx)
		if m.ctx.Err() != nil {
			return
		}
		m.mu.Lock()
		if errors.Is(err, sdk.ErrExecutorGone) {
			m.core.fall(err)
			m.settle()
			return
		}
		if result != nil {
			m.busy.Add(result.ComputeNanos)
		}
		m.core.answered(m.cfg.clock(), result, err)
		m.settle()
	}
}

// nextPending waits for something that an answer is owed to.
func (m *monitor) nextPending() (*sdk.Pending, bool) {
	for {
		m.mu.Lock()
		if m.pending.len() > 0 {
			p := *m.pending.front()
			m.pending.pop()
			m.mu.Unlock()
			return p, true
		}
		m.mu.Unlock()
		select {
		case <-m.answers:
		case <-m.ctx.Done():
			return nil, false
		}
	}
}

// giveUpSteps passes aborts on to the executor; a goroutine of its own, as the call may take its time.
func (m *monitor) giveUpSteps() {
	for {
		select {
		case id := <-m.cancels:
			_ = m.cfg.steps.Cancel(m.ctx, id) // if it can't be reached, its step fails by itself
		case <-m.ctx.Done():
			return
		}
	}
}

// refuseOverdue refuses frames whose plan does not come.
func (m *monitor) refuseOverdue() {
	timer := time.NewTimer(planPatience)
	defer timer.Stop()
	for {
		select {
		case <-m.holding:
		case <-timer.C:
		case <-m.ctx.Done():
			return
		}
		m.mu.Lock()
		next, any := m.core.overdue(m.cfg.clock())
		m.settle()
		if any {
			timer.Reset(next)
		}
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
