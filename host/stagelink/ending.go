package stagelink

import (
	"errors"
	"net"
	"sync"
	"time"
)

// errClosed ends a connection that this side closes.
var errClosed = errors.New("closed")

// ending is the life of a connection and the goroutines on it: it ends once, by a failure or by close.
type ending struct {
	conn net.Conn
	once sync.Once
	done chan struct{}
	err  error // set before done closes
	wait sync.WaitGroup
}

func newEnding(conn net.Conn) *ending { return &ending{conn: conn, done: make(chan struct{})} }

func (e *ending) fail(err error) {
	e.once.Do(func() {
		e.err = err
		close(e.done)
		_ = e.conn.Close() // it is given up
	})
}

// close ends the connection, unless it has ended, and waits for the goroutines.
func (e *ending) close() {
	e.fail(errClosed)
	e.wait.Wait()
}

// broken returns how the connection ended, nil when this side closed it. done must be closed.
func (e *ending) broken() error {
	if e.err == errClosed {
		return nil
	}
	return e.err
}

// writeDeadline bounds how long a write may take. It is renewed seldom, as that costs.
type writeDeadline struct {
	conn    net.Conn
	timeout time.Duration
	last    time.Time
}

// renew leaves the next write at least three quarters of the timeout.
func (d *writeDeadline) renew() error {
	now := time.Now()
	if now.Sub(d.last) < d.timeout/4 {
		return nil
	}
	d.last = now
	return d.conn.SetWriteDeadline(now.Add(d.timeout))
}
