package bringup

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
)

// Every reason for which a cluster does not come up: it is typed, tells both sides' values, names the stage at fault where
// it is one, and leaves every peer waiting.
func TestRefusals(t *testing.T) {
	model := testModel(t)
	other := t.TempDir()
	if err := leakyrnn.WriteRandom(other, leakyrnn.Config{HiddenSize: 8, Layers: 5, VocabSize: 32, ContextLength: 64}, 1); err != nil {
		t.Fatal(err)
	}
	two := "0-2,3-9"
	for _, tc := range []struct {
		name        string
		second      string // model of the second peer; default the first's
		peer        func(*PeerConfig, *toyRuntime)
		coordinator func(*CoordinatorConfig)
		code        cluster.Code // empty where the error is no refusal
		stage       int          // -1 for none
		says        []string
	}{
		{
			name: "secret", peer: func(c *PeerConfig, _ *toyRuntime) { c.Secure.Secret = testSecret(t, "another sixteen bytes") },
			code: cluster.CodeSecret, stage: 1, says: []string{"--cluster-secret-file"},
		},
		{
			name: "program version", peer: func(c *PeerConfig, _ *toyRuntime) { c.Secure.Self.Version = "v9" },
			code: cluster.CodeVersion, stage: 1, says: []string{"v9", testVersion},
		},
		{
			name: "cluster name", peer: func(c *PeerConfig, _ *toyRuntime) { c.Secure.Self.Cluster = "theirs" },
			code: cluster.CodeCluster, stage: 1, says: []string{"theirs", "test", "--cluster-name"},
		},
		{
			name: "one name for two", peer: func(c *PeerConfig, _ *toyRuntime) { c.Secure.Self.NodeID = "peer-0" },
			code: CodeNode, stage: 1, says: []string{"peer-0", "--node-id"},
		},
		{
			name: "no executor", peer: func(_ *PeerConfig, r *toyRuntime) {
				r.change = func(i *Inspection) {
					i.Profile, i.Family, i.Plugin, i.Problem = nil, sdk.Family{}, "", "none is installed"
					i.Executors = []sdk.Description{{Name: "gemma4", Version: "v1", Families: []sdk.Family{{Name: "gemma3", Pipeline: true}}}}
				}
			},
			code: cluster.CodeCapability, stage: 1, says: []string{"pipeline capability mismatch", "leaky_rnn", "gemma3", "example", "/plugins"},
		},
		{
			name: "not splittable", peer: func(_ *PeerConfig, r *toyRuntime) {
				r.change = func(i *Inspection) { i.Family.Pipeline, i.Executors[0].Families[0].Pipeline = false, false }
			},
			code: cluster.CodeCapability, stage: 1, says: []string{"unsplit only"},
		},
		{
			name: "another profile", peer: func(_ *PeerConfig, r *toyRuntime) {
				r.change = func(i *Inspection) { i.Profile.Boundary.Dtype = sdk.DtypeBFloat16 }
			},
			code: cluster.CodeCapability, stage: 1, says: []string{"bfloat16", "float32", "--dtype"},
		},
		{
			name: "a profile that differs far inside", peer: func(_ *PeerConfig, r *toyRuntime) {
				r.change = func(i *Inspection) { i.Profile.Layers[2].States[0].Block = 256 }
			},
			code: cluster.CodeCapability, stage: 1, says: []string{"Layers[2].States[0].Block 256, want 0"},
		},
		{
			name: "model identity", second: other,
			code: cluster.CodeModel, stage: 1, says: []string{"layers: want 6, got 5", "config.json"},
		},
		{
			name: "the coordinator's own copy", coordinator: func(c *CoordinatorConfig) { c.Identity = &cluster.Identity{Version: testVersion} },
			code: cluster.CodeModel, stage: 0, says: []string{"config.json"},
		},
		{
			name: "accelerator", peer: func(_ *PeerConfig, r *toyRuntime) {
				r.device = func() sdk.Device { return sdk.Device{Kind: "metal", TotalMemory: 1 << 30} }
			},
			code: cluster.CodeAccelerator, stage: 1, says: []string{"metal", "cpu"},
		},
		{
			name: "memory that is there no more", peer: func(_ *PeerConfig, r *toyRuntime) {
				free := []int64{1 << 30, 1 << 10}
				r.device = func() sdk.Device {
					d := sdk.Device{Kind: "cpu", TotalMemory: 1 << 30, FreeMemory: free[0]}
					free = slices.Delete(free, 0, min(1, len(free)-1))
					return d
				}
			},
			code: cluster.CodeMemory, stage: 1, says: []string{"1024 bytes"},
		},
		{
			name: "layer ranges", coordinator: func(c *CoordinatorConfig) { c.Demand.Pipeline.Layers = &two },
			stage: -1, says: []string{"--pp-layers", "layer 9 is out of range"},
		},
		{
			name: "a cluster file that can't be written", peer: func(c *PeerConfig, _ *toyRuntime) {
				c.SavePlan = func(string, []byte) error {
					return os.WriteFile(filepath.Join(c.Model.Dir, "nowhere", "x"), nil, 0o600)
				}
			},
			stage: 1, says: []string{"cluster's TOML", "nowhere"},
		},
		{
			name: "too little memory for the model", coordinator: func(c *CoordinatorConfig) { c.Topology.MemoryBytes = 1 << 10 },
			stage: -1, says: []string{"stage-0", "1.0 KiB"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.second == "" {
				tc.second = model
			}
			peers := []*testPeer{startPeer(t, "peer-0", model, "127.0.0.1:0", nil), startPeer(t, "peer-1", tc.second, "127.0.0.1:0", tc.peer)}
			err := failing(t, newTestCoordinator(t, addresses(peers), tc.coordinator))
			if tc.code != "" && !errors.Is(err, &cluster.Refusal{Code: tc.code}) {
				t.Errorf("%v, want a refusal of code %s", err, tc.code)
			}
			node, ok := errors.AsType[*NodeError](err)
			if ok != (tc.stage >= 0) || ok && node.Stage != tc.stage {
				t.Errorf("%v, want stage %d to be named", err, tc.stage)
			}
			for _, want := range tc.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want it to tell %q", err, want)
				}
			}
			for _, p := range peers {
				p.stop() // which looks for what is left
			}
		})
	}
}

// A coordinator without an executor of its own can't count layers: the peers do.
func TestCoordinatorWithoutExecutor(t *testing.T) {
	model := testModel(t)
	peers := startPeers(t, model, 2)
	have, err := (&toyRuntime{model: model, version: testVersion}).Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	have.Identity.Layers = 0
	running := bringUp(t, newTestCoordinator(t, addresses(peers), func(c *CoordinatorConfig) { c.Identity = &have.Identity }))
	if got := running.Plan.Identity.Layers; got != testModelShape.Layers || running.Plan.Family.Name != leakyrnn.Family {
		t.Errorf("%d layers of family %q", got, running.Plan.Family.Name)
	}
}

// The reason of an abort is in the log of every peer.
func TestAbortReachesLogs(t *testing.T) {
	model := testModel(t)
	var log bytes.Buffer // read once the peer has ended
	first := startPeer(t, "peer-0", model, "127.0.0.1:0", func(c *PeerConfig, _ *toyRuntime) {
		c.Logger = hclog.New(&hclog.LoggerOptions{Output: &log})
	})
	second := startPeer(t, "peer-1", model, "127.0.0.1:0", func(_ *PeerConfig, r *toyRuntime) {
		r.device = func() sdk.Device { return sdk.Device{Kind: "metal"} }
	})
	if err := failing(t, newTestCoordinator(t, []string{first.address, second.address}, nil)); err == nil {
		t.Fatal("no error")
	}
	first.await(PhaseWaiting)
	first.stop()
	if !strings.Contains(log.String(), "the coordinator aborts: stage 1 (stage-1") || !strings.Contains(log.String(), "accelerator family metal") {
		t.Errorf("log of the other peer:\n%s", log.String())
	}
}

// A peer serves one coordinator at a time.
func TestBusy(t *testing.T) {
	peers := startPeers(t, testModel(t), 2)
	running := bringUp(t, newTestCoordinator(t, addresses(peers), nil))
	_, err := newTestCoordinator(t, addresses(peers), func(c *CoordinatorConfig) { c.ConnectTimeout = 100 * time.Millisecond }).Prepare(t.Context())
	if !errors.Is(err, &cluster.Refusal{Code: cluster.CodeBusy}) || !strings.Contains(err.Error(), "coordinator#") {
		t.Errorf("%v, want a refusal that names the coordinator that the peer serves", err)
	}
	if _, err := greedy(t.Context(), running.Pipeline, testPrompt, 2); err != nil {
		t.Errorf("the cluster that runs is hurt: %v", err)
	}
}

// Two coordinators that each hold a peer that the other waits for do not wait for ever: the one whose run has the smaller name
// gets both, and the other once that one has ended.
func TestTwoCoordinatorsAtOnce(t *testing.T) {
	peers := startPeers(t, testModel(t), 2)
	held := make(chan struct{}) // closed once each holds one
	start := func(run byte, own int) <-chan *Running {
		c := newTestCoordinator(t, addresses(peers), func(c *CoordinatorConfig) {
			c.Rand = bytes.NewReader(bytes.Repeat([]byte{run}, len(transport.Session{})))
			c.Dial = func(ctx context.Context, address string) (net.Conn, error) {
				if address != peers[own].address {
					select {
					case <-held:
					case <-ctx.Done():
						return nil, context.Cause(ctx)
					}
				}
				return (&net.Dialer{}).DialContext(ctx, "tcp", address)
			}
		})
		up := make(chan *Running)
		go func() {
			defer close(up)
			committed, err := c.Prepare(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			running, err := committed.Activate(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			up <- running
		}()
		return up
	}
	second, first := start(2, 0), start(1, 1)
	for _, p := range peers {
		p.await(PhaseLearned)
	}
	close(held)
	for i, up := range []<-chan *Running{first, second} {
		running, ok := <-up
		if !ok {
			t.Fatalf("coordinator %d did not come up", i+1)
		}
		if _, err := greedy(t.Context(), running.Pipeline, testPrompt, 2); err != nil {
			t.Error(err)
		}
		if err := running.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// A coordinator that knows only older epochs than its peers goes past them.
func TestEpochsGrow(t *testing.T) {
	peers := startPeers(t, testModel(t), 2)
	c := newTestCoordinator(t, addresses(peers), nil)
	var last uint64
	for i := range 3 {
		if i == 2 {
			c = newTestCoordinator(t, addresses(peers), nil)
		}
		committed, err := c.Prepare(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if committed.Epoch <= last {
			t.Errorf("epoch %d after %d", committed.Epoch, last)
		}
		last = committed.Epoch
		if err := committed.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// What a coordinator and a peer answer a tool.
func TestStatus(t *testing.T) {
	peers := startPeers(t, testModel(t), 2)
	c := newTestCoordinator(t, addresses(peers), nil)
	running := bringUp(t, c)
	if _, err := greedy(t.Context(), running.Pipeline, testPrompt, 3); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() {
		served <- ServeStatus(ctx, securelink.ListenerConfig{Config: testSecure(t, "coordinator")}, l, c.Status)
	}()
	ask := func(address string) *Answer {
		t.Helper()
		a, err := Ask(t.Context(), testDialer(t), address)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	got := ask(l.Addr().String())
	if got.Role != "coordinator" || got.Phase != PhaseReady || got.Epoch != running.Epoch || len(got.Stages) != 2 || got.RoundTrip <= 0 {
		t.Errorf("%+v", got)
	}
	for i, s := range got.Stages {
		if s.Health != "ok" || s.Address != peers[i].address || s.Answered != peers[i].address || s.WeightBytes == 0 || s.Layers.End <= s.Layers.Start || s.KVBudget == 0 || s.BudgetBytes == 0 {
			t.Errorf("%+v", s)
		}
	}
	if s := got.Stages[0]; s.LinkAddress != peers[1].address || s.LinkRoundTrip <= 0 {
		t.Errorf("%+v", s)
	}
	p := ask(peers[1].address)
	if p.Role != "stage" || p.Phase != PhaseReady || len(p.Stages) != 1 {
		t.Fatalf("%+v", p)
	}
	budget := deviceBudget(partition.DefaultHeadroom(), sdk.Device{TotalMemory: 1 << 30, FreeMemory: 1 << 30}, 1)
	if s, of := p.Stages[0], got.Stages[1]; s.Stage != 1 || s.Received == 0 || s.BudgetBytes != budget || s.KVBudget != of.KVBudget || s.WeightBytes != of.WeightBytes || s.Layers != of.Layers {
		t.Errorf("%+v, the coordinator %+v", s, of)
	}
	for begin := time.Now(); ask(peers[1].address).Stages[0].BusyFraction == 0; { // which is of a short interval
		if _, err := greedy(t.Context(), running.Pipeline, testPrompt, 8); err != nil {
			t.Fatal(err)
		}
		if time.Since(begin) > 10*time.Second {
			t.Fatal("a peer that computes tells that it is idle")
		}
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if err := running.Close(context.Background()); err != nil {
		t.Error(err)
	}
	if p := ask(peers[1].address); p.Phase != PhaseWaiting || len(p.Stages) != 0 {
		t.Errorf("%+v", p)
	}
}

// Two peers on one machine share its memory; each on its own has all of it.
func TestMemoryOfOneMachine(t *testing.T) {
	learned := func(machine string) Learned {
		return Learned{Machine: machine, Inspection: Inspection{Device: sdk.Device{Kind: "cpu", TotalMemory: 1000, FreeMemory: 900}}}
	}
	nodes := topology("a:1", "b:2", "c:3")
	h := hardware(partition.Headroom{Fixed: 10}, nodes, nodes.Stages(), []Learned{learned("x"), learned("y"), learned("x")})
	if len(h.Memories) != 2 || h.Stages[0].Memory != h.Stages[2].Memory || h.Stages[0].Memory == h.Stages[1].Memory {
		t.Errorf("%+v", h)
	}
	if h.Memories[0].Budget != 900 || h.Memories[1].Budget != 900 {
		t.Errorf("%+v, want what is free", h.Memories)
	}
	nodes.Nodes[1].MemoryBytes = 300
	h = hardware(partition.Headroom{Fixed: 10}, nodes, nodes.Stages(), []Learned{learned("x"), learned("y"), learned("x")})
	if len(h.Memories) != 3 || h.Memories[0].Budget != 300 || h.Memories[2].Budget != 600 {
		t.Errorf("%+v, want 300 of stated memory, and the rest of the machine for the other", h.Memories)
	}
}

func TestKVBudgets(t *testing.T) {
	stage := func(memory string, budget, weights, kv int64) partition.StageAssignment {
		return partition.StageAssignment{Memory: memory, BudgetBytes: budget, Load: partition.Load{Weights: weights, KV: kv}}
	}
	for _, tc := range []struct {
		name   string
		stages []partition.StageAssignment
		given  []int64
		want   []int64
		fault  string
	}{
		{name: "what the weights leave", stages: []partition.StageAssignment{stage("a", 100, 40, 10), stage("b", 200, 50, 10)}, want: []int64{60, 150}},
		{name: "shared as it is needed", stages: []partition.StageAssignment{stage("a", 100, 20, 10), stage("a", 100, 20, 20)}, want: []int64{20, 40}},
		{name: "shared with no need", stages: []partition.StageAssignment{stage("a", 100, 20, 0), stage("a", 100, 20, 0)}, want: []int64{30, 30}},
		{name: "no limit", stages: []partition.StageAssignment{stage("a", partition.Unlimited, 20, 1)}, want: []int64{0}},
		{name: "one for all", stages: []partition.StageAssignment{stage("a", 100, 20, 1), stage("b", 100, 20, 1)}, given: []int64{7}, want: []int64{7, 7}},
		{name: "one for each", stages: []partition.StageAssignment{stage("a", 100, 20, 1), stage("b", 100, 20, 1)}, given: []int64{7, 8}, want: []int64{7, 8}},
		{name: "too many", stages: []partition.StageAssignment{stage("a", 100, 20, 1)}, given: []int64{7, 8}, fault: "--kv-budget gives 2 sizes for 1 stages"},
	} {
		got, err := kvBudgets(&partition.Plan{Stages: tc.stages}, tc.given)
		if !slices.Equal(got, tc.want) || (err != nil) != (tc.fault != "") || err != nil && !strings.Contains(err.Error(), tc.fault) {
			t.Errorf("%s: %v, %v, want %v", tc.name, got, err, tc.want)
		}
	}
}

func TestCandidates(t *testing.T) {
	to := Learned{Machine: "b", Reached: "10.0.0.2:1", Inspection: Inspection{}, Addresses: []string{"192.168.0.2:1", "10.0.0.2:1", "127.0.0.1:1"}}
	if got, want := candidates(Learned{Machine: "a"}, to), []string{"10.0.0.2:1", "192.168.0.2:1"}; !slices.Equal(got, want) {
		t.Errorf("from another machine %v, want %v", got, want)
	}
	if got, want := candidates(Learned{Machine: "b"}, to), []string{"127.0.0.1:1", "10.0.0.2:1", "192.168.0.2:1"}; !slices.Equal(got, want) {
		t.Errorf("on one machine %v, want %v", got, want)
	}
}
