package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/mlxcel/mlxcel/host/securelink"
)

// openingTimeout bounds the wait for an opening. A node sends it right behind its handshake.
const openingTimeout = 5 * time.Second

// Acceptor yields connections that have been secured, as securelink.Listener does.
type Acceptor interface {
	Accept() (*securelink.Conn, error)
	Close() error
}

// Handlers says who serves the connections of each kind. A handler owns its connection, and returns when that is over,
// when it has handed it on, or when ctx ends. A kind without a handler is closed.
type Handlers map[Kind]func(ctx context.Context, c *Conn)

// Serve accepts connections and hands each to its kind's handler, until ctx ends or the listener fails. It returns once every
// handler has and the listener is closed, so that its address can be listened on again. onRefused, where given, is told of
// connections that no handler got.
func Serve(ctx context.Context, l Acceptor, handlers Handlers, onRefused func(addr net.Addr, err error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel() // before the wait
	closed := make(chan error, 1)
	all.Go(func() {
		<-ctx.Done()
		closed <- l.Close()
	})
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close()
			}
			return nil
		case err != nil:
			cancel()
			return errors.Join(fmt.Errorf("accept connections: %w", err), <-closed)
		}
		all.Go(func() {
			if err := dispatch(ctx, conn, handlers); err != nil {
				_ = conn.Close()
				if onRefused != nil {
					onRefused(conn.RemoteAddr(), err)
				}
			}
		})
	}
}

// NotServedError is a connection of a kind that this node does not serve.
type NotServedError struct {
	Kind Kind
	Peer securelink.Identity
}

func (e *NotServedError) Error() string {
	return fmt.Sprintf("%s %q opens a %v connection, which this node does not serve", e.Peer.Role, e.Peer.NodeID, e.Kind)
}

func dispatch(ctx context.Context, conn *securelink.Conn, handlers Handlers) error {
	o, err := readOpening(ctx, conn)
	if err != nil {
		return err
	}
	handle, ok := handlers[o.Kind]
	if !ok {
		return &NotServedError{Kind: o.Kind, Peer: conn.Peer()}
	}
	handle(ctx, newConn(conn, o))
	return nil
}

func readOpening(ctx context.Context, conn net.Conn) (Opening, error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if err := conn.SetReadDeadline(time.Now().Add(openingTimeout)); err != nil {
		return Opening{}, err
	}
	var raw [openingSize]byte
	if _, err := io.ReadFull(conn, raw[:]); err != nil {
		return Opening{}, fmt.Errorf("read what the connection is for: %w", err)
	}
	o, err := parseOpening(&raw)
	if err != nil {
		return Opening{}, err
	}
	return o, conn.SetReadDeadline(time.Time{})
}
