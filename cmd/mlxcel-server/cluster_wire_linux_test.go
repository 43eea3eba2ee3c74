package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

// A slow network, and one that loses packets, change how long an answer takes, and nothing of it.
func TestClusterOnABadWire(t *testing.T) {
	want := server(t).choices(clusterPrompts[1])
	for name, quality := range map[string]hosts.Quality{
		"delay":  {Delay: 5 * time.Millisecond},
		"loss":   {Loss: 0.02},
		"jitter": {Delay: time.Millisecond, Jitter: 10 * time.Millisecond, Loss: 0.01},
	} {
		t.Run(name, func(t *testing.T) {
			n := hosts.New(t, clusterHosts(2)...)
			c := newCluster(t, n, tiny)
			c.at = (*hosts.Host).OnWire
			n.Wire.Shape(quality)
			if got := c.bringUp().choices(clusterPrompts[1]); got != want {
				t.Errorf("%s\none process:\n%s", got, want)
			}
			c.stop()
		})
	}
}

// A link that goes down without a sign is noticed in time, costs the requests that run, and when it is back so is the cluster.
func TestClusterLosesALink(t *testing.T) {
	want := server(t).choices("x")
	stages := []int{0, 1}
	for _, tc := range []struct {
		name     string
		at       func(*hosts.Host, int) string
		down, up func(*testing.T, *hosts.Network, *hosts.Host)
		blamed   []int
	}{
		{"the wire of a stage is cut", (*hosts.Host).OnWire,
			func(_ *testing.T, n *hosts.Network, h *hosts.Host) { n.Wire.Cut(h) },
			func(_ *testing.T, n *hosts.Network, h *hosts.Host) { n.Wire.Heal(h) }, stages[1:]},
		{"the cable of a stage is pulled", (*hosts.Host).LAN,
			func(t *testing.T, _ *hosts.Network, h *hosts.Host) { h.Unplug(t) },
			func(t *testing.T, _ *hosts.Network, h *hosts.Host) { h.Plug(t) }, stages[1:]},
		{"the stages lose each other", (*hosts.Host).OnWire,
			func(_ *testing.T, n *hosts.Network, h *hosts.Host) {
				shapeBetween(n, n.Hosts[1], h, hosts.Quality{Cut: true})
			},
			func(_ *testing.T, n *hosts.Network, h *hosts.Host) { shapeBetween(n, n.Hosts[1], h, hosts.Quality{}) }, stages},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := hosts.New(t, clusterHosts(2)...)
			c := newCluster(t, n, tiny)
			c.at = tc.at
			r := c.bringUp()
			answer := r.open(`{"prompt":"x","stream":true,"ignore_eos":true,"max_tokens":4000}`)
			defer answer.Body.Close()
			stream := bufio.NewReader(answer.Body)
			if _, err := stream.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			struck := time.Now()
			tc.down(t, n, c.peerHost(1))
			lost := c.coordinator.Await(t, hosts.IsMessage("the cluster goes down"))
			took := lost.Logged.Sub(struck)
			t.Logf("noticed after %v: %s", took, lost.Fields["error"])
			if hosts.TooLate(took, hosts.SilentLimit) {
				t.Errorf("noticed after %v, want at most %v", took, hosts.SilentLimit)
			}
			rest, err := io.ReadAll(stream)
			end := string(rest[max(0, len(rest)-1000):])
			if _, event, isError := strings.Cut(end, "event: error\n"); err != nil || !isError || strings.Contains(end, "[DONE]") || !blames(event, tc.blamed) {
				t.Errorf("the answer ends with %q (%v); want an error event that names one of the stages %v", end, err, tc.blamed)
			}
			if status, body := r.complete(`{"prompt":"x","max_tokens":1}`); status != http.StatusServiceUnavailable || !blames(body, tc.blamed) {
				t.Errorf("a request while the link is down gets %d %s", status, body)
			}
			tc.up(t, n, c.peerHost(1))
			c.coordinator.Await(t, hosts.IsMessage("the pipeline is back"))
			if got := r.choices("x"); got != want {
				t.Errorf("after the next bring-up\n%s\none process:\n%s", got, want)
			}
			for _, p := range c.peers {
				p.Await(t, hosts.IsMessage("the stage serves").With("epoch", 1))
				for serves := p.Await(t, hosts.IsMessage("the stage serves")); serves.Fields["epoch"] == 1.0; {
					t.Errorf("%s serves twice in one epoch", p)
					break
				}
			}
			c.stop()
		})
	}
}

// blames tells whether a text names one of the stages as lost.
func blames(text string, stages []int) bool {
	for _, i := range stages {
		if strings.Contains(text, fmt.Sprintf(`"code":"stage_lost","stage":%d`, i)) && strings.Contains(text, fmt.Sprintf("stage-%d", i)) {
			return true
		}
	}
	return false
}

func shapeBetween(n *hosts.Network, a, b *hosts.Host, q hosts.Quality) {
	n.Wire.ShapePath(a, b, q)
	n.Wire.ShapePath(b, a, q)
}

// Hosts with several interfaces need not reach each other over all of them: the one that answers is taken.
func TestClusterTakesTheAddressThatAnswers(t *testing.T) {
	want := server(t).choices("x")
	for _, tc := range []struct {
		name string
		at   func(*hosts.Host, int) string // where the coordinator finds the peers
		down func(*testing.T, *hosts.Network)
		link func(*hosts.Host, int) string // where stage 0 finds stage 1
	}{
		{"no wire between the stages", (*hosts.Host).OnWire,
			func(_ *testing.T, n *hosts.Network) {
				shapeBetween(n, n.Hosts[1], n.Hosts[2], hosts.Quality{Cut: true})
			}, (*hosts.Host).LAN},
		{"no cable at stage 1", (*hosts.Host).OnWire, func(t *testing.T, n *hosts.Network) { n.Hosts[2].Unplug(t) }, (*hosts.Host).OnWire},
		{"no wire at all", (*hosts.Host).LAN, func(_ *testing.T, n *hosts.Network) { n.Wire.Shape(hosts.Quality{Cut: true}) }, (*hosts.Host).LAN},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := hosts.New(t, clusterHosts(2)...)
			tc.down(t, n)
			c := newCluster(t, n, tiny)
			c.at = tc.at
			for i := range c.peers { // they listen on all interfaces, and offer each; the hosts share a name, so that the peers need one of their own
				c.startPeer(i, "--cluster-control-addr", fmt.Sprintf("0.0.0.0:%d", peerPort), "--node-id", c.peerHost(i).Name).Await(t, isWaiting)
			}
			c.startCoordinator()
			if got := c.ready().choices("x"); got != want {
				t.Errorf("%s\none process:\n%s", got, want)
			}
			linked := c.peers[0].Await(t, hosts.IsMessage("linked to the next stage"))
			if at := tc.link(c.peerHost(1), peerPort); linked.Fields["address"] != at {
				t.Errorf("stage 0 reached stage 1 at %v, want %s", linked.Fields["address"], at)
			}
			c.stop()
		})
	}
}
