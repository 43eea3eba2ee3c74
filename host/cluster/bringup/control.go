package bringup

import (
	"context"
	"errors"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
	"google.golang.org/grpc"
)

// controlServer is a session as its coordinator calls it.
type controlServer struct {
	pb.UnimplementedPeerServer
	s *session
}

// failed is the answer of a call that failed; it is logged here too, so that both sides have the reason.
func (c *controlServer) failed(call string, err error) error {
	if err != nil {
		c.s.peer.log.Warn("refused", "call", call, "coordinator", c.s.owner, "error", err)
	}
	return toStatus(err)
}

// Learn is the service's.
func (c *controlServer) Learn(ctx context.Context, _ *pb.LearnRequest) (*pb.LearnReply, error) {
	s, p := c.s, c.s.peer
	if err := s.open(ctx); err != nil {
		return nil, c.failed("learn", err)
	}
	device, err := p.runtime.Device(ctx)
	if err != nil {
		return nil, c.failed("learn", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	l := Learned{
		Inspection: *p.have, Node: p.cfg.Secure.Self.NodeID, Machine: p.cfg.Machine, LastEpoch: p.assignment.seen, Addresses: p.cfg.Addresses,
	}
	l.Device = device
	m, err := l.message()
	return m, c.failed("learn", err)
}

// Watch is the service's.
func (c *controlServer) Watch(r *pb.WatchRequest, out grpc.ServerStreamingServer[pb.WatchEvent]) error {
	s := c.s
	tick := time.NewTicker(max(time.Duration(r.GetIntervalMillis())*time.Millisecond, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case o := <-s.observed:
			if err := out.Send(&pb.WatchEvent{Event: &pb.WatchEvent_Observations{Observations: o}}); err != nil {
				return err
			}
			continue
		case err := <-s.failed:
			return out.Send(&pb.WatchEvent{Event: &pb.WatchEvent_Failure{Failure: failure(err)}})
		case <-s.ctx.Done():
			if f := failure(context.Cause(s.ctx)); f != nil {
				return out.Send(&pb.WatchEvent{Event: &pb.WatchEvent_Failure{Failure: f}})
			}
			return nil
		case <-out.Context().Done():
			return nil
		case <-tick.C:
		}
		if n := s.numbers(); n != nil {
			if err := out.Send(&pb.WatchEvent{Event: &pb.WatchEvent_Numbers{Numbers: n}}); err != nil {
				return err
			}
		}
	}
}

// failure is what the coordinator is told of the end of a session, nil where it knows.
func failure(cause error) *pb.Failure {
	if _, aborted := errors.AsType[*abortError](cause); aborted || errors.Is(cause, errShutdown) || errors.Is(cause, errCoordinatorGone) {
		return nil
	}
	f := &pb.Failure{Text: clip(cause.Error())}
	if e, ok := errors.AsType[*pipeline.StageError](cause); ok {
		f.Text, f.Phase = clip(e.Err.Error()), string(e.Phase)
	}
	return f
}

// numbers are what the coordinator is told now and then, nil before there is a stage.
func (s *session) numbers() *pb.Numbers {
	s.peer.mu.Lock()
	defer s.peer.mu.Unlock()
	if s.stage == nil {
		return nil
	}
	sent, received := s.traffic()
	s.seen = s.seen.next(time.Now(), s.stage.Busy(), sent, received)
	return &pb.Numbers{BusyNanos: int64(s.seen.busy), LinkBytesSent: sent, LinkBytesReceived: received}
}

// Offer is the service's.
func (c *controlServer) Offer(ctx context.Context, r *pb.OfferRequest) (*pb.OfferReply, error) {
	o := offerFrom(r)
	if err := c.s.accept(ctx, o); err != nil {
		return nil, c.failed("offer", err)
	}
	self := o.self()
	c.s.peer.log.Info("accepted a stage", "epoch", o.epoch, "stage", o.place.String(), "of", len(o.stages), "layers", partition.FormatRanges([]sdk.LayerRange{self.layers}), "node", self.node)
	return &pb.OfferReply{}, nil
}

// Commit is the service's.
func (c *controlServer) Commit(_ context.Context, r *pb.EpochRequest) (*pb.EpochReply, error) {
	return &pb.EpochReply{}, c.failed("commit", c.s.advance(r.GetEpoch(), PhaseCommitted))
}

// Activate is the service's.
func (c *controlServer) Activate(r *pb.EpochRequest, out grpc.ServerStreamingServer[pb.ActivateEvent]) error {
	return c.failed("activate", c.activate(r.GetEpoch(), out))
}

func (c *controlServer) activate(epoch uint64, out grpc.ServerStreamingServer[pb.ActivateEvent]) error {
	s := c.s
	if !s.begin() {
		return context.Cause(s.ctx)
	}
	defer s.work.Done()
	if err := s.advance(epoch, PhaseLoading); err != nil {
		return err
	}
	latest := make(chan sdk.LoadProgress, 1) // a coordinator that reads slowly must not hold up the load
	var info pipeline.StageInfo
	var startErr error
	started := make(chan struct{})
	go func() {
		defer close(started)
		info, startErr = s.start(func(p sdk.LoadProgress) {
			for {
				select {
				case latest <- p:
					return
				default:
				}
				select {
				case <-latest:
				default:
				}
			}
		})
	}()
	for loading := true; loading; {
		select {
		case p := <-latest:
			m, err := p.MarshalBinary()
			if err == nil && out.Send(&pb.ActivateEvent{Event: &pb.ActivateEvent_Progress{Progress: m}}) != nil {
				err = errCoordinatorGone
			}
			if err != nil {
				s.lose(err)
			}
		case <-started:
			loading = false
		}
	}
	if startErr != nil {
		return stageRefusal(startErr)
	}
	if err := s.advance(epoch, PhaseLoaded); err != nil {
		return err
	}
	s.peer.log.Info("loaded", "epoch", epoch, "bytes", info.Loaded.WeightBytes, "plugin", info.Plugin)
	report, err := reportMessage(info)
	if err != nil {
		return err
	}
	return out.Send(&pb.ActivateEvent{Event: &pb.ActivateEvent_Report{Report: report}})
}

// stageRefusal says that the executor did not come up.
func stageRefusal(err error) error {
	if e, ok := errors.AsType[*pipeline.StageError](err); ok {
		return &cluster.Refusal{Code: CodeStage, Reason: e.Error()}
	}
	return err
}

// Link is the service's.
func (c *controlServer) Link(ctx context.Context, r *pb.EpochRequest) (*pb.LinkReply, error) {
	s := c.s
	if !s.begin() {
		return nil, c.failed("link", context.Cause(s.ctx))
	}
	defer s.work.Done()
	if err := s.expect(r.GetEpoch(), PhaseLoaded, PhaseLinked); err != nil {
		return nil, c.failed("link", err)
	}
	found, err := s.connect(ctx)
	if err == nil {
		err = s.advance(r.GetEpoch(), PhaseLinked)
	}
	if err != nil {
		return nil, c.failed("link", err)
	}
	return &pb.LinkReply{Address: found.address, RoundTripNanos: int64(found.roundTrip)}, nil
}

// expect refuses a message that does not fit, before the work that leads to the phase begins.
func (s *session) expect(epoch uint64, at, to Phase) error {
	s.peer.mu.Lock()
	defer s.peer.mu.Unlock()
	a := s.peer.assignment
	switch {
	case epoch != a.epoch:
		return cluster.RefuseEpoch(a.epoch, epoch)
	case a.phase != at:
		return &OrderError{From: a.phase, To: to}
	}
	return nil
}

// Ready is the service's.
func (c *controlServer) Ready(_ context.Context, r *pb.EpochRequest) (*pb.EpochReply, error) {
	err := c.s.advance(r.GetEpoch(), PhaseReady)
	if err == nil {
		c.s.peer.log.Info("the stage serves", "epoch", r.GetEpoch())
	}
	return &pb.EpochReply{}, c.failed("ready", err)
}

// Drain is the service's.
func (c *controlServer) Drain(_ context.Context, r *pb.EpochRequest) (*pb.EpochReply, error) {
	return &pb.EpochReply{}, c.failed("drain", c.s.advance(r.GetEpoch(), PhaseDraining))
}

// Abort is the service's. It fits every phase; one of another epoch is dropped.
func (c *controlServer) Abort(_ context.Context, r *pb.AbortRequest) (*pb.EpochReply, error) {
	s := c.s
	s.peer.mu.Lock()
	ours := r.GetEpoch() == s.peer.assignment.epoch || s.offer == nil
	s.peer.mu.Unlock()
	if ours {
		s.lose(&abortError{reason: r.GetReason()})
	}
	return &pb.EpochReply{}, nil
}

// Shutdown is the service's.
func (c *controlServer) Shutdown(ctx context.Context, _ *pb.EpochRequest) (*pb.EpochReply, error) {
	c.s.lose(errShutdown)
	select {
	case <-c.s.torn:
	case <-ctx.Done():
	}
	return &pb.EpochReply{}, nil
}
