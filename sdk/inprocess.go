package sdk

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/hashicorp/go-plugin"
	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/test/bufconn"
)

// InProcess serves an executor in this process over the same messages, checks and shared memory as a process of
// its own, for tests and tools. A panic of the executor is a panic here. stop ends it and waits for it.
func InProcess(e Executor) (c *Client, stop func() error, err error) {
	region, err := NewRegion()
	if err != nil {
		return nil, nil, err
	}
	other, err := region.duplicate()
	if err != nil {
		return nil, nil, errors.Join(err, region.Close())
	}
	rethrow := func(operation string, cause any, stack []byte) {
		panic(fmt.Sprintf("executor panicked in %s: %v\n%s", operation, cause, stack))
	}
	g := newGRPCServer([]grpc.ServerOption{grpc.WaitForHandlers(true)})
	pb.RegisterExecutorServer(g, newServer(e, other, rethrow))
	alive := health.NewServer()
	alive.SetServingStatus(plugin.GRPCServiceName, grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(g, alive)

	listener := bufconn.Listen(64 << 10)
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:executor",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	closers := func() error {
		var connErr error
		if conn != nil {
			connErr = conn.Close()
		}
		g.Stop()
		return errors.Join(connErr, <-served, other.Close(), region.Close())
	}
	if err != nil {
		return nil, nil, errors.Join(err, closers())
	}
	return NewClient(conn, region), closers, nil
}

// duplicate opens the region a second time, as the executor's side does.
func (r *Region) duplicate() (*Region, error) {
	fd, err := unix.FcntlInt(r.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate a shared-memory region: %w", err)
	}
	return &Region{file: os.NewFile(uintptr(fd), r.file.Name())}, nil
}
