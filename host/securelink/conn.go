package securelink

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// closeWait is how long Close waits for a Write in progress and for the close record to leave.
const closeWait = 250 * time.Millisecond

// Conn is a secured connection. Reads, writes and Close may run at the same time, each from any number of goroutines.
//
// Read returns io.EOF only for the peer's authentic close. A connection that ends without one gives
// io.ErrUnexpectedEOF, or the network's error where it was reset; anything that is not the peer's next record gives a
// *RecordError and closes the connection.
// A Read that ran into its deadline may be repeated; after a failed Write no other succeeds, because part of a record
// may have left.
type Conn struct {
	conn   net.Conn
	peer   Identity
	tamper atomic.Pointer[RecordError] // ends both directions

	readMu sync.Mutex
	in     *keyedStream
	wire   []byte // received bytes: from got to end they are still sealed
	got    int
	end    int
	text   []byte // opened, not yet read; lies in wire
	inErr  error  // final

	writeMu sync.Mutex
	out     *keyedStream
	sealed  []byte
	outErr  error // final

	deadlineMu sync.Mutex
	closing    bool
	closeOnce  sync.Once
	closeErr   error
}

var _ net.Conn = (*Conn)(nil)

// Buffers start small, since many connections carry only heartbeats, and become large with the first large record.
const (
	smallBuffer = 16<<10 + recordOverhead
	largeBuffer = 2 * (maxRecordText + recordOverhead)
)

func newConn(c net.Conn, peer Identity, in, out *keyedStream) *Conn {
	return &Conn{conn: c, peer: peer, in: in, out: out}
}

// Peer returns what the other end has proven to be.
func (c *Conn) Peer() Identity { return c.peer }

// LocalAddr returns this end's address.
func (c *Conn) LocalAddr() net.Addr { return c.conn.LocalAddr() }

// RemoteAddr returns the other end's address.
func (c *Conn) RemoteAddr() net.Addr { return c.conn.RemoteAddr() }

// Read reads opened bytes, of at most one record at a time.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.readMu.Lock()
	defer c.readMu.Unlock()
	if len(c.text) == 0 {
		record, err := c.nextRecord()
		if err != nil {
			return 0, err
		}
		if n := len(record) - recordOverhead; n <= len(p) {
			return c.open(p[:n], record)
		}
		if _, err := c.open(record[recordHeader:], record); err != nil {
			return 0, err
		}
		c.text = record[recordHeader : len(record)-recordTag]
	}
	n := copy(p, c.text)
	c.text = c.text[n:]
	return n, nil
}

// open opens the next record into to.
func (c *Conn) open(to, record []byte) (int, error) {
	text, err := c.in.open(to, record)
	if err != nil {
		return 0, c.tampered(c.in.seq-1, err)
	}
	if len(text) == 0 {
		c.inErr = io.EOF
		return 0, io.EOF
	}
	return len(text), nil
}

// nextRecord returns the next whole record, still sealed, and takes it out of the buffer.
func (c *Conn) nextRecord() ([]byte, error) {
	size := recordHeader
	for {
		if c.inErr != nil {
			return nil, c.inErr
		}
		if c.end-c.got >= recordHeader {
			n := binary.LittleEndian.Uint32(c.wire[c.got:])
			if n > maxRecordText {
				return nil, c.tampered(c.in.seq, ErrRecordTooLong)
			}
			size = int(n) + recordOverhead
		}
		if c.end-c.got >= size {
			record := c.wire[c.got : c.got+size]
			c.got += size
			return record, nil
		}
		if err := c.fill(size); err != nil {
			return nil, err
		}
	}
}

// fill reads once, into a buffer with room for a record of the given size.
func (c *Conn) fill(size int) error {
	if c.got == c.end {
		c.got, c.end = 0, 0
	}
	if c.got+size > len(c.wire) {
		buffer := atLeast(c.wire, size)
		c.end = copy(buffer, c.wire[c.got:c.end])
		c.wire, c.got = buffer, 0
	}
	n, err := c.conn.Read(c.wire[c.end:])
	c.end += n
	if n > 0 || err == nil {
		return nil // an error comes again
	}
	if isTimeout(err) {
		return err
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	c.inErr = err
	return err
}

// atLeast returns b, or a larger buffer in its place.
func atLeast(b []byte, size int) []byte {
	switch {
	case size <= len(b):
		return b
	case size <= smallBuffer:
		return make([]byte, smallBuffer)
	}
	return make([]byte, largeBuffer)
}

// tampered ends the connection at once: nothing that comes after can be trusted, and the peer must learn of it.
func (c *Conn) tampered(seq uint64, cause error) error {
	err := &RecordError{Addr: addr(c.conn), Peer: c.peer, Seq: seq, Err: cause}
	c.inErr = err
	c.tamper.Store(err)
	c.conn.Close()
	return err
}

// Write seals p and sends it.
func (c *Conn) Write(p []byte) (int, error) { return c.WriteBuffers(p) }

// WriteBuffers sends bufs as one run of bytes. Only what shares a record with another slice is copied together. It
// returns the number of bytes in records that left whole, and keeps no slice.
func (c *Conn) WriteBuffers(bufs ...[]byte) (int, error) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	rest := gather{bufs: bufs}
	for _, b := range bufs {
		rest.size += len(b)
	}
	written := 0
	for rest.size > 0 {
		n, err := c.sealBatch(&rest)
		if err == nil {
			err = c.flush()
		}
		if err != nil {
			return written, err
		}
		written += n
	}
	return written, nil
}

// sealBatch fills the buffer with records and returns how many bytes of rest they hold.
func (c *Conn) sealBatch(rest *gather) (int, error) {
	if err := c.writable(); err != nil {
		return 0, err
	}
	c.sealed = atLeast(c.sealed[:cap(c.sealed)], min(rest.size, maxRecordText)+recordOverhead)[:0]
	before := rest.size
	for rest.size > 0 {
		n := min(rest.size, maxRecordText)
		start, end := len(c.sealed), len(c.sealed)+n+recordOverhead
		if end > cap(c.sealed) {
			break
		}
		record := c.sealed[start:end]
		if _, err := c.out.seal(record, rest.take(n, record[recordHeader:])); err != nil {
			c.outErr = err
			return 0, err
		}
		c.sealed = c.sealed[:end]
	}
	return before - rest.size, nil
}

// gather is what is left of the slices to write.
type gather struct {
	bufs   [][]byte
	offset int // in the first
	size   int // bytes in all
}

// take returns the next n bytes, at most as many as there are: from their slice where it holds them all, else joined in scratch.
func (s *gather) take(n int, scratch []byte) []byte {
	s.size -= n
	for s.offset == len(s.bufs[0]) {
		s.bufs, s.offset = s.bufs[1:], 0
	}
	if first := s.bufs[0][s.offset:]; n <= len(first) {
		s.offset += n
		return first[:n]
	}
	joined := scratch[:0]
	for len(joined) < n {
		first := s.bufs[0][s.offset:]
		part := first[:min(len(first), n-len(joined))]
		joined = append(joined, part...)
		if s.offset += len(part); s.offset == len(s.bufs[0]) {
			s.bufs, s.offset = s.bufs[1:], 0
		}
	}
	return joined
}

// writable tells why nothing more can be sent.
func (c *Conn) writable() error {
	if tampered := c.tamper.Load(); tampered != nil {
		return tampered
	}
	return c.outErr
}

// flush sends the records in the buffer.
func (c *Conn) flush() error {
	_, err := c.conn.Write(c.sealed)
	c.sealed = c.sealed[:0]
	if err != nil {
		c.outErr = err
		if tampered := c.tamper.Load(); tampered != nil {
			return tampered
		}
	}
	return err
}

// CloseWrite tells the peer that nothing more follows: its Read returns io.EOF. Reading goes on.
func (c *Conn) CloseWrite() error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if err := c.sendClose(); err != nil {
		return err
	}
	if half, ok := c.conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// sendClose sends the close record and ends this direction.
func (c *Conn) sendClose() error {
	if err := c.writable(); err != nil {
		return err
	}
	c.sealed = atLeast(c.sealed[:cap(c.sealed)], recordOverhead)[:recordOverhead]
	if _, err := c.out.seal(c.sealed, nil); err != nil {
		c.outErr = err
		return err
	}
	err := c.flush()
	if c.outErr == nil {
		c.outErr = net.ErrClosed
	}
	return err
}

// Close sends the close record and closes the connection. It waits closeWait at most, for a peer that does not read;
// the peer then sees no authentic close. Reads and writes in progress end. Closing again does nothing.
func (c *Conn) Close() error {
	c.closeOnce.Do(func() {
		c.deadlineMu.Lock()
		c.closing = true
		c.conn.SetWriteDeadline(time.Now().Add(closeWait))
		c.deadlineMu.Unlock()
		c.writeMu.Lock()
		c.sendClose()
		c.writeMu.Unlock()
		c.closeErr = c.conn.Close()
	})
	return c.closeErr
}

// SetDeadline limits reads and writes, as net.Conn has it.
func (c *Conn) SetDeadline(t time.Time) error { return c.setDeadline(c.conn.SetDeadline, t) }

// SetReadDeadline limits reads. A Read that ran into it may be repeated.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(c.conn.SetReadDeadline, t) }

// SetWriteDeadline limits writes. A Write that ran into it is the last one.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(c.conn.SetWriteDeadline, t) }

// setDeadline leaves a connection that is closing alone, so that nobody lifts Close's own limit.
func (c *Conn) setDeadline(set func(time.Time) error, t time.Time) error {
	c.deadlineMu.Lock()
	defer c.deadlineMu.Unlock()
	if c.closing {
		return net.ErrClosed
	}
	return set(t)
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}
