package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

// dryRun plans a cluster on the coordinator's host and returns what was printed and the exit code.
func (c *testCluster) dryRun(command hosts.Command) (string, int) {
	c.t.Helper()
	p := c.run(c.net.Host(coordinatorHost), command)
	code := p.Exit(c.t)
	var all strings.Builder
	for _, e := range p.Events() {
		all.WriteString(e.Line + "\n")
	}
	return all.String(), code
}

// A plan needs no secret, no weights and no executors, and prints exactly this.
func TestDryRun(t *testing.T) {
	n := hosts.Either(t, clusterHosts(2)...)
	c := newCluster(t, n, tiny)
	at := n.Host(coordinatorHost)
	config := t.TempDir() // a model without weights
	raw, err := os.ReadFile(filepath.Join(c.model, "config.json"))
	if err == nil {
		err = os.WriteFile(filepath.Join(config, "config.json"), raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, peers := range []string{"192.168.1.11:19001,192.168.1.12:19001", "192.168.1.11:19001,192.168.1.12:19001", "192.168.1.12:19001,192.168.1.11:19001"} {
		out, code := c.dryRun(hosts.Command{Path: bare(t), Args: []string{"-m", config, "--pp-auto", "2", "--cluster-peers", peers, "--cluster-control-addr", at.LAN(controlPort), "--dry-run"}})
		file := filepath.Join(at.Folder(), ".mlxcel/cluster.toml")
		want := fmt.Sprintf(`Cluster: mlxcel-cluster
  TP size: 1, PP size: 2
  Nodes (3):
    - coordinator @ %s [hybrid]
    - stage-0 @ 192.168.1.11:19001 [pipeline_stage]
    - stage-1 @ 192.168.1.12:19001 [pipeline_stage]
Emitted cluster TOML at: %s
`, at.LAN(controlPort), file)
		if out != want || code != 0 {
			t.Errorf("--cluster-peers %s: exit code %d and\n%s\nwant\n%s", peers, code, out, want)
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, string(raw))
	}
	if files[0] != files[1] || files[0] != files[2] {
		t.Errorf("the plan's files differ:\n%s", strings.Join(files, "\n---\n"))
	}
	n.CheckNothingLeft(t, nil)
}

// Each thing that keeps the cluster from coming up is told with its remedy; no file is written then.
func TestDryRunConflicts(t *testing.T) {
	for _, tc := range []struct {
		name    string
		prepare func(*testing.T, *testCluster)
		args    func(*testCluster) []string
		says    []string // nothing where there is no conflict
	}{
		{"no conflict", nil, nil, nil},
		{"too few peers", nil, func(c *testCluster) []string { return []string{"--cluster-peers", c.peerAddress(0)} },
			[]string{"--pp-auto 2 needs 2 peers, found 1 of 2", "remedy: name more of them in --cluster-peers"}},
		{"HTTP on the control address", nil, func(c *testCluster) []string {
			return []string{"--host", strings.TrimSuffix(c.net.Hosts[0].LAN(0), ":0"), "--port", fmt.Sprint(controlPort)}
		}, []string{"collides with the HTTP listen address", "remedy: change --cluster-control-addr or --port"}},
		{"the control port is taken", func(t *testing.T, c *testCluster) { occupy(t, c.net.Hosts[0], c.net.Hosts[0].LAN(controlPort)) }, nil,
			[]string{"coordinator @ ", "the TCP port is taken by another process", "remedy: stop that process, or give another port with --cluster-control-addr"}},
		{"a peer's port is taken", func(t *testing.T, c *testCluster) { occupy(t, c.net.Hosts[0], c.net.Hosts[0].LAN(peerPort)) },
			func(c *testCluster) []string {
				return []string{"--cluster-peers", c.net.Hosts[0].LAN(peerPort) + "," + c.peerAddress(1)}
			}, []string{"the TCP port is taken by another process", "remedy: ", "--cluster-peers"}},
		{"a peer's port is held by that peer", func(t *testing.T, c *testCluster) {
			c.start(c.net.Hosts[0], "--pp-peer", "--cluster-control-addr", c.net.Hosts[0].LAN(peerPort)).Await(t, isWaiting)
		}, func(c *testCluster) []string {
			return []string{"--cluster-peers", c.net.Hosts[0].LAN(peerPort) + "," + c.peerAddress(1)}
		}, nil},
		{"a peer of another version", func(t *testing.T, c *testCluster) {
			c.run(c.peerHost(0), hosts.Command{Path: otherVersion(t), Args: []string{"-m", c.model, "--cluster-secret-file", c.secret, "--log-format", "json",
				"--pp-peer", "--cluster-control-addr", c.peerAddress(0)}}).Await(t, isWaiting)
		}, nil, []string{"v0.0.0-other", "remedy: install the same version"}},
		{"a peer with another secret", func(t *testing.T, c *testCluster) {
			c.startPeer(0, "--cluster-secret-file", secretFile(t, "quite another secret")).Await(t, isWaiting)
		}, nil, []string{"the cluster secrets differ", "remedy: copy the same file to every host"}},
		{"a peer of another cluster", func(t *testing.T, c *testCluster) {
			c.startPeer(0, "--cluster-name", "elsewhere").Await(t, isWaiting)
		}, nil, []string{`"elsewhere"`, "remedy: give every node the same --cluster-name"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCluster(t, hosts.Either(t, clusterHosts(2)...), tiny)
			if tc.prepare != nil {
				tc.prepare(t, c)
			}
			args := []string{"--pp-auto", "2", "--cluster-peers", c.peerAddress(0) + "," + c.peerAddress(1), "--cluster-control-addr", c.net.Hosts[0].LAN(controlPort),
				"--cluster-secret-file", c.secret, "--dry-run"}
			if tc.args != nil {
				args = append(args, tc.args(c)...)
			}
			out, code := c.dryRun(hosts.Command{Path: binary(t, "mlxcel-server"), Args: args})
			for _, part := range tc.says {
				if !strings.Contains(out, part) {
					t.Errorf("it says\n%s\nwithout %q", out, part)
				}
			}
			_, err := os.Stat(filepath.Join(c.net.Hosts[0].Folder(), ".mlxcel/cluster.toml"))
			if written := err == nil; written != (len(tc.says) == 0) || (code == 0) != written {
				t.Errorf("exit code %d, a file written: %v:\n%s", code, written, out)
			}
		})
	}
}

func occupy(t *testing.T, h *hosts.Host, address string) {
	t.Helper()
	l, err := h.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
}

// The coordinator writes its plan, and each peer the one that it got: the same.
func TestClusterWritesItsPlan(t *testing.T) {
	c := newCluster(t, hosts.Either(t, clusterHosts(2)...), tiny)
	c.bringUp()
	var files []string
	for i, h := range c.net.Hosts {
		name := ".mlxcel/cluster.toml"
		if i > 0 {
			name = fmt.Sprintf(".mlxcel/cluster-stage-%d.toml", i-1)
		}
		raw, err := os.ReadFile(filepath.Join(h.Folder(), name))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, string(raw))
	}
	if files[0] != files[1] || files[0] != files[2] {
		t.Errorf("the plan's files differ:\n%s", strings.Join(files, "\n---\n"))
	}
	c.stop()
	// The file starts the same cluster.
	file := filepath.Join(c.net.Hosts[0].Folder(), ".mlxcel/cluster.toml")
	for i := range c.peers {
		c.peers[i] = c.start(c.peerHost(i), "--distributed-config", file, "--node-id", fmt.Sprintf("stage-%d", i))
		c.peers[i].Await(t, isWaiting)
	}
	c.coordinator = c.start(c.net.Hosts[0], "--distributed-config", file, "--node-id", "coordinator", "--port", "0")
	if text := c.ready().text("x", ""); text == "" {
		t.Error("no answer")
	}
	c.stop()
}

// A cluster of a file that an operator has written.
func TestClusterByHand(t *testing.T) {
	want := server(t).choices("x")
	for _, tc := range []struct {
		name        string
		file        func(c *testCluster) string
		coordinator func(c *testCluster) []string
		peer        []string
		says        string // in every log
	}{
		{"plain", (*testCluster).topology, nil, []string{"--node-role", "pipeline_stage"}, ""},
		{"layers cut by hand", (*testCluster).topology, func(*testCluster) []string { return []string{"--pp-layers", "0-0,1-5"} }, nil, ""},
		{"no coordinator in the file", func(c *testCluster) string {
			return edited(c, func(text string) string {
				before, rest, _ := strings.Cut(text, "[[nodes]]")
				_, stages, _ := strings.Cut(rest, "[[nodes]]")
				return before + "[[nodes]]" + stages
			})
		}, func(c *testCluster) []string {
			return []string{"--cluster-control-addr", c.net.Hosts[0].LAN(controlPort)}
		}, nil, ""},
		{"peers that skip the wait for a plan", (*testCluster).topology, nil, []string{"--pp-peer"}, ""},
		{"a transport that does not exist yet", func(c *testCluster) string {
			return edited(c, func(text string) string {
				return strings.Replace(text, "[cluster]\n", "[cluster]\ntransport_backend = \"rdma\"\n", 1)
			})
		}, nil, nil, "rdma_transport: falling back to TCP (reason=os=linux, driver="},
		{"the secret's place in the file", func(c *testCluster) string {
			return edited(c, func(text string) string {
				return strings.Replace(text, "[cluster]\n", fmt.Sprintf("[cluster]\nsecret_file = %q\n", c.secret), 1)
			})
		}, nil, nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCluster(t, hosts.Either(t, clusterHosts(2)...), tiny)
			file := tc.file(c)
			start := func(h *hosts.Host, id string, more ...string) *hosts.Process {
				args := []string{"-m", c.model, "--distributed-config", file, "--node-id", id, "--log-format", "json", "--verbose"}
				if raw, err := os.ReadFile(file); err != nil || !strings.Contains(string(raw), "secret_file") {
					args = append(args, "--cluster-secret-file", c.secret)
				}
				return c.run(h, hosts.Command{Path: binary(t, "mlxcel-server"), Args: append(args, more...)})
			}
			for i := range c.peers {
				c.peers[i] = start(c.peerHost(i), fmt.Sprintf("stage-%d", i), append([]string{"--peers", c.peerAddress(1 - i)}, tc.peer...)...)
				c.peers[i].Await(t, isWaiting)
			}
			var more []string
			if tc.coordinator != nil {
				more = tc.coordinator(c)
			}
			c.coordinator = start(c.net.Hosts[0], "coordinator", append([]string{"--port", "0"}, more...)...)
			r := c.ready()
			if got := r.choices("x"); got != want {
				t.Errorf("%s\none process:\n%s", got, want)
			}
			if slices.Contains(more, "--pp-layers") {
				if got := fmt.Sprint(c.peers[0].Await(t, hosts.IsMessage("accepted a stage")).Fields["layers"]); got != "0-0" {
					t.Errorf("stage 0 has the layers %s", got)
				}
			}
			for _, p := range c.all {
				if tc.says != "" && !says(p, tc.says) {
					t.Errorf("%s does not say %q", p, tc.says)
				}
			}
			c.stop()
		})
	}
}

// edited writes the cluster's file with a change.
func edited(c *testCluster, change func(string) string) string {
	c.t.Helper()
	path := c.topology()
	raw, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(change(string(raw))), 0o600)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return path
}

// What makes no sense together is refused before anything starts.
func TestClusterFlagsThatExcludeEachOther(t *testing.T) {
	c := newCluster(t, hosts.Loopback(t, clusterHosts(2)...), tiny)
	auto := []string{"--pp-auto", "2", "--cluster-peers", c.peerAddress(0) + "," + c.peerAddress(1), "--port", "0"}
	for _, tc := range []struct {
		args []string
		says []string
	}{
		{append(slices.Clone(auto), "--distributed-config", c.topology(), "--node-id", "coordinator"), []string{"--pp-auto and --distributed-config exclude each other"}},
		{append(slices.Clone(auto), "--pp-layers", "0-2,3-5"), []string{"--pp-auto and --pp-layers exclude each other"}},
		{append(slices.Clone(auto), "--pp-peer"), []string{"--pp-auto and --pp-peer exclude each other"}},
		{[]string{"--distributed-config", c.topology(), "--node-id", "nobody"}, []string{"has no such node", "stage-1"}},
		{[]string{"--distributed-config", c.topology(), "--node-id", "stage-0", "--node-role", "hybrid"}, []string{"gives node stage-0 the role pipeline_stage"}},
		{[]string{"--distributed-config", edited(c, func(text string) string { return strings.ReplaceAll(text, "stage = 1", "stage = 0\nspeed = 1") }), "--node-id", "stage-0"},
			[]string{"speed", "stage"}},
	} {
		p := c.start(c.net.Hosts[0], tc.args...)
		if code := p.Exit(t); code != 1 {
			t.Errorf("%q: exit code %d", tc.args, code)
		}
		for _, text := range tc.says {
			if !says(p, text) {
				t.Errorf("%q: it does not say %q", tc.args, text)
			}
		}
	}
	p := c.startAsCoordinator(auto...)
	p.Await(t, hosts.IsMessage("waiting for a peer"))
	p.Signal(t, syscall.SIGTERM) // nobody has come
	if code := p.Exit(t); code != 0 {
		t.Errorf("a coordinator that waits for its peers ends with exit code %d on SIGTERM", code)
	}
}

// A stage with little memory gets few layers, and a prompt that one stage has no room for is refused as a whole, with that stage named.
func TestClusterKeepsToItsMemory(t *testing.T) {
	t.Run("layers", func(t *testing.T) {
		c := newCluster(t, hosts.Either(t, clusterHosts(2)...), tiny)
		r := c.bringUp("--no-warmup", "--ctx-size", "64", "--stage-memory", "200KiB,1GiB")
		for i, want := range []string{"0-1", "2-5"} {
			if got := c.peers[i].Await(t, hosts.IsMessage("accepted a stage")).Fields["layers"]; got != want {
				t.Errorf("stage %d has the layers %v, want %s", i, got, want)
			}
		}
		if text := r.text("x", ""); text == "" {
			t.Error("no answer")
		}
		c.stop()
	})
	t.Run("prompts", func(t *testing.T) {
		c := newCluster(t, hosts.Either(t, clusterHosts(2)...), tiny)
		r := c.bringUp("--no-warmup", "--kv-budget", "1GiB,64KiB")
		want := r.choices("x")
		status, body := r.complete(fmt.Sprintf(`{"prompt":%q,"max_tokens":4}`, strings.Repeat("fox ", 200)))
		if status != 400 || !strings.Contains(body, "the KV budget of stage 1") {
			t.Errorf("a prompt that stage 1 has no room for gets %d %s", status, body)
		}
		if got := r.choices("x"); got != want {
			t.Errorf("after it the answer is\n%s\nbefore\n%s", got, want)
		}
		c.stop()
	})
}
