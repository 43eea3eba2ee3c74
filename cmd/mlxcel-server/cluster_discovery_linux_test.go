package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

// mdns is what every node is given whose peers are found by beacons.
var mdns = []string{"--cluster-discovery", "mdns"}

// startAnnounced starts a peer that announces itself from wherever it is.
func (c *testCluster) startAnnounced(i int, more ...string) *hosts.Process {
	c.t.Helper()
	c.peers[i] = c.start(c.peerHost(i), append(append([]string{"--pp-peer"}, mdns...), more...)...)
	return c.peers[i]
}

// awaitFound waits until the coordinator tells of what it looks for.
func awaitFound(t *testing.T, coordinator *hosts.Process, texts ...string) {
	t.Helper()
	for {
		e := coordinator.Await(t, hosts.IsMessage("looking for peers"))
		missing := false
		for _, text := range texts {
			missing = missing || !strings.Contains(fmt.Sprint(e.Fields["found"]), text)
		}
		if !missing {
			return
		}
	}
}

// Peers that announce themselves need not be named. The coordinator tells how many it has found, and whom it refuses.
func TestClusterFindsItsPeers(t *testing.T) {
	want := server(t).choices("x")
	n := hosts.New(t, append(clusterHosts(2), "stranger")...)
	c := newCluster(t, n, tiny)
	c.startAsCoordinator(append(mdns, "--pp-auto", "2")...)
	awaitFound(t, c.coordinator, "found 0 of 2")
	stranger := n.Host("stranger").Start(t, hosts.Command{Path: binary(t, "mlxcel-server"), Args: append([]string{"-m", c.model, "--pp-peer",
		"--cluster-secret-file", secretFile(t, "quite another secret"), "--log-format", "json"}, mdns...)})
	awaitFound(t, c.coordinator, "found 0 of 2", "refused "+strings.TrimSuffix(n.Host("stranger").LAN(0), ":0"))
	first := c.startAnnounced(0)
	awaitFound(t, c.coordinator, "found 1 of 2", c.address(0))
	first.Await(t, isWaiting)
	c.startAnnounced(1)
	awaitFound(t, c.coordinator, "found 2 of 2", c.address(0), c.address(1))
	if got := c.ready().choices("x"); got != want {
		t.Errorf("%s\none process:\n%s", got, want)
	}
	stranger.Signal(t, syscall.SIGTERM)
	if code := stranger.Exit(t); code != 0 {
		t.Errorf("the stranger ends with exit code %d", code)
	}
	c.stop()
}

// address is a peer's without a port.
func (c *testCluster) address(i int) string {
	return strings.TrimSuffix(c.peerHost(i).LAN(0), ":0") + ":"
}

// An interface that leads nowhere holds nothing up, whichever of two it is.
func TestClusterFindsPeersDespiteADeadInterface(t *testing.T) {
	want := server(t).choices("x")
	for _, tc := range []struct {
		name string
		dead func(*testing.T, *hosts.Network)
		more func(*hosts.Network) []string // for the peers
	}{
		{"the second", func(_ *testing.T, n *hosts.Network) { n.Wire.Shape(hosts.Quality{Cut: true}) }, func(*hosts.Network) []string { return nil }},
		{"the first", func(t *testing.T, n *hosts.Network) {
			for _, h := range n.Hosts {
				h.Unplug(t)
			}
		}, func(n *hosts.Network) []string { // no broadcast on the other
			return []string{"--cluster-discovery-target", strings.TrimSuffix(n.Host(coordinatorHost).OnWire(0), ":0")}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := hosts.New(t, clusterHosts(2)...)
			tc.dead(t, n)
			c := newCluster(t, n, tiny)
			for i := range c.peers {
				c.startAnnounced(i, append(tc.more(n), "--node-id", c.peerHost(i).Name)...)
			}
			c.startAsCoordinator(append(mdns, "--pp-auto", "2")...)
			if got := c.ready().choices("x"); got != want {
				t.Errorf("%s\none process:\n%s", got, want)
			}
			c.stop()
		})
	}
}

// A dry run waits no longer than it is told, and says whom it has found.
func TestDryRunLooksForPeers(t *testing.T) {
	n := hosts.New(t, clusterHosts(2)...)
	c := newCluster(t, n, tiny)
	c.startAnnounced(0).Await(t, isWaiting)
	dry := c.startAsCoordinator(append(mdns, "--pp-auto", "2", "--dry-run", "--cluster-discovery-timeout", "3")...)
	if code := dry.Exit(t); code != 1 {
		t.Errorf("with one peer of two the exit code is %d", code)
	}
	text := stdout(dry)
	for _, part := range []string{"--pp-auto 2 needs 2 peers, found 1 of 2", c.address(0), "remedy: ", "--cluster-discovery-target", "49555"} {
		if !strings.Contains(text, part) {
			t.Errorf("it prints %q, without %q", text, part)
		}
	}
	c.startAnnounced(1).Await(t, isWaiting)
	dry = c.startAsCoordinator(append(mdns, "--pp-auto", "2", "--dry-run")...)
	if code := dry.Exit(t); code != 0 {
		t.Errorf("with both the exit code is %d: %s", code, stdout(dry))
	}
	c.coordinator = nil
	c.stop()
}

// stdout is what a process has printed.
func stdout(p *hosts.Process) string {
	var text strings.Builder
	for _, e := range p.Events() {
		if e.Stdout {
			text.WriteString(e.Line + "\n")
		}
	}
	return text.String()
}
