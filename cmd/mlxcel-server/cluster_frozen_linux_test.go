package main

import (
	"fmt"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

// TestFrozenExecutorOfAPeer stops a peer's executor, then sends the cluster far more than a socket takes: every request is
// answered, the cluster comes up again, and answers as before.
func TestFrozenExecutorOfAPeer(t *testing.T) {
	for stage := range 2 {
		t.Run(fmt.Sprintf("stage %d", stage), func(t *testing.T) {
			onNetworks(t, 2, func(t *testing.T, n *hosts.Network) {
				c := newCluster(t, n, tiny)
				r := c.bringUp("--parallel", "16", "--prefill-chunk-size", "16")
				want := r.choices("before")
				frozen := executorOf(t, c.peers[stage])
				frozen.Signal(t, syscall.SIGSTOP)
				r.floodFrozen(16)
				frozen.AwaitEnd(t)
				r.waitReady()
				if got := r.choices("before"); got != want {
					t.Errorf("after the loss %q, before it %q", got, want)
				}
				c.stop()
			})
		})
	}
}

var requestActive = regexp.MustCompile(`(?m)^mlxcel_active_requests [1-9]`)

// TestSigtermWhileAPeersExecutorIsFrozen ends a coordinator whose peer's executor stands still, with a request on its way there,
// and then the peers.
func TestSigtermWhileAPeersExecutorIsFrozen(t *testing.T) {
	for stage := range 2 {
		t.Run(fmt.Sprintf("stage %d", stage), func(t *testing.T) {
			c := newCluster(t, hosts.Loopback(t, clusterHosts(2)...), tiny)
			r := c.bringUp("--parallel", "16", "--prefill-chunk-size", "16", "--metrics")
			frozen := executorOf(t, c.peers[stage])
			frozen.Signal(t, syscall.SIGSTOP)
			var wait sync.WaitGroup
			wait.Go(func() { // how it ends is as it may be: the coordinator goes
				if answer, err := r.http.Post(r.url+"/v1/completions", "application/json", strings.NewReader(longPrompt)); err == nil {
					answer.Body.Close()
				}
			})
			r.awaitMetrics(requestActive)
			c.stop()
			wait.Wait()
		})
	}
}
