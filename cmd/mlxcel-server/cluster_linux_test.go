package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

// The tests of clusters run one process on each host of a network: peers that hold a stage each, and a coordinator.
const (
	coordinatorHost = "coordinator"
	controlPort     = 19000
	peerPort        = 19001

	smolLM2 = root + "/models/smollm2-135m-instruct"
)

// testCluster is a coordinator and its peers. Peer i is on the network's host i+1, and becomes stage i.
type testCluster struct {
	t           testing.TB
	net         *hosts.Network
	model       string
	secret      string                            // its file
	at          func(h *hosts.Host, p int) string // the peers' addresses, Host.LAN or Host.OnWire
	peers       []*hosts.Process                  // nil where none was started
	coordinator *hosts.Process                    // nil where none was started
	all         []*hosts.Process                  // that were ever started, for their logs
}

// clusterHosts names the hosts of a cluster.
func clusterHosts(stages int) []string {
	names := []string{coordinatorHost}
	for i := range stages {
		names = append(names, fmt.Sprintf("stage-%d", i))
	}
	return names
}

func newCluster(t testing.TB, n *hosts.Network, model string) *testCluster {
	t.Helper()
	c := &testCluster{t: t, net: n, model: absolute(t, model), secret: secretFile(t, "the secret of this test's cluster"), at: (*hosts.Host).LAN}
	for _, h := range n.Hosts {
		if strings.HasPrefix(h.Name, "stage-") {
			c.peers = append(c.peers, nil)
		}
	}
	return c
}

// secretFile writes a secret. Its text is easy to find wherever it does not belong.
func secretFile(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// start runs the server on a host with what every node of the cluster is given. A flag that is given again counts anew.
func (c *testCluster) start(h *hosts.Host, more ...string) *hosts.Process {
	c.t.Helper()
	args := []string{"-m", c.model, "--cluster-secret-file", c.secret, "--log-format", "json", "--verbose"}
	return c.run(h, hosts.Command{Path: binary(c.t, "mlxcel-server"), Args: append(args, more...)})
}

func (c *testCluster) run(h *hosts.Host, command hosts.Command) *hosts.Process {
	c.t.Helper()
	p := h.Start(c.t, command)
	c.all = append(c.all, p)
	return p
}

// peerHost is the host of a peer.
func (c *testCluster) peerHost(i int) *hosts.Host { return c.net.Hosts[i+1] }

// peerAddress is where a peer listens.
func (c *testCluster) peerAddress(i int) string { return c.at(c.peerHost(i), peerPort) }

// startPeer does not wait for it.
func (c *testCluster) startPeer(i int, more ...string) *hosts.Process {
	c.t.Helper()
	c.peers[i] = c.start(c.peerHost(i), append([]string{"--pp-peer", "--cluster-control-addr", c.peerAddress(i)}, more...)...)
	return c.peers[i]
}

// startPeers waits until all wait for a coordinator.
func (c *testCluster) startPeers(more ...string) {
	c.t.Helper()
	for i := range c.peers {
		c.startPeer(i, more...)
	}
	for _, p := range c.peers {
		p.Await(c.t, isWaiting)
	}
}

// isWaiting is what a peer says when it can be given a stage.
var isWaiting = hosts.IsMessage("waiting for a coordinator")

// startCoordinator does not wait for it.
func (c *testCluster) startCoordinator(more ...string) *hosts.Process {
	c.t.Helper()
	var addresses []string
	for i := range c.peers {
		addresses = append(addresses, c.peerAddress(i))
	}
	return c.startAsCoordinator(append([]string{"--pp-auto", fmt.Sprint(len(c.peers)), "--cluster-peers", strings.Join(addresses, ",")}, more...)...)
}

// startAsCoordinator leaves it to the caller to name the peers.
func (c *testCluster) startAsCoordinator(more ...string) *hosts.Process {
	c.t.Helper()
	h := c.net.Host(coordinatorHost)
	args := []string{"--cluster-control-addr", h.LAN(controlPort), "--host", "127.0.0.1", "--port", "0"}
	c.coordinator = c.start(h, append(args, more...)...)
	return c.coordinator
}

// bringUp starts everything and returns the server once it is ready.
func (c *testCluster) bringUp(more ...string) *running {
	c.t.Helper()
	c.startPeers()
	c.startCoordinator(more...)
	return c.ready()
}

// ready waits until the coordinator, just started, serves.
func (c *testCluster) ready() *running {
	c.t.Helper()
	r := c.server()
	c.coordinator.Await(c.t, hosts.IsMessage("ready"))
	if status, body := r.get("/health"); status != http.StatusOK {
		c.t.Errorf("the coordinator is ready, and its health is %d: %s", status, body)
	}
	return r
}

// server is the coordinator as its clients see it. It waits for the port.
func (c *testCluster) server() *running {
	c.t.Helper()
	return &running{t: c.t, url: c.coordinator.URL(c.t), http: *c.net.Host(coordinatorHost).HTTP()}
}

// stop ends everything in order and checks that nothing is left.
func (c *testCluster) stop() {
	c.t.Helper()
	c.net.Host(coordinatorHost).HTTP().CloseIdleConnections()
	for _, p := range append([]*hosts.Process{c.coordinator}, c.peers...) {
		if p == nil {
			continue
		}
		p.Signal(c.t, syscall.SIGTERM)
		if code := p.Exit(c.t); code != 0 {
			c.t.Errorf("%s ends with exit code %d", p, code)
		}
	}
	c.net.CheckNothingLeft(c.t, nil)
	c.checkSecret()
}

// checkSecret fails the test if the secret is where it does not belong: in a log, or in a file of a host.
func (c *testCluster) checkSecret() {
	c.t.Helper()
	raw, err := os.ReadFile(c.secret)
	if err != nil {
		c.t.Fatal(err)
	}
	text := strings.TrimSpace(string(raw))
	forms := []string{text, hex.EncodeToString([]byte(text))}
	holds := func(s string) bool {
		return slices.ContainsFunc(forms, func(form string) bool { return strings.Contains(strings.ToLower(s), form) })
	}
	for _, p := range c.all {
		for _, e := range p.Events() {
			if holds(e.Line) {
				c.t.Errorf("%s logs the secret: %s", p, e.Line)
			}
		}
	}
	for _, h := range c.net.Hosts {
		err := filepath.WalkDir(h.Folder(), func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			raw, err := os.ReadFile(path)
			if holds(string(raw)) {
				c.t.Errorf("%s on %s holds the secret", path, h.Name)
			}
			return err
		})
		if err != nil {
			c.t.Error(err)
		}
	}
}

// topology writes the cluster as a TOML.
func (c *testCluster) topology() string {
	c.t.Helper()
	var b strings.Builder
	node := func(id, address, role, more string) {
		fmt.Fprintf(&b, "\n[[nodes]]\nid = %q\naddress = %q\nrole = %q\n%s", id, address, role, more)
	}
	fmt.Fprintf(&b, "[cluster]\nname = \"mlxcel-cluster\"\npipeline_parallel_size = %d\n", len(c.peers))
	node("coordinator", c.net.Host(coordinatorHost).LAN(controlPort), "hybrid", "")
	for i := range c.peers {
		node(fmt.Sprintf("stage-%d", i), c.peerAddress(i), "pipeline_stage", fmt.Sprintf("stage = %d\n", i))
	}
	path := filepath.Join(c.t.TempDir(), "cluster.toml")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return path
}

// choices asks for greedy tokens and returns the answer's choices with their log-probabilities, to the last bit.
func (r *running) choices(prompt string) string {
	r.t.Helper()
	status, body := r.complete(fmt.Sprintf(`{"prompt":%q,"max_tokens":24,"ignore_eos":true,"temperature":0,"logprobs":2}`, prompt))
	var a struct{ Choices json.RawMessage }
	if err := json.Unmarshal([]byte(body), &a); err != nil || status != http.StatusOK {
		r.t.Errorf("%d %s", status, body)
	}
	return string(a.Choices)
}

// onNetworks runs a test on hosts of loopback, and on hosts in namespaces.
func onNetworks(t *testing.T, stages int, test func(*testing.T, *hosts.Network)) {
	for name, network := range map[string]func(testing.TB, ...string) *hosts.Network{"loopback": hosts.Loopback, "namespaces": hosts.New} {
		t.Run(name, func(t *testing.T) { test(t, network(t, clusterHosts(stages)...)) })
	}
}
