package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/discovery"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/sdk"
)

// These tests run commands in this process, against nodes that they start in it.

// command runs one and returns stdout, stderr and the exit code.
func command(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), append([]string{"mlxcel"}, args...), strings.NewReader(""), &out, &errs)
	return out.String(), errs.String(), code
}

// bareEnvironment has no secret and no executors of this user.
func bareEnvironment(t *testing.T) {
	for _, name := range []string{"MLXCEL_CLUSTER_SECRET_FILE", "MLXCEL_CLUSTER_SECRET", "MLXCEL_PLUGIN_DIR"} {
		t.Setenv(name, "")
	}
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_DATA_HOME", t.TempDir())
}

// newSecret makes a secret file as an operator does.
func newSecret(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cluster.secret")
	if _, errs, code := command(t, "cluster", "secret", "new", path); code != 0 {
		t.Fatal(errs)
	}
	return path
}

func readSecret(t *testing.T, path string) securelink.Secret {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := securelink.NewSecret(bytes.TrimSpace(raw))
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

// startNode serves a status until the test ends, and returns its address.
func startNode(t *testing.T, secretFile string, status bringup.Status) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	status.Version = version
	self := securelink.Identity{NodeID: status.Node, Cluster: status.Cluster, Version: version}
	cfg := securelink.ListenerConfig{Config: securelink.Config{Secret: readSecret(t, secretFile), Self: self}}
	untilEnd(t, func(ctx context.Context) error {
		return bringup.ServeStatus(ctx, cfg, l, func() bringup.Status { return status })
	})
	return l.Addr().String()
}

// untilEnd runs f until the test ends.
func untilEnd(t *testing.T, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		if err := f(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); done.Wait() })
}

// twoStages is a coordinator's status while its second stage loads.
func twoStages() bringup.Status {
	return bringup.Status{
		Cluster: "mlxcel-cluster", Node: "coordinator", Role: "coordinator", Phase: bringup.PhaseLoading, Epoch: 3, Model: "smollm2",
		Failure: "stage-1: its node is silent",
		Stages: []bringup.StageStatus{{
			Stage: 0, Node: "stage-0", Address: "studio-1.local:19001", Answered: "192.168.1.11:19001", Layers: sdk.LayerRange{Start: 0, End: 15}, Plugin: "llama",
			Phase: bringup.PhaseLoaded, Health: "ok", BudgetBytes: 16 << 30, WeightBytes: 3 << 30, KVBudget: 5 << 30, RoundTrip: 420 * time.Microsecond,
			LinkAddress: "192.168.1.12:19001", LinkRoundTrip: 210 * time.Microsecond, Sent: 7 << 20, Received: 2 << 10, BusyFraction: 0.618,
		}, {
			Stage: 1, Node: "stage-1", Address: "192.168.1.12:19001", Answered: "192.168.1.12:19001", Layers: sdk.LayerRange{Start: 15, End: 30},
			Phase: bringup.PhaseLoading, Health: "silent for 2s", Loaded: 1 << 30, LoadTotal: 4 << 30,
		}},
	}
}

func TestClusterSecretNew(t *testing.T) {
	path := newSecret(t)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() < 32 {
		t.Fatalf("%v, %v, want 32 bytes or more that only their owner can read", info, err)
	}
	_, errs, code := command(t, "cluster", "secret", "new", path)
	if code != 1 || !strings.Contains(errs, "is kept") {
		t.Errorf("a second time: exit code %d, %q, want 1 and that the file is kept", code, errs)
	}
}

func TestClusterStatus(t *testing.T) {
	bareEnvironment(t)
	secret := newSecret(t)
	address := startNode(t, secret, twoStages())
	out, errs, code := command(t, "cluster", "status", "--cluster-secret-file", secret, "--cluster-control-addr", address)
	if code != 0 || errs != "" {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	checkCells(t, out,
		[]string{"cluster", "mlxcel-cluster"},
		[]string{"node", "coordinator, coordinator at " + address + ", version " + version},
		[]string{"phase", "loading, bring-up 3"},
		[]string{"failure", "stage-1: its node is silent"},
		[]string{"STAGE", "NODE", "ADDRESS", "LAYERS", "PHASE", "HEALTH", "WEIGHTS", "KV BUDGET", "MEMORY", "ROUND TRIP", "LINK TO NEXT", "SENT", "RECEIVED", "BUSY"},
		[]string{"0", "stage-0", "studio-1.local:19001 (192.168.1.11:19001)", "0-14", "loaded", "ok", "3.0 GiB", "5.0 GiB", "16.0 GiB", "420µs", "192.168.1.12:19001 210µs", "7.0 MiB", "2.0 KiB", "62%"},
		[]string{"1", "stage-1", "192.168.1.12:19001", "15-29", "loading 25%", "silent for 2s", "0 B", "-", "-", "-", "-", "0 B", "0 B", "0%"})
}

// checkCells finds each row among the lines, its cells in their columns.
func checkCells(t *testing.T, out string, rows ...[]string) {
	t.Helper()
	found := map[string]bool{}
	for line := range strings.Lines(out) {
		var cells []string
		for cell := range strings.SplitSeq(strings.TrimRight(line, "\n"), "  ") {
			if cell = strings.TrimSpace(cell); cell != "" {
				cells = append(cells, cell)
			}
		}
		found[strings.Join(cells, "|")] = true
	}
	for _, row := range rows {
		if !found[strings.Join(row, "|")] {
			t.Errorf("no row %q in\n%s", row, out)
		}
	}
}

func TestClusterStatusJSON(t *testing.T) {
	bareEnvironment(t)
	secret := newSecret(t)
	address := startNode(t, secret, twoStages())
	out, errs, code := command(t, "cluster", "status", "--json", "--cluster-secret-file", secret, "--cluster-control-addr", address)
	var got struct {
		Asked     string `json:"asked"`
		RoundTrip int64  `json:"round_trip_ns"`
		Cluster   string
		Phase     string
		Epoch     int
		Stages    []struct {
			Node       string
			Layers     string
			Start, End int
			RoundTrip  int64   `json:"round_trip_ns"`
			Sent       int64   `json:"bytes_sent"`
			Busy       float64 `json:"busy_fraction"`
		}
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v: %s%s", code, err, out, errs)
	}
	if got.Asked != address || got.RoundTrip <= 0 || got.Cluster != "mlxcel-cluster" || got.Phase != "loading" || got.Epoch != 3 || len(got.Stages) != 2 {
		t.Fatalf("status %+v", got)
	}
	if s := got.Stages[0]; s.Node != "stage-0" || s.Layers != "0-14" || s.Start != 0 || s.End != 15 || s.RoundTrip != 420_000 || s.Sent != 7<<20 || s.Busy != 0.618 {
		t.Errorf("stage %+v", s)
	}
}

// writeTopology writes a cluster's TOML with a coordinator and one address for each stage.
func writeTopology(t *testing.T, secret, coordinator string, stages ...string) string {
	t.Helper()
	text := fmt.Sprintf("[cluster]\nname = \"by-file\"\npipeline_parallel_size = %d\nsecret_file = %q\n", len(stages), secret)
	text += fmt.Sprintf("[[nodes]]\nid = \"coordinator\"\naddress = %q\nrole = \"hybrid\"\n", coordinator)
	for i, address := range stages {
		text += fmt.Sprintf("[[nodes]]\nid = \"stage-%d\"\naddress = %q\nrole = \"pipeline_stage\"\nstage = %d\n", i, address, i)
	}
	path := filepath.Join(t.TempDir(), "cluster.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestClusterStatusByFile(t *testing.T) {
	bareEnvironment(t)
	secret := newSecret(t)
	coordinator := startNode(t, secret, bringup.Status{Cluster: "by-file", Node: "the coordinator", Role: "coordinator", Phase: bringup.PhaseReady})
	peer := startNode(t, secret, bringup.Status{Cluster: "by-file", Node: "the peer", Role: "stage", Phase: bringup.PhaseWaiting})
	file := writeTopology(t, secret, coordinator, peer, "127.0.0.1:1")
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "the coordinator, coordinator at " + coordinator},
		{[]string{"--node-id", "stage-0"}, "the peer, stage at " + peer},
		{[]string{"--cluster-control-addr", peer}, "the peer, stage at " + peer},
	} {
		out, errs, code := command(t, append([]string{"cluster", "status", "--distributed-config", file}, tc.args...)...)
		if code != 0 || !strings.Contains(out, tc.want) {
			t.Errorf("%v: exit code %d, %s%s, want %q", tc.args, code, out, errs, tc.want)
		}
	}
}

func TestClusterStatusFails(t *testing.T) {
	bareEnvironment(t)
	secret, other := newSecret(t), newSecret(t)
	address := startNode(t, secret, twoStages())
	at := func(args ...string) []string { return append([]string{"--cluster-control-addr", address}, args...) }
	for name, tc := range map[string]struct {
		args []string
		want []string
	}{
		"no secret":       {at(), []string{"--cluster-secret-file", "mlxcel cluster secret new"}},
		"another secret":  {at("--cluster-secret-file", other), []string{address, "secrets differ"}},
		"another cluster": {at("--cluster-secret-file", secret, "--cluster-name", "x"), []string{address, `"x"`, "--cluster-name"}},
		"nobody there":    {[]string{"--cluster-control-addr", "127.0.0.1:1", "--cluster-secret-file", secret}, []string{"127.0.0.1:1", "nobody listens"}},
		"no address":      {[]string{"--cluster-control-addr", "19000"}, []string{"19000", "host:port"}},
		"no file":         {[]string{"--distributed-config", "missing.toml"}, []string{"missing.toml"}},
		"node of no file": {[]string{"--node-id", "stage-0"}, []string{"--node-id", "--distributed-config"}},
		"argument":        {[]string{"stray"}, []string{"stray", "--cluster-control-addr"}},
		"flag":            {[]string{"--stray"}, []string{"stray", "--help"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, errs, code := command(t, append([]string{"cluster", "status"}, tc.args...)...)
			if code != 1 || out != "" {
				t.Errorf("exit code %d, stdout %q, want 1 and nothing", code, out)
			}
			for _, want := range tc.want {
				if !strings.Contains(errs, want) {
					t.Errorf("the message lacks %q: %s", want, errs)
				}
			}
		})
	}
}

func TestCommandsThatHoldOthers(t *testing.T) {
	for _, args := range [][]string{{"stray"}, {"cluster", "stray"}, {"cluster", "secret", "stray"}} {
		if out, errs, code := command(t, args...); code != 1 || out != "" || !strings.Contains(errs, `"stray"`) {
			t.Errorf("%v: exit code %d, %q, %q, want 1 and the name", args, code, out, errs)
		}
		holder := args[:len(args)-1]
		if out, _, code := command(t, holder...); code != 0 || !strings.Contains(out, "COMMANDS") {
			t.Errorf("%v: exit code %d, %q, want help", holder, code, out)
		}
	}
}

// finding is one of doctor --json.
type finding struct{ Name, Level, Text, Remedy string }

// diagnose runs doctor and returns its findings by name; of several with one name, the last.
func diagnose(t *testing.T, args ...string) (found map[string]finding, code int) {
	t.Helper()
	out, errs, code := command(t, append([]string{"doctor", "--json"}, args...)...)
	var report struct {
		Findings           []finding
		Failures, Warnings int
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v: %s%s", err, out, errs)
	}
	found = map[string]finding{}
	for _, f := range report.Findings {
		found[f.Name] = f
		if (f.Level == "ok") != (f.Remedy == "") {
			t.Errorf("a remedy belongs to what is not ok: %+v", f)
		}
	}
	if (report.Failures > 0) != (code == 1) {
		t.Errorf("%d failures and exit code %d", report.Failures, code)
	}
	return found, code
}

// expect compares findings by level and part of the text.
func expect(t *testing.T, found map[string]finding, wants map[string][2]string) {
	t.Helper()
	for name, want := range wants {
		if f, is := found[name]; !is || f.Level != want[0] || !strings.Contains(f.Text, want[1]) {
			t.Errorf("%s: %+v, want %q", name, f, want)
		}
	}
	if t.Failed() {
		t.Logf("findings: %+v", found)
	}
}

func TestDoctorOnACoordinator(t *testing.T) {
	bareEnvironment(t)
	secret := newSecret(t)
	peer := startNode(t, secret, bringup.Status{Cluster: "mlxcel-cluster", Node: "studio-1", Role: "stage", Phase: bringup.PhaseWaiting})
	found, code := diagnose(t, "--cluster-secret-file", secret, "--cluster-peers", peer, "--cluster-control-addr", "127.0.0.1:0")
	if code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	expect(t, found, map[string][2]string{
		"secret": {"ok", secret}, "addresses": {"ok", "127.0.0.1"}, "port tcp": {"ok", "127.0.0.1:0"}, "peer " + peer: {"ok", "stage studio-1, waiting"},
		"peer " + peer + " clock": {"ok", ""}, "peer " + peer + " MTU": {"ok", "interface lo"},
		"executors": {"warning", "none"}, // its peers have them
	})
	if f := found["peer "+peer+" round trip"]; f.Text == "" {
		t.Errorf("no round trip: %+v", found)
	}
}

func TestDoctorSaysWhatIsWrong(t *testing.T) {
	bareEnvironment(t)
	secret, loose := newSecret(t), newSecret(t)
	if err := os.Chmod(loose, 0o644); err != nil {
		t.Fatal(err)
	}
	peer := startNode(t, secret, bringup.Status{Cluster: "mlxcel-cluster", Node: "studio-1", Role: "stage"})
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	_, port, _ := net.SplitHostPort(taken.Addr().String())

	found, code := diagnose(t, "--cluster-secret-file", loose, "--cluster-peers", peer, "--port", port)
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	expect(t, found, map[string][2]string{"secret": {"failure", "mode 0644"}, "peers": {"failure", "not asked"}})
	if f := found["port tcp "+port]; f.Level == "ok" {
		t.Errorf("port %s is taken, and doctor says %+v", port, f)
	}

	found, code = diagnose(t, "--cluster-secret-file", loose, "--allow-loose-secret", "--cluster-peers", peer+",127.0.0.1:1")
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	expect(t, found, map[string][2]string{
		"secret": {"warning", "mode 0644"}, "peer " + peer: {"failure", "secrets differ"}, "peer 127.0.0.1:1": {"failure", "nobody listens"},
	})
	out, _, code := command(t, "doctor", "--cluster-secret-file", loose, "--cluster-peers", peer)
	if code != 1 || !strings.Contains(out, "FAILURE  secret") || !strings.Contains(out, "remedy: run `chmod 600 "+loose) {
		t.Errorf("exit code %d, %s", code, out)
	}
}

func TestDoctorByFile(t *testing.T) {
	bareEnvironment(t)
	secret := newSecret(t)
	peer := startNode(t, secret, bringup.Status{Cluster: "by-file", Node: "the peer", Role: "stage", Phase: bringup.PhaseWaiting})
	file := writeTopology(t, secret, "127.0.0.1:1", peer, "127.0.0.1:2")
	found, _ := diagnose(t, "--distributed-config", file, "--node-id", "stage-0")
	_, port, _ := net.SplitHostPort(peer)
	expect(t, found, map[string][2]string{
		"cluster file": {"ok", "this one is stage-0"}, "secret": {"ok", "secret_file"}, "port tcp " + port: {"ok", "stage the peer of this cluster"},
		"peer coordinator": {"warning", "127.0.0.1:1: nobody"}, "peer stage-1": {"failure", "127.0.0.1:2: nobody"},
	})
	found, _ = diagnose(t, "--distributed-config", file)
	expect(t, found, map[string][2]string{"cluster file": {"ok", "--node-id"}, "peer stage-0": {"ok", "the peer"}})
	found, code := diagnose(t, "--distributed-config", file, "--node-id", "stage-7")
	expect(t, found, map[string][2]string{"cluster file": {"failure", "stage-7"}})
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
}

func TestDoctorFindsPeersByBeacon(t *testing.T) {
	bareEnvironment(t)
	secret := newSecret(t)
	peer := netip.MustParseAddrPort(startNode(t, secret, bringup.Status{Cluster: "mlxcel-cluster", Node: "studio-1", Role: "stage", Phase: bringup.PhaseWaiting}))
	port := freeUDP(t)
	untilEnd(t, func(ctx context.Context) error {
		return discovery.Announce(ctx, discovery.AnnounceConfig{
			Secret: readSecret(t, secret), Cluster: "mlxcel-cluster", NodeID: "studio-1", Version: version, Listen: peer, Port: port, Interval: 50 * time.Millisecond,
		})
	})
	found, _ := diagnose(t, "--cluster-secret-file", secret, "--cluster-discovery", "mdns", "--cluster-discovery-port", fmt.Sprint(port), "--cluster-discovery-timeout", "1")
	expect(t, found, map[string][2]string{
		fmt.Sprintf("port udp %d", port): {"ok", "free"}, "discovery": {"ok", "studio-1 (version " + version + ")"}, "peer studio-1": {"ok", "stage studio-1, waiting"},
	})
}

func freeUDP(t *testing.T) int {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).Port
}

func TestDoctorChecksExecutorsAndModel(t *testing.T) {
	bareEnvironment(t)
	found, code := diagnose(t, "--plugin-dir", root+"/bin/plugins", "-m", tiny)
	if code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	expect(t, found, map[string][2]string{
		"executor llama": {"ok", "llama"}, "device": {"ok", "memory"}, "model": {"ok", "family llama"}, "model weights": {"ok", "every tensor"},
		"secret": {"warning", "no cluster secret"}, // no failure where nothing asks for a cluster
	})
	stranger := t.TempDir()
	if err := os.WriteFile(filepath.Join(stranger, "stranger"), []byte("#!/bin/sh\necho hello\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	found, code = diagnose(t, "--plugin-dir", stranger, "-m", t.TempDir())
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	expect(t, found, map[string][2]string{"executor stranger": {"failure", "hello"}, "executors": {"failure", "none"}, "model": {"failure", "config.json"}})
}

func TestDoctorBadInput(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want []string
	}{
		"argument":        {[]string{"stray"}, []string{"stray"}},
		"discovery":       {[]string{"--cluster-discovery", "dns"}, []string{"--cluster-discovery", "dns", "mdns"}},
		"several at once": {[]string{"--cluster-discovery", "mdns", "--cluster-discovery-port", "0", "--cluster-discovery-timeout", "0", "--cluster-peers", "nonsense"}, []string{"--cluster-discovery-port 0", "--cluster-discovery-timeout 0", "nonsense"}},
		"node of no file": {[]string{"--node-id", "stage-0"}, []string{"--distributed-config"}},
		"dtype":           {[]string{"-m", tiny, "--dtype", "int3"}, []string{"int3"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, errs, code := command(t, append([]string{"doctor"}, tc.args...)...)
			if code != 1 || out != "" {
				t.Errorf("exit code %d, stdout %q, want 1 and nothing", code, out)
			}
			for _, want := range tc.want {
				if !strings.Contains(errs, want) {
					t.Errorf("the message lacks %q: %s", want, errs)
				}
			}
		})
	}
}
