package transport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/mlxcel/mlxcel/host/securelink"
)

// Dialer opens secured connections.
type Dialer struct {
	Secure  securelink.Config
	Dial    func(ctx context.Context, address string) (net.Conn, error) // default TCP
	Timeout time.Duration                                               // of one address, handshake included; default 5 s
	Stagger time.Duration                                               // from one address to the next where the first does not answer; default 200 ms
}

func (d Dialer) withDefaults() Dialer {
	if d.Dial == nil {
		d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", address) // heartbeats do better
		}
	}
	if d.Timeout == 0 {
		d.Timeout = 5 * time.Second
	}
	if d.Stagger == 0 {
		d.Stagger = 200 * time.Millisecond
	}
	return d
}

// DialError is a node that none of its addresses led to.
type DialError struct {
	Attempts []Attempt // in the order of the candidates
}

// Attempt is what became of one address.
type Attempt struct {
	Address string
	Err     error
}

func (e *DialError) Error() string {
	if len(e.Attempts) == 0 {
		return "no address to dial"
	}
	parts := make([]string, len(e.Attempts))
	for i, a := range e.Attempts {
		parts[i] = fmt.Sprintf("%s: %v", a.Address, a.Err)
	}
	return strings.Join(parts, "; ")
}

// Unwrap returns why each address failed.
func (e *DialError) Unwrap() []error {
	errs := make([]error, len(e.Attempts))
	for i, a := range e.Attempts {
		errs[i] = a.Err
	}
	return errs
}

// Connected is a connection and the candidate that it was made with.
type Connected struct {
	*Conn
	Address string
}

// Connect dials a node's candidate addresses and returns the first connection that is secured and that accept, where given,
// agrees to. An address that does not answer soon does not hold up the next. The error is a *DialError, or ctx's.
func (d Dialer) Connect(ctx context.Context, candidates []string, o Opening, accept func(securelink.Identity) error) (*Connected, error) {
	d = d.withDefaults()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type outcome struct {
		index int
		conn  *securelink.Conn
		err   error
	}
	outcomes := make(chan outcome) // every attempt that was begun is received from it
	attempts := make([]Attempt, len(candidates))
	var winner *outcome
	stagger := time.NewTimer(0)
	defer stagger.Stop()
	for next, running := 0, 0; ; {
		begin := stagger.C
		if next == len(candidates) || winner != nil {
			begin = nil
		}
		if begin == nil && running == 0 {
			break
		}
		select {
		case <-begin:
			i := next
			next, running = next+1, running+1
			attempts[i].Address = candidates[i]
			go func() {
				conn, err := d.attempt(ctx, candidates[i], accept)
				outcomes <- outcome{i, conn, err}
			}()
			stagger.Reset(d.Stagger)
		case out := <-outcomes:
			running--
			attempts[out.index].Err = out.err
			switch {
			case out.err != nil:
				stagger.Reset(0) // why wait for the next
			case winner == nil:
				winner = &out
				cancel()
			default:
				_ = out.conn.Close()
			}
		}
	}
	if winner == nil {
		return nil, failure(ctx, attempts)
	}
	if _, err := winner.conn.Write(o.append(nil)); err != nil {
		_ = winner.conn.Close()
		attempts = []Attempt{{candidates[winner.index], fmt.Errorf("tell what the connection is for: %w", err)}}
		return nil, &DialError{Attempts: attempts}
	}
	return &Connected{Conn: newConn(winner.conn, o), Address: candidates[winner.index]}, nil
}

func failure(ctx context.Context, attempts []Attempt) error {
	if ctx.Err() != nil && allCanceled(attempts) {
		return context.Cause(ctx)
	}
	return &DialError{Attempts: attempts}
}

func allCanceled(attempts []Attempt) bool {
	for _, a := range attempts {
		if !errors.Is(a.Err, context.Canceled) {
			return false
		}
	}
	return true
}

// attempt makes one connection.
func (d Dialer) attempt(ctx context.Context, address string, accept func(securelink.Identity) error) (*securelink.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	raw, err := d.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	conn, err := securelink.Client(ctx, raw, d.Secure) // closes raw when it fails
	if err != nil {
		return nil, err
	}
	if accept != nil {
		if err := accept(conn.Peer()); err != nil {
			_ = conn.Close()
			return nil, err
		}
	}
	return conn, nil
}
