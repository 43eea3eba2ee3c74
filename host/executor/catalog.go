// Package executor owns the executor processes of a host: it finds their binaries, decides which may be run,
// starts them, notices their death and ends them.
package executor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/mlxcel/mlxcel/sdk"
)

// Entry is one binary found in a plugin folder, or a folder that could not be read.
type Entry struct {
	Path            string // absolute
	Name            string // what it calls itself; the file's name until it has said so
	Version         string
	ContractVersion int
	Runtime         string // its tensor library
	Checksum        ChecksumState
	Device          sdk.Device // that stages load on: the first that it names
	Capabilities    []string
	Families        []sdk.Family // those that it serves
	Shadowed        []Shadow     // those that it could serve, were they not served by an executor found earlier
	Problem         error        // why it is not used; nil when it is
}

// Shadow is a family that an earlier executor serves.
type Shadow struct {
	Family string
	By     string // the earlier binary
}

// Used tells whether the executor serves a family.
func (e *Entry) Used() bool { return e.Problem == nil }

// Choice is an executor and the family of it that was asked for.
type Choice struct {
	Entry  Entry
	Family sdk.Family
}

// Catalog knows the executors that are installed and runs them. It is safe for concurrent use.
type Catalog struct {
	cfg     Config
	folders []folder
	*launcher

	scanned sync.Mutex // one Scan at a time
	state   sync.Mutex
	entries []Entry
	warm    map[string]*Process // started by Scan, by path, and not taken yet
}

// Open prepares the catalog: it makes the run folder of this process and sweeps those that killed hosts
// left. Nothing is started until Scan.
func Open(cfg Config) (*Catalog, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	launcher, err := newLauncher(cfg)
	if err != nil {
		return nil, err
	}
	return &Catalog{cfg: cfg, folders: pluginFolders(&cfg, runtime.GOOS), launcher: launcher, warm: map[string]*Process{}}, nil
}

// Close stops every executor that still runs and removes the run folder.
func (c *Catalog) Close(ctx context.Context) error { return c.launcher.close(ctx) }

// Folders returns where executors are looked for, in order.
func (c *Catalog) Folders() []string {
	out := make([]string, len(c.folders))
	for i, f := range c.folders {
		out[i] = f.path
	}
	return out
}

// Scan starts every candidate, all at once, asks it what it is, and returns what was found in the order of
// the folders and names. Executors that are used stay up until Start takes them or Release ends them. The
// error is that of ctx; what is wrong with a single binary stands in its Entry.
func (c *Catalog) Scan(ctx context.Context) ([]Entry, error) {
	c.scanned.Lock()
	defer c.scanned.Unlock()
	if err := c.Release(ctx); err != nil {
		return nil, err
	}
	entries, runnable := c.find()
	processes := make([]*Process, len(entries))
	var all sync.WaitGroup
	for i := range entries {
		if runnable[i] {
			all.Go(func() { entries[i], processes[i] = c.examine(ctx, entries[i].Path) })
		}
	}
	all.Wait()
	resolve(entries)
	warm := map[string]*Process{}
	var unused []*Process
	for i, p := range processes {
		switch {
		case p == nil:
		case entries[i].Used() && ctx.Err() == nil:
			warm[entries[i].Path] = p
		default:
			unused = append(unused, p)
		}
	}
	err := stopAll(ctx, unused)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("look for executors: %w", context.Cause(ctx))
	}
	c.state.Lock()
	defer c.state.Unlock()
	c.entries, c.warm = entries, warm
	return slices.Clone(entries), err
}

// find lists the candidates of every folder; runnable tells which entries are to be started.
func (c *Catalog) find() (entries []Entry, runnable []bool) {
	for _, f := range c.folders {
		paths, problems := candidates(f)
		for _, path := range paths {
			problems = append(problems, Entry{Path: path, Name: filepath.Base(path)})
		}
		slices.SortStableFunc(problems, func(a, b Entry) int { return strings.Compare(a.Path, b.Path) })
		for _, e := range problems {
			entries = append(entries, e)
			runnable = append(runnable, e.Problem == nil)
		}
	}
	return entries, runnable
}

// examine admits one candidate, starts it and asks it what it is.
func (c *Catalog) examine(ctx context.Context, path string) (Entry, *Process) {
	e := Entry{Path: path, Name: filepath.Base(path)}
	e.Checksum, e.Problem = c.admit(path)
	if e.Problem != nil {
		return e, nil
	}
	p, err := c.start(ctx, Spec{Plugin: path})
	if err != nil {
		if contract, ok := errors.AsType[*ContractError](err); ok {
			e.ContractVersion = contract.Got
		}
		e.Problem = err
		return e, nil
	}
	d, err := c.describe(ctx, path, p)
	if err != nil {
		e.Problem = errors.Join(err, p.Stop(ctx))
		return e, nil
	}
	e.Name, e.Version, e.Runtime, e.Families, e.Capabilities = d.Name, d.Version, d.Runtime, d.Families, d.Capabilities
	if len(d.Devices) > 0 {
		e.Device = d.Devices[0]
	}
	e.ContractVersion = d.ContractVersion
	return e, p
}

func (c *Catalog) describe(ctx context.Context, path string, p *Process) (*sdk.Description, error) {
	p.Enter(PhaseDescribe)
	defer p.Enter(PhaseIdle)
	limited, cancel := context.WithTimeout(ctx, c.cfg.StartTimeout)
	defer cancel()
	d, err := p.client.Describe(limited)
	switch {
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		return nil, &StartTimeoutError{Path: path, Timeout: c.cfg.StartTimeout, Phase: PhaseDescribe, LastLines: p.child.ring.last()}
	case errors.Is(err, sdk.ErrExecutorGone):
		if err = p.Explain(err); p.Err() == nil {
			err = &NotPluginError{Path: path, Err: err, LastLines: p.child.ring.last()}
		}
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("describe executor %s: %w", path, err)
	case d.ContractVersion != sdk.ContractVersion:
		return nil, &ContractError{Path: path, Want: sdk.ContractVersion, Got: d.ContractVersion}
	case len(d.Families) == 0:
		return nil, fmt.Errorf("%s serves no family: its Describe names none", path)
	}
	return d, nil
}

// resolve gives each family to the first executor that serves it.
func resolve(entries []Entry) {
	owner := map[string]string{}
	for i := range entries {
		e := &entries[i]
		if !e.Used() {
			continue
		}
		var kept []sdk.Family
		for _, f := range e.Families {
			if by, taken := owner[f.Name]; taken {
				e.Shadowed = append(e.Shadowed, Shadow{Family: f.Name, By: by})
				continue
			}
			owner[f.Name] = e.Path
			kept = append(kept, f)
		}
		e.Families = kept
		if len(kept) == 0 {
			e.Problem = &DuplicateError{Path: e.Path, Shadowed: e.Shadowed}
		}
	}
}

// ForModelType returns the executor for a value of config.json's model_type, by the last Scan. The error is
// an *UnknownModelError.
func (c *Catalog) ForModelType(modelType string) (Choice, error) {
	return c.choose("model_type", modelType, func(f *sdk.Family) bool { return slices.Contains(f.ModelTypes, modelType) })
}

// ForFamily returns the executor for a family's wire name, by the last Scan. The error is an
// *UnknownModelError.
func (c *Catalog) ForFamily(name string) (Choice, error) {
	return c.choose("family", name, func(f *sdk.Family) bool { return f.Name == name })
}

// ForImport returns the executor that can import a container such as "gguf:llama", by the last Scan. The
// error is an *UnknownModelError.
func (c *Catalog) ForImport(container string) (Choice, error) {
	return c.choose("container", container, func(f *sdk.Family) bool { return slices.Contains(f.Imports, container) })
}

func (c *Catalog) choose(kind, name string, fits func(*sdk.Family) bool) (Choice, error) {
	c.state.Lock()
	defer c.state.Unlock()
	unknown := &UnknownModelError{Kind: kind, Name: name, Folders: c.Folders()}
	for _, e := range c.entries {
		if !e.Used() {
			unknown.Unused = append(unknown.Unused, e)
			continue
		}
		for i := range e.Families {
			f := &e.Families[i]
			if fits(f) {
				return Choice{Entry: e, Family: *f}, nil
			}
			unknown.Installed = append(unknown.Installed, InstalledFamily{Family: f.Name, ModelTypes: f.ModelTypes, Imports: f.Imports, Plugin: e.Path})
		}
	}
	return Choice{}, unknown
}

// Start returns a running executor: the one that Scan left running, where there is one, else a new process.
// The owner and the checksum of the binary are checked again before a new process. ctx bounds the start
// only. Errors are those that an Entry can have as its Problem.
func (c *Catalog) Start(ctx context.Context, spec Spec) (*Process, error) {
	if p := c.take(spec.Plugin); p != nil {
		p.SetStage(spec.Stage)
		return p, nil
	}
	return c.Launch(ctx, spec)
}

// take returns the warm process of a binary, if it still lives.
func (c *Catalog) take(path string) *Process {
	c.state.Lock()
	defer c.state.Unlock()
	p := c.warm[path]
	if p == nil || p.Err() != nil {
		return nil // a dead one stays for Release
	}
	delete(c.warm, path)
	return p
}

// Launch starts a new process. Start is to be preferred where a fresh one is not needed.
func (c *Catalog) Launch(ctx context.Context, spec Spec) (*Process, error) {
	if _, err := c.admit(spec.Plugin); err != nil {
		return nil, err
	}
	return c.start(ctx, spec)
}

// Release ends the executors that Scan left running and nobody took.
func (c *Catalog) Release(ctx context.Context) error {
	c.state.Lock()
	var idle []*Process
	for _, p := range c.warm {
		idle = append(idle, p)
	}
	c.warm = map[string]*Process{}
	c.state.Unlock()
	return stopAll(ctx, idle)
}

// Return gives back a process that was taken for calls that leave nothing behind, so that the next Start of its
// binary finds it. Where one waits already, p runs on until Close.
func (c *Catalog) Return(p *Process) {
	c.state.Lock()
	defer c.state.Unlock()
	if c.warm[p.plugin] == nil {
		c.warm[p.plugin] = p
	}
}
