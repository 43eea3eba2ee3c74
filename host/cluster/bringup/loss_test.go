package bringup

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// onceAt calls f, on a goroutine, when the peer first enters a phase.
func (p *testPeer) onceAt(want Phase, f func()) {
	var once sync.Once
	p.mu.Lock()
	defer p.mu.Unlock()
	p.on = func(phase Phase) {
		if phase == want {
			once.Do(func() { go f() })
		}
	}
}

// failing brings a cluster up that something happens to, and returns the error that ends it.
func failing(t *testing.T, c *Coordinator) error {
	t.Helper()
	committed, err := c.Prepare(t.Context())
	if err != nil {
		return err
	}
	running, err := committed.Activate(t.Context())
	if err != nil {
		return err
	}
	select {
	case <-running.Done():
	case <-time.After(30 * time.Second):
		t.Fatal("nothing ends the cluster")
	}
	err = running.Err()
	if _, ok := errors.AsType[*pipeline.StageError](err); !ok {
		t.Errorf("the cluster ends with %v, want a *pipeline.StageError", err)
	}
	if _, stepErr := greedy(t.Context(), running.Pipeline, testPrompt, 1); stepErr == nil {
		t.Error("a lost cluster answers")
	} else if _, ok := errors.AsType[*pipeline.StageError](stepErr); !ok {
		t.Errorf("a request ends with %v, want a *pipeline.StageError", stepErr)
	}
	if err := running.Close(context.Background()); err != nil {
		t.Error(err)
	}
	return err
}

// works brings a cluster of the peers up and lets it answer.
func works(t *testing.T, peers []*testPeer) {
	t.Helper()
	running := bringUp(t, newTestCoordinator(t, addresses(peers), nil))
	if _, err := greedy(t.Context(), running.Pipeline, testPrompt, 3); err != nil {
		t.Error(err)
	}
	if err := running.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// allPhases are those of a bring-up from the offer on.
var allPhases = []Phase{PhaseOffered, PhaseCommitted, PhaseLoading, PhaseLoaded, PhaseLinked, PhaseReady}

// A peer that goes in whatever phase takes the cluster down everywhere, is named, and the next bring-up works at once.
func TestPeerLossInEveryPhase(t *testing.T) {
	model := testModel(t)
	for _, how := range []struct {
		name string
		kill func(*testPeer)
	}{
		{"stops", func(p *testPeer) { p.cancel() }},
		{"is cut off", func(p *testPeer) { p.net.cut() }},
	} {
		for i, phase := range allPhases {
			victim := i % 2
			t.Run(fmt.Sprintf("stage %d %s when %s", victim, how.name, phase), func(t *testing.T) {
				peers := startPeers(t, model, 2)
				peers[victim].onceAt(phase, func() { how.kill(peers[victim]) })
				err := failing(t, newTestCoordinator(t, addresses(peers), nil))
				var node *NodeError
				if !errors.As(err, &node) || node.Stage != victim || node.Node != fmt.Sprintf("stage-%d", victim) {
					t.Errorf("the cluster ends with %v, want a *NodeError of stage %d", err, victim)
				}
				for _, p := range peers {
					p.await(PhaseLearned)
					p.await(PhaseStopping)
					p.await(PhaseWaiting)
				}
				if how.name == "stops" {
					peers[victim].stop()
					peers[victim] = startPeer(t, fmt.Sprintf("peer-%d", victim), model, peers[victim].address, nil)
				}
				works(t, peers)
			})
		}
	}
}

// dialCuttable is a coordinator's way out that can be cut or frozen.
type dialCuttable struct{ cuttable }

func (d *dialCuttable) dial(ctx context.Context, address string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	f := &freezable{Conn: c, frozen: make(chan struct{}), closed: make(chan struct{})}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conns = append(d.conns, f)
	return f, nil
}

// A coordinator that goes in whatever phase leaves peers that wait, and serve the next one at once.
func TestCoordinatorLossInEveryPhase(t *testing.T) {
	model := testModel(t)
	for i, phase := range append([]Phase{PhaseLearned}, allPhases...) {
		t.Run(string(phase), func(t *testing.T) {
			peers := startPeers(t, model, 2)
			d := &dialCuttable{}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			peers[i%2].onceAt(phase, func() {
				cancel() // it is not to dial again
				d.cut()
			})
			c := newTestCoordinator(t, addresses(peers), func(cfg *CoordinatorConfig) { cfg.Dial = d.dial })
			committed, err := c.Prepare(ctx)
			var running *Running
			if err == nil {
				running, err = committed.Activate(ctx)
			}
			if err == nil {
				<-running.Done()
				err = running.Err()
			}
			if err == nil {
				t.Error("no error")
			}
			peers[i%2].await(phase)
			for _, p := range peers {
				if phase != PhaseLearned {
					p.await(PhaseWaiting)
				}
			}
			works(t, peers)
		})
	}
}

// Nobody answers on connections that are frozen, and nobody closes them: heartbeats find out.
func TestSilence(t *testing.T) {
	fast := impatient
	model := testModel(t)
	start := func(t *testing.T, d *dialCuttable) ([]*testPeer, *Coordinator) {
		t.Cleanup(d.cut)
		var peers []*testPeer
		for i := range 2 {
			peers = append(peers, startPeer(t, fmt.Sprintf("peer-%d", i), model, "127.0.0.1:0", func(c *PeerConfig, _ *toyRuntime) { c.Heartbeat = fast }))
		}
		return peers, newTestCoordinator(t, addresses(peers), func(cfg *CoordinatorConfig) {
			cfg.Heartbeat, cfg.Dial = fast, d.dial
		})
	}
	t.Run("peer", func(t *testing.T) {
		peers, c := start(t, &dialCuttable{})
		peers[1].onceAt(PhaseReady, peers[1].net.freeze)
		err := failing(t, c)
		var node *NodeError
		if !errors.As(err, &node) || node.Stage != 1 || !strings.Contains(err.Error(), "no heartbeat") { // the stage before may be the first to find out
			t.Errorf("the cluster ends with %v, want the silence of stage 1", err)
		}
		for _, p := range peers {
			p.await(PhaseStopping)
			p.await(PhaseWaiting)
		}
		works(t, peers)
	})
	t.Run("coordinator", func(t *testing.T) {
		d := &dialCuttable{}
		peers, c := start(t, d)
		running := bringUp(t, c)
		d.freeze()
		<-running.Done() // it finds both silent
		for _, p := range peers {
			p.await(PhaseStopping)
			p.await(PhaseWaiting)
		}
		works(t, peers)
	})
}

// Closing never hangs on a peer that does not answer.
func TestCloseWithASilentPeer(t *testing.T) {
	fast := impatient
	peers := startPeers(t, testModel(t), 2)
	running := bringUp(t, newTestCoordinator(t, addresses(peers), func(c *CoordinatorConfig) { c.Heartbeat = fast }))
	peers[0].net.freeze()
	if err := running.Close(context.Background()); err != nil {
		t.Error(err)
	}
	peers[0].net.cut()
	peers[1].await(PhaseStopping)
	peers[1].await(PhaseWaiting)
}

// An executor that dies is the loss of its stage, and the peer of it is there for the next bring-up.
func TestExecutorDeath(t *testing.T) {
	model := testModel(t)
	for victim := range 2 {
		t.Run(fmt.Sprintf("stage %d", victim), func(t *testing.T) {
			peers := startPeers(t, model, 2)
			peers[victim].onceAt(PhaseReady, func() { peers[victim].runtime.last().die() })
			err := failing(t, newTestCoordinator(t, addresses(peers), nil))
			var stage *pipeline.StageError
			if !errors.As(err, &stage) || stage.Place.Stage != victim || stage.Node != fmt.Sprintf("stage-%d", victim) || !strings.Contains(err.Error(), "the toy crashed") {
				t.Errorf("the cluster ends with %v, want a *pipeline.StageError of stage %d with the reason", err, victim)
			}
			works(t, peers)
		})
	}
}

// A load that fails aborts the loads of all others.
func TestLoadFailure(t *testing.T) {
	model := testModel(t)
	loading, canceled := make(chan struct{}), make(chan struct{})
	first := startPeer(t, "peer-0", model, "127.0.0.1:0", func(_ *PeerConfig, r *toyRuntime) {
		r.gate = func(ctx context.Context, _ partition.StageAssignment) error {
			close(loading)
			<-ctx.Done()
			close(canceled)
			return context.Cause(ctx)
		}
	})
	second := startPeer(t, "peer-1", model, "127.0.0.1:0", func(_ *PeerConfig, r *toyRuntime) {
		r.gate = func(context.Context, partition.StageAssignment) error {
			<-loading // else there would be nothing to abort
			return sdk.Errorf(sdk.CodeCorrupt, "tensor layers.4.decay is cut short")
		}
	})
	err := failing(t, newTestCoordinator(t, []string{first.address, second.address}, nil))
	var node *NodeError
	if !errors.As(err, &node) || node.Stage != 1 || !strings.Contains(err.Error(), "layers.4.decay") {
		t.Errorf("%v, want a *NodeError of stage 1 that names the tensor", err)
	}
	<-canceled
	for _, p := range []*testPeer{first, second} {
		p.await(PhaseWaiting)
		p.runtime.gate = nil
	}
	works(t, []*testPeer{first, second})
}

// Peers may start after the coordinator, and one that goes before all have come may come again.
func TestPeersMayComeLate(t *testing.T) {
	model := testModel(t)
	first := startPeer(t, "peer-0", model, "127.0.0.1:0", nil)
	late, err := net.Listen("tcp", "127.0.0.1:0") // for its address only
	if err != nil {
		t.Fatal(err)
	}
	address := late.Addr().String()
	if err := late.Close(); err != nil {
		t.Fatal(err)
	}
	started := make(chan struct{})
	first.onceAt(PhaseLearned, func() {
		first.net.cut()
		startPeer(t, "peer-1", model, address, nil)
		close(started)
	})
	running := bringUp(t, newTestCoordinator(t, []string{first.address, address}, nil))
	<-started
	if _, err := greedy(t.Context(), running.Pipeline, testPrompt, 3); err != nil {
		t.Error(err)
	}
	if err := running.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// A peer that is never there is named, with what was tried.
func TestPeerNeverComes(t *testing.T) {
	peers := startPeers(t, testModel(t), 1)
	c := newTestCoordinator(t, []string{peers[0].address, "127.0.0.1:1"}, func(cfg *CoordinatorConfig) { cfg.ConnectTimeout = 50 * time.Millisecond })
	_, err := c.Prepare(t.Context())
	var node *NodeError
	if !errors.As(err, &node) || node.Stage != 1 || node.Address != "127.0.0.1:1" || !strings.Contains(err.Error(), "refused") {
		t.Errorf("%v, want a *NodeError of stage 1 with the dial's error", err)
	}
}

// A coordinator that is told to stop while it waits leaves at once.
func TestPrepareObeysItsContext(t *testing.T) {
	peers := startPeers(t, testModel(t), 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("interrupted")
	peers[0].onceAt(PhaseLearned, func() { cancel(why) })
	_, err := newTestCoordinator(t, []string{peers[0].address, "127.0.0.1:1"}, nil).Prepare(ctx)
	if !errors.Is(err, why) {
		t.Errorf("%v, want %v", err, why)
	}
	peers[0].await(PhaseStopping)
	peers[0].await(PhaseWaiting)
}
