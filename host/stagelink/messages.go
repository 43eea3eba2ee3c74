package stagelink

import (
	"net"
	"time"

	"github.com/mlxcel/mlxcel/host/wire"
)

// Config bounds what a connection carries and how long it may take.
type Config struct {
	// MaxMessage is the most bytes of one order or report. Default 64 MiB.
	MaxMessage int
	// MaxQueued is how many orders or reports may wait to be sent: more mean that the other side does not take them.
	// Default 8192.
	MaxQueued int
	// MessageTimeout bounds the writing of orders and reports, which the other side always reads at once. Default 10 s.
	MessageTimeout time.Duration
	// FrameTimeout bounds the writing of one activation. The next stage may rightly not read on while it computes what it
	// has, so this must exceed the longest step of a micro-batch. Heartbeats find a host that is gone or stands still
	// long before. Default 10 min.
	FrameTimeout time.Duration
}

func (c Config) withDefaults() Config {
	if c.MaxMessage == 0 {
		c.MaxMessage = 64 << 20
	}
	if c.MaxQueued == 0 {
		c.MaxQueued = 8192
	}
	if c.MessageTimeout == 0 {
		c.MessageTimeout = 10 * time.Second
	}
	if c.FrameTimeout == 0 {
		c.FrameTimeout = 10 * time.Minute
	}
	return c
}

// dataConn is one end of a data connection.
type dataConn struct {
	*ending
	cfg   Config
	queue *queue[message]
	// refuse is told of a message that can't be sent: it is too large, or the contract has no encoding of it.
	refuse func(*message, error)
}

func newDataConn(conn net.Conn, cfg Config, refuse func(*message, error)) *dataConn {
	cfg = cfg.withDefaults()
	c := &dataConn{ending: newEnding(conn), cfg: cfg, queue: newQueue[message](cfg.MaxQueued), refuse: refuse}
	c.wait.Go(c.write)
	c.wait.Go(func() {
		<-c.done
		c.queue.close()
	})
	return c
}

// send queues a message. It never waits. What comes after the end is dropped: whoever must know of the end learns of it.
func (c *dataConn) send(m message) {
	if err := c.queue.push(m); err != nil && err != errClosed {
		c.fail(err)
	}
}

// batchBytes is how many bytes of messages are gathered for one write.
const batchBytes = 64 << 10

// write sends what is queued, messages that wait together in one go.
func (c *dataConn) write() {
	deadline := writeDeadline{conn: c.conn, timeout: c.cfg.MessageTimeout}
	var items []message
	buf := []byte(wire.Preface)
	var scratch []byte
	for more := true; more; {
		items, more = c.queue.drain(items)
		for i := range items {
			buf, scratch = c.append(buf, scratch, &items[i])
			if len(buf) < batchBytes && i < len(items)-1 {
				continue
			}
			if err := c.flush(buf, &deadline); err != nil {
				c.fail(err)
				return
			}
			if buf = buf[:0]; cap(buf) > 16*batchBytes {
				buf, scratch = nil, nil // a rare large one
			}
		}
	}
}

// append appends the message to buf unless it can't be sent; scratch is memory for what it says.
func (c *dataConn) append(buf, scratch []byte, m *message) (out, used []byte) {
	body, err := appendMessage(scratch[:0], m)
	if n := len(body); err == nil && n > c.cfg.MaxMessage {
		err = &wire.LimitError{Part: wire.PartMessage, Got: int64(n), Limit: int64(c.cfg.MaxMessage)}
	}
	if err != nil {
		c.refuse(m, err)
		return buf, body
	}
	return wire.AppendMessage(buf, m.kind, body), body
}

func (c *dataConn) flush(buf []byte, deadline *writeDeadline) error {
	if len(buf) == 0 {
		return nil
	}
	if err := deadline.renew(); err != nil {
		return err
	}
	_, err := c.conn.Write(buf)
	return err
}

// read hands each message that comes to take, until the connection ends.
func (c *dataConn) read(take func(*message) error) {
	r := wire.NewMessageReader(c.conn, c.cfg.MaxMessage)
	for {
		kind, body, err := r.Next()
		if err != nil {
			c.fail(err)
			return
		}
		m, err := decode(kind, body)
		if err == nil {
			err = take(&m)
		}
		if err != nil {
			c.fail(err)
			return
		}
	}
}
