package bringup

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
)

// TestMain lets this binary be the executor of its own tests.
func TestMain(m *testing.M) {
	if sdk.Launched() {
		sdk.Serve(sdk.ServeOptions{New: leakyrnn.New})
		return
	}
	os.Exit(m.Run())
}

// localPlugins has this binary as the only executor.
func localPlugins(t testing.TB) executor.Config {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	plugins := t.TempDir()
	if err := os.WriteFile(filepath.Join(plugins, "example"), binary, 0o700); err != nil {
		t.Fatal(err)
	}
	base, err := os.MkdirTemp("", "mlxt") // t.TempDir is too long for a socket on macOS
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	return executor.Config{
		PluginDirs: []string{plugins}, Environ: []string{"PATH=" + os.Getenv("PATH")}, UID: os.Getuid(), RunBase: filepath.Join(base, "run"),
		StartTimeout: time.Minute, GraceTimeout: time.Minute, TermTimeout: time.Minute, Logger: hclog.NewNullLogger(),
	}
}

// localPeers starts peers whose executors are processes.
func localPeers(t testing.TB, model string, n int) []*testPeer {
	peers := make([]*testPeer, n)
	for i := range peers {
		cfg := LocalConfig{Model: ModelConfig{Dir: model}, Version: testVersion, Verify: true, Plugins: localPlugins(t)}
		peers[i] = startPeer(t, fmt.Sprintf("peer-%d", i), model, "127.0.0.1:0", func(c *PeerConfig, _ *toyRuntime) {
			c.Open = func(context.Context) (Runtime, error) { return OpenLocal(cfg) }
			c.Logger = hclog.NewNullLogger()
		})
	}
	return peers
}

func TestLocalExecutors(t *testing.T) {
	model := testModel(t)
	peers := localPeers(t, model, 2)
	want := alone(t, model, 5)
	for range 2 {
		running := bringUp(t, newTestCoordinator(t, addresses(peers), nil))
		got, err := greedy(t.Context(), running.Pipeline, testPrompt, len(want))
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%v, %v, want %v", got, err, want)
		}
		if err := running.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// A peer whose model no executor runs waits all the same, and says so.
func TestLocalWithoutExecutor(t *testing.T) {
	cfg := localPlugins(t)
	cfg.PluginDirs = []string{t.TempDir()}
	l, err := OpenLocal(LocalConfig{Model: ModelConfig{Dir: testModel(t)}, Plugins: cfg})
	if err != nil {
		t.Fatal(err)
	}
	have, err := l.Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if have.Problem == "" || have.Profile != nil || have.ModelType != leakyrnn.Family || !slices.Equal(have.Folders, cfg.PluginDirs) {
		t.Errorf("%+v", have)
	}
	if err := l.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
