package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/stagelink"
	"github.com/mlxcel/mlxcel/sdk"
)

// cluster is a pipeline whose stages are reached over links, with everything on this host.
type cluster struct {
	cfg    pipeline.Config
	dial   func(name string) (near, far net.Conn, err error) // near is the dialling side's
	stages []*pipeline.Stage
	ports  []*stagelink.Port
	serve  []context.CancelFunc
	served []chan error
}

// startOver returns a start of pipelines over connections that dial makes.
func startOver(dial func(name string) (near, far net.Conn, err error)) func(context.Context, pipeline.Config) (*pipeline.Pipeline, error) {
	return func(ctx context.Context, cfg pipeline.Config) (*pipeline.Pipeline, error) {
		c := &cluster{cfg: cfg, dial: dial}
		p, err := c.start(ctx)
		if err != nil {
			return nil, errors.Join(err, c.close(context.WithoutCancel(ctx)))
		}
		return p, nil
	}
}

func overPipes(string) (near, far net.Conn, err error) {
	near, far = net.Pipe()
	return near, far, nil
}

func node(stage int) string { return fmt.Sprintf("node-%d", stage) }

func (c *cluster) start(ctx context.Context) (*pipeline.Pipeline, error) {
	n := len(c.cfg.Plan.Stages)
	for i := range n {
		s, err := c.startStage(ctx, i)
		if err != nil {
			return nil, err
		}
		c.stages = append(c.stages, s)
	}
	conns := make([]stagelink.Connections, n)
	var remote []pipeline.RemoteStage
	for i := range n {
		near, far, err := c.dial(fmt.Sprintf("data %d", i))
		if err != nil {
			return nil, err
		}
		conns[i].Coordinator = far
		c.ports = append(c.ports, stagelink.NewPort(near, sdk.Place{Stage: i}, c.cfg.Epoch, stagelink.Config{}))
		if i > 0 {
			conns[i-1].Next = make([]net.Conn, 1)
			if conns[i-1].Next[0], conns[i].Previous, err = c.dial(fmt.Sprintf("link %d", i)); err != nil {
				return nil, err
			}
		}
		info := c.stages[i].Info()
		info.DeviceID = node(i)
		remote = append(remote, pipeline.RemoteStage{
			Port: pipeline.PortTo{StagePort: c.ports[i], Stage: c.stages[i]}, Info: info, Busy: c.stages[i].Busy,
		})
	}
	remote[0].Close = c.close
	p, err := pipeline.Connect(c.cfg, remote)
	if err != nil {
		return nil, err
	}
	for i, s := range c.stages {
		ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		served := make(chan error, 1)
		c.serve, c.served = append(c.serve, cancel), append(c.served, served)
		go func() { served <- stagelink.ServeStage(ctx, s, conns[i], stagelink.Config{}) }()
		c.ports[i].Start(p.Reporter())
	}
	return p, nil
}

func (c *cluster) startStage(ctx context.Context, i int) (*pipeline.Stage, error) {
	return pipeline.StartStage(ctx, pipeline.StageConfig{
		Epoch: c.cfg.Epoch, Node: node(i), Assignment: c.cfg.Plan.Stages[i], Stages: len(c.cfg.Plan.Stages),
		Launcher: c.cfg.Launcher, Load: c.cfg.LoadRequest(i), Boundary: c.cfg.Profile.Boundary, VocabSize: c.cfg.Profile.VocabSize,
	})
}

// close ends everything, as the loss of a coordinator does.
func (c *cluster) close(ctx context.Context) error {
	for _, p := range c.ports {
		p.Close()
	}
	for i, served := range c.served {
		if _, ok := errors.AsType[*stagelink.LinkError](<-served); !ok {
			return fmt.Errorf("stage %d was served to its end without an error", i)
		}
		c.serve[i]()
	}
	errs := make([]error, len(c.stages))
	var wait sync.WaitGroup
	for i, s := range c.stages {
		wait.Go(func() { errs[i] = s.Close(ctx) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

func overTCP(string) (near, far net.Conn, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if near, err = net.Dial("tcp", l.Addr().String()); err != nil {
		return nil, nil, err
	}
	far, err = l.Accept()
	return near, far, err
}

// overSecureTCP makes connections as nodes of a cluster have them.
func overSecureTCP(name string) (near, far net.Conn, err error) {
	dialled, accepted, err := overTCP(name)
	if err != nil {
		return nil, nil, err
	}
	secret, err := securelink.NewSecret([]byte("sixteen bytes or more"))
	if err != nil {
		return nil, nil, err
	}
	config := securelink.Config{Secret: secret, Self: securelink.Identity{Role: securelink.RoleStage, NodeID: "node"}}
	answered := make(chan error, 1)
	go func() {
		c, err := securelink.Server(context.Background(), accepted, config, func(securelink.Identity) *securelink.Refusal { return nil })
		far = c
		answered <- err
	}()
	near, err = securelink.Client(context.Background(), dialled, config)
	return near, far, errors.Join(err, <-answered)
}

// Everything that holds in one process holds over links.
func TestOverLinks(t *testing.T) {
	pipeline.OverLinks(t, startOver(overPipes))
	for name, test := range pipeline.Anywhere {
		t.Run(name, test)
	}
}

// All that comes back is the same, bit for bit, in one process and over links.
func TestLinksChangeNothing(t *testing.T) {
	here := pipeline.Transcript(t)
	pipeline.OverLinks(t, startOver(overPipes))
	if there := pipeline.Transcript(t); !reflect.DeepEqual(here, there) {
		t.Errorf("in one process\n%v\nover links\n%v", here, there)
	}
}

func TestOverSecureTCP(t *testing.T) {
	p, err := startOver(overSecureTCP)(t.Context(), pipeline.ToyConfig(t, 3, &pipeline.ToyLauncher{}))
	if err != nil {
		t.Fatal(err)
	}
	if err := pipeline.WholeLife(t, p); err != nil {
		t.Error(err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// cutting passes a number of bytes and then breaks the connection.
type cutting struct {
	net.Conn
	left int
	cut  *bool
}

func (c *cutting) Write(b []byte) (int, error) {
	if len(b) <= c.left {
		c.left -= len(b)
		return c.Conn.Write(b)
	}
	n, _ := c.Conn.Write(b[:c.left])
	c.left, *c.cut = 0, true
	_ = c.Conn.Close()
	return n, io.ErrClosedPipe
}

// Wherever a connection is cut, the call under way ends with an error that names the stage at one of its ends, and the
// node; nothing hangs, and nothing stays behind.
func TestConnectionCutAnywhere(t *testing.T) {
	for name, stages := range map[string][]int{"data 0": {0}, "data 1": {1}, "data 2": {2}, "link 1": {0, 1}, "link 2": {1, 2}} {
		for _, side := range []string{"near", "far"} {
			t.Run(name+", "+side, func(t *testing.T) {
				cut := true
				for at := 0; cut; at += 7 {
					cut = false
					synctest.Test(t, func(t *testing.T) { lifeWithCut(t, name, side, at, &cut, stages) })
				}
			})
		}
	}
}

// lifeWithCut runs a request on a pipeline one of whose connections breaks after so many bytes from one side.
func lifeWithCut(t *testing.T, name, side string, at int, cut *bool, stages []int) {
	dial := func(n string) (near, far net.Conn, err error) {
		near, far = net.Pipe()
		switch {
		case n != name:
		case side == "near":
			near = &cutting{near, at, cut}
		default:
			far = &cutting{far, at, cut}
		}
		return near, far, nil
	}
	p, err := startOver(dial)(t.Context(), pipeline.ToyConfig(t, 3, &pipeline.ToyLauncher{}))
	if err != nil {
		t.Fatal(err)
	}
	err = pipeline.WholeLife(t, p)
	if *cut {
		<-p.Done()
		e, ok := errors.AsType[*pipeline.StageError](p.Err())
		if !ok || !slices.Contains(stages, e.Stage) || e.Node != node(e.Stage) || e.Plugin != "toy" || e.Phase == "" {
			t.Errorf("after %d bytes: got %v, want the loss of stage %d", at, p.Err(), stages)
		}
		if err != nil && !errors.Is(err, p.Err()) {
			t.Errorf("after %d bytes: the caller got %v, the pipeline went down by %v", at, err, p.Err())
		}
	} else if err != nil {
		t.Errorf("nothing was cut after %d bytes: %v", at, err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// With many requests under way, the loss of any connection ends them all.
func TestCutUnderLoad(t *testing.T) {
	for seed := range uint64(30) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			names := []string{"data 0", "data 1", "data 2", "link 1", "link 2"}
			name, at, cut := names[rng.IntN(len(names))], 500+rng.IntN(5000), false
			dial := func(n string) (near, far net.Conn, err error) {
				near, far = net.Pipe()
				if n == name {
					near = &cutting{near, at, &cut}
				}
				return near, far, nil
			}
			cfg := pipeline.ToyConfig(t, 3, &pipeline.ToyLauncher{})
			cfg.MicroBatch = 2
			p, err := startOver(dial)(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			var wait sync.WaitGroup
			for range 16 {
				wait.Go(func() {
					for {
						if err := pipeline.WholeLife(t, p); err != nil {
							if !errors.Is(err, p.Err()) {
								t.Errorf("got %v, want %v", err, p.Err())
							}
							return
						}
					}
				})
			}
			wait.Wait()
			if e, ok := errors.AsType[*pipeline.StageError](p.Err()); !ok || e.Node != node(e.Stage) {
				t.Errorf("%s cut after %d bytes: %v", name, at, p.Err())
			}
			if err := p.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A stage whose service ends because its host wants that leaves the others to the coordinator.
func TestServiceEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := pipeline.StartStage(t.Context(), pipeline.StageConfig{})
		if s != nil || err == nil {
			t.Error("a stage of nothing started")
		}
		l := &pipeline.ToyLauncher{}
		c := &cluster{cfg: pipeline.ToyConfig(t, 1, l), dial: overPipes}
		if s, err = c.startStage(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		for _, conns := range []func(a, b net.Conn) stagelink.Connections{
			func(a, _ net.Conn) stagelink.Connections { return stagelink.Connections{Previous: a} },
			func(a, b net.Conn) stagelink.Connections { return stagelink.Connections{Coordinator: a, Previous: b} },
			func(a, b net.Conn) stagelink.Connections {
				return stagelink.Connections{Coordinator: a, Next: []net.Conn{b}}
			},
		} {
			a, far := net.Pipe()
			b, _ := net.Pipe()
			if err := stagelink.ServeStage(t.Context(), s, conns(a, b), stagelink.Config{}); err == nil {
				t.Error("the only stage was served with other connections than it has")
			}
			if _, err := far.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("a connection was left open: %v", err)
			}
		}
		near, far := net.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		served := make(chan error)
		go func() {
			served <- stagelink.ServeStage(ctx, s, stagelink.Connections{Coordinator: far}, stagelink.Config{})
		}()
		synctest.Wait()
		cancel()
		if err := <-served; err != nil {
			t.Errorf("got %v, want nothing", err)
		}
		if _, err := near.Read(make([]byte, 1)); err == nil {
			t.Error("the coordinator's connection was left open")
		}
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// BenchmarkStepOverhead measures what a decode step takes outside the executors, whose computing is fixed: the share
// of it on two stages over secured loopback connections, and in one process for comparison.
func BenchmarkStepOverhead(b *testing.B) {
	for _, c := range []struct {
		name  string
		start func(context.Context, pipeline.Config) (*pipeline.Pipeline, error)
	}{{"one process", pipeline.Start}, {"pipes", startOver(overPipes)}, {"TCP", startOver(overTCP)}, {"secured", startOver(overSecureTCP)}} {
		b.Run(c.name, func(b *testing.B) {
			l := &pipeline.ToyLauncher{}
			pipeline.Spin(l, 5*time.Millisecond)
			p, err := c.start(b.Context(), pipeline.ToyConfig(b, 2, l))
			if err != nil {
				b.Fatal(err)
			}
			defer p.Close(context.Background())
			if err := p.Reserve(b.Context(), sdk.Reservation{Seq: 1}); err != nil {
				b.Fatal(err)
			}
			begin := time.Now()
			steps := 0
			for b.Loop() {
				if _, err := p.Step(b.Context(), []sdk.SeqStep{{Seq: 1, Pos: steps, Rows: 1, Tokens: []int32{1}, Want: sdk.WantToken}}); err != nil {
					b.Fatal(err)
				}
				steps++
			}
			outside := time.Since(begin)
			for _, busy := range p.Busy() {
				outside -= busy
			}
			b.ReportMetric(float64(outside.Microseconds())/float64(steps), "µs-outside/op")
			b.ReportMetric(100*outside.Seconds()/time.Since(begin).Seconds(), "%outside")
		})
	}
}
