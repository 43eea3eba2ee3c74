package executor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/mlxcel/mlxcel/sdk"
)

// Process is one executor process that has come up. Whoever has it must Stop it, also when it died: that is
// what frees its region and its folder.
type Process struct {
	cfg      Config
	plugin   string
	folder   string
	region   *sdk.Region
	channel  *sdk.SideChannel
	child    *child
	goplugin *plugin.Client
	client   *sdk.Client
	forget   func()

	mu    sync.Mutex
	stage string
	phase Phase

	stats atomic.Pointer[sdk.Stats] // the last that it told of itself

	stopping atomic.Bool
	done     chan struct{}
	err      error // set before done closes
	stopOnce sync.Once
	stopErr  error
}

// Client returns the typed client.
func (p *Process) Client() *sdk.Client { return p.client }

// Region returns the memory shared with the executor. It is unmapped by Stop.
func (p *Process) Region() *sdk.Region { return p.region }

// Plugin returns the path of the binary.
func (p *Process) Plugin() string { return p.plugin }

// PID returns the process's number.
func (p *Process) PID() int { return p.child.pid() }

// Done is closed when the process has ended, whether it was asked to or not.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err returns a *DeathError when the process ended without being asked to, or otherwise than asked, and nil
// while it lives or after a Stop.
func (p *Process) Err() error {
	select {
	case <-p.done:
		return p.err
	default:
		return nil
	}
}

// Enter names what the executor is about to do, for the error should it die in it.
func (p *Process) Enter(phase Phase) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.phase = phase
}

// SetStage names what the executor holds, for messages.
func (p *Process) SetStage(stage string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stage = stage
}

// Explain turns the error of a call into the death behind it, where there is one: a connection breaks a
// moment before the process is reaped.
func (p *Process) Explain(err error) error {
	if !errors.Is(err, sdk.ErrExecutorGone) {
		return err
	}
	wait := time.NewTimer(time.Second)
	defer wait.Stop()
	select {
	case <-p.done:
	case <-wait.C:
		return fmt.Errorf("executor %s (pid %d) closed its connection but still runs: %w", p.plugin, p.PID(), err)
	}
	death, ok := errors.AsType[*DeathError](p.err)
	if !ok {
		return err // it was stopped
	}
	with := *death
	with.Err = err
	return &with
}

// Health is a sign of life.
type Health struct {
	RoundTrip time.Duration // of an empty call
	Stats     *sdk.Stats    // Stats.Steps tells progress, see Progress; nil during a load, whose own progress tells
}

// Health asks the process for a sign of life and for its counters. Without a deadline in ctx it waits
// sdk.PingTimeout. The error is a *DeathError when the process is gone, an *UnresponsiveError when it runs
// but does not answer.
func (p *Process) Health(ctx context.Context) (Health, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, sdk.PingTimeout)
		defer cancel()
	}
	var h Health
	begin := time.Now()
	err := p.client.Ping(ctx)
	h.RoundTrip = time.Since(begin)
	if err == nil && p.currentPhase() != PhaseLoad {
		if h.Stats, err = p.client.Stats(ctx); err == nil {
			p.stats.Store(h.Stats)
		}
	}
	if err != nil {
		return h, p.unresponsive(err, time.Since(begin))
	}
	return h, nil
}

// unresponsive gives the error of a health call its type.
func (p *Process) unresponsive(err error, waited time.Duration) error {
	if !errors.Is(err, context.DeadlineExceeded) || p.Err() != nil {
		return p.Explain(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return &UnresponsiveError{Stage: p.stage, Plugin: p.plugin, PID: p.PID(), Phase: p.phase, Waited: waited, Err: err}
}

func (p *Process) currentPhase() Phase {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.phase
}

// connect starts the process and the gRPC connection to it. When ctx ends first, the process is killed.
func (p *Process) connect(ctx context.Context) error {
	type result struct {
		client *sdk.Client
		err    error
	}
	up := make(chan result, 1)
	go func() {
		client, err := sdk.Dispense(p.goplugin)
		up <- result{client, err}
	}()
	select {
	case r := <-up:
		if r.err == nil {
			p.client = r.client
			p.Enter(PhaseIdle)
		}
		return r.err
	case <-ctx.Done():
		// go-plugin holds its lock while it starts; killing the child is what makes it let go.
		stuck := p.child.end()
		if stuck == nil {
			<-up
		}
		return errors.Join(ctx.Err(), stuck)
	}
}

// failedStart frees everything of a process that did not come up, and says why it did not.
func (p *Process) failedStart(ctx context.Context, err error) error {
	if p.child.pid() != 0 && !p.child.endsWithin(drainTime) {
		if stuck := p.child.end(); stuck != nil {
			return errors.Join(err, stuck)
		}
	}
	return errors.Join(p.classify(ctx, err), p.free())
}

// classify turns a failed start into an error that says what the program did instead.
func (p *Process) classify(ctx context.Context, err error) error {
	seen, version, output := p.child.handshake.result()
	lines := p.child.ring.last()
	switch startErr := p.child.startErr; {
	case ctx.Err() != nil:
		return fmt.Errorf("start of executor %s: %w", p.plugin, context.Cause(ctx))
	case errors.Is(startErr, syscall.ENOEXEC) || errors.Is(startErr, syscall.ENOENT):
		return &NotPluginError{Path: p.plugin, Err: startErr}
	case p.child.pid() == 0:
		return fmt.Errorf("start executor %s: %w", p.plugin, err)
	case seen && version != sdk.ContractVersion:
		return &ContractError{Path: p.plugin, Want: sdk.ContractVersion, Got: version}
	case !seen && output != "":
		return &NotPluginError{Path: p.plugin, Output: output, LastLines: lines}
	case errors.Is(err, context.DeadlineExceeded):
		return &StartTimeoutError{Path: p.plugin, Timeout: p.cfg.StartTimeout, Phase: PhaseStart, LastLines: lines}
	case p.child.died():
		return p.death()
	case !seen:
		return &NotPluginError{Path: p.plugin, LastLines: lines}
	}
	return &NotPluginError{Path: p.plugin, LastLines: lines, Err: err}
}

// watch waits for the process's end.
func (p *Process) watch() {
	<-p.child.exited
	// A crash just before Stop, or during it, is a death all the same.
	if !p.stopping.Load() || p.child.died() {
		p.err = p.death()
	}
	close(p.done)
}

func (p *Process) death() *DeathError {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := &DeathError{
		Stage: p.stage, Plugin: p.plugin, Phase: p.phase, PID: p.child.pid(),
		ExitCode: p.child.state.ExitCode(), LastLines: p.child.ring.last(), Stats: p.stats.Load(),
	}
	if status, ok := p.child.state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		e.Signal = status.Signal()
	}
	return e
}

// Kill ends the process at once, also one that stands still, and returns when it is reaped. What belonged to it stays
// until Stop, which must follow.
func (p *Process) Kill() error { return p.child.end() }

// Stop ends the process and frees what belongs to it. It asks over the contract first, then sends SIGTERM,
// then SIGKILL, each after its time in Config; the end of ctx goes straight to SIGKILL. It returns once the
// process is reaped, at the latest a few seconds after SIGKILL with a *StuckError. Nobody may use the region
// any more when it is called. It may be called more than once and at any time.
func (p *Process) Stop(ctx context.Context) error {
	p.stopOnce.Do(func() { p.stopErr = p.stop(ctx) })
	return p.stopErr
}

func (p *Process) stop(ctx context.Context) error {
	defer p.forget()
	p.stopping.Store(true)
	asked := make(chan struct{})
	grace, cancel := context.WithTimeout(ctx, p.cfg.GraceTimeout)
	defer cancel()
	go func() {
		defer close(asked)
		p.ask(grace, cancel)
	}()
	if !p.child.endsBefore(grace, p.cfg.GraceTimeout) {
		p.child.term()
		if !p.child.endsBefore(ctx, p.cfg.TermTimeout) {
			if err := p.child.end(); err != nil {
				return err
			}
		}
	}
	<-asked // its connection broke with the process
	<-p.done
	return p.free()
}

// ask ends the executor's server, upon which its main returns. Where nobody listens it calls deaf, so that
// no grace is wasted. It returns at the latest when the process is gone.
func (p *Process) ask(ctx context.Context, deaf func()) {
	if p.client.Ping(ctx) != nil {
		deaf()
		return
	}
	if protocol, err := p.goplugin.Client(); err == nil {
		_ = protocol.Close()
	}
}

// free gives back what belonged to a process that has ended.
func (p *Process) free() error {
	p.goplugin.Kill() // waits for go-plugin's goroutines
	return errors.Join(p.channel.Close(), p.region.Close(), os.RemoveAll(p.folder))
}

// printed logs what an executor prints through Go's os.Stdout and os.Stderr, which go-plugin redirects.
type printed struct {
	log  hclog.Logger
	ring *logRing
}

func (w printed) Write(b []byte) (int, error) {
	for line := range strings.Lines(string(b)) {
		line = strings.TrimRight(line, "\r\n")
		w.ring.add(line)
		w.log.Debug(line)
	}
	return len(b), nil
}
