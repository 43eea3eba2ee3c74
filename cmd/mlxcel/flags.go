package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/urfave/cli/v2"
)

const (
	groupPipeline = "pipeline"
	groupSampling = "sampling"
	groupScripts  = "for scripts"
	groupPlugins  = "executors"
)

func pluginFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "plugin-dir", Category: groupPlugins, Usage: "search `FOLDER` for executors before all others; may be given again"},
		&cli.BoolFlag{Name: "plugin-require-checksum", Category: groupPlugins, Usage: "refuse an executor without a .sha256 file beside it"},
		&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "print the plan and log what happens"},
	}
}

func modelFlag() cli.Flag {
	return &cli.StringFlag{Name: "model", Aliases: []string{"m"}, Usage: "model `FOLDER` with config.json and *.safetensors"}
}

func dtypeFlag() cli.Flag {
	return &cli.StringFlag{Name: "dtype", Value: "auto", Usage: "activations: auto, float32, bfloat16 or float16; float32 raises every floating tensor"}
}

func pipelineFlags() []cli.Flag {
	return append([]cli.Flag{
		&cli.IntFlag{Name: "pp-size", Category: groupPipeline, Usage: "split the model over `N` stages (default: 1, no split)"},
		&cli.StringFlag{Name: "pp-layers", Category: groupPipeline, Usage: "inclusive layer `RANGES`, one per stage, e.g. \"0-14,15-29\""},
		&cli.IntFlag{Name: "pp-micro-batch-size", Category: groupPipeline, Usage: "sequences per micro-batch (default: 1)"},
		&cli.IntFlag{Name: "threads", Category: groupPipeline, Usage: "compute threads of each stage (default: what the executor chooses)"},
		&cli.IntFlag{Name: "prefill-chunk-size", Category: groupPipeline, Value: engine.DefaultPrefillChunk, Usage: "prompt tokens per step at most"},
	}, objectiveFlags()...)
}

// objectiveFlags say what an automatic cut is for.
func objectiveFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "pp-objective", Category: groupPipeline, Value: string(partition.ObjectiveMemory), Usage: "make small: memory (the heaviest stage's bytes) or speed (the slowest stage's time)"},
		&cli.StringFlag{Name: "stage-speed", Category: groupPipeline, Usage: "relative `SPEEDS` of the stages for --pp-objective speed, e.g. \"1,2.5\" (default: all equal)"},
	}
}

func setObjective(c *cli.Context, cfg *engine.Config) (err error) {
	if cfg.Pipeline.Objective, err = partition.ParseObjective(c.String("pp-objective")); err != nil || !c.IsSet("stage-speed") {
		return err
	}
	cfg.Pipeline.Speeds, err = partition.ParseSpeeds(c.String("stage-speed"))
	return err
}

func samplingFlags() []cli.Flag {
	return []cli.Flag{
		&cli.IntFlag{Name: "max-tokens", Aliases: []string{"n"}, Category: groupSampling, Value: defaultMaxTokens, Usage: "tokens to generate at most"},
		&cli.Float64Flag{Name: "temp", Category: groupSampling, Value: defaultTemperature, Usage: "temperature; 0 always takes the most probable token"},
		&cli.Float64Flag{Name: "top-p", Category: groupSampling, Value: 1, Usage: "keep the most probable tokens that reach this probability together"},
		&cli.IntFlag{Name: "top-k", Category: groupSampling, Usage: "keep the `K` most probable tokens; 0 keeps all"},
		&cli.Float64Flag{Name: "min-p", Category: groupSampling, Usage: "drop tokens less probable than this share of the most probable one's"},
		&cli.Uint64Flag{Name: "seed", Category: groupSampling, Usage: "the same seed gives the same text (default: a new one each time)"},
		&cli.Float64Flag{Name: "repetition-penalty", Category: groupSampling, Value: 1, Usage: "above 1, tokens seen before become less probable"},
		&cli.Float64Flag{Name: "presence-penalty", Category: groupSampling, Usage: "taken from the logit of each token generated before"},
		&cli.Float64Flag{Name: "frequency-penalty", Category: groupSampling, Usage: "taken once for each time a token was generated before"},
		&cli.GenericFlag{Name: "stop", Category: groupSampling, Value: &texts{}, Usage: "end the answer before this `TEXT`; may be given again"},
		&cli.BoolFlag{Name: "ignore-eos", Category: groupSampling, Usage: "treat the end-of-answer token as any other"},
	}
}

// The defaults of mlx-lm's generate: 100 tokens, greedy. Scripts that compare the two need no flags.
const (
	defaultMaxTokens   = 100
	defaultTemperature = 0
)

// texts is a flag that may be given again. cli's own string slices trim spaces, which count here.
type texts []string

func (t *texts) Set(s string) error { *t = append(*t, s); return nil }
func (t *texts) String() string     { return strings.Join(*t, ", ") }

func stopTexts(c *cli.Context) []string { return *c.Generic("stop").(*texts) }

// engineConfig reads the flags that every command shares.
func engineConfig(c *cli.Context) engine.Config {
	level := hclog.Warn
	if c.Bool("verbose") {
		level = hclog.Info
	}
	exe, err := os.Executable()
	if err != nil {
		exe = ""
	}
	return engine.Config{
		Plugins: executor.Config{
			PluginDirs: c.StringSlice("plugin-dir"), RequireChecksum: c.Bool("plugin-require-checksum"),
			Executable: exe, Environ: os.Environ(), UID: os.Getuid(), RunBase: executor.DefaultRunBase(os.TempDir(), os.Getuid()),
		},
		TemplateCheck: []string{exe, templateCheckName},
		Logger:        hclog.New(&hclog.LoggerOptions{Name: "mlxcel", Level: level, Output: c.App.ErrWriter}),
	}
}

// setModel reads the flags of commands that open a model.
func setModel(c *cli.Context, cfg *engine.Config) error {
	if cfg.Model = c.String("model"); cfg.Model == "" {
		return errors.New("no model: give --model FOLDER")
	}
	var err error
	cfg.Dtype, err = sdk.ParseActivationDtype(c.String("dtype"))
	return err
}

// setPipeline reads the pipeline flags; one that is not given stays nil, so that its default can depend on the others.
func setPipeline(c *cli.Context, cfg *engine.Config) error {
	if c.IsSet("pp-size") {
		n := c.Int("pp-size")
		cfg.Pipeline.Size = &n
	}
	if c.IsSet("pp-layers") {
		s := c.String("pp-layers")
		cfg.Pipeline.Layers = &s
	}
	if c.IsSet("pp-micro-batch-size") {
		n := c.Int("pp-micro-batch-size")
		cfg.Pipeline.MicroBatchSize = &n
	}
	cfg.Threads = c.Int("threads")
	cfg.PrefillChunk = c.Int("prefill-chunk-size")
	return setObjective(c, cfg)
}

// size writes bytes for a reader.
func size(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, name := float64(n)/unit, "KiB"
	for _, next := range []string{"MiB", "GiB", "TiB"} {
		if value < unit {
			break
		}
		value, name = value/unit, next
	}
	return fmt.Sprintf("%.1f %s", value, name)
}
