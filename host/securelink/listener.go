package securelink

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// DefaultMaxPending is how many unproven clients a Listener keeps at a time.
const DefaultMaxPending = 256

// ListenerConfig says how a Listener receives its clients.
type ListenerConfig struct {
	Config
	MaxPending int                              // unproven clients at a time; default DefaultMaxPending
	Decide     func(Identity) *Refusal          // as Server's; must bear calls at the same time
	OnRefused  func(client net.Addr, err error) // told of clients that failed or were refused; must bear calls at the same time; may be nil
}

// Listener accepts clients that have proven themselves. What others can cost it is bounded: MaxPending connections,
// of each a hello and a proof in bytes, and HandshakeTimeout. When there are more, one is given up for the newest.
type Listener struct {
	inner  net.Listener
	cfg    ListenerConfig
	report *reporter
	ctx    context.Context
	cancel context.CancelFunc
	ready  chan *Conn
	wg     sync.WaitGroup

	mu      sync.Mutex
	pending []*pending // oldest first
}

// pending is an unproven client.
type pending struct {
	conn    net.Conn
	source  netip.Prefix
	greeted atomic.Bool // its whole hello has come
	crowded atomic.Bool // given up for another
}

// NewListener starts to receive clients of inner, which it owns from now on. A fault of cfg is the only error.
func NewListener(inner net.Listener, cfg ListenerConfig) (*Listener, error) {
	var err error
	if cfg.Config, err = cfg.Config.withDefaults(); err != nil {
		return nil, err
	}
	if cfg.MaxPending == 0 {
		cfg.MaxPending = DefaultMaxPending
	}
	l := &Listener{inner: inner, cfg: cfg, report: newReporter(cfg.OnRefused, time.Now), ready: make(chan *Conn)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.wg.Go(l.acceptAll)
	return l, nil
}

// Accept returns the next proven client, or net.ErrClosed after Close.
func (l *Listener) Accept() (*Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Addr returns the listening address.
func (l *Listener) Addr() net.Addr { return l.inner.Addr() }

// Close ends listening and the unfinished handshakes, and waits for them. Accepted connections go on.
func (l *Listener) Close() error {
	l.cancel()
	err := l.inner.Close()
	l.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// acceptAll takes connections until Close. Failures to accept, such as too many open files, pass.
func (l *Listener) acceptAll() {
	const shortest, longest = 5 * time.Millisecond, time.Second
	pause := shortest
	for {
		c, err := l.inner.Accept()
		if err == nil {
			pause = shortest
			l.admit(c)
			continue
		}
		if l.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			l.cancel()
			return
		}
		l.report.failed(l.inner.Addr(), fmt.Errorf("accepting connections: %w", err))
		select {
		case <-time.After(pause):
		case <-l.ctx.Done():
		}
		pause = min(2*pause, longest)
	}
}

// admit starts a client's handshake, at the cost of another's where there are too many.
func (l *Listener) admit(c net.Conn) {
	p := &pending{conn: c, source: source(c.RemoteAddr())}
	l.mu.Lock()
	if len(l.pending) >= l.cfg.MaxPending {
		i := victim(l.pending)
		l.pending[i].giveUp()
		l.pending = slices.Delete(l.pending, i, i+1)
	}
	l.pending = append(l.pending, p)
	l.mu.Unlock()
	l.wg.Go(func() { l.receive(p) })
}

// giveUp resets the connection, so that its client does not take the end for an answer to its proof.
func (p *pending) giveUp() {
	p.crowded.Store(true)
	if tcp, ok := p.conn.(interface{ SetLinger(seconds int) error }); ok {
		tcp.SetLinger(0)
	}
	p.conn.Close()
}

func (l *Listener) receive(p *pending) {
	conn, err := serve(l.ctx, p.conn, l.cfg.Config, l.cfg.Decide, func() { p.greeted.Store(true) })
	l.mu.Lock()
	if i := slices.Index(l.pending, p); i >= 0 {
		l.pending = slices.Delete(l.pending, i, i+1)
	}
	l.mu.Unlock()
	if err != nil {
		if p.crowded.Load() {
			err = &HandshakeError{Peer: addr(p.conn), Step: "unfinished", Err: ErrCrowdedOut}
		}
		if l.ctx.Err() == nil {
			l.report.failed(p.conn.RemoteAddr(), err)
		}
		return
	}
	select {
	case l.ready <- conn:
	case <-l.ctx.Done():
		conn.Close()
	}
}

// victim chooses whom to give up: of the source with the most unproven clients, one that has not even sent its hello,
// else the oldest. So a crowd from one place only crowds out itself, and a client that does its part is safe for as
// long as it takes as many newer ones to do the same.
func victim(all []*pending) int {
	counts := make(map[netip.Prefix]int, len(all))
	for _, p := range all {
		counts[p.source]++
	}
	best := 0
	for i, p := range all {
		more := counts[p.source] - counts[all[best].source]
		if more > 0 || more == 0 && p.source == all[best].source && !p.greeted.Load() && all[best].greeted.Load() {
			best = i
		}
	}
	return best
}

// source tells clients apart by address, where one host has many addresses by network.
func source(a net.Addr) netip.Prefix {
	if a == nil {
		return netip.Prefix{}
	}
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{}
	}
	ip, bits := at.Addr().Unmap(), 32
	if ip.Is6() {
		bits = 64
	}
	prefix, err := ip.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return prefix
}

// reporter passes failures on, of unproven clients at most maxReports a second: they must not fill the log.
type reporter struct {
	tell func(net.Addr, error)
	now  func() time.Time

	mu     sync.Mutex
	second time.Time // when counting began
	told   int       // since then
	untold int
}

const maxReports = 20

func newReporter(tell func(net.Addr, error), now func() time.Time) *reporter {
	return &reporter{tell: tell, now: now}
}

func (r *reporter) failed(client net.Addr, err error) {
	if r.tell == nil {
		return
	}
	if _, proven := errors.AsType[*RefusedError](err); !proven {
		untold, ok := r.take()
		if !ok {
			return
		}
		if untold > 0 {
			err = fmt.Errorf("%w (%d more failed handshakes not reported)", err, untold)
		}
	}
	r.tell(client, err)
}

// take asks for leave to report, and returns how many were not since the last that was.
func (r *reporter) take() (untold int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := r.now(); now.Sub(r.second) >= time.Second {
		r.second, r.told = now, 0
	}
	if r.told == maxReports {
		r.untold++
		return 0, false
	}
	r.told++
	untold, r.untold = r.untold, 0
	return untold, true
}
