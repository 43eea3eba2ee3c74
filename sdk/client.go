package sdk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-plugin"
	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// Client is the host's side of one executor. Its methods mean what Executor's do; errors of the executor arrive
// as *Error, and ErrExecutorGone is wrapped when the process is gone. It is safe for concurrent use.
type Client struct {
	calls     pb.ExecutorClient
	health    grpc_health_v1.HealthClient
	region    *Region
	channel   *SideChannel
	streaming atomic.Bool
}

// NewClient returns a client over a connection to an executor. region and channel are what the executor inherited; nil
// ones serve everything but Load and steps.
func NewClient(conn grpc.ClientConnInterface, region *Region, channel *SideChannel) *Client {
	return &Client{
		calls:   pb.NewExecutorClient(conn),
		health:  grpc_health_v1.NewHealthClient(conn),
		region:  region,
		channel: channel,
	}
}

// Hand hands a descriptor to the executor over the side channel; see SideChannel.Hand.
func (c *Client) Hand(purpose string, f *os.File) (uint32, error) {
	if c.channel == nil {
		return 0, Errorf(CodeInvalid, "hand over a descriptor for %s: the executor was started without a side channel", purpose)
	}
	return c.channel.Hand(purpose, f)
}

func limits() []grpc.CallOption {
	return []grpc.CallOption{grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)}
}

// Region returns the shared memory of the executor.
func (c *Client) Region() *Region { return c.region }

func (c *Client) Describe(ctx context.Context) (*Description, error) {
	m, err := c.calls.Describe(ctx, &pb.DescribeRequest{}, limits()...)
	if err != nil {
		return nil, callError(ctx, "describe", err)
	}
	return toDescription(m)
}

func (c *Client) Inspect(ctx context.Context, req InspectRequest) (*ModelProfile, error) {
	m, err := c.calls.Inspect(ctx, fromInspectRequest(req), limits()...)
	if err != nil {
		return nil, callError(ctx, "inspect", err)
	}
	return toProfile(m)
}

// Load maps the region with req.Region first. progress may be nil; the last progress before the end may be left out.
func (c *Client) Load(ctx context.Context, req LoadRequest, progress func(LoadProgress)) (*LoadReport, error) {
	if c.region == nil {
		return nil, Errorf(CodeInvalid, "load: the executor was started without a shared-memory region")
	}
	if err := c.region.Map(req.Region); err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.calls.Load(ctx, fromLoadRequest(req), limits()...)
	if err != nil {
		return nil, callError(ctx, "load", err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, errors.New("load: the executor ended the load without a report")
		}
		if err != nil {
			return nil, callError(ctx, "load", err)
		}
		if r := m.GetReport(); r != nil {
			return toReport(r)
		}
		if p := m.GetProgress(); p != nil && progress != nil {
			progress(toProgress(p))
		}
	}
}

func (c *Client) Import(ctx context.Context, req ImportRequest) (*ImportPlan, error) {
	in, err := fromImportRequest(req)
	if err != nil {
		return nil, fmt.Errorf("import: %w", err)
	}
	m, err := c.calls.Import(ctx, in, limits()...)
	if err != nil {
		return nil, callError(ctx, "import", err)
	}
	return toImportPlan(m)
}

func (c *Client) Unload(ctx context.Context) error {
	if _, err := c.calls.Unload(ctx, &pb.UnloadRequest{}, limits()...); err != nil {
		return callError(ctx, "unload", err)
	}
	return nil
}

// Stats waits while Load or Unload runs; use Ping and the load's progress then.
func (c *Client) Stats(ctx context.Context) (*Stats, error) {
	m, err := c.calls.Stats(ctx, &pb.StatsRequest{}, limits()...)
	if err != nil {
		return nil, callError(ctx, "stats", err)
	}
	return toStats(m)
}

// PingTimeout is how long Ping waits when its context has no deadline.
const PingTimeout = 2 * time.Second

// Ping checks that the process answers, without touching the executor's work: it answers while Load runs.
func (c *Client) Ping(ctx context.Context) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, PingTimeout)
		defer cancel()
	}
	reply, err := c.health.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: plugin.GRPCServiceName}, limits()...)
	if err != nil {
		return callError(ctx, "ping", err)
	}
	if reply.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("ping: the executor is %v", reply.GetStatus())
	}
	return nil
}

// callError gives the error of a call its meaning: the executor's own *Error, the end of ctx, or ErrExecutorGone.
func callError(ctx context.Context, call string, err error) error {
	st := status.Convert(err)
	for _, detail := range st.Details() {
		if m, ok := detail.(*pb.Error); ok {
			return fmt.Errorf("%s: %w", call, toError(m))
		}
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", call, context.Cause(ctx))
	}
	switch st.Code() {
	case codes.DeadlineExceeded:
		return fmt.Errorf("%s: %w", call, context.DeadlineExceeded)
	case codes.Unavailable, codes.Canceled:
		return fmt.Errorf("%s: %w: %s", call, ErrExecutorGone, st.Message())
	}
	return fmt.Errorf("%s: %s: %s", call, st.Code(), st.Message())
}
