package bringup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/stagelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
)

// What ends a session beside a failure of the stage.
var (
	errCoordinatorGone = errors.New("the coordinator is gone")
	errPeerStops       = errors.New("the peer was told to stop")
	errShutdown        = errors.New("the coordinator ends the cluster")
)

// yieldError is the end of a session whose coordinator still waited for other peers when another came.
type yieldError struct{ to string }

func (e *yieldError) Error() string {
	return fmt.Sprintf("the peer goes over to coordinator %s, which came at the same time", e.to)
}

// abortError is the end that a coordinator wants because another node failed.
type abortError struct{ reason string }

func (e *abortError) Error() string { return "the coordinator aborts: " + e.reason }

// session is what a peer does for one coordinator, from the control connection to the end of everything that came of it.
type session struct {
	peer      *Peer
	id        transport.Session
	owner     string
	ctx       context.Context // ends when the session is to
	cancel    context.CancelCauseFunc
	heartbeat *transport.Heartbeat
	work      sync.WaitGroup // of goroutines that use the stage or its connections; see begin
	data      chan *transport.Conn
	previous  chan *transport.Conn
	failed    chan error            // the loss of the stage, for Watch
	observed  chan *pb.Observations // what the stage did, for Watch
	torn      chan struct{}         // closed when nothing of the session is left but its control connection

	// Guarded by peer.mu.
	offer        *offer
	plan         *partition.Plan
	budget       int64 // bytes that the stage had to fit in; partition.Unlimited where nothing is known
	stage        *pipeline.Stage
	load         sdk.LoadProgress
	previousLink *stageLink   // nil on stage 0
	nextLinks    []*stageLink // to every place of the next stage
	link         linked
	seen         numbers // that the coordinator was told last
}

// linked is what the self-test of the link to the next stage found.
type linked struct {
	address   string
	roundTrip time.Duration
}

func newSession(ctx context.Context, p *Peer, c *transport.Conn) *session {
	s := &session{
		peer: p, id: c.Opening.Session, owner: c.Peer().NodeID, heartbeat: transport.NewHeartbeat(p.cfg.Heartbeat),
		data: make(chan *transport.Conn, 1), previous: make(chan *transport.Conn, 1), failed: make(chan error, 1), observed: make(chan *pb.Observations), torn: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx)) // lose alone ends it
	return s
}

// open makes this the peer's session; a *cluster.Refusal where it has one that does not yield.
func (s *session) open(ctx context.Context) error {
	for {
		yielding, err := s.tryOpen()
		if yielding == nil {
			return err
		}
		select {
		case <-yielding.torn:
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// tryOpen returns the session that must end first, where it yields to this one.
func (s *session) tryOpen() (yielding *session, err error) {
	p := s.peer
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case s.ctx.Err() != nil:
		return nil, context.Cause(s.ctx)
	case p.session == s:
		return nil, nil
	case p.assignment.yieldsTo(s.owner):
		p.session.loseHeld(&yieldError{s.owner})
		return p.session, nil
	}
	return nil, s.openHeld()
}

// openHeld begins the session; peer.mu is held.
func (s *session) openHeld() error {
	p := s.peer
	if err := p.assignment.open(s.id, s.owner); err != nil {
		return err
	}
	p.session, p.failure = s, ""
	p.changed()
	p.log.Info("a coordinator has come", "coordinator", s.owner)
	s.work.Go(func() {
		if err := s.heartbeat.Watch(s.ctx); s.ctx.Err() == nil {
			p.log.Warn("the coordinator is silent", "error", err)
			s.lose(fmt.Errorf("%w: %w", errCoordinatorGone, err))
		}
	})
	return nil
}

// begin lets a goroutine use the session, until it calls work.Done. It reports false once the session ends.
func (s *session) begin() bool {
	s.peer.mu.Lock()
	defer s.peer.mu.Unlock()
	if s.peer.session != s || s.peer.assignment.phase == PhaseStopping {
		return false
	}
	s.work.Add(1)
	return true
}

// advance takes the session to a phase of its epoch.
func (s *session) advance(epoch uint64, to Phase) error {
	p := s.peer
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != s {
		return &OrderError{From: PhaseWaiting, To: to}
	}
	if err := p.assignment.advance(epoch, to); err != nil {
		return err
	}
	p.changed()
	return nil
}

// lose begins the end of the session. The first reason counts.
func (s *session) lose(err error) {
	s.peer.mu.Lock()
	defer s.peer.mu.Unlock()
	s.loseHeld(err)
}

// loseHeld is lose; peer.mu is held.
func (s *session) loseHeld(err error) {
	p := s.peer
	if s.ctx.Err() != nil {
		return
	}
	if p.session == s && p.assignment.stop(s.id) {
		if !errors.Is(err, errShutdown) {
			p.failure = err.Error()
		}
		p.changed()
		p.log.Info("the stage ends", "coordinator", s.owner, "epoch", p.assignment.epoch, "reason", err)
	}
	s.cancel(err)
}

// loseUnopened ends a connection whose coordinator has not asked for the peer.
func (s *session) loseUnopened() {
	s.peer.mu.Lock()
	opened := s.peer.session == s
	s.peer.mu.Unlock()
	if !opened {
		s.lose(errCoordinatorGone)
	}
}

// end waits for everything that uses the stage, ends the executor, and takes the peer back to waiting. The session's context has ended.
func (s *session) end() {
	p := s.peer
	defer close(s.torn)
	p.mu.Lock()
	ours := p.session == s
	p.mu.Unlock()
	if !ours { // it was never opened
		return
	}
	s.work.Wait()
	for _, c := range []chan *transport.Conn{s.data, s.previous} { // handed over, and never taken
		select {
		case conn := <-c:
			_ = conn.Close()
		default:
		}
	}
	if s.stage != nil { // nobody else is left
		ctx, cancel := context.WithTimeout(context.Background(), sessionTimeout)
		defer cancel()
		if err := s.stage.Close(ctx); err != nil {
			p.log.Warn("the executor did not end in order", "error", err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.session = nil
	p.assignment.stopped()
	p.changed()
	p.log.Info("waiting for a coordinator")
}

// hand passes a connection on to whoever makes the stage of it. A second one of a kind has no use.
func (s *session) hand(to chan *transport.Conn, c *transport.Conn) {
	select {
	case to <- c:
	default:
		_ = c.Close()
	}
}

// take waits for a connection that another node opens.
func (s *session) take(ctx context.Context, from chan *transport.Conn, what string) (*transport.Conn, error) {
	select {
	case c := <-from:
		return c, nil
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	case <-ctx.Done():
		return nil, &cluster.Refusal{Code: CodeLink, Reason: what + " did not come", Remedy: "see the log of the node that should have dialled it"}
	}
}

// accept takes an offer in, or refuses it with a *cluster.Refusal.
func (s *session) accept(ctx context.Context, o *offer) error {
	p := s.peer
	p.mu.Lock()
	err := p.assignment.offer(o.epoch)
	if p.session != s {
		err = &OrderError{From: PhaseWaiting, To: PhaseOffered}
	}
	if err == nil {
		p.changed()
	}
	p.mu.Unlock()
	if err != nil {
		return err
	}
	device, err := p.runtime.Device(ctx)
	if err != nil {
		return err
	}
	self := p.cfg.Secure.Self
	plan, err := o.check(self.Cluster, self.Version, p.have, device, p.cfg.headroom())
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s.offer, s.plan, s.budget = o, plan, o.budget(device, p.cfg.headroom())
	return nil
}

// start launches the executor and loads the stage.
func (s *session) start(progress func(sdk.LoadProgress)) (pipeline.StageInfo, error) {
	p := s.peer
	o := s.offer
	if p.cfg.SavePlan != nil {
		if err := p.cfg.SavePlan(o.self().node, o.config); err != nil {
			return pipeline.StageInfo{}, fmt.Errorf("write the cluster's TOML: %w", err)
		}
	}
	cfg := o.stageConfig(s.plan, p.cfg.Model, p.have, p.runtime.Launcher())
	cfg.Progress = func(l sdk.LoadProgress) {
		p.mu.Lock()
		s.load = l
		p.mu.Unlock()
		progress(l)
	}
	if o.observe {
		seen := newObservations()
		cfg.Observer = seen
		s.work.Go(func() { seen.tell(s.ctx, s.observed) })
	}
	stage, err := pipeline.StartStage(s.ctx, cfg)
	if err != nil {
		if s.ctx.Err() != nil {
			err = context.Cause(s.ctx)
		}
		return pipeline.StageInfo{}, err
	}
	p.mu.Lock()
	s.stage = stage
	p.mu.Unlock()
	s.work.Go(func() { // the caller is counted, so the group is not waited for yet
		select {
		case <-stage.Done():
			s.stageLost(stage.Err())
		case <-s.ctx.Done():
		}
	})
	return stage.Info(), nil
}

// stageLost tells the coordinator, which then aborts everywhere. Were this peer first, the other stages would report broken
// links before anybody knew why.
func (s *session) stageLost(err error) {
	s.peer.log.Error("the stage is lost", "error", err)
	s.failed <- err
	timer := time.NewTimer(partingTimeout)
	defer timer.Stop()
	select {
	case <-s.ctx.Done():
	case <-timer.C:
		s.lose(err)
	}
}

// answerLink lets the stage before test its link to this one.
func (s *session) answerLink(c *transport.Conn) error {
	s.peer.mu.Lock()
	o := s.offer
	s.peer.mu.Unlock()
	if o == nil || c.Opening.Place != (sdk.Place{Stage: o.place.Stage - 1}) { // the first rank sends
		return fmt.Errorf("stage %s dials this node, which is not the next", c.Opening.Place)
	}
	return stagelink.AnswerSelfTest(s.ctx, c)
}

// connect joins the stage to its neighbours and the coordinator, and begins to serve.
func (s *session) connect(ctx context.Context) (linked, error) {
	var conns stagelink.Connections
	var opened []*transport.Conn
	failed := func(err error) (linked, error) {
		for _, c := range opened {
			_ = c.Close()
		}
		return linked{}, err
	}
	coordinator, err := s.take(ctx, s.data, "the coordinator's data connection")
	if err != nil {
		return failed(err)
	}
	opened = append(opened, coordinator)
	conns.Coordinator = coordinator
	var found linked
	var nextLinks []*stageLink
	for i, next := range s.offer.next() {
		link, at, err := s.dialNext(ctx, next)
		if err != nil {
			return failed(err)
		}
		if i == 0 {
			found = at
		}
		opened, nextLinks = append(opened, link.Conn), append(nextLinks, link)
		conns.Next = append(conns.Next, link)
	}
	var previousLink *stageLink
	if s.offer.place.Stage > 0 {
		previous, err := s.take(ctx, s.previous, "the link from the stage before")
		if err != nil {
			return failed(err)
		}
		previousLink = &stageLink{Conn: previous}
		conns.Previous = previousLink
	}
	s.peer.mu.Lock()
	s.previousLink, s.nextLinks, s.link = previousLink, nextLinks, found
	s.peer.mu.Unlock()
	s.work.Go(func() { // the caller is counted
		err := stagelink.ServeStage(s.ctx, s.stage, conns, stagelink.Config{MaxMessage: maxOrder})
		if err == nil {
			err = errCoordinatorGone
		}
		s.lose(err)
	})
	return found, nil
}

// dialNext tries the candidate addresses of a place of the next stage and tests the link to the one that answers.
func (s *session) dialNext(ctx context.Context, next offeredStage) (*stageLink, linked, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })()
	opening := transport.Opening{Kind: transport.KindLink, Session: s.id, Place: s.offer.place}
	isNext := func(id securelink.Identity) error {
		if id.NodeID != next.peer {
			return fmt.Errorf("node %q answers, not %q", id.NodeID, next.peer)
		}
		return nil
	}
	c, err := s.peer.dial.Connect(ctx, next.candidates, opening, isNext)
	refusal := func(err error) error {
		return &cluster.Refusal{
			Code: CodeLink, Reason: fmt.Sprintf("no link to stage %s (%s): %v", next.place, next.node, err),
			Remedy: "check that the node's port is open to this one, or give the peer another --cluster-control-addr",
		}
	}
	if err != nil {
		return nil, linked{}, refusal(err)
	}
	link := &stageLink{Conn: c.Conn}
	probe, err := stagelink.SelfTest(ctx, c, s.peer.cfg.Rand)
	if err == nil {
		err = s.beatNext(ctx, link, c.Address, isNext)
	}
	if err != nil {
		_ = c.Close()
		return nil, linked{}, refusal(fmt.Errorf("%s: %w", c.Address, err))
	}
	s.peer.log.Info("linked to the next stage", "stage", next.place.String(), "node", next.node, "address", c.Address,
		"round_trip", probe.RoundTrip, "mib_per_s", int64(probe.BytesPerSecond)>>20)
	return link, linked{c.Address, probe.RoundTrip}, nil
}

// traffic returns the bytes that went over the stage's links; peer.mu is held.
func (s *session) traffic() (sent, received int64) {
	for _, c := range append([]*stageLink{s.previousLink}, s.nextLinks...) {
		if c != nil {
			out, in := c.Traffic()
			sent, received = sent+out, received+in
		}
	}
	return sent, received
}

// status is the session's line of a Status; peer.mu is held.
func (s *session) status() []StageStatus {
	if s.offer == nil {
		return nil
	}
	self := s.offer.self()
	sent, received := s.traffic()
	out := StageStatus{
		Stage: s.offer.place.Stage, Node: self.node, Address: self.address, Layers: self.layers, Health: "ok",
		Phase: s.peer.assignment.phase, KVBudget: self.kvBudget, RoundTrip: s.heartbeat.RoundTrip(),
		LinkAddress: s.link.address, LinkRoundTrip: s.link.roundTrip, Sent: sent, Received: received,
		BusyFraction: s.seen.fraction, Loaded: s.load.Loaded, LoadTotal: s.load.Total,
	}
	if s.budget < partition.Unlimited {
		out.BudgetBytes = s.budget
	}
	if s.stage != nil {
		info := s.stage.Info()
		out.Plugin, out.WeightBytes = info.Plugin, info.Loaded.WeightBytes
	}
	return []StageStatus{out}
}
