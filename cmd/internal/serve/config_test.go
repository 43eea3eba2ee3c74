package serve

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/urfave/cli/v2"
)

// parse runs the flags as a program does, up to the Config.
func parse(t *testing.T, args ...string) (cfg *Config, err error) {
	t.Helper()
	app := cli.NewApp()
	app.Flags, app.DisableSliceFlagSeparator, app.HideVersion = Flags(), true, true
	app.Writer, app.ErrWriter = io.Discard, io.Discard
	app.ExitErrHandler = func(*cli.Context, error) {}
	app.Action = func(c *cli.Context) error {
		cfg, err = read(c, "test")
		return nil
	}
	if parseErr := app.RunContext(context.Background(), append([]string{"server"}, args...)); parseErr != nil {
		return nil, parseErr
	}
	return cfg, err
}

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDefaults(t *testing.T) {
	cfg, err := parse(t, "--model", "models/small/")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Host != "127.0.0.1" || cfg.Port != 8080 || cfg.Parallel != 16 || cfg.MaxQueue != 256 || cfg.Timeout != 10*time.Minute || cfg.DefaultMaxTokens != 1024 {
		t.Errorf("%+v", cfg)
	}
	if cfg.Metrics || len(cfg.APIKeys) > 0 || cfg.MicroBatch != 0 || cfg.Preemption != batch.PreemptNone || cfg.Engine.PrefillChunk != 512 {
		t.Errorf("%+v", cfg)
	}
	if !reflect.DeepEqual(cfg.Aliases, []string{"small"}) {
		t.Errorf("aliases %v", cfg.Aliases)
	}
}

// A flag goes before the environment, and that before the file.
func TestPrecedence(t *testing.T) {
	path := file(t, "model = \"from-file\"\nport = 1\nparallel = 2\ntemp = 1\nmetrics = true\nplugin-dir = [\"a,b\", \"c\"]\nallowed-origins = \"https://a.example,https://b.example\"\n")
	t.Setenv("MLXCEL_CONFIG", path)
	t.Setenv("MLXCEL_PARALLEL", "3")
	t.Setenv("MLXCEL_PORT", "4")
	t.Setenv("MLXCEL_NO_WARMUP", "true")
	t.Setenv("MLXCEL_API_KEY", "k")
	cfg, err := parse(t, "--port", "5")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Engine.Model != "from-file" || cfg.Port != 5 || cfg.Parallel != 3 || cfg.Sampling.Temperature != 1 || !cfg.Metrics || !cfg.NoWarmup {
		t.Errorf("%+v", cfg)
	}
	if got := cfg.Engine.Plugins.PluginDirs; !reflect.DeepEqual(got, []string{"a,b", "c"}) {
		t.Errorf("plugin folders %q", got)
	}
	if !reflect.DeepEqual(cfg.AllowedOrigins, []string{"https://a.example", "https://b.example"}) || !reflect.DeepEqual(cfg.APIKeys, []string{"k"}) {
		t.Errorf("%+v", cfg)
	}
}

// Every flag but --plugin-dir, whose variable all commands share, has a variable of its own.
func TestEveryFlagHasAVariable(t *testing.T) {
	for _, f := range Flags() {
		names := f.(cli.DocGenerationFlag).GetEnvVars()
		want := envName(f.Names()[0])
		if f.Names()[0] == pluginDirFlag {
			want = nil
		}
		if !reflect.DeepEqual(names, want) {
			t.Errorf("--%s has %v", f.Names()[0], names)
		}
		if f.(cli.CategorizableFlag).GetCategory() == "" {
			t.Errorf("--%s is in no group", f.Names()[0])
		}
	}
}

func TestFaults(t *testing.T) {
	for _, tc := range []struct {
		name string
		args []string
		says []string
	}{
		{"no model", nil, []string{"no model: give --model FOLDER"}},
		{"all at once", []string{"-m", "x", "--port", "70000", "--parallel", "0", "--temp", "3", "--top-p", "0", "--log-format", "xml"},
			[]string{"--port 70000", "--parallel 0", "--temp 3", "--top-p 0", `--log-format "xml"`}},
		{"an argument", []string{"-m", "x", "y"}, []string{`unexpected argument "y"`}},
		{"a path as origin", []string{"-m", "x", "--allowed-origins", "https://a.example/x"}, []string{`--allowed-origins "https://a.example/x"`}},
		{"no such key file", []string{"-m", "x", "--api-key-file", "nowhere"}, []string{"--api-key-file", "nowhere"}},
		{"policy without preemption", []string{"-m", "x", "--preemption-policy", "lru"}, []string{"without --enable-preemption"}},
		{"preemption without a budget", []string{"-m", "x", "--enable-preemption"}, []string{"--kv-budget"}},
		{"unknown policy", []string{"-m", "x", "--enable-preemption", "--kv-budget", "1GiB", "--preemption-policy", "random"}, []string{`"random"`}},
		{"a size", []string{"-m", "x", "--kv-budget", "lots"}, []string{`--kv-budget: "lots"`, "16GiB"}},
		{"micro-batch of 0", []string{"-m", "x", "--pp-micro-batch-size", "0"}, []string{"--pp-micro-batch-size 0"}},
		{"stages", []string{"-m", "x", "--pp-size", "0"}, []string{"--pp-size"}},
		{"metrics port", []string{"-m", "x", "--metrics-port", "0"}, []string{"--metrics-port 0"}},
		{"no such config", []string{"-m", "x", "--config", "nowhere.toml"}, []string{"--config", "nowhere.toml"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := parse(t, tc.args...)
			if err == nil {
				t.Fatal("no fault")
			}
			for _, want := range tc.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v: no %q", err, want)
				}
			}
		})
	}
}

func TestFaultsOfTheFile(t *testing.T) {
	for _, tc := range []struct{ content, says string }{
		{"prot = 8081", `unknown key "prot"`},
		{"[server]\nport = 1", `unknown key "server"`},
		{"config = \"x\"", `unknown key "config"`},
		{"port = \"8081\"", "port: wanted a whole number, got a string"},
		{"port = 1.5", "port: wanted a whole number, got a number"},
		{"metrics = 1", "metrics: wanted true or false, got a number"},
		{"model = true", "model: wanted a string, got true or false"},
		{"temp = \"hot\"", "temp: wanted a number, got a string"},
		{"plugin-dir = [1]", "plugin-dir: wanted a string or an array of strings, got a number"},
		{"port = \n", ":1:"},
	} {
		path := file(t, tc.content)
		_, err := parse(t, "-m", "x", "--config", path)
		if err == nil || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v, want %q", tc.content, err, tc.says)
		}
	}
}

func TestKeyFile(t *testing.T) {
	cfg, err := parse(t, "-m", "x", "--api-key", "one", "--api-key-file", file(t, "# keys\ntwo\n\n three \n"))
	if err != nil || !reflect.DeepEqual(cfg.APIKeys, []string{"one", "two", "three"}) {
		t.Errorf("%v, %v", cfg, err)
	}
	if _, err := parse(t, "-m", "x", "--api-key-file", file(t, "# none\n")); err == nil || !strings.Contains(err.Error(), "has no key") {
		t.Error(err)
	}
	open := file(t, "k")
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	if w := secretFileWarning(open); !strings.Contains(w, "644") {
		t.Errorf("warning %q", w)
	}
}

func TestMemoryFlags(t *testing.T) {
	cfg, err := parse(t, "-m", "x", "--kv-budget", "1.5GiB, 512MiB", "--enable-preemption")
	if err != nil || !reflect.DeepEqual(cfg.KVBudgets, []int64{3 << 29, 512 << 20}) || cfg.Preemption != batch.PreemptLRU {
		t.Errorf("%+v, %v", cfg, err)
	}
	if _, err := parse(t, "-m", "x", "--kv-budget", "0"); err == nil || !strings.Contains(err.Error(), "--kv-budget") {
		t.Errorf("a budget of nothing: %v", err)
	}
}

func TestMetricsPort(t *testing.T) {
	for args, want := range map[string]struct {
		on   bool
		port int
	}{"": {false, 0}, "--metrics": {true, 0}, "--metrics-port 8080": {true, 0}, "--metrics-port 9090": {true, 9090}, "--metrics --metrics-port 9090": {true, 9090}} {
		cfg, err := parse(t, append([]string{"-m", "x"}, strings.Fields(args)...)...)
		if err != nil || cfg.Metrics != want.on || cfg.MetricsPort != want.port {
			t.Errorf("%q: %+v, %v", args, cfg, err)
		}
	}
}

// What docs/cli.md says of the server has every flag.
func TestEveryFlagIsDescribed(t *testing.T) {
	raw, err := os.ReadFile("../../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range Flags() {
		if name := "`--" + f.Names()[0]; !strings.Contains(string(raw), name+"`") && !strings.Contains(string(raw), name+" ") {
			t.Errorf("%s is not described", name)
		}
	}
}

// A key that is in the environment must not show up in --help.
func TestHelpKeepsSecrets(t *testing.T) {
	t.Setenv("MLXCEL_API_KEY", "sesame")
	app := cli.NewApp()
	var out bytes.Buffer
	app.Flags, app.HideVersion, app.Writer = Flags(), true, &out
	if err := app.Run([]string{"server", "--help"}); err != nil {
		t.Fatal(err)
	}
	help := out.String()
	if strings.Contains(help, "sesame") || !strings.Contains(help, "MLXCEL_API_KEY") {
		t.Error(help)
	}
	for _, group := range []string{groupModel, groupListen, groupAccess, groupBatching, groupSampling, groupPipeline, groupExecutors, groupLog} {
		if !strings.Contains(help, "   "+group+"\n") {
			t.Errorf("no group %q", group)
		}
	}
}
