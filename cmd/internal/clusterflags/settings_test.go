package clusterflags

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/urfave/cli/v2"
)

// parse reads flags as the server does; pp-size and pp-layers are the pipeline's.
func parse(t *testing.T, args ...string) (s *Settings, err error) {
	t.Helper()
	for _, name := range []string{cluster.EnvSecret, cluster.EnvSecretFile} {
		t.Setenv(name, "")
	}
	app := cli.NewApp()
	app.Flags = append(Flags(), &cli.IntFlag{Name: "pp-size"}, &cli.StringFlag{Name: "pp-layers"})
	app.Writer, app.ErrWriter, app.HideVersion = io.Discard, io.Discard, true
	app.ExitErrHandler = func(*cli.Context, error) {}
	app.Action = func(c *cli.Context) error {
		s, err = Read(c, "v1", Listen{Host: "192.168.1.10", Port: 8080})
		return nil
	}
	if e := app.RunContext(context.Background(), append([]string{"server"}, args...)); e != nil {
		return nil, e
	}
	return s, err
}

const file = `[cluster]
name = "studio"
pipeline_parallel_size = 2

[[nodes]]
id = "stage-0"
address = "192.168.1.11:19001"
role = "pipeline_stage"
stage = 0

[[nodes]]
id = "stage-1"
address = "192.168.1.12:19001"
role = "pipeline_stage"
stage = 1
`

const coordinatorNode = `
[[nodes]]
id = "head"
address = "192.168.1.10:19000"
role = "hybrid"
`

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cluster.toml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestModes(t *testing.T) {
	whole, headless := write(t, file+coordinatorNode), write(t, file)
	for _, tc := range []struct {
		name, args string
		mode       Mode
		node       string
		says       string // the error, empty for none
	}{
		{"no cluster", "", Alone, "", ""},
		{"coordinator", "--pp-auto 2 --cluster-peers a:1,b:1", Coordinator, "", ""},
		{"peer", "--pp-peer --cluster-control-addr 127.0.0.1:19001", Peer, "", ""},
		{"named peer", "--pp-peer --node-id studio-2 --cluster-control-addr 127.0.0.1:19001", Peer, "studio-2", ""},
		{"node of a file", "--distributed-config " + whole + " --node-id stage-1", Peer, "stage-1", ""},
		{"peer of a file", "--pp-peer --distributed-config " + whole + " --node-id stage-1", Peer, "stage-1", ""},
		{"role of a file", "--distributed-config " + whole + " --node-id stage-1 --node-role pipeline_stage --peers 192.168.1.11:19001", Peer, "stage-1", ""},
		{"coordinator of a file", "--distributed-config " + whole + " --node-id head --pp-layers 0-1,2-3", Coordinator, "head", ""},
		{"file without a coordinator", "--distributed-config " + headless + " --node-id coordinator --cluster-control-addr 192.168.1.10:19000", Coordinator, "coordinator", ""},
		{"two plans", "--pp-auto 2 --distributed-config " + whole, 0, "", "--pp-auto and --distributed-config exclude each other"},
		{"two roles", "--pp-auto 2 --pp-peer", 0, "", "--pp-auto and --pp-peer exclude each other"},
		{"cut by hand", "--pp-auto 2 --pp-layers 0-1,2-3", 0, "", "--pp-layers"},
		{"two sizes", "--pp-auto 2 --pp-size 2", 0, "", "--pp-size"},
		{"peer that the file makes a coordinator", "--pp-peer --distributed-config " + whole + " --node-id head", 0, "", "which runs no stage"},
		{"no such node", "--distributed-config " + whole + " --node-id stage-7", 0, "", "stage-7"},
		{"no node", "--distributed-config " + whole, 0, "", "--node-id"},
		{"other role", "--distributed-config " + whole + " --node-id stage-1 --node-role hybrid", 0, "", "--node-role"},
		{"other name", "--distributed-config " + whole + " --node-id stage-1 --cluster-name other", 0, "", "--cluster-name other"},
		{"no such file", "--distributed-config nowhere.toml --node-id stage-1", 0, "", "nowhere.toml"},
		{"dry run of nothing", "--dry-run", 0, "", "--dry-run"},
		{"no such discovery", "--pp-auto 2 --cluster-discovery bonjour", 0, "", `--cluster-discovery "bonjour"`},
		{"discovery port", "--pp-auto 2 --cluster-discovery mdns --cluster-discovery-port 70000", 0, "", "--cluster-discovery-port 70000"},
		{"discovery target", "--pp-peer --cluster-discovery mdns --cluster-discovery-target fd00::1", 0, "", "--cluster-discovery-target"},
		{"sizes", "--pp-auto 2 --stage-memory lots", 0, "", "lots"},
		{"peers of nobody", "--cluster-peers a:1", 0, "", "--cluster-peers has no effect without --pp-auto"},
		{"peers beside beacons", "--pp-auto 2 --cluster-discovery mdns --cluster-peers a:1", 0, "", "--cluster-peers has no effect without"},
		{"two faults", "--pp-auto 2 --pp-peer --node-role hybrid", 0, "", "--node-role has no effect"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := parse(t, strings.Fields(tc.args)...)
			switch {
			case tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)):
				t.Errorf("error %v, want one that says %q", err, tc.says)
			case tc.says == "" && err != nil:
				t.Error(err)
			case tc.says == "" && (s.Mode != tc.mode || s.NodeID != tc.node):
				t.Errorf("mode %d, node %q; want %d, %q", s.Mode, s.NodeID, tc.mode, tc.node)
			}
		})
	}
}

func TestAddresses(t *testing.T) {
	whole := write(t, file+coordinatorNode)
	for args, want := range map[string]string{
		"--pp-auto 2": "192.168.1.10:19000",
		"--pp-auto 2 --cluster-control-addr 0.0.0.0:7":         "0.0.0.0:7",
		"--distributed-config " + whole + " --node-id head":    "192.168.1.10:19000",
		"--pp-peer --cluster-control-addr 127.0.0.1:5":         "127.0.0.1:5",
		"--pp-peer --cluster-discovery mdns":                   "0.0.0.0:0",
		"--pp-peer":                                            "",
		"--distributed-config " + whole + " --node-id stage-1": "192.168.1.12:19001",
		"--distributed-config " + whole + " --node-id stage-1 --cluster-control-addr 0.0.0.0:19001": "0.0.0.0:19001",
	} {
		s, err := parse(t, strings.Fields(args)...)
		if err != nil {
			t.Errorf("%s: %v", args, err)
			continue
		}
		got, _ := s.ControlListen()
		if s.Mode == Peer {
			got, _ = s.PeerAddress()
		}
		if got != want {
			t.Errorf("%s: listens at %q, want %q", args, got, want)
		}
	}
}

// Without a secret a dry run plans and checks; it never starts.
func TestDryRun(t *testing.T) {
	t.Chdir(t.TempDir())
	run := func(args string) (string, error) {
		s, err := parse(t, strings.Fields(args)...)
		if err != nil {
			return "", err
		}
		var out strings.Builder
		err = s.RunDry(context.Background(), hclog.NewNullLogger(), func(securelink.Secret) cluster.Probe {
			t.Error("asked a node without a secret")
			return nil
		}, &out)
		return out.String(), err
	}
	first, err := run("--pp-auto 2 --dry-run --cluster-peers 192.168.7.12:19001,192.168.7.11:19001")
	if err != nil || !strings.Contains(first, "- stage-0 @ 192.168.7.11:19001 [pipeline_stage]") || !strings.Contains(first, "Emitted cluster TOML at: ") {
		t.Errorf("%v\n%s", err, first)
	}
	written, err := os.ReadFile(cluster.DefaultConfigOut)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := run("--pp-auto 2 --dry-run --cluster-peers 192.168.7.11:19001,192.168.7.12:19001"); err != nil {
		t.Error(err)
	}
	if again, err := os.ReadFile(cluster.DefaultConfigOut); err != nil || string(again) != string(written) {
		t.Errorf("another order of peers wrote\n%s (%v), before\n%s", again, err, written)
	}
	if out, err := run("--pp-auto 3 --dry-run --cluster-peers 192.168.7.11:19001"); err == nil || !strings.Contains(out, "found 1 of 3") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, err := run("--pp-auto 2 --dry-run --cluster-discovery mdns"); !errors.Is(err, cluster.ErrNoSecret) {
		t.Errorf("beacons without a secret: %v", err)
	}
}
