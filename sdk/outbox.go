package sdk

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// What may wait for an executor that does not read. A stage that works has a few operations of each of its sequences under
// way, so this much means that it stands still.
const (
	maxQueuedFrames = 1 << 14
	maxQueuedBytes  = 256 << 20
)

// outbox writes frames without making anybody wait: what the socket does not take at once is queued for a writer.
type outbox struct {
	conn *net.UnixConn
	fail func(error)

	mu      sync.Mutex
	queue   [][]byte // the first is being written
	bytes   int
	closed  bool
	waiting chan struct{} // something is queued, or closed; holds one token
	ended   chan struct{}
}

func newOutbox(conn *net.UnixConn, fail func(error)) *outbox {
	o := &outbox{conn: conn, fail: fail, waiting: make(chan struct{}, 1), ended: make(chan struct{})}
	go o.write()
	return o
}

// push hands a frame over. An error is the end of the stream.
func (o *outbox) push(frame []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.queue) == 0 {
		// The common case: no goroutine needs to wake up for it.
		n, err := tryWrite(o.conn, frame)
		if err != nil || n == len(frame) {
			return err
		}
		frame = frame[n:]
	}
	if len(o.queue) >= maxQueuedFrames || len(frame) > maxQueuedBytes-o.bytes {
		return fmt.Errorf("step stream: %w: %d operations of %d bytes wait for an executor that does not take them",
			ErrExecutorGone, len(o.queue), o.bytes)
	}
	o.queue = append(o.queue, frame)
	o.bytes += len(frame)
	o.signal()
	return nil
}

func (o *outbox) signal() {
	select {
	case o.waiting <- struct{}{}:
	default:
	}
}

func (o *outbox) write() {
	defer close(o.ended)
	for {
		frame, open := o.front()
		switch {
		case !open:
			return
		case frame == nil:
			<-o.waiting
			continue
		}
		if _, err := o.conn.Write(frame); err != nil {
			o.fail(fmt.Errorf("step stream: %w: %w", ErrExecutorGone, err))
			return
		}
		o.mu.Lock()
		o.bytes -= len(frame)
		o.queue[0] = nil
		o.queue = o.queue[1:]
		o.mu.Unlock()
	}
}

func (o *outbox) front() (frame []byte, open bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.queue) > 0 {
		frame = o.queue[0]
	}
	return frame, !o.closed
}

// close ends the writer and waits for it. The connection is closed already.
func (o *outbox) close() {
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.signal()
	<-o.ended
}

// tryWrite writes what the socket takes now.
func tryWrite(conn *net.UnixConn, b []byte) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("step stream: %w: %w", ErrExecutorGone, err)
	}
	n, written := 0, error(nil)
	err = raw.Write(func(fd uintptr) bool {
		for {
			n, written = unix.Write(int(fd), b)
			if written != unix.EINTR {
				return true // one try
			}
		}
	})
	if err == nil && !errors.Is(written, unix.EAGAIN) {
		err = written
	}
	if err != nil {
		return 0, fmt.Errorf("step stream: %w: %w", ErrExecutorGone, err)
	}
	return max(0, n), nil
}

// tryWriteFile writes one byte where there is room for it.
func tryWriteFile(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Write(func(fd uintptr) bool {
		_, _ = unix.Write(int(fd), []byte{1})
		return true
	})
}
