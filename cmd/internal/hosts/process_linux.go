package hosts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Patience is how long the harness waits for what must happen at all; nothing is measured by it.
const Patience = 2 * time.Minute

// Command is a program to run on a host.
type Command struct {
	Path string // absolute, or relative to the test's own folder
	Args []string
	Env  []string // name=value, beside PATH, TMPDIR, HOME; nothing else of the test's environment is passed on
}

// Process is a program that was started on a host. Its methods may be called by several goroutines.
type Process struct {
	Host *Host
	Name string // of the program

	cmd     *exec.Cmd
	journal *journal
	streams []*os.File // the ends that are read
	readers sync.WaitGroup
	exited  chan struct{}

	mu     sync.Mutex
	cursor int // the events before it were awaited
}

// Start runs a program on the host until the test ends, if not before.
func (h *Host) Start(t testing.TB, c Command) *Process {
	t.Helper()
	path, err := filepath.Abs(c.Path)
	if err != nil {
		t.Fatal(err)
	}
	p := &Process{Host: h, Name: filepath.Base(path), cmd: exec.Command(path, c.Args...), journal: newJournal(2), exited: make(chan struct{})}
	p.cmd.Dir = h.Folder()
	p.cmd.Env = append(h.environment(), c.Env...)
	// A process group of its own, so that a signal of the terminal is the test's alone; it dies with the host's thread.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.start(); err != nil {
		t.Fatalf("start %s on %s: %v", p.Name, h.Name, err)
	}
	h.processes = append(h.processes, p)
	t.Cleanup(func() {
		p.end()
		if t.Failed() {
			t.Logf("%s wrote:\n%s", p, p.tail(100))
		}
	})
	return p
}

func (p *Process) start() error {
	stdout, out, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	stderr, errOut, err := os.Pipe()
	if err != nil {
		stdout.Close()
		return err
	}
	defer errOut.Close()
	p.streams = []*os.File{stdout, stderr}
	p.cmd.Stdout, p.cmd.Stderr = out, errOut
	if err := p.Host.space.do(p.cmd.Start); err != nil {
		stdout.Close()
		stderr.Close()
		return err
	}
	p.readers.Go(func() { p.journal.record(stdout, true) })
	p.readers.Go(func() { p.journal.record(stderr, false) })
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait()
	}()
	return nil
}

// end kills the process and waits for its log.
func (p *Process) end() {
	_ = p.cmd.Process.Kill()
	<-p.exited
	for _, s := range p.streams {
		_ = s.SetReadDeadline(time.Now().Add(time.Second)) // a child that outlives it may hold the other end
	}
	p.readers.Wait()
	for _, s := range p.streams {
		s.Close()
	}
}

func (p *Process) String() string {
	return fmt.Sprintf("%s (process %d on %s)", p.Name, p.PID(), p.Host.Name)
}

// PID is the process's id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// tail is the end of the log.
func (p *Process) tail(lines int) string {
	events, _, _ := p.journal.after(0)
	var b strings.Builder
	for _, e := range events[max(0, len(events)-lines):] {
		b.WriteString("  " + e.Line + "\n")
	}
	return b.String()
}

// Await waits for an event after the one that was awaited last, past or to come.
func (p *Process) Await(t testing.TB, m Match) Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	e, err := p.Next(ctx, m)
	if err != nil {
		t.Fatalf("%s did not log %s: %v; the end of its log:\n%s", p, m, err, p.tail(30))
	}
	return e
}

// Next is Await with an error: io.EOF says that the process has ended.
func (p *Process) Next(ctx context.Context, m Match) (Event, error) {
	p.mu.Lock()
	from := p.cursor
	p.mu.Unlock()
	e, behind, err := p.journal.next(ctx, from, m)
	if err == nil {
		p.mu.Lock()
		p.cursor = max(p.cursor, behind)
		p.mu.Unlock()
	}
	return e, err
}

// Skip forgets what was logged until now: Await looks only at what comes.
func (p *Process) Skip() {
	events, _, _ := p.journal.after(0)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cursor = len(events)
}

// Events is all that was logged until now.
func (p *Process) Events() []Event {
	events, _, _ := p.journal.after(0)
	return append([]Event(nil), events...)
}

// URL waits for "listening on http://…" and returns the address; Host.HTTP reaches it.
func (p *Process) URL(t testing.TB) string {
	t.Helper()
	const before = "listening on "
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	e, _, err := p.journal.next(ctx, 0, Match{before, func(e Event) bool { return e.Stdout && strings.HasPrefix(e.Message, before) }})
	if err != nil {
		t.Fatalf("%s does not listen: %v; the end of its log:\n%s", p, err, p.tail(30))
	}
	return strings.TrimPrefix(e.Message, before)
}

// Exit waits for the process and all that it wrote, and returns its exit code; -1 if a signal ended it.
func (p *Process) Exit(t testing.TB) int {
	t.Helper()
	select {
	case <-p.exited:
		p.journal.awaitEnd(time.Second)
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(Patience):
		t.Fatalf("%s does not end; the end of its log:\n%s", p, p.tail(30))
		return 0
	}
}

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Signal sends a signal and returns the moment before. After SIGSTOP the process has stopped.
func (p *Process) Signal(t testing.TB, s syscall.Signal) time.Time {
	t.Helper()
	at, err := signal(p.PID(), s, p.cmd.Process.Signal)
	if err != nil {
		t.Fatalf("%v to %s: %v", s, p, err)
	}
	return at
}

// Executor is a model family's process that a process started.
type Executor struct {
	PID    int
	Family string // the plugin's name
	handle *os.File
}

// Executors returns those that run now, the oldest first.
func (p *Process) Executors(t testing.TB) []*Executor {
	t.Helper()
	all, err := processes()
	if err != nil {
		t.Fatal(err)
	}
	var found []*Executor
	for _, c := range all {
		if c.parent != p.PID() || filepath.Base(filepath.Dir(c.program)) != "plugins" {
			continue
		}
		fd, err := unix.PidfdOpen(c.pid, 0)
		if err != nil {
			continue // it has just ended
		}
		e := &Executor{PID: c.pid, Family: filepath.Base(c.program), handle: os.NewFile(uintptr(fd), "pidfd")}
		t.Cleanup(func() { e.handle.Close() })
		found = append(found, e)
	}
	return found
}

// Signal sends a signal and returns the moment before. After SIGSTOP the executor has stopped.
func (e *Executor) Signal(t testing.TB, s syscall.Signal) time.Time {
	t.Helper()
	at, err := signal(e.PID, s, func(s os.Signal) error {
		return unix.PidfdSendSignal(int(e.handle.Fd()), s.(syscall.Signal), nil, 0)
	})
	if err != nil {
		t.Fatalf("%v to executor %s (process %d): %v", s, e.Family, e.PID, err)
	}
	return at
}

// AwaitEnd waits until the executor has ended.
func (e *Executor) AwaitEnd(t testing.TB) {
	t.Helper()
	poll := []unix.PollFd{{Fd: int32(e.handle.Fd()), Events: unix.POLLIN}}
	n, err := unix.Poll(poll, int(Patience.Milliseconds()))
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Poll(poll, int(Patience.Milliseconds()))
	}
	if err != nil || n != 1 {
		t.Fatalf("executor %s (process %d) still runs (%v)", e.Family, e.PID, err)
	}
}

func signal(pid int, s syscall.Signal, send func(os.Signal) error) (time.Time, error) {
	at := time.Now()
	if err := send(s); err != nil || s != syscall.SIGSTOP {
		return at, err
	}
	return at, retry(func() error {
		one, err := readProcess(pid)
		if err == nil && one.state != "T" {
			err = fmt.Errorf("its state is %q, not stopped", one.state)
		}
		return err
	})
}

// retry tries until there is no error, for as long as the kernel and a process may take to settle.
func retry(try func() error) error {
	const settle, pause = 10 * time.Second, 10 * time.Millisecond
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for deadline := time.Now().Add(settle); ; <-tick.C {
		err := try()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}
