package engine

import (
	"context"

	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// Stages is a model that other machines hold, loaded and ready.
type Stages interface {
	Pipeline() *pipeline.Pipeline
	Profile() *sdk.ModelProfile
	Device() sdk.Device // of one kind on all of them, with what holds on each
	// Drain tells the machines that no new work comes.
	Drain(ctx context.Context) error
	// Close ends the pipeline and lets the machines go. The end of ctx makes it ungentle, not incomplete.
	Close(ctx context.Context) error
}

// OpenRemote reads the model's config, tokenizer and template from the folder, which needs no weights, and takes the pipeline from
// start. Nothing is left running when it fails.
func OpenRemote(ctx context.Context, cfg Config, start func(context.Context, *modelrepo.Model) (Stages, error)) (e *Engine, err error) {
	cfg = cfg.withDefaults()
	begin := cfg.Now()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e = &Engine{cfg: cfg}
	if e.Model, err = modelrepo.Open(cfg.Model); err != nil {
		return nil, err
	}
	err = e.bringUp(ctx, func(ctx context.Context) (err error) {
		if e.remote, err = start(ctx, e.Model); err != nil {
			return err
		}
		e.Pipeline, e.Profile = e.remote.Pipeline(), e.remote.Profile()
		return nil
	})
	if err != nil {
		return nil, err
	}
	e.LoadSeconds = cfg.Now().Sub(begin).Seconds()
	return e, nil
}
