package sdk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Purposes of descriptors that a host hands over.
const (
	PurposeSteps = "steps" // one end of a socket pair, for the step stream
	PurposeState = "state" // a file to export a sequence's state to or to import one from
)

// SideChannel is the host's end of a Unix socket pair over which a running executor gets descriptors: memory for a
// state, the step stream's socket, and whatever comes later. An executor inherits the other end; see Inherit.
type SideChannel struct {
	conn *net.UnixConn
	far  *os.File // the executor's end

	mu   sync.Mutex
	last uint32
}

// A descriptor goes with its number (4 bytes, little-endian), the length of its purpose (1 byte), and the purpose.
const (
	handHeader     = 5
	maxPurpose     = 32
	maxDescriptors = 64 // handed over and not used yet: more are a fault of the host
)

// NewSideChannel opens a side channel.
func NewSideChannel() (*SideChannel, error) {
	near, far, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("open a side channel: %w", err)
	}
	conn, err := unixConn(near)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a side channel: %w", err), far.Close())
	}
	return &SideChannel{conn: conn, far: far}, nil
}

// Hand hands a descriptor to the executor and returns the number by which operations and calls name it. f stays the
// caller's. It never waits for the executor: one that does not take what it is handed is an error.
func (c *SideChannel) Hand(purpose string, f *os.File) (uint32, error) {
	if purpose == "" || len(purpose) > maxPurpose {
		return 0, Errorf(CodeInvalid, "a descriptor's purpose is %q, want 1 to %d bytes", purpose, maxPurpose)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	number := c.last + 1
	message := make([]byte, handHeader, handHeader+len(purpose))
	binary.LittleEndian.PutUint32(message, number)
	message[4] = byte(len(purpose))
	message = append(message, purpose...)
	if err := c.send(message, f); err != nil {
		return 0, fmt.Errorf("hand a descriptor for %s to the executor: %w", purpose, err)
	}
	c.last = number
	return number, nil
}

// send tries once, so that a socket that the executor does not read can't hold the caller.
func (c *SideChannel) send(message []byte, f *os.File) error {
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = withDescriptor(f, func(fd int) error {
		return raw.Write(func(socket uintptr) bool {
			// So few bytes are taken whole or not at all.
			sent = unix.Sendmsg(int(socket), message, unix.UnixRights(fd), nil, 0)
			return true
		})
	})
	switch {
	case err != nil:
		return err
	case errors.Is(sent, unix.EAGAIN):
		return errors.New("it does not take what it was handed before")
	case errors.Is(sent, unix.EPIPE) || errors.Is(sent, unix.ECONNRESET):
		return fmt.Errorf("%w: %w", ErrExecutorGone, sent)
	}
	return sent
}

// Close closes both ends as far as this process holds them.
func (c *SideChannel) Close() error { return errors.Join(c.conn.Close(), c.far.Close()) }

// descriptors is the executor's end: what was handed over, by number.
type descriptors struct {
	conn *net.UnixConn

	mu     sync.Mutex
	held   map[uint32]handed
	last   uint32
	change chan struct{} // closed and replaced when something came
	err    error         // why nothing comes any more
}

type handed struct {
	purpose string
	file    *os.File
}

// newDescriptors takes descriptors from the executor's end of a side channel until it closes.
func newDescriptors(far *os.File) (*descriptors, error) {
	conn, err := unixConn(far)
	if err != nil {
		return nil, fmt.Errorf("side channel: %w", err)
	}
	d := &descriptors{conn: conn, held: map[uint32]handed{}, change: make(chan struct{})}
	go d.receive()
	return d, nil
}

func (d *descriptors) receive() {
	for {
		number, h, err := d.next()
		d.mu.Lock()
		if err == nil {
			err = d.add(number, h)
		}
		if err != nil {
			d.err = err
		}
		close(d.change)
		d.change = make(chan struct{})
		d.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// add keeps a descriptor; d.mu is held.
func (d *descriptors) add(number uint32, h handed) error {
	var err error
	switch {
	case number != d.last+1:
		err = fmt.Errorf("descriptor %d follows descriptor %d", number, d.last)
	case len(d.held) >= maxDescriptors:
		err = fmt.Errorf("%d descriptors are held unused", len(d.held))
	}
	if err != nil {
		return errors.Join(err, h.file.Close())
	}
	d.last = number
	d.held[number] = h
	return nil
}

// next reads one descriptor. Its message begins where its ancillary data does, and a read never goes past that.
func (d *descriptors) next() (uint32, handed, error) {
	var header [handHeader]byte
	control := make([]byte, unix.CmsgSpace(4))
	n, controlBytes, _, _, err := d.conn.ReadMsgUnix(header[:], control)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return 0, handed{}, err
	}
	file, err := rightsOf(control[:controlBytes])
	if err != nil {
		return 0, handed{}, err
	}
	purpose, err := d.rest(header[:], n)
	if err != nil {
		return 0, handed{}, errors.Join(err, file.Close())
	}
	return binary.LittleEndian.Uint32(header[:]), handed{purpose, file}, nil
}

// rest reads what is missing of the header and the purpose behind it.
func (d *descriptors) rest(header []byte, have int) (string, error) {
	if _, err := io.ReadFull(d.conn, header[have:]); err != nil {
		return "", err
	}
	size := int(header[4])
	if size == 0 || size > maxPurpose {
		return "", fmt.Errorf("a purpose of %d bytes", size)
	}
	purpose := make([]byte, size)
	_, err := io.ReadFull(d.conn, purpose)
	return string(purpose), err
}

// rightsOf takes the one descriptor out of ancillary data.
func rightsOf(control []byte) (*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	var fds []int
	for i := range messages {
		some, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return nil, err
		}
		fds = append(fds, some...)
	}
	if len(fds) != 1 {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return nil, fmt.Errorf("%d descriptors in one message, want 1", len(fds))
	}
	return os.NewFile(uintptr(fds[0]), "handed over"), nil
}

// take waits for a descriptor, which is the caller's from then on: a number serves once.
func (d *descriptors) take(ctx context.Context, number uint32, purpose string) (*os.File, error) {
	if d == nil {
		return nil, Errorf(CodeInvalid, "no side channel was handed over: set %s", EnvChannelFD)
	}
	for {
		d.mu.Lock()
		h, ok := d.held[number]
		change, err, past := d.change, d.err, number <= d.last
		if ok && h.purpose == purpose {
			delete(d.held, number)
		}
		d.mu.Unlock()
		switch {
		case ok && h.purpose != purpose:
			return nil, Errorf(CodeInvalid, "descriptor %d was handed over for %s, not for %s", number, h.purpose, purpose)
		case ok:
			return h.file, nil
		case past:
			return nil, Errorf(CodeInvalid, "descriptor %d was used before", number)
		case err != nil:
			return nil, Errorf(CodeInternal, "descriptor %d can't come: %v", number, err)
		}
		select {
		case <-change:
		case <-ctx.Done():
			return nil, Errorf(CodeCanceled, "descriptor %d did not come: %v", number, context.Cause(ctx))
		}
	}
}

func (d *descriptors) close() error {
	err := d.conn.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range d.held {
		err = errors.Join(err, h.file.Close())
	}
	clear(d.held)
	return err
}

// socketPair makes two connected stream sockets that no child inherits by accident.
func socketPair() (a, b *os.File, err error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	return os.NewFile(uintptr(fds[0]), "host's end"), os.NewFile(uintptr(fds[1]), "executor's end"), nil
}

// unixConn turns a socket into a connection. The file is used up.
func unixConn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%s is no Unix socket", f.Name()), conn.Close())
	}
	return u, nil
}

// withDescriptor calls f with the file's descriptor, which stays open meanwhile and keeps its mode.
func withDescriptor(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}
