package transport

import (
	"sync/atomic"

	"github.com/mlxcel/mlxcel/host/securelink"
)

// Conn is a secured connection with what it is for. It counts what goes over it.
type Conn struct {
	*securelink.Conn
	Opening Opening

	sent, received atomic.Int64
}

func newConn(c *securelink.Conn, o Opening) *Conn { return &Conn{Conn: c, Opening: o} }

// Read is net.Conn's.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.received.Add(int64(n))
	return n, err
}

// Write is net.Conn's.
func (c *Conn) Write(p []byte) (int, error) { return c.WriteBuffers(p) }

// WriteBuffers is securelink.Conn's.
func (c *Conn) WriteBuffers(bufs ...[]byte) (int, error) {
	n, err := c.Conn.WriteBuffers(bufs...)
	c.sent.Add(int64(n))
	return n, err
}

// Traffic returns the bytes that were sent and received so far, without what sealing adds.
func (c *Conn) Traffic() (sent, received int64) { return c.sent.Load(), c.received.Load() }
