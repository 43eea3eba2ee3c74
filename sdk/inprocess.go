package sdk

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// InProcess serves an executor in this process over the same sockets, messages, checks and shared memory as a process of
// its own, for tests and tools. A panic of the executor is a panic here. stop ends it and waits for it.
func InProcess(e Executor) (c *Client, stop func() error, err error) {
	var closers []func() error // in reverse
	stop = func() error {
		var errs []error
		for i := len(closers) - 1; i >= 0; i-- {
			errs = append(errs, closers[i]())
		}
		return errors.Join(errs...)
	}
	fail := func(err error) (*Client, func() error, error) { return nil, nil, errors.Join(err, stop()) }

	region, err := NewRegion()
	if err != nil {
		return fail(err)
	}
	closers = append(closers, region.Close)
	other, err := region.duplicate()
	if err != nil {
		return fail(err)
	}
	closers = append(closers, other.Close)
	channel, err := NewSideChannel()
	if err != nil {
		return fail(err)
	}
	closers = append(closers, channel.conn.Close)
	handed, err := newDescriptors(channel.far)
	if err != nil {
		return fail(err)
	}
	rethrow := func(operation string, cause any, stack []byte) {
		panic(fmt.Sprintf("executor panicked in %s: %v\n%s", operation, cause, stack))
	}
	s := newServer(e, other, handed, hclog.NewNullLogger(), rethrow)
	closers = append(closers, s.close)
	conn, end, err := serveGRPC(s)
	if err != nil {
		return fail(err)
	}
	closers = append(closers, end)
	return NewClient(conn, region, channel), stop, nil
}

// serveGRPC serves s over a pair of sockets.
func serveGRPC(s *server) (conn *grpc.ClientConn, stop func() error, err error) {
	a, b, err := socketPair()
	if err != nil {
		return nil, nil, err
	}
	near, nearErr := unixConn(a)
	far, farErr := unixConn(b)
	if err := errors.Join(nearErr, farErr); err != nil {
		return nil, nil, err
	}
	g := newGRPCServer([]grpc.ServerOption{grpc.WaitForHandlers(true)})
	pb.RegisterExecutorServer(g, s)
	alive := health.NewServer()
	alive.SetServingStatus(plugin.GRPCServiceName, grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(g, alive)
	served := make(chan error, 1)
	go func() { served <- g.Serve(&oneConn{conn: far, closed: make(chan struct{})}) }()
	conn, err = grpc.NewClient("passthrough:executor",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return near, nil }))
	if err != nil {
		g.Stop()
		return nil, nil, errors.Join(err, <-served, near.Close())
	}
	return conn, func() error {
		err := conn.Close()
		_ = near.Close() // where no call was made it was never dialled, and the server waits for its first bytes
		g.Stop()
		return errors.Join(err, <-served)
	}, nil
}

// oneConn is a listener that has one connection to give.
type oneConn struct {
	mu     sync.Mutex
	conn   net.Conn // nil once given
	once   sync.Once
	closed chan struct{}
}

func (l *oneConn) Accept() (net.Conn, error) {
	l.mu.Lock()
	conn := l.conn
	l.conn = nil
	l.mu.Unlock()
	if conn != nil {
		return conn, nil
	}
	<-l.closed
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *oneConn) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }

// duplicate opens the region a second time, as the executor's side does.
func (r *Region) duplicate() (*Region, error) {
	fd, err := unix.FcntlInt(r.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate a shared-memory region: %w", err)
	}
	return &Region{file: os.NewFile(uintptr(fd), r.file.Name())}, nil
}
