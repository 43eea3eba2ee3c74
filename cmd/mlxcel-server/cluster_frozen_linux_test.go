package main

import (
	"fmt"
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
