package bringup

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	"google.golang.org/grpc"
)

// node is one peer of a run.
type node struct {
	run   *run
	index int
	at    cluster.Node

	// Guarded by run.mu. What is opened is set only while the run is not over, so that its end finds all of it.
	conn   *peerConn          // nil until it is reached
	port   *stagelink.Port    // nil before the link phase
	stage  pipeline.StageInfo // of what was loaded; empty before, and without an assignment
	loaded sdk.LoadProgress
	link   linked
	seen   numbers
}

// peerConn is a control and a heartbeat connection to a peer.
type peerConn struct {
	learned   Learned
	control   *transport.Connected
	rpc       *grpc.ClientConn
	client    pb.PeerClient
	heartbeat *transport.Heartbeat
	cancel    context.CancelFunc
	work      sync.WaitGroup
	gone      chan struct{} // closed when it is lost while others are still to come
}

func (c *peerConn) close() {
	c.cancel()
	_ = c.rpc.Close()
	_ = c.control.Close()
	c.work.Wait()
}

// gather brings the node to learned, and again when it goes before the others have come.
func (n *node) gather(ctx context.Context) {
	r := n.run
	for {
		conn, err := n.come(ctx)
		if err != nil {
			if ctx.Err() == nil || errors.Is(context.Cause(ctx), errNotReached) {
				r.fail(n, err)
			}
			return
		}
		r.reached(n, PhaseLearned)
		select {
		case <-r.gathered:
			return
		case <-ctx.Done():
			return
		case <-conn.gone:
			conn.close()
		}
	}
}

// errNotReached ends the wait for peers.
var errNotReached = errors.New("not all peers were reached in time")

// come tries until the peer is reached and learned, or can't be.
func (n *node) come(ctx context.Context) (*peerConn, error) {
	r := n.run
	last := errNotReached
	retry := time.NewTicker(r.cfg.RetryEvery)
	defer retry.Stop()
	for {
		conn, err := n.learn(ctx)
		if err == nil {
			r.log.Info("reached a peer", "node", n.at.ID, "address", n.at.Address, "answered", conn.learned.Reached, "peer", conn.learned.Node)
			return conn, nil
		}
		if hopeless(err) {
			return nil, err
		}
		if ctx.Err() == nil && err.Error() != last.Error() {
			last = err
			r.log.Info("waiting for a peer", "node", n.at.ID, "address", n.at.Address, "error", err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("not reached within %v: %w: check that the peer runs, and that its port is open to this host", r.cfg.ConnectTimeout, last)
		case <-retry.C:
		}
	}
}

// hopeless tells that another attempt would end the same.
func hopeless(err error) bool {
	refusal, ok := errors.AsType[*cluster.Refusal](err)
	return ok && refusal.Code != cluster.CodeBusy
}

// learn opens the control and heartbeat connections of a peer and asks what it has.
func (n *node) learn(ctx context.Context) (*peerConn, error) {
	r := n.run
	control, err := r.dial.Connect(ctx, []string{n.at.Address}, transport.Opening{Kind: transport.KindControl, Session: r.session}, isStage)
	if err != nil {
		return nil, n.handshake(err)
	}
	rpc, err := dialRPC(control, maxOffer, maxAnswer)
	if err != nil {
		return nil, errors.Join(err, control.Close())
	}
	live, cancel := context.WithCancel(context.WithoutCancel(ctx)) // until close: an abort goes over it
	c := &peerConn{
		control: control, rpc: rpc, client: pb.NewPeerClient(rpc), heartbeat: transport.NewHeartbeat(r.cfg.Heartbeat),
		cancel: cancel, gone: make(chan struct{}),
	}
	failed := func(err error) (*peerConn, error) {
		c.close()
		return nil, err
	}
	limited, done := context.WithTimeout(ctx, r.cfg.PhaseTimeout)
	defer done()
	reply, err := c.client.Learn(limited, &pb.LearnRequest{Coordinator: r.dial.Secure.Self.NodeID})
	if err != nil {
		return failed(fromStatus(err))
	}
	if c.learned, err = learnedFrom(reply); err != nil {
		return failed(err)
	}
	c.learned.Reached = control.RemoteAddr().String()
	beats, err := r.dial.Connect(limited, []string{c.learned.Reached}, transport.Opening{Kind: transport.KindHeartbeat, Session: r.session}, n.same(control))
	if err != nil {
		return failed(n.handshake(err))
	}
	watch, err := c.client.Watch(live, &pb.WatchRequest{IntervalMillis: r.cfg.WatchEvery.Milliseconds()})
	if err != nil {
		_ = beats.Close()
		return failed(fromStatus(err))
	}
	lost := func(err error) {
		if live.Err() == nil {
			n.lost(c, err)
		}
	}
	r.mu.Lock()
	over := r.roster.cause
	if over == nil {
		c.work.Go(func() { lost(c.heartbeat.Run(live, beats)) })
		c.work.Go(func() { lost(c.heartbeat.Watch(live)) })
		c.work.Go(func() { lost(n.watch(watch)) })
		n.conn = c
	}
	r.mu.Unlock()
	if over != nil {
		_ = beats.Close()
		return failed(over)
	}
	return c, nil
}

// isStage refuses a node of another role.
func isStage(id securelink.Identity) error {
	if id.Role != securelink.RoleStage {
		return &cluster.Refusal{Code: CodeOrder, Reason: fmt.Sprintf("a %s %q listens there, not a peer", id.Role, id.NodeID), Remedy: "correct " + cluster.FlagSeeds}
	}
	return nil
}

// same accepts the node that the control connection leads to: a name may have many addresses.
func (n *node) same(control *transport.Connected) func(securelink.Identity) error {
	return func(id securelink.Identity) error {
		if want := control.Peer(); id != want {
			return fmt.Errorf("%q answers, %q did before: give each peer an address of its own", id.NodeID, want.NodeID)
		}
		return nil
	}
}

// handshake names the refusal that a failed connection amounts to, where it is one.
func (n *node) handshake(err error) error {
	if refusal := cluster.FromHandshake(err); refusal != nil {
		return fmt.Errorf("%w (%w)", refusal, err)
	}
	return err
}

// lost takes in the end of a connection to the peer.
func (n *node) lost(c *peerConn, err error) {
	r := n.run
	r.mu.Lock()
	if n.conn == c && r.roster.left(n.index) {
		n.conn = nil
		close(c.gone)
		r.mu.Unlock()
		r.log.Info("a peer is gone again", "node", n.at.ID, "error", err)
		return
	}
	mine := n.conn == c
	r.mu.Unlock()
	if mine {
		r.fail(n, err)
	}
}

// errConnectionLost is the end of a control connection without a reason.
var errConnectionLost = errors.New("the connection to the peer broke: it ended, or the network between did")

// watch takes in what the peer tells, until it tells nothing more.
func (n *node) watch(stream grpc.ServerStreamingClient[pb.WatchEvent]) error {
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return errors.New("the peer has ended its stage")
		}
		if err != nil {
			return errConnectionLost
		}
		if f := event.GetFailure(); f != nil {
			return n.told(f)
		}
		if o := event.GetObservations(); o != nil {
			if err := n.observe(o); err != nil {
				return err
			}
			continue
		}
		n.count(event.GetNumbers(), time.Now())
	}
}

// observe passes on what the peer's stage did.
func (n *node) observe(m *pb.Observations) error {
	observer := n.run.cfg.Observer
	if observer == nil {
		return errors.New("the peer tells what its stage does, though nobody asked")
	}
	if m.GetDropped() > 0 {
		n.run.log.Warn("a peer dropped observations that it could not tell in time", "peer", n.at.ID, "dropped", m.GetDropped())
	}
	for _, one := range m.GetObservations() {
		o, err := observationFrom(one)
		if err == nil && o.Place.Stage != n.index {
			err = fmt.Errorf("the peer of stage %d tells what stage %s did", n.index, o.Place)
		}
		if err != nil {
			return err
		}
		observer.Observe(o)
	}
	return nil
}

// told is why the peer gave its stage up.
func (n *node) told(f *pb.Failure) error {
	err := errors.New(f.GetText())
	if f.GetPhase() == "" { // not for its executor's sake
		return err
	}
	return &pipeline.StageError{Place: sdk.Place{Stage: n.index}, Node: n.at.ID, Plugin: n.plugin(), Phase: pipeline.Phase(f.GetPhase()), Err: err}
}

func (n *node) count(m *pb.Numbers, now time.Time) {
	n.run.mu.Lock()
	defer n.run.mu.Unlock()
	n.seen = n.seen.next(now, time.Duration(m.GetBusyNanos()), m.GetLinkBytesSent(), m.GetLinkBytesReceived())
}

// plugin names the executor; empty before the load.
func (n *node) plugin() string {
	n.run.mu.Lock()
	defer n.run.mu.Unlock()
	return n.stage.Plugin
}

// stageError is the loss of the node's stage; run.mu is held.
func (n *node) stageError(err error) *pipeline.StageError {
	if e, ok := errors.AsType[*pipeline.StageError](err); ok {
		return e
	}
	return &pipeline.StageError{Place: sdk.Place{Stage: n.index}, Node: n.at.ID, Plugin: n.stage.Plugin, Err: err}
}

// load has the peer load its stage, for as long as that makes progress.
func (n *node) load(ctx context.Context) error {
	r := n.run
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stalled := fmt.Errorf("the load made no progress for %v", r.cfg.LoadTimeout)
	timer := time.AfterFunc(r.cfg.LoadTimeout, func() { cancel(stalled) })
	defer timer.Stop()
	stream, err := n.conn.client.Activate(ctx, &pb.EpochRequest{Epoch: r.epoch})
	if err != nil {
		return fromStatus(err)
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			if errors.Is(context.Cause(ctx), stalled) {
				return stalled
			}
			return fromStatus(err)
		}
		timer.Reset(r.cfg.LoadTimeout)
		done, err := n.take(event)
		if err != nil {
			return err
		}
		if done {
			r.log.Info("a stage is loaded", "node", n.at.ID, "bytes", n.stage.Loaded.WeightBytes, "plugin", n.stage.Plugin)
			return nil
		}
	}
}

// take takes in an event of the load; the report is the last.
func (n *node) take(event *pb.ActivateEvent) (done bool, err error) {
	var d decoder
	n.run.mu.Lock()
	defer n.run.mu.Unlock()
	switch e := event.GetEvent().(type) {
	case *pb.ActivateEvent_Progress:
		d.read(e.Progress, &n.loaded)
	case *pb.ActivateEvent_Report:
		d.read(e.Report.GetReport(), &n.stage.Loaded)
		n.stage.Plugin, done = e.Report.GetPlugin(), true
	}
	return done, d.refusal()
}

// openData opens the connection for orders.
func (n *node) openData(ctx context.Context) error {
	r := n.run
	opening := transport.Opening{Kind: transport.KindData, Session: r.session}
	c, err := r.dial.Connect(ctx, []string{n.conn.learned.Reached}, opening, n.same(n.conn.control))
	if err != nil {
		return n.handshake(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.roster.cause != nil {
		return errors.Join(r.roster.cause, c.Close())
	}
	n.port = stagelink.NewPort(c, sdk.Place{Stage: n.index}, r.epoch, stagelink.Config{MaxMessage: maxOrder})
	return nil
}

func (n *node) remoteStage(a partition.StageAssignment) pipeline.RemoteStage {
	info := n.stage
	info.StageAssignment = a
	return pipeline.RemoteStage{
		Port: n.port, Info: info,
		Busy: func() time.Duration {
			n.run.mu.Lock()
			defer n.run.mu.Unlock()
			return n.seen.busy
		},
		Close: func(context.Context) error {
			n.port.Close()
			return nil
		},
	}
}

// shutdown has the peer end its stage in order.
func (n *node) shutdown(ctx context.Context) {
	n.run.mu.Lock()
	conn := n.conn
	n.run.mu.Unlock()
	if conn == nil {
		return
	}
	// A peer that is silent won't answer: its heartbeats tell.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	silent := make(chan struct{})
	go func() {
		defer close(silent)
		if conn.heartbeat.Watch(ctx) != nil {
			cancel()
		}
	}()
	if _, err := conn.client.Shutdown(ctx, &pb.EpochRequest{Epoch: n.run.epoch}); err != nil {
		n.run.log.Warn("a peer did not end its stage in order", "node", n.at.ID, "error", fromStatus(err))
	}
	cancel()
	<-silent
}

// close ends the connections.
func (n *node) close() {
	n.run.mu.Lock()
	conn, port := n.conn, n.port
	n.run.mu.Unlock()
	if port != nil {
		port.Close()
	}
	if conn != nil {
		conn.close()
	}
}

// status is the node's line of a Status; run.mu is held.
func (n *node) status() StageStatus {
	r := n.run
	out := StageStatus{
		Stage: n.index, Node: n.at.ID, Address: n.at.Address, Phase: r.roster.phases[n.index], Health: "ok",
		WeightBytes: n.stage.Loaded.WeightBytes, Plugin: n.stage.Plugin, Loaded: n.loaded.Loaded, LoadTotal: n.loaded.Total,
		LinkAddress: n.link.address, LinkRoundTrip: n.link.roundTrip,
		BusyFraction: n.seen.fraction, Sent: n.seen.sent, Received: n.seen.received,
	}
	if r.plan != nil {
		a := r.plan.Stages[n.index]
		out.Layers, out.KVBudget = a.LayerRange, r.plan.KVBudgets[n.index]
		if a.Limited() {
			out.BudgetBytes = a.BudgetBytes
		}
	}
	switch {
	case r.roster.cause != nil && r.roster.culprit == n.index:
		out.Health = r.roster.cause.Error()
	case n.conn == nil:
		out.Health = "not reached"
	}
	if n.conn != nil {
		out.Answered, out.RoundTrip = n.conn.learned.Reached, n.conn.heartbeat.RoundTrip()
	}
	return out
}
