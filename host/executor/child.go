package executor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
)

// child is one operating system process and its pipes. It is the runner that go-plugin starts and waits on,
// so that this package, not go-plugin, owns the process: it learns of a death from wait(2) itself and
// never through a lock that go-plugin holds while it starts.
type child struct {
	cmd *exec.Cmd
	log hclog.Logger

	ring      logRing
	handshake handshake

	stdoutR, stderrR *os.File
	lines            *io.PipeReader // the handshake line, for go-plugin
	linesW           *io.PipeWriter

	number   atomic.Int64     // the process's; 0 before it started
	killed   atomic.Bool      // by us, or to be killed by us as soon as it is there
	termed   atomic.Bool      // by us
	startErr error            // set before exited closes, when it could not be started
	state    *os.ProcessState // set before exited closes, when it was
	exited   chan struct{}    // closed once the process is reaped and its pipes are drained
}

// drainTime bounds how long a dead process's pipes are still read: somebody else may hold them open.
const drainTime = 200 * time.Millisecond

func newChild(cmd *exec.Cmd, log hclog.Logger) *child {
	c := &child{cmd: cmd, log: log, exited: make(chan struct{})}
	c.lines, c.linesW = io.Pipe()
	return c
}

// Start starts the process.
func (c *child) Start(context.Context) error {
	stdoutW, stderrW, err := c.openPipes()
	if err != nil {
		return err
	}
	c.cmd.Stdin = nil // go-plugin ties it to the host's
	c.cmd.Stdout, c.cmd.Stderr = stdoutW, stderrW
	c.cmd.SysProcAttr = processAttributes()
	started := make(chan error, 1)
	go c.run(started)
	err = <-started
	stdoutW.Close()
	stderrW.Close()
	return err
}

func (c *child) openPipes() (stdoutW, stderrW *os.File, err error) {
	if c.stdoutR, stdoutW, err = os.Pipe(); err != nil {
		return nil, nil, err
	}
	if c.stderrR, stderrW, err = os.Pipe(); err != nil {
		c.stdoutR.Close()
		stdoutW.Close()
		return nil, nil, err
	}
	return stdoutW, stderrW, nil
}

// run starts the process, waits for it and reaps it, all on one operating system thread: Linux sends the
// parent-death signal when the thread that started the child ends, not when the process does, so that
// thread has to live as long as the child.
func (c *child) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := c.cmd.Start(); err != nil {
		c.startErr = err
		c.stdoutR.Close()
		c.stderrR.Close()
		c.linesW.Close()
		close(c.exited)
		started <- err
		return
	}
	c.number.Store(int64(c.cmd.Process.Pid))
	if c.killed.Load() { // given up while it was being started
		_ = c.cmd.Process.Kill()
	}
	var pumps sync.WaitGroup
	pumps.Go(func() { pumpLog(c.stderrR, c.log, &c.ring) })
	pumps.Go(func() { c.pumpStdout() })
	started <- nil

	// The error only repeats what the state says: both outputs are plain files.
	_ = c.cmd.Wait()
	c.state = c.cmd.ProcessState
	// What it had started itself goes with it. The group's number can't be taken anew while a member lives,
	// and process numbers are not reused at once.
	_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
	deadline := time.Now().Add(drainTime)
	_ = c.stdoutR.SetReadDeadline(deadline)
	_ = c.stderrR.SetReadDeadline(deadline)
	pumps.Wait()
	c.stdoutR.Close()
	c.stderrR.Close()
	close(c.exited)
}

// pumpStdout hands the handshake line to go-plugin and logs everything else. A library that prints a banner
// before the handshake does no harm; a program that prints too much of something else is no plugin.
func (c *child) pumpStdout() {
	defer c.linesW.Close()
	eachLine(c.stdoutR, func(line string) {
		switch c.handshake.take(line) {
		case lineHandshake:
			_, _ = io.WriteString(c.linesW, line+"\n")
		case lineTooMuch:
			c.linesW.Close()
		case lineNoise:
			c.log.Debug("executor printed", "stdout", line)
		}
	})
}

// Wait blocks until the process is reaped.
func (c *child) Wait(context.Context) error {
	<-c.exited
	if c.state == nil || c.state.Success() {
		return nil
	}
	return &exec.ExitError{ProcessState: c.state}
}

// Kill does nothing: go-plugin calls it when a start fails, and a process shall first have the chance to end
// by itself, so that how it ended tells what was wrong. The Process calls end then.
func (c *child) Kill(context.Context) error { return nil }

func (c *child) signal(sig os.Signal) error {
	if c.pid() == 0 {
		return nil
	}
	if err := c.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

func (c *child) pid() int { return int(c.number.Load()) }

// endsWithin waits for the process's end.
func (c *child) endsWithin(d time.Duration) bool { return c.endsBefore(context.Background(), d) }

// endsBefore waits for the process's end, until d has passed or ctx ends.
func (c *child) endsBefore(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c.exited:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// term asks the process to end.
func (c *child) term() {
	c.termed.Store(true)
	_ = c.signal(syscall.SIGTERM) // end comes next
}

// end kills the process and waits until it is reaped. One that is being started ends as it starts.
func (c *child) end() error {
	c.killed.Store(true)
	if err := c.signal(syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill executor %s: %w", c.cmd.Path, err)
	}
	if !c.endsWithin(killTimeout) {
		return &StuckError{Plugin: c.cmd.Path, PID: c.pid(), Waited: killTimeout}
	}
	return nil
}

// died tells whether the ended process ended badly, and not by a signal of ours.
func (c *child) died() bool {
	if c.state == nil || c.state.Success() {
		return false
	}
	status, ok := c.state.Sys().(syscall.WaitStatus)
	ours := ok && (status.Signal() == syscall.SIGKILL && c.killed.Load() || status.Signal() == syscall.SIGTERM && c.termed.Load())
	return !ours
}

// Stdout is the handshake line; the rest of the program's output is not go-plugin's business.
func (c *child) Stdout() io.ReadCloser { return c.lines }

// Stderr is empty for go-plugin: pumpLog reads the real one.
func (c *child) Stderr() io.ReadCloser { return io.NopCloser(strings.NewReader("")) }

func (c *child) Name() string { return c.cmd.Path }

func (c *child) ID() string {
	if pid := c.pid(); pid != 0 {
		return strconv.Itoa(pid)
	}
	return ""
}

// Diagnose is empty: the caller makes its own error of what the child printed.
func (c *child) Diagnose(context.Context) string { return "" }

// PluginToHost and HostToPlugin are the identity: both live on one file system.
func (c *child) PluginToHost(network, addr string) (string, string, error) { return network, addr, nil }
func (c *child) HostToPlugin(network, addr string) (string, string, error) { return network, addr, nil }
