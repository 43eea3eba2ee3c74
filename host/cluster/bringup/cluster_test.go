package bringup

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
)

// These tests run whole clusters in this process: real connections on loopback, real handshakes, and the sdk's example
// executor served in this process.

const testVersion = "v1.2.3"

var testModelShape = leakyrnn.Config{HiddenSize: 8, Layers: 6, VocabSize: 32, ContextLength: 64}

func testSecret(t testing.TB, text string) securelink.Secret {
	t.Helper()
	s, err := securelink.NewSecret([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func testSecure(t testing.TB, node string) securelink.Config {
	return securelink.Config{
		Secret: testSecret(t, "sixteen bytes or more"),
		Self:   securelink.Identity{NodeID: node, Cluster: "test", Version: testVersion},
	}
}

// toyRuntime serves the example executor in this process.
type toyRuntime struct {
	model   string
	version string
	change  func(*Inspection)                                                // of what it tells of the machine; may be nil
	device  func() sdk.Device                                                // nil is 1 GiB, all free
	gate    func(ctx context.Context, stage partition.StageAssignment) error // before a load; may be nil

	mu       sync.Mutex
	launched []*toyProcess
}

func (r *toyRuntime) Inspect(ctx context.Context) (*Inspection, error) {
	e := leakyrnn.New(hclog.NewNullLogger())
	d, err := e.Describe(ctx)
	if err != nil {
		return nil, err
	}
	profile, err := e.Inspect(ctx, sdk.InspectRequest{Dir: r.model})
	if err != nil {
		return nil, err
	}
	model, err := modelrepo.Open(r.model)
	if err != nil {
		return nil, err
	}
	out := &Inspection{
		ModelType: model.ModelType, Executors: []sdk.Description{{Name: d.Name, Version: d.Version, Families: d.Families}},
		Folders: []string{"/plugins"}, Plugin: "example", Family: d.Families[0], Profile: profile,
	}
	if out.Identity, err = cluster.Identify(model, len(profile.Layers), r.version); err != nil {
		return nil, err
	}
	if r.change != nil {
		r.change(out)
	}
	return out, nil
}

func (r *toyRuntime) Device(context.Context) (sdk.Device, error) {
	if r.device != nil {
		return r.device(), nil
	}
	return sdk.Device{Kind: "cpu", TotalMemory: 1 << 30, FreeMemory: 1 << 30}, nil
}

func (r *toyRuntime) Launcher() pipeline.Launcher { return r }

func (r *toyRuntime) Close(context.Context) error { return nil }

func (r *toyRuntime) Launch(_ context.Context, a partition.StageAssignment) (pipeline.Executor, error) {
	client, stop, err := sdk.InProcess(leakyrnn.New(hclog.NewNullLogger()))
	if err != nil {
		return nil, err
	}
	p := &toyProcess{runtime: r, stage: a, client: client, stop: stop, done: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.launched = append(r.launched, p)
	return p, nil
}

// running are the executors that were not stopped.
func (r *toyRuntime) running() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.launched {
		if !p.isStopped() {
			n++
		}
	}
	return n
}

// last is the executor that was launched last.
func (r *toyRuntime) last() *toyProcess {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.launched[len(r.launched)-1]
}

// toyProcess is an executor that can die.
type toyProcess struct {
	runtime *toyRuntime
	stage   partition.StageAssignment
	client  *sdk.Client
	stop    func() error

	mu      sync.Mutex
	once    sync.Once
	done    chan struct{}
	err     error
	stopped bool
}

func (p *toyProcess) Plugin() string          { return "example" }
func (p *toyProcess) Region() *sdk.Region     { return p.client.Region() }
func (p *toyProcess) Enter(pipeline.Phase)    {}
func (p *toyProcess) Done() <-chan struct{}   { return p.done }
func (p *toyProcess) Explain(err error) error { return err }

func (p *toyProcess) Health(ctx context.Context) error { return p.client.Ping(ctx) }

func (p *toyProcess) Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	if gate := p.runtime.gate; gate != nil {
		if err := gate(ctx, p.stage); err != nil {
			return nil, err
		}
	}
	return p.client.Load(ctx, req, progress)
}

func (p *toyProcess) OpenSteps(ctx context.Context) (sdk.StepClient, error) {
	steps, err := p.client.OpenSteps(ctx)
	if err != nil {
		return nil, err
	}
	return steps, nil
}

func (p *toyProcess) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

func (p *toyProcess) end(err error) {
	p.once.Do(func() {
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(p.done)
	})
}

// die ends it as a crash does, as far as its host can tell.
func (p *toyProcess) die() { p.end(errors.New("the toy crashed")) }

func (p *toyProcess) Kill() error {
	p.end(errors.New("killed"))
	return nil
}

func (p *toyProcess) Stop(context.Context) error {
	p.end(nil)
	p.mu.Lock()
	first := !p.stopped
	p.stopped = true
	p.mu.Unlock()
	if !first {
		return nil
	}
	return p.stop()
}

func (p *toyProcess) isStopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped
}

// cuttable is a listener whose connections can be cut or frozen, as by a network that goes or a process that stops.
type cuttable struct {
	net.Listener
	mu    sync.Mutex
	conns []*freezable
}

func (l *cuttable) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	f := &freezable{Conn: c, frozen: make(chan struct{}), closed: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns = append(l.conns, f)
	return f, nil
}

func (l *cuttable) each(f func(*freezable)) {
	l.mu.Lock()
	conns := slices.Clone(l.conns)
	l.mu.Unlock()
	for _, c := range conns {
		f(c)
	}
}

// cut breaks every connection at once.
func (l *cuttable) cut() { l.each(func(c *freezable) { _ = c.Conn.Close() }) }

// freeze lets nothing through any more, and tells nobody.
func (l *cuttable) freeze() { l.each((*freezable).freeze) }

type freezable struct {
	net.Conn
	once      sync.Once
	frozen    chan struct{}
	closeOnce sync.Once
	closed    chan struct{}
}

func (c *freezable) freeze() { c.once.Do(func() { close(c.frozen) }) }

func (c *freezable) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		switch {
		case !c.isFrozen():
			return n, err
		case err != nil && c.isClosed():
			return 0, net.ErrClosed
		case errors.Is(err, os.ErrDeadlineExceeded):
			return 0, err
		case err != nil:
			<-c.closed // the other side's end is not seen either
			return 0, net.ErrClosed
		}
	}
}

func (c *freezable) Write(p []byte) (int, error) {
	if c.isFrozen() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *freezable) isFrozen() bool { return isDone(c.frozen) }
func (c *freezable) isClosed() bool { return isDone(c.closed) }

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Close of a frozen connection is not seen by the other side, until cut.
func (c *freezable) Close() error {
	c.closeOnce.Do(func() { close(c.closed) })
	if c.isFrozen() {
		return c.Conn.SetDeadline(time.Unix(1, 0))
	}
	return c.Conn.Close()
}

// testPeer is a peer that runs.
type testPeer struct {
	t       testing.TB
	runtime *toyRuntime
	net     *cuttable
	address string
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // after done

	mu     sync.Mutex
	phases []Phase
	signal chan struct{} // closed and renewed with every phase
	on     func(Phase)
	saved  []byte
}

// startPeer starts a peer; change may alter its configuration before.
func startPeer(t testing.TB, name, model, address string, change func(*PeerConfig, *toyRuntime)) *testPeer {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	p := &testPeer{
		t: t, runtime: &toyRuntime{model: model, version: testVersion}, net: &cuttable{Listener: l}, address: l.Addr().String(),
		done: make(chan struct{}), signal: make(chan struct{}),
	}
	cfg := PeerConfig{
		Secure: testSecure(t, name), Listener: p.net, Machine: "one", Model: ModelConfig{Dir: model},
		Open:     func(context.Context) (Runtime, error) { return p.runtime, nil },
		SavePlan: func(_ string, config []byte) error { p.saved = config; return nil },
		OnPhase:  p.onPhase, Heartbeat: testHeartbeat, Logger: testLogger(t, name),
	}
	if change != nil {
		change(&cfg, p.runtime)
	}
	peer, err := NewPeer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	go func() {
		defer close(p.done)
		p.err = peer.Run(ctx)
	}()
	t.Cleanup(p.stop)
	return p
}

// testHeartbeat is patient enough for a busy machine.
var testHeartbeat = transport.HeartbeatConfig{Interval: 50 * time.Millisecond, Limit: 5 * time.Second}

// impatient finds silence soon, and yet bears a machine that is busy.
var impatient = transport.HeartbeatConfig{Interval: 50 * time.Millisecond, Limit: time.Second}

func testLogger(t testing.TB, name string) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{Name: name, Level: hclog.Debug, Output: testWriter{t}, DisableTime: true})
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(string(b[:len(b)-1]))
	return len(b), nil
}

// stop ends the peer and checks that nothing is left of it.
func (p *testPeer) stop() {
	p.cancel()
	<-p.done
	p.net.cut()
	if p.err != nil {
		p.t.Errorf("peer %s: %v", p.address, p.err)
	}
	if n := p.runtime.running(); n > 0 {
		p.t.Errorf("peer %s left %d executors", p.address, n)
	}
}

func (p *testPeer) onPhase(phase Phase) {
	p.mu.Lock()
	p.phases = append(p.phases, phase)
	close(p.signal)
	p.signal = make(chan struct{})
	on := p.on
	p.mu.Unlock()
	if on != nil {
		on(phase)
	}
}

// await waits until the peer has entered a phase since the mark that the last await left.
func (p *testPeer) await(want Phase) {
	p.t.Helper()
	for {
		p.mu.Lock()
		if i := slices.Index(p.phases, want); i >= 0 {
			p.phases = p.phases[i+1:]
			p.mu.Unlock()
			return
		}
		signal := p.signal
		p.mu.Unlock()
		select {
		case <-signal:
		case <-time.After(30 * time.Second):
			p.t.Fatalf("peer %s never came to %s: %v", p.address, want, p.phases)
		}
	}
}

// startPeers starts n peers of one model.
func startPeers(t testing.TB, model string, n int) []*testPeer {
	peers := make([]*testPeer, n)
	for i := range peers {
		peers[i] = startPeer(t, fmt.Sprintf("peer-%d", i), model, "127.0.0.1:0", nil)
	}
	return peers
}

func testModel(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := leakyrnn.WriteRandom(dir, testModelShape, 1); err != nil {
		t.Fatal(err)
	}
	return dir
}

// topology is a cluster of the peers in the given order.
func topology(addresses ...string) *cluster.Config {
	c := &cluster.Config{
		Name: "test", PipelineParallel: len(addresses), TensorParallel: 1,
		Nodes: []cluster.Node{{ID: "coordinator", Address: "127.0.0.1:19000", Role: cluster.RoleHybrid, Stage: cluster.Unset, Rank: cluster.Unset}},
	}
	for i, a := range addresses {
		c.Nodes = append(c.Nodes, cluster.Node{ID: fmt.Sprintf("stage-%d", i), Address: a, Role: cluster.RolePipelineStage, Stage: i, Rank: cluster.Unset})
	}
	return c
}

func addresses(peers []*testPeer) []string {
	out := make([]string, len(peers))
	for i, p := range peers {
		out[i] = p.address
	}
	return out
}

// newTestCoordinator makes a coordinator of the nodes at the addresses.
func newTestCoordinator(t testing.TB, at []string, change func(*CoordinatorConfig)) *Coordinator {
	t.Helper()
	none := partition.Headroom{}
	cfg := CoordinatorConfig{
		Secure: testSecure(t, "coordinator"), Topology: topology(at...), Demand: Demand{Context: 32, Sequences: 2, Headroom: &none},
		RetryEvery: 5 * time.Millisecond, WatchEvery: 20 * time.Millisecond, Heartbeat: testHeartbeat, Logger: testLogger(t, "coordinator"),
	}
	if change != nil {
		change(&cfg)
	}
	c, err := NewCoordinator(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// bringUp takes a cluster to where it serves; the test closes it.
func bringUp(t testing.TB, c *Coordinator) *Running {
	t.Helper()
	committed, err := c.Prepare(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	running, err := committed.Activate(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := running.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return running
}

// greedy answers a prompt.
func greedy(ctx context.Context, p *pipeline.Pipeline, prompt []int32, n int) ([]int32, error) {
	seq := p.NewSeq()
	if err := p.Reserve(ctx, sdk.Reservation{Seq: seq, Prompt: prompt, MaxLen: len(prompt) + n}); err != nil {
		return nil, err
	}
	step := sdk.SeqStep{Seq: seq, Rows: len(prompt), Tokens: prompt, Prompt: true, Want: sdk.WantToken}
	var out []int32
	for range n {
		r, err := p.Step(ctx, []sdk.SeqStep{step})
		if err != nil {
			return nil, err
		}
		out = append(out, r[0].Token)
		step = sdk.SeqStep{Seq: seq, Pos: step.Pos + len(step.Tokens), Rows: 1, Tokens: []int32{r[0].Token}, Want: sdk.WantToken}
	}
	return out, p.Release(ctx, seq)
}

var testPrompt = []int32{3, 1, 4, 1, 5}

// alone is what the unsplit model answers.
func alone(t testing.TB, model string, n int) []int32 {
	t.Helper()
	r := &toyRuntime{model: model}
	have, err := r.Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	plan, err := partition.New(partition.Request{Profile: have.Profile, Hardware: partition.Local(1, partition.Memory{Budget: partition.Unlimited})})
	if err != nil {
		t.Fatal(err)
	}
	p, err := pipeline.Start(t.Context(), pipeline.Config{Plan: plan, Profile: have.Profile, Launcher: r, ModelDir: model, Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	out, err := greedy(t.Context(), p, testPrompt, n)
	if err := errors.Join(err, p.Close(context.Background())); err != nil {
		t.Fatal(err)
	}
	return out
}

func testDialer(t testing.TB) transport.Dialer {
	return transport.Dialer{Secure: testSecure(t, "tool")}
}
