package bringup

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
)

// CoordinatorConfig is what a coordinator is made of.
type CoordinatorConfig struct {
	Secure    securelink.Config // Self is the coordinator: its node id, the cluster's name, the program's version; the role is set
	Topology  *cluster.Config   // of cluster.Plan or a file
	Demand    Demand
	Shape     Shape
	Identity  *cluster.Identity // of this host's copy of the model; nil where it has none; without Layers where it has no executor
	Executors []sdk.Description // that this host has, for messages

	ConnectTimeout time.Duration // for all peers to be there; default 60 s
	PhaseTimeout   time.Duration // for each of the short phases: offer, commit, links, canary; default 30 s
	LoadTimeout    time.Duration // for a load without progress; default 2 min
	RetryEvery     time.Duration // between attempts to reach a peer; default 250 ms
	WatchEvery     time.Duration // between the peers' numbers; default 1 s

	// Observer, where set, is told what the peers' stages do with each micro-batch, in each peer's order and by its clock; nil
	// has the peers take no notice of it.
	Observer pipeline.Observer

	Heartbeat transport.HeartbeatConfig                       // default 500 ms and 2.5 s
	Dial      func(context.Context, string) (net.Conn, error) // default TCP
	Rand      io.Reader                                       // of session names; default crypto/rand
	Logger    hclog.Logger                                    // default none
}

func (c CoordinatorConfig) withDefaults() CoordinatorConfig {
	for _, d := range []struct {
		value   *time.Duration
		instead time.Duration
	}{
		{&c.ConnectTimeout, time.Minute}, {&c.PhaseTimeout, 30 * time.Second}, {&c.LoadTimeout, 2 * time.Minute},
		{&c.RetryEvery, 250 * time.Millisecond}, {&c.WatchEvery, time.Second},
	} {
		if *d.value == 0 {
			*d.value = d.instead
		}
	}
	if c.Rand == nil {
		c.Rand = rand.Reader
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	c.Heartbeat = c.Heartbeat.WithDefaults()
	c.Secure.Self.Role = securelink.RoleCoordinator
	return c
}

// Coordinator brings a cluster up, as often as it is asked to, one run at a time. It runs no stage itself.
type Coordinator struct {
	cfg CoordinatorConfig
	log hclog.Logger

	mu      sync.Mutex
	epoch   uint64 // of the last run
	current *run   // nil before the first
}

// NewCoordinator checks the configuration.
func NewCoordinator(cfg CoordinatorConfig) (*Coordinator, error) {
	if cfg.Topology == nil || len(cfg.Topology.Stages()) == 0 {
		return nil, errors.New("a coordinator needs a topology with stages")
	}
	if len(cfg.Secure.Self.NodeID) > securelink.MaxNodeID-len("#01234567") {
		return nil, fmt.Errorf("node id %q is too long for a coordinator: want at most %d bytes", cfg.Secure.Self.NodeID, securelink.MaxNodeID-len("#01234567"))
	}
	cfg = cfg.withDefaults()
	return &Coordinator{cfg: cfg, log: cfg.Logger}, nil
}

// Status tells of the last run.
func (c *Coordinator) Status() Status {
	c.mu.Lock()
	r := c.current
	c.mu.Unlock()
	self := c.cfg.Secure.Self
	s := Status{Cluster: c.cfg.Topology.Name, Node: self.NodeID, Version: self.Version, Role: "coordinator", Phase: PhaseWaiting}
	if r != nil {
		r.status(&s)
	}
	return s
}

// Prepare reaches every peer, plans on what they have, and has all of them accept and commit to their stages. When it fails, no
// peer holds anything of it. The run lives past ctx, which bounds this phase only, until its Close or a loss.
func (c *Coordinator) Prepare(ctx context.Context) (*Committed, error) {
	r, err := c.newRun()
	if err != nil {
		return nil, err
	}
	for _, phase := range []func(context.Context) error{r.gather, r.planAndOffer, r.commit} {
		if err := phase(ctx); err != nil {
			<-r.down
			return nil, err
		}
	}
	return &Committed{run: r, Plan: r.plan, Epoch: r.epoch}, nil
}

func (c *Coordinator) newRun() (*run, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil && !c.current.isDown() {
		return nil, errors.New("a run of this coordinator is still up: close it first")
	}
	r := &run{c: c, cfg: c.cfg, log: c.log, gathered: make(chan struct{}), down: make(chan struct{})}
	if _, err := io.ReadFull(c.cfg.Rand, r.session[:]); err != nil {
		return nil, fmt.Errorf("random name of a session: %w", err)
	}
	secure := c.cfg.Secure
	secure.Self.NodeID += "#" + r.session.String() // so that peers tell this run from an earlier one
	r.dial = transport.Dialer{Secure: secure, Dial: c.cfg.Dial}
	nodes := c.cfg.Topology.Stages()
	r.roster = newRoster(len(nodes))
	r.ctx, r.cancel = context.WithCancelCause(context.Background())
	for i, n := range nodes {
		r.nodes = append(r.nodes, &node{run: r, index: i, at: n})
	}
	c.current = r
	go r.supervise()
	return r, nil
}

// nextEpoch is past every epoch that this coordinator or a peer has seen.
func (c *Coordinator) nextEpoch(learned []Learned) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range learned {
		c.epoch = max(c.epoch, l.LastEpoch)
	}
	c.epoch++
	return c.epoch
}

// Committed is a cluster whose peers all hold their stages ready.
type Committed struct {
	Plan  *Plan
	Epoch uint64

	run *run
}

// Done is closed when the cluster is lost or closed.
func (c *Committed) Done() <-chan struct{} { return c.run.ctx.Done() }

// Err says why, a *NodeError for a loss; nil before.
func (c *Committed) Err() error { return c.run.err() }

// Close gives the cluster up.
func (c *Committed) Close(ctx context.Context) error { return c.run.close(ctx) }

// Activate loads every stage, links them, and sends one token through all. When it fails, nothing is left of the cluster.
func (c *Committed) Activate(ctx context.Context) (*Running, error) {
	r := c.run
	for _, phase := range []func(context.Context) error{r.activate, r.link, r.canary, r.announce} {
		if err := phase(ctx); err != nil {
			<-r.down
			return nil, err
		}
	}
	return &Running{Pipeline: r.pipeline, Plan: r.plan, Epoch: r.epoch, run: r}, nil
}
