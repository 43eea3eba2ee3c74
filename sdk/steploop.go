package sdk

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// Threaded is an Executor whose operations run on one thread of its own. The step stream is read on that thread then, so
// that a step need not be handed from one thread to another.
type Threaded interface {
	Executor
	// RunSteps calls loop.Run on the thread, and returns when that has. Whatever else the executor wants done there
	// meanwhile, it does from the function given to Run, which Wake has called.
	RunSteps(loop *StepLoop)
}

// OnStepThread tells whether ctx is that of an operation, which runs on a Threaded executor's own thread.
func OnStepThread(ctx context.Context) bool { return ctx.Value(stepThread{}) != nil }

type stepThread struct{}

// StepLoop is one step stream being served: it reads an operation, applies it, answers, and reads the next.
type StepLoop struct{ stream *opStream }

// Run serves the stream until it ends. woken, which may be nil, is called before the first operation and, after a Wake,
// as soon as no operation runs.
func (l *StepLoop) Run(woken func()) {
	if woken == nil {
		woken = func() {}
	}
	woken()
	l.stream.fault = l.stream.serve(woken)
}

// Wake makes Run call woken. It may be called at any time, also before and after Run.
func (l *StepLoop) Wake() { l.stream.socket.wake() }

// stepSocket is the executor's end of a step stream. Its reads block the thread that makes them, which is the one that
// computes: nothing else has to wake up for a step.
type stepSocket struct {
	file     *os.File
	fd       int
	wakeR    *os.File
	wakeW    *os.File
	watchers sync.WaitGroup
	stopR    *os.File // its other end's closing ends the watch for a hang-up
	stopW    *os.File

	buf  []byte // read and not used: buf[from:to]
	from int
	to   int
	out  []byte
}

// newStepSocket takes the file over.
func newStepSocket(file *os.File) (*stepSocket, error) {
	s := &stepSocket{file: file, buf: make([]byte, streamBuffer)}
	var err error
	if s.wakeR, s.wakeW, err = os.Pipe(); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if s.stopR, s.stopW, err = os.Pipe(); err != nil {
		return nil, errors.Join(err, file.Close(), s.wakeR.Close(), s.wakeW.Close())
	}
	s.fd = int(file.Fd()) // blocking from here on
	return s, nil
}

// wake makes a waiting or coming next return early. More than the pipe holds are as good as one.
func (s *stepSocket) wake() { _ = tryWriteFile(s.wakeW) }

// next reads a message into m. It calls woken after a wake, and returns io.EOF once ctx has ended and a wake told of it.
func (s *stepSocket) next(ctx context.Context, m proto.Message, woken func()) error {
	for {
		if s.to-s.from >= frameHeader {
			size, err := frameSize(s.buf[s.from:])
			if err != nil {
				return err
			}
			if end := s.from + frameHeader + size; end <= s.to {
				err := proto.Unmarshal(s.buf[s.from+frameHeader:end], m)
				s.from = end
				return err
			}
			s.makeRoom(frameHeader + size)
		} else {
			s.makeRoom(frameHeader)
		}
		if err := s.fill(ctx, woken); err != nil {
			return err
		}
	}
}

// makeRoom moves what is there to the front and makes the buffer hold at least size bytes.
func (s *stepSocket) makeRoom(size int) {
	if s.from > 0 {
		s.to = copy(s.buf, s.buf[s.from:s.to])
		s.from = 0
	}
	if len(s.buf) < size {
		s.buf = append(s.buf, make([]byte, size-len(s.buf))...)
	}
}

// awaitWake waits for a wake.
func (s *stepSocket) awaitWake() error {
	fd := int(s.wakeR.Fd())
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if err == nil {
			return drain(fd)
		}
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("poll", err)
		}
	}
}

// drain takes what wakes have written.
func drain(fd int) error {
	var drained [64]byte
	if _, err := unix.Read(fd, drained[:]); err != nil && !errors.Is(err, unix.EINTR) {
		return os.NewSyscallError("read", err)
	}
	return nil
}

// fill waits for bytes and reads them.
func (s *stepSocket) fill(ctx context.Context, woken func()) error {
	wakeFD := int(s.wakeR.Fd())
	for {
		fds := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}, {Fd: int32(wakeFD), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return os.NewSyscallError("poll", err)
		}
		if fds[1].Revents != 0 {
			if err := drain(wakeFD); err != nil {
				return err
			}
			woken()
			if ctx.Err() != nil {
				return io.EOF
			}
		}
		if fds[0].Revents == 0 {
			continue
		}
		n, err := unix.Read(s.fd, s.buf[s.to:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ECONNRESET) || err == nil && n == 0:
			return io.EOF
		case err != nil:
			return os.NewSyscallError("read", err)
		}
		s.to += n
		return nil
	}
}

// send writes a message. It waits for the host, which always reads.
func (s *stepSocket) send(m *pb.Outcome) error {
	var err error
	if s.out, err = appendStreamFrame(s.out[:0], m); err != nil {
		return err
	}
	for b := s.out; len(b) > 0; {
		n, err := unix.Write(s.fd, b)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("write", err)
		}
		b = b[max(0, n):]
	}
	if cap(s.out) > 16*streamBuffer {
		s.out = nil // a rare large one
	}
	return nil
}

// onHangUp calls f once the host has closed the stream, also while an operation runs.
func (s *stepSocket) onHangUp(f func()) {
	s.watchers.Go(func() {
		for {
			fds := []unix.PollFd{{Fd: int32(s.fd)}, {Fd: int32(s.stopR.Fd())}}
			if _, err := unix.Poll(fds, -1); err != nil && errors.Is(err, unix.EINTR) {
				continue
			}
			f()
			return
		}
	})
}

func (s *stepSocket) close() error {
	err := s.stopW.Close()
	s.watchers.Wait()
	return errors.Join(err, s.file.Close(), s.wakeR.Close(), s.wakeW.Close(), s.stopR.Close())
}
