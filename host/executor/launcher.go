package executor

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"github.com/mlxcel/mlxcel/sdk"
)

// Spec says which executor to start, and for what.
type Spec struct {
	Plugin string // path of the binary
	Stage  string // what it will hold, for messages, e.g. "stage 1 (layers 15-29)"; may be empty
}

// launcher starts executor processes and knows those that live.
type launcher struct {
	cfg      Config
	run      *runFolder
	lifeline *sdk.Lifeline // one for all: the host never closes it while an executor is to live

	mu    sync.Mutex
	count int
	live  []*Process
}

func newLauncher(cfg Config) (*launcher, error) {
	run, err := openRunFolder(cfg.RunBase, cfg.UID)
	if err != nil {
		return nil, err
	}
	lifeline, err := sdk.NewLifeline()
	if err != nil {
		return nil, errors.Join(err, run.close())
	}
	return &launcher{cfg: cfg, run: run, lifeline: lifeline}, nil
}

// close stops every executor that still lives and removes the run folder.
func (l *launcher) close(ctx context.Context) error {
	l.mu.Lock()
	live := slices.Clone(l.live)
	l.mu.Unlock()
	return errors.Join(stopAll(ctx, live), l.lifeline.Close(), l.run.close())
}

func stopAll(ctx context.Context, processes []*Process) error {
	errs := make([]error, len(processes))
	var all sync.WaitGroup
	for i, p := range processes {
		all.Go(func() { errs[i] = p.Stop(ctx) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// admit checks that the binary may be run: whose it is, who may change it, and its checksum.
func (l *launcher) admit(path string) (ChecksumState, error) {
	if err := checkTrust(path, l.cfg.UID); err != nil {
		return ChecksumNone, err
	}
	return checkChecksum(path, l.cfg.RequireChecksum)
}

// start runs an admitted binary up to the point where it answers calls.
func (l *launcher) start(ctx context.Context, spec Spec) (*Process, error) {
	p, err := l.prepare(spec)
	if err != nil {
		return nil, err
	}
	startCtx, cancel := context.WithTimeout(ctx, l.cfg.StartTimeout)
	defer cancel()
	if err := p.connect(startCtx); err != nil {
		return nil, p.failedStart(ctx, err)
	}
	l.mu.Lock()
	l.live = append(l.live, p)
	l.mu.Unlock()
	go p.watch()
	return p, nil
}

// prepare makes everything that a process needs before it starts.
func (l *launcher) prepare(spec Spec) (*Process, error) {
	l.mu.Lock()
	l.count++
	number := l.count
	l.mu.Unlock()
	folder, err := l.run.subfolder(number)
	if err != nil {
		return nil, err
	}
	region, err := sdk.NewRegion()
	if err != nil {
		return nil, err
	}
	channel, err := sdk.NewSideChannel()
	if err != nil {
		return nil, errors.Join(err, region.Close())
	}
	p := &Process{
		cfg: l.cfg, plugin: spec.Plugin, stage: spec.Stage, phase: PhaseStart,
		folder: folder, region: region, channel: channel, done: make(chan struct{}),
	}
	p.forget = func() { l.forget(p) }
	log := l.cfg.Logger.Named(filepath.Base(spec.Plugin))
	p.child = newChild(l.command(spec.Plugin, folder, region, channel), log)
	config := sdk.ClientConfig(nil, region, channel, hclog.NewNullLogger())
	config.StartTimeout = 2 * l.cfg.StartTimeout // connect's own deadline comes first
	config.SyncStdout, config.SyncStderr = printed{log, &p.child.ring}, printed{log, &p.child.ring}
	config.UnixSocketConfig = &plugin.UnixSocketConfig{TempDir: folder}
	config.RunnerFunc = func(_ hclog.Logger, cmd *exec.Cmd, _ string) (runner.Runner, error) {
		// go-plugin's own socket folder has too long a name for macOS: the later of two settings counts.
		p.child.cmd.Env = append(p.child.cmd.Env, cmd.Env...)
		p.child.cmd.Env = append(p.child.cmd.Env, plugin.EnvUnixSocketDir+"="+folder)
		return p.child, nil
	}
	p.goplugin = plugin.NewClient(config)
	return p, nil
}

func (l *launcher) command(path, folder string, region *sdk.Region, channel *sdk.SideChannel) *exec.Cmd {
	cmd := exec.Command(path)
	cmd.Env = append(childEnvironment(l.cfg.Environ, l.cfg.PassEnv),
		"TMPDIR="+folder,
		sdk.EnvLogLevel+"="+logLevel(l.cfg.Logger).String())
	sdk.Inherit(cmd, region, l.lifeline, channel)
	return cmd
}

// logLevel is the level that executors log at: the host's, but never less than info, because their last lines
// explain a death.
func logLevel(host hclog.Logger) hclog.Level {
	if level := host.GetLevel(); level != hclog.NoLevel {
		return min(level, hclog.Info)
	}
	return hclog.Info
}

func (l *launcher) forget(p *Process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live = slices.DeleteFunc(l.live, func(q *Process) bool { return q == p })
}
