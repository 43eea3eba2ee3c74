package sdk

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// server is the executor's side of the contract: it turns messages into calls of an Executor, and refuses what
// no correct host sends before the executor sees it.
type server struct {
	pb.UnimplementedExecutorServer
	exec   Executor
	region *Region      // what the host handed over; nil when it handed over none
	handed *descriptors // likewise
	log    hclog.Logger
	fatal  fatalFunc

	ctx     context.Context // of the step streams
	cancel  context.CancelFunc
	streams sync.WaitGroup

	gate   sync.RWMutex // Load and Unload hold it alone, everything else together
	loaded *loaded      // nil when nothing is; guarded by gate

	streaming chan struct{} // holds one token while a step stream is served
	mu        sync.Mutex
	stream    *opStream // the step stream being served; guarded by mu
}

// loaded is what the executor holds, as far as the checks need it.
type loaded struct {
	request LoadRequest
	report  LoadReport
}

// fatalFunc ends the process after a panic of the executor, whose state is unknown from then on.
type fatalFunc func(operation string, cause any, stack []byte)

func newServer(exec Executor, region *Region, handed *descriptors, log hclog.Logger, fatal fatalFunc) *server {
	ctx, cancel := context.WithCancel(context.Background())
	return &server{
		exec: exec, region: region, handed: handed, log: log, fatal: fatal,
		ctx: ctx, cancel: cancel, streaming: make(chan struct{}, 1),
	}
}

// close waits for the end of the step streams, which the host must have closed, and drops what was handed over.
func (s *server) close() error {
	s.cancel()
	s.streams.Wait()
	if s.handed == nil {
		return nil
	}
	return s.handed.close()
}

// guard is deferred around every call of the executor.
func (s *server) guard(operation string) {
	if cause := recover(); cause != nil {
		s.fatal(operation, cause, debug.Stack())
	}
}

// newGRPCServer is go-plugin's factory; its own default takes messages of 4 MiB only.
func newGRPCServer(opts []grpc.ServerOption) *grpc.Server {
	return grpc.NewServer(append(opts, grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage))...)
}

func (s *server) Describe(ctx context.Context, _ *pb.DescribeRequest) (*pb.Description, error) {
	d, err := shared(s, "describe", func() (*Description, error) { return s.exec.Describe(ctx) })
	if err != nil {
		return nil, toStatus(err)
	}
	return fromDescription(d), nil
}

func (s *server) Inspect(ctx context.Context, m *pb.InspectRequest) (*pb.ModelProfile, error) {
	req, err := toInspectRequest(m)
	if err != nil {
		return nil, toStatus(err)
	}
	p, err := shared(s, "inspect", func() (*ModelProfile, error) { return s.exec.Inspect(ctx, req) })
	if err != nil {
		return nil, toStatus(err)
	}
	return fromProfile(p), nil
}

func (s *server) Import(ctx context.Context, m *pb.ImportRequest) (*pb.ImportPlan, error) {
	req, err := toImportRequest(m)
	if err != nil {
		return nil, toStatus(err)
	}
	p, err := shared(s, "import", func() (*ImportPlan, error) { return s.exec.Import(ctx, req) })
	if err != nil {
		return nil, toStatus(err)
	}
	return fromImportPlan(p), nil
}

func (s *server) Stats(ctx context.Context, _ *pb.StatsRequest) (*pb.StatsReply, error) {
	stats, err := shared(s, "stats", func() (*Stats, error) { return s.exec.Stats(ctx) })
	if err != nil {
		return nil, toStatus(err)
	}
	return fromStats(stats), nil
}

// shared makes a call that may run beside any other but Load and Unload.
func shared[T any](s *server, operation string, call func() (*T, error)) (*T, error) {
	s.gate.RLock()
	defer s.gate.RUnlock()
	return guarded(s, operation, call)
}

// guarded makes a call of the executor that answers with something or fails.
func guarded[T any](s *server, operation string, call func() (*T, error)) (*T, error) {
	defer s.guard(operation)
	answer, err := call()
	if err == nil && answer == nil {
		err = Errorf(CodeInternal, "the executor answered %s with neither a result nor an error", operation)
	}
	return answer, err
}

func (s *server) Load(m *pb.LoadRequest, stream grpc.ServerStreamingServer[pb.LoadEvent]) error {
	req, err := toLoadRequest(m)
	if err != nil {
		return toStatus(err)
	}
	report, err := s.load(req, stream)
	if err != nil {
		return toStatus(err)
	}
	return stream.Send(&pb.LoadEvent{Event: &pb.LoadEvent_Report{Report: fromReport(report)}})
}

func (s *server) load(req LoadRequest, stream grpc.ServerStreamingServer[pb.LoadEvent]) (*LoadReport, error) {
	s.gate.Lock()
	defer s.open()
	if s.loaded != nil {
		held := s.loaded.request
		return nil, Errorf(CodeInvalid, "layers [%d, %d) of %s are loaded: unload them first", held.Layers.Start, held.Layers.End, held.Dir)
	}
	if s.region == nil {
		return nil, Errorf(CodeInvalid, "no shared-memory region was handed over: set %s", EnvRegionFD)
	}
	if err := s.region.attach(req.Region); err != nil {
		return nil, Errorf(CodeInvalid, "%v", err)
	}
	progress := newProgressSender(stream)
	report, err := guarded(s, "load", func() (*LoadReport, error) {
		return s.exec.Load(stream.Context(), req, progress.put)
	})
	progress.stop()
	if err == nil {
		err = checkReport(req, report)
	}
	if err != nil {
		return nil, errors.Join(err, s.region.detach())
	}
	s.loaded = &loaded{request: req, report: *report}
	return report, nil
}

func checkReport(req LoadRequest, r *LoadReport) error {
	if r.Boundary.Width < 1 || r.Boundary.Dtype.Size() == 0 {
		return Errorf(CodeInternal, "the executor reported the boundary %+v after the load", r.Boundary)
	}
	if req.HasHead && r.VocabSize < 1 {
		return Errorf(CodeInternal, "the executor loaded a head, but reported a vocabulary of %d", r.VocabSize)
	}
	return nil
}

func (s *server) Unload(ctx context.Context, _ *pb.UnloadRequest) (*pb.UnloadReply, error) {
	s.gate.Lock()
	defer s.open()
	err := s.unload(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	s.loaded = nil
	if s.region != nil {
		if err := s.region.detach(); err != nil {
			return nil, toStatus(err)
		}
	}
	return &pb.UnloadReply{}, nil
}

// open frees the gate, and tells a step stream that waits for it.
func (s *server) open() {
	s.gate.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stream != nil {
		s.stream.socket.wake()
	}
}

func (s *server) unload(ctx context.Context) error {
	defer s.guard("unload")
	return s.exec.Unload(ctx)
}

// progressSender passes on the latest progress, and never makes a load wait for a slow host.
type progressSender struct {
	mu     sync.Mutex
	latest chan LoadProgress
	done   chan struct{}
}

func newProgressSender(stream grpc.ServerStreamingServer[pb.LoadEvent]) *progressSender {
	p := &progressSender{latest: make(chan LoadProgress, 1), done: make(chan struct{})}
	go func() {
		defer close(p.done)
		for progress := range p.latest {
			// A host that is gone is noticed by the load's context.
			_ = stream.Send(&pb.LoadEvent{Event: &pb.LoadEvent_Progress{Progress: fromProgress(progress)}})
		}
	}()
	return p
}

// put replaces a progress that was not sent yet.
func (p *progressSender) put(progress LoadProgress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.latest:
	default:
	}
	p.latest <- progress
}

// stop sends what is left. put must not be called any more.
func (p *progressSender) stop() {
	close(p.latest)
	<-p.done
}

// typedError gives any error of an executor its type.
func typedError(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return &Error{Code: e.Code, Message: err.Error(), File: e.File, Tensor: e.Tensor, Wanted: e.Wanted, Held: e.Held}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return &Error{Code: CodeCanceled, Message: err.Error()}
	}
	return &Error{Code: CodeInternal, Message: err.Error()}
}

// toStatus makes the error of a call: the *Error travels as the status's detail.
func toStatus(err error) error {
	typed := typedError(err)
	st := status.New(codes.Unknown, typed.Message)
	detailed, detailErr := st.WithDetails(fromError(typed))
	if detailErr != nil {
		return status.Error(codes.Internal, fmt.Sprintf("%s (its details can't be sent: %v)", typed.Message, detailErr))
	}
	return detailed.Err()
}
