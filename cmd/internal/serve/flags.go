// Package serve owns the server as a program: its flags, environment and config file, and its life from listening over
// loading to the last drained request. Both mlxcel-server and "mlxcel serve" are it.
package serve

import (
	"strings"

	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/urfave/cli/v2"
)

// Groups of flags in --help.
const (
	groupModel     = "model"
	groupListen    = "listening"
	groupAccess    = "who may call"
	groupBatching  = "batching and memory"
	groupSampling  = "sampling, where a request does not say"
	groupPipeline  = "pipeline"
	groupExecutors = "executors"
	groupLog       = "logs and metrics"
)

// Defaults of flags.
const (
	defaultHost      = "127.0.0.1"
	defaultPort      = 8080
	defaultParallel  = 16
	defaultQueue     = 256
	defaultMaxTokens = 1024
	defaultTimeout   = 600 // seconds
	defaultTemp      = 1   // as OpenAI documents it
)

// Flags returns the flags of the server, each with its environment variable.
func Flags() []cli.Flag {
	var flags []cli.Flag
	for _, group := range [][]cli.Flag{
		modelFlags(), listenFlags(), accessFlags(), batchingFlags(), samplingFlags(), pipelineFlags(), clusterflags.Flags(), executorFlags(), logFlags(),
	} {
		flags = append(flags, group...)
	}
	for _, f := range flags {
		setEnv(f)
	}
	return flags
}

func modelFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "model", Aliases: []string{"m"}, Category: groupModel, Usage: "model `FOLDER` with config.json and *.safetensors"},
		&cli.StringFlag{Name: "alias", Category: groupModel, Usage: "`NAMES` to serve the model under, separated by commas", DefaultText: "the folder's name"},
		&cli.IntFlag{Name: "ctx-size", Aliases: []string{"c"}, Category: groupModel, Usage: "positions of a sequence, prompt and answer together", DefaultText: "the model's context"},
		&cli.StringFlag{Name: "dtype", Category: groupModel, Value: "auto", Usage: "activations: auto, float32, bfloat16 or float16; float32 raises every floating tensor"},
		&cli.StringFlag{Name: "chat-template-file", Category: groupModel, Usage: "Jinja `FILE` in place of the model's chat template"},
		&cli.BoolFlag{Name: "no-warmup", Category: groupModel, Usage: "be ready without a few steps that measure how long they take"},
		&cli.StringFlag{Name: "config", Category: groupModel, Usage: "TOML `FILE` with the flags' names as keys; flags and environment go before it"},
	}
}

func listenFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "host", Category: groupListen, Value: defaultHost, Usage: "`ADDRESS` to listen on; others than loopback should have an API key"},
		&cli.IntFlag{Name: "port", Category: groupListen, Value: defaultPort, Usage: "`PORT` to listen on; 0 picks a free one and prints it"},
		&cli.IntFlag{Name: "timeout", Category: groupListen, Value: defaultTimeout, Usage: "`SECONDS` that a request may take in all; 0 for any number"},
	}
}

func accessFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "api-key", Category: groupAccess, Usage: "`KEY` that requests must carry; other users of the machine can see it, unlike a file's"},
		&cli.StringFlag{Name: "api-key-file", Category: groupAccess, Usage: "`FILE` with such keys, one a line"},
		&cli.StringFlag{Name: "allowed-origins", Category: groupAccess, Usage: "`ORIGINS` whose pages may call, separated by commas, e.g. https://chat.example.com; * for all", DefaultText: "the server's own"},
	}
}

func batchingFlags() []cli.Flag {
	return []cli.Flag{
		&cli.IntFlag{Name: "parallel", Aliases: []string{"np"}, Category: groupBatching, Value: defaultParallel, Usage: "`N` sequences at a time at most"},
		&cli.IntFlag{Name: "max-batch-size", Category: groupBatching, Usage: "`N` sequences of one step at most", DefaultText: "--parallel"},
		&cli.IntFlag{Name: "max-queue-depth", Category: groupBatching, Value: defaultQueue, Usage: "`N` requests that wait at most; more are answered with 429"},
		&cli.IntFlag{Name: "prefill-chunk-size", Category: groupBatching, Value: engine.DefaultPrefillChunk, Usage: "prompt tokens of one step at most"},
		&cli.IntFlag{Name: "default-max-tokens", Category: groupBatching, Value: defaultMaxTokens, Usage: "`N` tokens of an answer at most, where the request does not say"},
		&cli.StringFlag{Name: "kv-budget", Category: groupBatching, Usage: "`SIZE` of the KV cache of each stage, e.g. 4GiB, or one for each, separated by commas", DefaultText: "no limit"},
		&cli.BoolFlag{Name: "enable-preemption", Category: groupBatching, Usage: "let more sequences in than the KV budget can hold to their ends, and take some out when it runs short"},
		&cli.StringFlag{Name: "preemption-policy", Category: groupBatching, Usage: "which go first: lru, longest or lowest-priority", DefaultText: "lru"},
	}
}

func samplingFlags() []cli.Flag {
	return []cli.Flag{
		&cli.Float64Flag{Name: "temp", Category: groupSampling, Value: defaultTemp, Usage: "temperature; 0 always takes the most probable token"},
		&cli.Float64Flag{Name: "top-p", Category: groupSampling, Value: 1, Usage: "keep the most probable tokens that reach this probability together"},
		&cli.IntFlag{Name: "top-k", Category: groupSampling, Usage: "keep the `K` most probable tokens; 0 keeps all"},
		&cli.Float64Flag{Name: "min-p", Category: groupSampling, Usage: "drop tokens less probable than this share of the most probable one's"},
		&cli.Float64Flag{Name: "repetition-penalty", Category: groupSampling, Value: 1, Usage: "above 1, tokens seen before become less probable"},
		&cli.Float64Flag{Name: "presence-penalty", Category: groupSampling, Usage: "taken from the logit of each token generated before"},
		&cli.Float64Flag{Name: "frequency-penalty", Category: groupSampling, Usage: "taken once for each time a token was generated before"},
	}
}

func pipelineFlags() []cli.Flag {
	return []cli.Flag{
		&cli.IntFlag{Name: "pp-size", Category: groupPipeline, Usage: "split the model over `N` stages", DefaultText: "1, no split"},
		&cli.StringFlag{Name: "pp-layers", Category: groupPipeline, Usage: "inclusive layer `RANGES`, one per stage, e.g. \"0-14,15-29\""},
		&cli.StringFlag{Name: "pp-objective", Category: groupPipeline, Value: string(partition.ObjectiveMemory), Usage: "what an automatic cut makes small: memory (the heaviest stage's bytes) or speed (the slowest stage's time)"},
		&cli.StringFlag{Name: "stage-speed", Category: groupPipeline, Usage: "relative `SPEEDS` of the stages for --pp-objective speed, e.g. \"1,2.5\"", DefaultText: "all equal"},
		&cli.IntFlag{Name: "pp-micro-batch-size", Category: groupPipeline, Usage: "`N` sequences of one step", DefaultText: "what the measured step times say"},
		&cli.IntFlag{Name: "threads", Aliases: []string{"t"}, Category: groupPipeline, Usage: "compute threads of each stage", DefaultText: "what the executor chooses"},
	}
}

func executorFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: pluginDirFlag, Category: groupExecutors, Usage: "search `FOLDER` for executors before all others; may be given again"},
		&cli.BoolFlag{Name: "plugin-require-checksum", Category: groupExecutors, Usage: "refuse an executor without a .sha256 file beside it"},
	}
}

func logFlags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Category: groupLog, Usage: "log more, the plan and every request included"},
		&cli.StringFlag{Name: "log-file", Category: groupLog, Usage: "append the log to `FILE` instead of stderr"},
		&cli.StringFlag{Name: "log-format", Category: groupLog, Value: "text", Usage: "text or json"},
		&cli.BoolFlag{Name: "log-prompts", Category: groupLog, Usage: "write the prompts to the log as well"},
		&cli.BoolFlag{Name: "metrics", Category: groupLog, Usage: "serve /metrics for Prometheus"},
		&cli.IntFlag{Name: "metrics-port", Category: groupLog, Usage: "serve /metrics on `PORT`, which has a listener of its own when it is not --port", DefaultText: "none"},
	}
}

// pluginDirFlag is the one flag whose environment variable is not its own: MLXCEL_PLUGIN_DIR adds to it, for every command.
const pluginDirFlag = "plugin-dir"

// envPrefix begins the environment variable of a flag.
const envPrefix = "MLXCEL_"

func envName(flag string) []string {
	return []string{envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))}
}

func setEnv(f cli.Flag) {
	switch f := f.(type) {
	case *cli.StringFlag:
		f.EnvVars = envName(f.Name)
	case *cli.IntFlag:
		f.EnvVars = envName(f.Name)
	case *cli.BoolFlag:
		f.EnvVars = envName(f.Name)
	case *cli.Float64Flag:
		f.EnvVars = envName(f.Name)
	}
}
