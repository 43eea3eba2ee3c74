package bringup

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
)

// ErrClosed is why a cluster that was closed is down.
var ErrClosed = errors.New("the cluster is closed")

const (
	abortTimeout    = time.Second      // for a peer to hear of an abort; the end of its connections tells it as well
	shutdownTimeout = 10 * time.Second // for a peer to end its stage in order
)

// run is one bring-up and the cluster that comes of it.
type run struct {
	c        *Coordinator
	cfg      CoordinatorConfig
	log      hclog.Logger
	session  transport.Session
	dial     transport.Dialer
	nodes    []*node
	ctx      context.Context // ends with the first loss, refusal, or close
	cancel   context.CancelCauseFunc
	gathered chan struct{} // closed once all nodes are learned
	down     chan struct{} // closed once nothing is left
	work     sync.WaitGroup

	// Set by the phase that makes them, read by those after it.
	epoch    uint64
	plan     *Plan
	pipeline *pipeline.Pipeline

	mu     sync.Mutex
	roster *roster
	phase  Phase // that all nodes have reached; empty before the first
}

// err says why the run is over, nil while it is not. It is there before ctx ends.
func (r *run) err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.roster.cause
}

func (r *run) isDown() bool {
	select {
	case <-r.down:
		return true
	default:
		return false
	}
}

// reached takes in that a node has come to a phase.
func (r *run) reached(n *node, p Phase) {
	r.mu.Lock()
	next, err := r.roster.reached(n.index, p)
	if err == nil && r.roster.all(p) {
		r.phase = p
		r.log.Debug("all peers", "phase", p)
	}
	r.mu.Unlock()
	switch {
	case err != nil:
		r.fail(n, err)
	case next == stepOffer:
		close(r.gathered)
	}
}

// fail aborts the run, at a node, or for a nil one at all of them. The first reason counts. Once there is a pipeline, the loss of a
// node is that of its stage, a *pipeline.StageError.
func (r *run) fail(n *node, err error) {
	r.mu.Lock()
	p, index := r.pipeline, -1
	var lost *pipeline.StageError
	if n != nil {
		index = n.index
		if p != nil {
			lost = n.stageError(err)
			err = lost
		}
		err = &NodeError{Stage: index, Node: n.at.ID, Address: n.at.Address, Phase: r.roster.phases[index], Err: err}
	}
	first := r.roster.failed(index, err) == stepAbort
	r.mu.Unlock()
	if !first {
		return
	}
	r.log.Error("the cluster goes down", "epoch", r.epoch, "error", err)
	if lost != nil {
		p.Reporter().Lost(r.epoch, lost)
	}
	r.cancel(err)
}

// everywhere does something at all nodes at the same time, which takes them to a phase.
func (r *run) everywhere(ctx context.Context, to Phase, timeout time.Duration, do func(context.Context, *node) error) error {
	limited, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(r.ctx, func() { cancel(context.Cause(r.ctx)) })()
	if timeout > 0 {
		timer := time.AfterFunc(timeout, func() { cancel(fmt.Errorf("not %s within %v", to, timeout)) })
		defer timer.Stop()
	}
	var all sync.WaitGroup
	for _, n := range r.nodes {
		all.Go(func() {
			err := do(limited, n)
			switch {
			case err == nil:
				r.reached(n, to)
			case ctx.Err() != nil:
				r.fail(nil, context.Cause(ctx))
			case limited.Err() != nil:
				r.fail(n, context.Cause(limited))
			default:
				r.fail(n, err)
			}
		})
	}
	all.Wait()
	return r.err()
}

// gather reaches every peer and learns what it has. Peers may come late, and come again, until all are there.
func (r *run) gather(ctx context.Context) error {
	limited, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(r.ctx, func() { cancel(context.Cause(r.ctx)) })()
	timer := time.AfterFunc(r.cfg.ConnectTimeout, func() { cancel(errNotReached) })
	defer timer.Stop()
	var all sync.WaitGroup
	for _, n := range r.nodes {
		all.Go(func() { n.gather(limited) })
	}
	all.Wait()
	if ctx.Err() != nil {
		r.fail(nil, context.Cause(ctx))
	}
	return r.err()
}

// planAndOffer cuts the model for what the peers have, and asks each to take its stage.
func (r *run) planAndOffer(ctx context.Context) error {
	learned := make([]Learned, len(r.nodes))
	at := make([]cluster.Node, len(r.nodes))
	for i, n := range r.nodes {
		learned[i], at[i] = n.conn.learned, n.at
	}
	err := offerer{identity: r.cfg.Identity, executors: r.cfg.Executors}.agree(at, learned)
	if err == nil {
		r.plan, err = makePlan(r.cfg.Demand, r.cfg.Topology, learned)
	}
	if err != nil {
		r.fail(nil, err)
		return r.err()
	}
	for _, w := range r.plan.Warnings {
		r.log.Warn(w)
	}
	r.epoch = r.c.nextEpoch(learned)
	list := offers(r.epoch, r.cfg.Secure.Self.Version, r.cfg.Topology, r.plan, learned, r.cfg.Shape, r.cfg.Observer != nil)
	return r.everywhere(ctx, PhaseOffered, r.cfg.PhaseTimeout, func(ctx context.Context, n *node) error {
		_, err := n.conn.client.Offer(ctx, list[n.index].message())
		return fromStatus(err)
	})
}

func (r *run) commit(ctx context.Context) error {
	return r.everywhere(ctx, PhaseCommitted, r.cfg.PhaseTimeout, func(ctx context.Context, n *node) error {
		_, err := n.conn.client.Commit(ctx, &pb.EpochRequest{Epoch: r.epoch})
		return fromStatus(err)
	})
}

// activate starts every executor and loads its layers.
func (r *run) activate(ctx context.Context) error {
	return r.everywhere(ctx, PhaseLoaded, 0, func(ctx context.Context, n *node) error {
		r.reached(n, PhaseLoading)
		return n.load(ctx)
	})
}

// link opens the data connections, then has every stage dial the next.
func (r *run) link(ctx context.Context) error {
	return r.everywhere(ctx, PhaseLinked, r.cfg.PhaseTimeout, func(ctx context.Context, n *node) error {
		if err := n.openData(ctx); err != nil {
			return err
		}
		reply, err := n.conn.client.Link(ctx, &pb.EpochRequest{Epoch: r.epoch})
		if err != nil {
			return fromStatus(err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		n.link = linked{address: reply.GetAddress(), roundTrip: time.Duration(reply.GetRoundTripNanos())}
		return nil
	})
}

// promised is what the devices of all nodes promise.
func promised(nodes []*node) sdk.Numerics {
	all := sdk.Numerics{BatchInvariant: true, ChunkInvariant: true}
	for _, n := range nodes {
		own := n.conn.learned.Device.Numerics
		all.BatchInvariant = all.BatchInvariant && own.BatchInvariant
		all.ChunkInvariant = all.ChunkInvariant && own.ChunkInvariant
	}
	return all
}

// canary connects the pipeline and sends one token through all stages.
func (r *run) canary(ctx context.Context) error {
	cfg := r.cfg.Shape.pipelineConfig(r.plan.Plan, r.plan.Profile, r.epoch)
	cfg.KVBudgets = r.plan.KVBudgets
	cfg.Device.Numerics = promised(r.nodes)
	remote := make([]pipeline.RemoteStage, len(r.nodes))
	for i, n := range r.nodes {
		remote[i] = n.remoteStage(r.plan.Stages[i])
	}
	p, err := pipeline.Connect(cfg, remote)
	if err != nil {
		r.fail(nil, err)
		return r.err()
	}
	r.mu.Lock()
	over := r.roster.cause
	if over == nil {
		r.pipeline = p // which the end of the run closes
		for _, n := range r.nodes {
			n.port.Start(p.Reporter())
		}
		r.work.Go(func() {
			<-p.Done()
			if err := p.Err(); !errors.Is(err, pipeline.ErrClosed) {
				r.failStage(err)
			}
		})
	}
	r.mu.Unlock()
	if over != nil {
		return over // the ports are closed as well
	}
	limited, cancel := context.WithTimeoutCause(ctx, r.cfg.PhaseTimeout, fmt.Errorf("the canary did not pass within %v", r.cfg.PhaseTimeout))
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	if err := sendCanary(limited, p, r.plan.Profile.VocabSize); err != nil {
		r.failStage(err)
		return r.err()
	}
	return r.err()
}

// failStage aborts the run for an error of the pipeline, which names the stage where it is one stage's.
func (r *run) failStage(err error) {
	if e, ok := errors.AsType[*pipeline.StageError](err); ok && e.Place.Stage >= 0 && e.Place.Stage < len(r.nodes) {
		r.fail(r.nodes[e.Place.Stage], e)
		return
	}
	r.fail(nil, err)
}

// sendCanary has the pipeline answer one token with one token.
func sendCanary(ctx context.Context, p *pipeline.Pipeline, vocab int) error {
	const token = 0 // every vocabulary has it
	seq := p.NewSeq()
	if err := p.Reserve(ctx, sdk.Reservation{Seq: seq, Prompt: []int32{token}, MaxLen: 2}); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	results, err := p.Step(ctx, []sdk.SeqStep{{Seq: seq, Rows: 1, Tokens: []int32{token}, Prompt: true, Want: sdk.WantToken, Logprob: true}})
	if err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	if err := p.Release(ctx, seq); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	if len(results) != 1 || results[0].Token < 0 || int(results[0].Token) >= vocab || math.IsNaN(float64(results[0].Logprob)) {
		return fmt.Errorf("canary: the stages answer one token with %+v, want one of %d tokens: check the executors' logs", results, vocab)
	}
	return nil
}

// announce tells every peer that its stage serves.
func (r *run) announce(ctx context.Context) error {
	return r.everywhere(ctx, PhaseReady, r.cfg.PhaseTimeout, func(ctx context.Context, n *node) error {
		_, err := n.conn.client.Ready(ctx, &pb.EpochRequest{Epoch: r.epoch})
		return fromStatus(err)
	})
}

// supervise waits for the end of the run, then leaves nothing of it.
func (r *run) supervise() {
	defer close(r.down)
	<-r.ctx.Done()
	cause := context.Cause(r.ctx)
	if !errors.Is(cause, ErrClosed) {
		r.atAll(abortTimeout, func(ctx context.Context, n *node, client pb.PeerClient) {
			_, err := client.Abort(ctx, &pb.AbortRequest{Epoch: r.epoch, Reason: clip(cause.Error())})
			if err != nil {
				r.log.Debug("abort", "node", n.at.ID, "error", err) // it is gone, or finds that we are
			}
		})
	}
	r.mu.Lock()
	p := r.pipeline
	r.mu.Unlock()
	if p != nil {
		ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			r.log.Debug("close the pipeline", "error", err)
		}
	}
	for _, n := range r.nodes {
		n.close()
	}
	r.work.Wait()
}

// atAll calls every node that is connected, and waits no longer than the timeout.
func (r *run) atAll(timeout time.Duration, call func(context.Context, *node, pb.PeerClient)) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var all sync.WaitGroup
	for _, n := range r.nodes {
		r.mu.Lock()
		conn := n.conn
		r.mu.Unlock()
		if conn != nil {
			all.Go(func() { call(ctx, n, conn.client) })
		}
	}
	all.Wait()
}

// close ends a run in order: the pipeline takes nothing more, every stage is ended, then the connections. A peer that is gone, or that
// does not answer, holds nothing up for longer than ctx and shutdownTimeout.
func (r *run) close(ctx context.Context) error {
	r.mu.Lock()
	p := r.pipeline
	r.mu.Unlock()
	if p != nil && p.Err() != nil && !errors.Is(p.Err(), pipeline.ErrClosed) {
		r.failStage(p.Err()) // who uses the pipeline was faster than who watches it
	}
	r.mu.Lock()
	closing := r.roster.failed(-1, ErrClosed) == stepAbort // what peers do from now on is no loss
	r.mu.Unlock()
	if closing {
		limited, cancel := context.WithTimeout(ctx, shutdownTimeout)
		defer cancel()
		if p != nil {
			if err := p.Close(limited); err != nil {
				r.log.Debug("close the pipeline", "error", err)
			}
		}
		var all sync.WaitGroup
		for _, n := range r.nodes {
			all.Go(func() { n.shutdown(limited) })
		}
		all.Wait()
		r.cancel(ErrClosed)
	}
	select {
	case <-r.down:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Running is a cluster that serves.
type Running struct {
	Pipeline *pipeline.Pipeline
	Plan     *Plan
	Epoch    uint64

	run *run
}

// Device is what the stages compute on: the first one's, with what the devices of all promise.
func (r *Running) Device() sdk.Device {
	d := r.run.nodes[0].conn.learned.Device
	d.Numerics = promised(r.run.nodes)
	return d
}

// Done is closed when the cluster is lost or closed.
func (r *Running) Done() <-chan struct{} { return r.run.ctx.Done() }

// Err says why: a *NodeError that holds a *pipeline.StageError for a lost stage, ErrClosed, or nil while it serves.
func (r *Running) Err() error { return r.run.err() }

// Drain tells the peers that no new work comes; what runs goes on.
func (r *Running) Drain(ctx context.Context) error {
	return r.run.everywhere(ctx, PhaseDraining, r.run.cfg.PhaseTimeout, func(ctx context.Context, n *node) error {
		_, err := n.conn.client.Drain(ctx, &pb.EpochRequest{Epoch: r.Epoch})
		return fromStatus(err)
	})
}

// Status tells what the stages do.
func (r *Running) Status() Status { return r.run.c.Status() }

// Close ends what is in flight, then the stages, then the connections.
func (r *Running) Close(ctx context.Context) error { return r.run.close(ctx) }

// status completes s by what the run is.
func (r *run) status(s *Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Phase, s.Epoch = r.phase, r.epoch
	if s.Phase == "" {
		s.Phase = PhaseWaiting
	}
	if r.roster.cause != nil {
		s.Phase, s.Failure = PhaseStopping, r.roster.cause.Error()
		if r.isDown() {
			s.Phase = PhaseWaiting
		}
		if errors.Is(r.roster.cause, ErrClosed) {
			s.Failure = ""
		}
	}
	for _, n := range r.nodes {
		s.Stages = append(s.Stages, n.status())
		if c := n.conn; c != nil {
			s.Model = c.learned.ModelType
		}
	}
}
