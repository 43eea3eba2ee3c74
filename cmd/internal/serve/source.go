package serve

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/cmd/internal/coordinate"
	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/engine"
)

// source is where the model's engine comes from, at the start and after a stage was lost.
type source interface {
	Open(ctx context.Context) (*engine.Engine, error)
	// Close gives up what has begun and led to no engine.
	Close(ctx context.Context) error
}

// local runs all stages on this machine.
type local struct{ cfg engine.Config }

// Open is called by one goroutine at a time.
func (l *local) Open(ctx context.Context) (*engine.Engine, error) {
	l.cfg.Epoch++
	return engine.Open(ctx, l.cfg)
}

func (l *local) Close(context.Context) error { return nil }

// source returns the model's source. For a cluster it comes back once every peer has committed to its stage.
func (p *program) source(ctx context.Context) (source, error) {
	if p.cfg.Cluster.Mode == clusterflags.Alone {
		return &local{p.engineConfig()}, nil
	}
	c, err := coordinate.New(ctx, coordinate.Config{
		Cluster: p.cfg.Cluster, Engine: p.engineConfig(), Demand: p.demand(), Shape: p.shape(), Logger: p.log,
	})
	if err != nil {
		return nil, err
	}
	l, err := c.Listen()
	if err != nil {
		return nil, err
	}
	r := &remote{Coordinator: c, status: serveStatus(ctx, c, l)}
	if err := c.Prepare(ctx); err != nil {
		return nil, errors.Join(err, r.Close(ctx))
	}
	return r, nil
}

// remote runs the stages on the peers of a cluster.
type remote struct {
	*coordinate.Coordinator
	status func() error // ends the answers to mlxcel cluster status
}

func (r *remote) Close(ctx context.Context) error {
	return errors.Join(r.Coordinator.Close(ctx), r.status())
}

// serveStatus answers until the function that it returns is called. It outlives ctx, so that draining can be looked at.
func serveStatus(ctx context.Context, c *coordinate.Coordinator, l net.Listener) func() error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var err error
	var wait sync.WaitGroup
	wait.Go(func() { err = c.ServeStatus(ctx, l) })
	return func() error {
		cancel()
		wait.Wait()
		return err
	}
}

// demand is what the cluster's memory is planned for. Where the operator does not say, it is one sequence: what the weights
// leave decides how many more are let in.
func (p *program) demand() bringup.Demand {
	return bringup.Demand{Pipeline: p.cfg.Engine.Pipeline, Context: p.cfg.ContextSize, KVBudgets: p.cfg.KVBudgets}
}

func (p *program) shape() bringup.Shape {
	return bringup.Shape{PrefillChunk: p.cfg.Engine.PrefillChunk, MicroBatch: p.maxBatch()}
}
