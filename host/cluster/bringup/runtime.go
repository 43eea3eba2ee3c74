package bringup

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// Runtime is what a peer's machine brings: a model, the executor that runs it, and memory.
type Runtime interface {
	// Inspect looks at the model once. A model without an executor is no error: Inspection.Problem says so, and the
	// coordinator is told. One whose files are missing or broken is.
	Inspect(ctx context.Context) (*Inspection, error)
	// Device counts the memory again.
	Device(ctx context.Context) (sdk.Device, error)
	// Launcher starts the executor of a stage. It is asked for after Inspect.
	Launcher() pipeline.Launcher
	// Close ends everything that was started.
	Close(ctx context.Context) error
}

// ModelConfig is the model on a peer's machine.
type ModelConfig struct {
	Dir     string    // the model folder
	Dtype   sdk.Dtype // of the activations; DtypeAuto takes the checkpoint's own
	Threads int       // compute threads of the stage; 0 lets the executor choose
}

// LocalConfig is what Local needs.
type LocalConfig struct {
	Model   ModelConfig
	Version string // of the program
	Verify  bool   // hash the weights (--verify), which reads them all
	Plugins executor.Config
}

// Local is the Runtime of executor plugins.
type Local struct {
	cfg     LocalConfig
	catalog *executor.Catalog
	choice  executor.Choice
}

// OpenLocal prepares the search for executors.
func OpenLocal(cfg LocalConfig) (*Local, error) {
	dir, err := filepath.Abs(cfg.Model.Dir) // what an executor is told must not hang on where it runs
	if err != nil {
		return nil, err
	}
	cfg.Model.Dir = dir
	catalog, err := executor.Open(cfg.Plugins)
	if err != nil {
		return nil, err
	}
	return &Local{cfg: cfg, catalog: catalog}, nil
}

// Inspect is Runtime's.
func (l *Local) Inspect(ctx context.Context) (*Inspection, error) {
	model, err := modelrepo.Open(l.cfg.Model.Dir)
	if err != nil {
		return nil, err
	}
	if err := model.RequireWeights(); err != nil {
		return nil, err
	}
	entries, err := l.catalog.Scan(ctx)
	if err != nil {
		return nil, err
	}
	out := &Inspection{ModelType: model.ModelType, Folders: l.catalog.Folders()}
	for _, e := range entries {
		if e.Used() {
			out.Executors = append(out.Executors, sdk.Description{Name: e.Name, Version: e.Version, Families: e.Families})
		}
	}
	var unknown *executor.UnknownModelError
	l.choice, err = l.catalog.ForModelType(model.ModelType)
	switch {
	case errors.As(err, &unknown):
		out.Problem = err.Error()
		if err := l.catalog.Release(ctx); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	default:
		if err := l.profile(ctx, out); err != nil {
			return nil, err
		}
	}
	layers := 0
	if out.Profile != nil {
		layers = len(out.Profile.Layers)
	}
	if out.Identity, err = cluster.Identify(model, layers, l.cfg.Version); err != nil {
		return nil, err
	}
	if l.cfg.Verify {
		out.Identity, err = out.Identity.WithHashes(ctx, l.cfg.Model.Dir)
	}
	return out, err
}

// profile asks the chosen executor about the model.
func (l *Local) profile(ctx context.Context, out *Inspection) error {
	path := l.choice.Entry.Path
	out.Plugin = strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	out.Family, out.Device = l.choice.Family, l.choice.Entry.Device
	return l.ask(ctx, func(c *sdk.Client) (err error) {
		if err := l.catalog.Release(ctx); err != nil { // those of other families
			return err
		}
		out.Profile, err = c.Inspect(ctx, sdk.InspectRequest{Dir: l.cfg.Model.Dir, Dtype: l.cfg.Model.Dtype})
		return err
	})
}

// ask calls the executor of the model. Its process stays up, and becomes that of the next stage.
func (l *Local) ask(ctx context.Context, call func(*sdk.Client) error) error {
	p, err := l.waiting(ctx)
	if err != nil {
		return err
	}
	if err := call(p.Client()); err != nil {
		return errors.Join(p.Explain(err), p.Stop(ctx))
	}
	l.catalog.Return(p)
	return nil
}

// waiting returns the executor that waits for a stage. One that died meanwhile, or stands still, is replaced: nothing is lost with it.
func (l *Local) waiting(ctx context.Context) (*executor.Process, error) {
	spec := executor.Spec{Plugin: l.choice.Entry.Path, Stage: "waiting for a stage"}
	p, err := l.catalog.Start(ctx, spec)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, sdk.PingTimeout)
	defer cancel()
	if _, err = p.Health(limited); err == nil {
		return p, nil
	}
	if failed := errors.Join(p.Kill(), p.Stop(ctx)); failed != nil || ctx.Err() != nil {
		return nil, errors.Join(err, failed)
	}
	if log := l.cfg.Plugins.Logger; log != nil {
		log.Warn("an executor that waited for a stage is replaced", "error", err)
	}
	return l.catalog.Launch(ctx, spec)
}

// Device is Runtime's.
func (l *Local) Device(ctx context.Context) (device sdk.Device, err error) {
	if l.choice.Entry.Path == "" {
		return sdk.Device{}, nil
	}
	err = l.ask(ctx, func(c *sdk.Client) error {
		d, err := c.Describe(ctx)
		if err == nil && len(d.Devices) > 0 {
			device = d.Devices[0]
		}
		return err
	})
	return device, err
}

// Launcher is Runtime's.
func (l *Local) Launcher() pipeline.Launcher {
	return pipeline.Local{Catalog: l.catalog, Plugin: l.choice.Entry.Path}
}

// runtimeStopTimeout bounds the ordered end of all executors; past it they are killed.
const runtimeStopTimeout = 10 * time.Second

// Close is Runtime's.
func (l *Local) Close(ctx context.Context) error { return l.catalog.Close(ctx) }
