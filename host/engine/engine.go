// Package engine owns one running model: it takes a folder from its files, over the executor's profile and the plan,
// to a pipeline that answers requests.
package engine

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/gguf"
	"github.com/mlxcel/mlxcel/host/modelimport"
	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// Config says which model to run, and how.
type Config struct {
	Model         string // the model folder
	Pipeline      partition.PipelineConfig
	Dtype         sdk.Dtype // of the activations; DtypeAuto takes the checkpoint's own
	Threads       int       // compute threads of each stage; 0 lets the executor choose
	PrefillChunk  int       // prompt rows per step at most, default 512
	KVBudgets     []int64   // bytes of sequences' state that each stage may hold, one for each or one for all; nil for no limit
	Epoch         uint64    // of the pipeline, larger with every restart; default 1
	Plugins       executor.Config
	TemplateFile  string           // a chat template in place of the model's; empty takes the model's
	TemplateCheck []string         // command that tries a chat template in a process of its own (chat.Probe)
	Now           func() time.Time // default time.Now
	Logger        hclog.Logger     // default none
}

// DefaultPrefillChunk is the number of prompt rows per step where nothing is asked for.
const DefaultPrefillChunk = 512

// stopTimeout bounds the ordered end of all executors; past it they are killed.
const stopTimeout = 10 * time.Second

func (c Config) withDefaults() Config {
	if c.PrefillChunk == 0 {
		c.PrefillChunk = DefaultPrefillChunk
	}
	if c.Epoch == 0 {
		c.Epoch = 1
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	c.Plugins.Logger = c.Logger.Named("executor")
	return c
}

// Validate returns the faults that can be told before anything is started, all at once.
func (c *Config) Validate() error {
	faults := []error{c.Pipeline.Validate(nil)}
	if c.PrefillChunk < 0 {
		faults = append(faults, fmt.Errorf("--prefill-chunk-size %d: a chunk needs at least 1 row", c.PrefillChunk))
	}
	if c.Threads < 0 {
		faults = append(faults, fmt.Errorf("--threads %d: give 1 or more, or leave the flag out", c.Threads))
	}
	return errors.Join(faults...)
}

// withCatalog scans the plugin folders and runs f; every executor that f leaves running is ended.
func withCatalog(ctx context.Context, cfg executor.Config, f func(*executor.Catalog, []executor.Entry) error) (err error) {
	catalog, err := executor.Open(cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeCatalog(ctx, catalog)) }()
	entries, err := catalog.Scan(ctx)
	if err != nil {
		return err
	}
	return f(catalog, entries)
}

// closeCatalog ends all executors also where ctx is over already.
func closeCatalog(ctx context.Context, catalog *executor.Catalog) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	return catalog.Close(ctx)
}

// PluginList is what a search for executors found.
type PluginList struct {
	Entries []executor.Entry
	Folders []string // looked through, in order
}

// Plugins finds the installed executors.
func Plugins(ctx context.Context, cfg Config) (*PluginList, error) {
	cfg = cfg.withDefaults()
	var list PluginList
	err := withCatalog(ctx, cfg.Plugins, func(c *executor.Catalog, entries []executor.Entry) error {
		list = PluginList{Entries: entries, Folders: c.Folders()}
		return nil
	})
	return &list, err
}

// ImportGGUF writes the model in the GGUF file to a new folder.
func ImportGGUF(ctx context.Context, cfg Config, file, dir string) (report *modelimport.Report, err error) {
	cfg = cfg.withDefaults()
	f, err := gguf.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	err = withCatalog(ctx, cfg.Plugins, func(c *executor.Catalog, _ []executor.Entry) error {
		choice, err := c.ForImport("gguf:" + f.Architecture())
		if err != nil {
			return err
		}
		p, err := c.Start(ctx, executor.Spec{Plugin: choice.Entry.Path, Stage: "import"})
		if err != nil {
			return err
		}
		report, err = modelimport.GGUF(ctx, f, dir, p.Client())
		return p.Explain(err)
	})
	return report, err
}

// Inspection is what is known of a model folder without loading it.
type Inspection struct {
	Model   *modelrepo.Model
	Family  sdk.Family
	Plugin  string // path of the executor
	Profile *sdk.ModelProfile
	Checks  []Check
}

// Check is one finding on a model folder. Err is nil where all is well.
type Check struct {
	Name string
	Text string // what was found
	Err  error
}

// Inspect profiles the model folder and checks its files.
func Inspect(ctx context.Context, cfg Config) (out *Inspection, err error) {
	cfg = cfg.withDefaults()
	model, err := modelrepo.Open(cfg.Model)
	if err != nil {
		return nil, err
	}
	out = &Inspection{Model: model, Checks: checks(model)}
	err = withCatalog(ctx, cfg.Plugins, func(c *executor.Catalog, _ []executor.Entry) error {
		choice, err := c.ForModelType(model.ModelType)
		if err != nil {
			return err
		}
		out.Family, out.Plugin = choice.Family, choice.Entry.Path
		out.Profile, err = inspect(ctx, c, choice, cfg)
		if err != nil && model.WeightsErr != nil {
			out.Checks = append(out.Checks, Check{Name: "profile", Err: err}) // the weights' own check says why
			return nil
		}
		return err
	})
	return out, err
}

// inspect asks the chosen executor about the model. Its process stays up for whoever starts that executor next.
func inspect(ctx context.Context, c *executor.Catalog, choice executor.Choice, cfg Config) (*sdk.ModelProfile, error) {
	dir, err := filepath.Abs(cfg.Model) // what an executor is told must not hang on where it runs
	if err != nil {
		return nil, err
	}
	p, err := c.Start(ctx, executor.Spec{Plugin: choice.Entry.Path, Stage: "inspect"})
	if err != nil {
		return nil, err
	}
	profile, err := p.Client().Inspect(ctx, sdk.InspectRequest{Dir: dir, Dtype: cfg.Dtype})
	if err != nil {
		return nil, p.Explain(err)
	}
	c.Return(p)
	return profile, nil
}
