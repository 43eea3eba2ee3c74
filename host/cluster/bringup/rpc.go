package bringup

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// What messages may have, in bytes. A list of empty parts becomes about a hundred times its size in memory, so none may have
// more than the largest cluster needs.
const (
	maxOffer  = 2 << 20   // of a coordinator: an offer names every stage with its addresses, and has the cluster's TOML
	maxAnswer = 256 << 10 // of a peer: a profile, executors, and a model's files of weights
	maxStatus = 1 << 20   // of any node: a line of each stage
	maxAsk    = 4 << 10   // of a tool
	// maxHeaders holds a refusal, whose texts are clipped.
	maxHeaders = 64 << 10
	// maxCalls is how many calls of one connection run at once. A coordinator has at most three: it watches, waits for one
	// thing, and aborts.
	maxCalls = 8
)

// maxOrder bounds an order on a data connection, and its report, to what an executor takes in one message. The largest are
// a prompt of some million tokens, and the token masks of some hundred sequences.
const maxOrder = 16 << 20

// partingTimeout bounds the wait for the last answers of a control connection to leave.
const partingTimeout = 2 * time.Second

// rpcServer serves gRPC on one connection that is there already.
type rpcServer struct {
	server *grpc.Server
	conn   *watchedConn
	served chan struct{}
}

// serveRPC begins to serve on conn, which is secured: gRPC's own security would add nothing. Requests and replies have the given
// bytes at most.
func serveRPC(conn net.Conn, maxRequest, maxReply int, register func(*grpc.Server)) *rpcServer {
	r := &rpcServer{
		server: grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.MaxSendMsgSize(maxReply), grpc.MaxHeaderListSize(maxHeaders), grpc.MaxConcurrentStreams(maxCalls)),
		conn:   &watchedConn{Conn: conn, closed: make(chan struct{})}, served: make(chan struct{}),
	}
	register(r.server)
	go func() {
		defer close(r.served)
		_ = r.server.Serve(&singleListener{conn: r.conn, done: make(chan struct{})}) // ends with stop, and then says so
	}()
	return r
}

// closed is closed once the connection is.
func (r *rpcServer) closed() <-chan struct{} { return r.conn.closed }

// stop closes the connection. Where the other side is there, it lets the calls under way bring their answers out, for a while.
func (r *rpcServer) stop(there bool) {
	if there {
		timer := time.AfterFunc(partingTimeout, r.server.Stop)
		defer timer.Stop()
		r.server.GracefulStop()
	}
	r.server.Stop()
	<-r.served
	_ = r.conn.Close()
}

// watchedConn tells when it was closed.
type watchedConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

func (c *watchedConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.closed) })
	return err
}

// singleListener yields one connection, then nothing until it is closed.
type singleListener struct {
	conn net.Conn
	once sync.Once
	done chan struct{}

	mu    sync.Mutex
	taken bool
}

func (l *singleListener) Accept() (net.Conn, error) {
	l.mu.Lock()
	first := !l.taken
	l.taken = true
	l.mu.Unlock()
	if first {
		return l.conn, nil
	}
	<-l.done
	return nil, net.ErrClosed
}

func (l *singleListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *singleListener) Addr() net.Addr { return l.conn.LocalAddr() }

// errUsed is what a client whose connection broke finds when it wants another.
var errUsed = errors.New("the connection is closed")

// dialRPC is a client on one connection that is there already. It never opens another. The limits are those of serveRPC.
func dialRPC(conn net.Conn, maxRequest, maxReply int) (*grpc.ClientConn, error) {
	once := make(chan net.Conn, 1)
	once <- conn
	return grpc.NewClient("passthrough:///node",
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case c := <-once:
				return c, nil
			default:
				return nil, errUsed
			}
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the connection itself is secured
		grpc.WithNoProxy(), grpc.WithIdleTimeout(0), grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReply), grpc.MaxCallSendMsgSize(maxRequest)),
	)
}
