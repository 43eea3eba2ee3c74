// Package coordinate owns the coordinator's process: from the flags over the plan and the bring-up to an engine whose stages run on
// other machines, again after each loss.
package coordinate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/sdk"
)

// Config is what a coordinator needs to know beyond its cluster.
type Config struct {
	Cluster *clusterflags.Settings
	Engine  engine.Config // of the model's text side, and of this host's executors, which name the family in messages
	Demand  bringup.Demand
	Shape   bringup.Shape
	Logger  hclog.Logger
}

const (
	// firstWait is how long a start waits for peers that are not up yet.
	firstWait = time.Minute
	// returnWait is how long a cluster that lost a peer waits for it to come back.
	returnWait = time.Hour
)

// Coordinator brings one cluster up, as often as needed. It is safe for concurrent use.
type Coordinator struct {
	cfg    Config
	secret securelink.Secret
	own    []sdk.Description

	mu        sync.Mutex
	identity  *cluster.Identity    // that peers must have; nil until it is known
	runs      int                  // begun
	current   *bringup.Coordinator // of the last run; nil before the first
	committed *bringup.Committed   // waits for Open
}

// New reads the secret and looks at this host's copy of the model.
func New(ctx context.Context, cfg Config) (*Coordinator, error) {
	secret, err := cfg.Cluster.Secret()
	if err != nil {
		return nil, err
	}
	c := &Coordinator{cfg: cfg, secret: secret}
	for _, n := range cfg.Cluster.Notices {
		cfg.Logger.Info(n)
	}
	return c, c.inspect(ctx)
}

// inspect finds out what this host has of the model. It needs neither weights nor an executor.
func (c *Coordinator) inspect(ctx context.Context) error {
	model, err := modelrepo.Open(c.cfg.Engine.Model)
	if err != nil || model.WeightsErr != nil {
		return err
	}
	plugins := c.cfg.Engine.Plugins
	plugins.Logger = c.cfg.Logger.Named("executor")
	local, err := bringup.OpenLocal(bringup.LocalConfig{
		Model:   bringup.ModelConfig{Dir: c.cfg.Engine.Model, Dtype: c.cfg.Engine.Dtype},
		Version: c.cfg.Cluster.Version, Verify: c.cfg.Cluster.Verify, Plugins: plugins,
	})
	if err != nil {
		return err
	}
	found, err := local.Inspect(ctx)
	if err == nil {
		c.identity, c.own = &found.Identity, found.Executors
	}
	return errors.Join(err, local.Close(ctx))
}

// Prepare plans the cluster, writes its TOML, and waits until every peer has committed to its stage.
func (c *Coordinator) Prepare(ctx context.Context) error {
	topology, err := c.cfg.Cluster.Plan(ctx, c.secret, c.cfg.Logger)
	if err != nil {
		return err
	}
	if out := c.cfg.Cluster.Out(); out != "" {
		if err := cluster.WriteFile(out, topology); err != nil {
			return err
		}
	}
	run, err := c.begin(topology)
	if err != nil {
		return err
	}
	committed, err := run.Prepare(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.committed = committed
	return nil
}

// begin makes the coordinator of a run.
func (c *Coordinator) begin(topology *cluster.Config) (*bringup.Coordinator, error) {
	self, ok := topology.Coordinator()
	if !ok {
		return nil, fmt.Errorf("%s has no coordinator: give --cluster-control-addr", topology.Path)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	wait := firstWait
	if c.runs++; c.runs > 1 {
		wait = returnWait
	}
	run, err := bringup.NewCoordinator(bringup.CoordinatorConfig{
		Secure: c.secure(self.ID), Topology: topology, Demand: c.cfg.Demand, Shape: c.cfg.Shape, Identity: c.identity, Executors: c.own,
		ConnectTimeout: wait, Logger: c.cfg.Logger.Named("cluster"),
	})
	if err == nil {
		c.current = run
	}
	return run, err
}

func (c *Coordinator) secure(id string) securelink.Config {
	return securelink.Config{
		Secret: c.secret,
		Self:   securelink.Identity{Role: securelink.RoleCoordinator, NodeID: id, Cluster: c.cfg.Cluster.Name, Version: c.cfg.Cluster.Version},
	}
}

// Open activates what Prepare has committed, or where there is nothing prepares first.
func (c *Coordinator) Open(ctx context.Context) (*engine.Engine, error) {
	return engine.OpenRemote(ctx, c.cfg.Engine, func(ctx context.Context, _ *modelrepo.Model) (engine.Stages, error) {
		committed := c.take()
		if committed == nil {
			if err := c.Prepare(ctx); err != nil {
				return nil, err
			}
			committed = c.take()
		}
		running, err := committed.Activate(ctx)
		if err != nil {
			return nil, err
		}
		c.pin(running.Plan.Identity)
		return stages{running}, nil
	})
}

// pin keeps a coordinator without a copy of the model to the one that it has served: peers that come back with another
// are refused.
func (c *Coordinator) pin(id cluster.Identity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.identity == nil {
		c.identity = &id
	}
}

func (c *Coordinator) take() *bringup.Committed {
	c.mu.Lock()
	defer c.mu.Unlock()
	committed := c.committed
	c.committed = nil
	return committed
}

// Close gives up what was prepared and never opened.
func (c *Coordinator) Close(ctx context.Context) error {
	if committed := c.take(); committed != nil {
		return committed.Close(ctx)
	}
	return nil
}

// Status tells how the cluster is.
func (c *Coordinator) Status() bringup.Status {
	c.mu.Lock()
	run := c.current
	c.mu.Unlock()
	if run == nil {
		return bringup.Status{Cluster: c.cfg.Cluster.Name, Version: c.cfg.Cluster.Version, Role: "coordinator", Phase: bringup.PhaseWaiting}
	}
	return run.Status()
}

// Listen opens the port at which ServeStatus is to answer.
func (c *Coordinator) Listen() (net.Listener, error) {
	address, from := c.cfg.Cluster.ControlListen()
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", from, address, err)
	}
	return l, nil
}

// ServeStatus answers `mlxcel cluster status` until ctx ends, and closes the listener.
func (c *Coordinator) ServeStatus(ctx context.Context, l net.Listener) error {
	return bringup.ServeStatus(ctx, securelink.ListenerConfig{
		Config:    c.secure(cluster.CoordinatorID),
		OnRefused: func(a net.Addr, err error) { c.cfg.Logger.Warn("refused a connection", "from", a, "error", err) },
	}, l, c.Status)
}

// stages is a cluster that runs, as an engine sees it.
type stages struct{ *bringup.Running }

func (s stages) Pipeline() *pipeline.Pipeline { return s.Running.Pipeline }
func (s stages) Profile() *sdk.ModelProfile   { return s.Running.Plan.Profile }
func (s stages) Device() sdk.Device           { return s.Running.Device() }
