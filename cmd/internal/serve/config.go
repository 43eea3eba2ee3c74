package serve

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/urfave/cli/v2"
)

// Config is everything that the flags say.
type Config struct {
	Version string
	Engine  engine.Config
	Cluster *clusterflags.Settings
	Aliases []string // names of the model; the first is its own

	Host             string
	Port             int // 0 picks one
	MetricsPort      int // 0 means the main listener, where Metrics is set
	Metrics          bool
	APIKeys          []string
	KeyFile          string // that some of them came from; empty for none
	AllowedOrigins   []string
	Timeout          time.Duration // 0 means none
	ContextSize      int           // 0 means the model's
	Parallel         int
	MaxBatch         int // 0 means Parallel
	MaxQueue         int
	MicroBatch       int     // 0 lets measured times decide
	KVBudgets        []int64 // bytes, one for each stage or one for all; none means no limit
	Preemption       batch.PreemptionPolicy
	Sampling         sdk.Sampler
	DefaultMaxTokens int
	NoWarmup         bool

	Verbose    bool
	LogFile    string // empty means stderr
	LogJSON    bool
	LogPrompts bool
}

// read takes the flags to a Config. All faults are told at once.
func read(c *cli.Context, version string) (*Config, error) {
	if path := c.String("config"); path != "" {
		if err := applyFile(c, path); err != nil {
			return nil, err
		}
	}
	if c.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q; see --help", c.Args().First())
	}
	cfg := &Config{
		Version: version, Host: c.String("host"), Port: c.Int("port"), Metrics: c.Bool("metrics"), MetricsPort: c.Int("metrics-port"),
		ContextSize: c.Int("ctx-size"), Parallel: c.Int("parallel"), MaxBatch: c.Int("max-batch-size"), MaxQueue: c.Int("max-queue-depth"),
		MicroBatch: c.Int("pp-micro-batch-size"), DefaultMaxTokens: c.Int("default-max-tokens"), NoWarmup: c.Bool("no-warmup"),
		Timeout: time.Duration(c.Int("timeout")) * time.Second,
		Verbose: c.Bool("verbose"), LogFile: c.String("log-file"), LogPrompts: c.Bool("log-prompts"),
		AllowedOrigins: commaList(c.String("allowed-origins")), Aliases: commaList(c.String("alias")),
	}
	faults := faults{c: c}
	faults.cluster(cfg)
	faults.engine(cfg)
	faults.numbers(cfg)
	faults.access(cfg)
	faults.sampling(cfg)
	faults.memory(cfg)
	if format := c.String("log-format"); format == "json" || format == "text" {
		cfg.LogJSON = format == "json"
	} else {
		faults.add("--log-format %q: want text or json", format)
	}
	return cfg, errors.Join(faults.list...)
}

func commaList(s string) []string {
	var out []string
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// faults gathers what is wrong with the flags.
type faults struct {
	c    *cli.Context
	list []error
}

func (f *faults) add(format string, args ...any) {
	f.list = append(f.list, fmt.Errorf(format, args...))
}

func (f *faults) cluster(cfg *Config) {
	var err error
	cfg.Cluster, err = clusterflags.Read(f.c, cfg.Version, clusterflags.Listen{Host: cfg.Host, Port: cfg.Port})
	if err != nil {
		f.list = append(f.list, err)
	}
}

func (f *faults) engine(cfg *Config) {
	c, e := f.c, &cfg.Engine
	if e.Model = c.String("model"); e.Model == "" && !cfg.Cluster.DryRun {
		f.add("no model: give --model FOLDER")
	} else if len(cfg.Aliases) == 0 {
		cfg.Aliases = []string{modelName(e.Model)}
	}
	var err error
	if e.Dtype, err = sdk.ParseActivationDtype(c.String("dtype")); err != nil {
		f.list = append(f.list, err)
	}
	if c.IsSet("pp-size") {
		n := c.Int("pp-size")
		e.Pipeline.Size = &n
	}
	if c.IsSet("pp-layers") {
		s := c.String("pp-layers")
		e.Pipeline.Layers = &s
	}
	if c.IsSet("pp-micro-batch-size") && cfg.MicroBatch < 1 {
		f.add("--pp-micro-batch-size %d: give 1 or more, or leave the flag out to let measured step times decide", cfg.MicroBatch)
	}
	if e.Pipeline.Objective, err = partition.ParseObjective(c.String("pp-objective")); err != nil {
		f.list = append(f.list, err)
	}
	if text := c.String("stage-speed"); text != "" {
		if e.Pipeline.Speeds, err = partition.ParseSpeeds(text); err != nil {
			f.list = append(f.list, err)
		}
	}
	e.Threads, e.PrefillChunk, e.TemplateFile = c.Int("threads"), c.Int("prefill-chunk-size"), c.String("chat-template-file")
	exe, err := os.Executable()
	if err != nil {
		exe = ""
	}
	e.Plugins = executor.Config{
		PluginDirs: c.StringSlice(pluginDirFlag), RequireChecksum: c.Bool("plugin-require-checksum"),
		Executable: exe, Environ: os.Environ(), UID: os.Getuid(), RunBase: executor.DefaultRunBase(os.TempDir(), os.Getuid()),
	}
	e.TemplateCheck = []string{exe, TemplateCheckName}
	if err := e.Validate(); err != nil {
		f.list = append(f.list, err)
	}
}

// modelName names a model by its folder.
func modelName(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	return filepath.Base(dir)
}

func (f *faults) numbers(cfg *Config) {
	for _, n := range []struct {
		flag      string
		value     int
		low, high int
	}{
		{"port", cfg.Port, 0, 65535},
		{"metrics-port", cfg.MetricsPort, 0, 65535},
		{"parallel", cfg.Parallel, 1, 1 << 16},
		{"max-batch-size", cfg.MaxBatch, 0, 1 << 16},
		{"max-queue-depth", cfg.MaxQueue, 1, 1 << 24},
		{"default-max-tokens", cfg.DefaultMaxTokens, 1, 1 << 30},
		{"ctx-size", cfg.ContextSize, 0, 1 << 30},
		{"timeout", int(cfg.Timeout / time.Second), 0, 1 << 30},
	} {
		if n.value < n.low || n.value > n.high {
			f.add("--%s %d: want %d to %d", n.flag, n.value, n.low, n.high)
		}
	}
	if f.c.IsSet("metrics-port") {
		cfg.Metrics = true
		if cfg.MetricsPort == 0 {
			f.add("--metrics-port 0: want 1 to 65535")
		}
		if cfg.MetricsPort == cfg.Port {
			cfg.MetricsPort = 0
		}
	}
}

func (f *faults) access(cfg *Config) {
	if key := strings.TrimSpace(f.c.String("api-key")); key != "" {
		cfg.APIKeys = append(cfg.APIKeys, key)
	}
	if path := f.c.String("api-key-file"); path != "" {
		keys, err := readKeys(path)
		if err != nil {
			f.list = append(f.list, err)
		}
		cfg.APIKeys, cfg.KeyFile = append(cfg.APIKeys, keys...), path
	}
	for _, origin := range cfg.AllowedOrigins {
		u, err := url.Parse(origin)
		if origin != "*" && (err != nil || u.Scheme == "" || u.Host == "" || origin != u.Scheme+"://"+u.Host) {
			f.add("--allowed-origins %q: want scheme and host, such as https://chat.example.com, or *", origin)
		}
	}
}

// readKeys reads one key a line. Empty lines and those that begin with # are left out.
func readKeys(path string) ([]string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--api-key-file: %w", err)
	}
	var keys []string
	for line := range strings.Lines(string(raw)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			keys = append(keys, line)
		}
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("--api-key-file %s: has no key", path)
	}
	return keys, nil
}

func (f *faults) sampling(cfg *Config) {
	number := func(flag string, ok func(float64) bool, want string) float32 {
		v := f.c.Float64(flag)
		if !ok(v) {
			f.add("--%s %v: want %s", flag, v, want)
		}
		return float32(v)
	}
	within := func(low, high float64) func(float64) bool {
		return func(v float64) bool { return v >= low && v <= high }
	}
	cfg.Sampling = sdk.Sampler{
		Temperature:       number("temp", within(0, 2), "0 to 2"),
		TopP:              number("top-p", func(v float64) bool { return v > 0 && v <= 1 }, "more than 0 and at most 1"),
		MinP:              number("min-p", within(0, 1), "0 to 1"),
		RepetitionPenalty: number("repetition-penalty", within(0.01, 100), "0.01 to 100"),
		PresencePenalty:   number("presence-penalty", within(-2, 2), "-2 to 2"),
		FrequencyPenalty:  number("frequency-penalty", within(-2, 2), "-2 to 2"),
		TopK:              f.c.Int("top-k"),
	}
	if cfg.Sampling.TopK < 0 {
		f.add("--top-k %d: want 0 or more", cfg.Sampling.TopK)
	}
}

func (f *faults) memory(cfg *Config) {
	for _, text := range commaList(f.c.String("kv-budget")) {
		n, err := partition.ParseSize(text)
		switch {
		case err != nil:
			f.add("--kv-budget: %w", err)
		case n == 0:
			f.add("--kv-budget %q: want more than 0 bytes", text)
		}
		cfg.KVBudgets = append(cfg.KVBudgets, n)
	}
	policy := batch.PreemptionPolicy(f.c.String("preemption-policy"))
	enabled := f.c.Bool("enable-preemption")
	switch {
	case policy != "" && !slices.Contains([]batch.PreemptionPolicy{batch.PreemptLRU, batch.PreemptLongest, batch.PreemptLowestPriority}, policy):
		f.add("--preemption-policy %q: want lru, longest or lowest-priority", policy)
	case policy != "" && !enabled:
		f.add("--preemption-policy %s has no effect without --enable-preemption", policy)
	case enabled && len(cfg.KVBudgets) == 0 && cfg.Cluster.Mode == clusterflags.Alone:
		f.add("--enable-preemption needs a --kv-budget that can run short")
	case enabled && policy == "":
		policy = batch.PreemptLRU
	}
	cfg.Preemption = policy
}

// secretFileWarning tells that others can read a file with keys; empty where they can't.
func secretFileWarning(path string) string {
	st, err := os.Stat(path)
	if err != nil || st.Mode()&fs.FileMode(0o077) == 0 {
		return ""
	}
	return fmt.Sprintf("%s can be read by other users of this machine (mode %o)", path, st.Mode().Perm())
}
