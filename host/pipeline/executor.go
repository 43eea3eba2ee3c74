package pipeline

import (
	"context"
	"fmt"

	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// Launcher starts the executor that is to hold a stage. ctx bounds the start only.
type Launcher interface {
	Launch(ctx context.Context, stage partition.StageAssignment) (Executor, error)
}

// Executor is one running executor process, as the pipeline needs it.
type Executor interface {
	// Plugin names the binary.
	Plugin() string
	// Load maps the region and loads the model's layers.
	Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error)
	// Region is the memory shared with the process. Nothing touches it once Stop is called.
	Region() *sdk.Region
	// OpenSteps opens the step stream; it lives until its Close or the end of ctx.
	OpenSteps(ctx context.Context) (sdk.StepClient, error)
	// Enter says what the process is about to do, for the error should it die.
	Enter(Phase)
	// Done is closed when the process has ended.
	Done() <-chan struct{}
	// Err tells how the process ended, with its last log lines; nil while it lives.
	Err() error
	// Health asks for a sign of life. It is answered while a load or a step runs.
	Health(ctx context.Context) error
	// Kill ends the process at once, however it stands. Stop must follow.
	Kill() error
	// Explain turns the error of a call into the death of the process behind it, where there is one.
	Explain(error) error
	// Stop ends the process and frees what belongs to it; the end of ctx makes it ungentle.
	Stop(ctx context.Context) error
}

// Local launches executors on this machine.
type Local struct {
	Catalog *executor.Catalog
	Plugin  string // path of the family's binary
}

// Launch is Launcher's.
func (l Local) Launch(ctx context.Context, stage partition.StageAssignment) (Executor, error) {
	p, err := l.Catalog.Start(ctx, executor.Spec{
		Plugin: l.Plugin,
		Stage:  fmt.Sprintf("stage %d (layers %d-%d)", stage.StageIndex, stage.LayerRange.Start, stage.LayerRange.End-1),
	})
	if err != nil {
		return nil, err
	}
	return localExecutor{p}, nil
}

type localExecutor struct{ *executor.Process }

func (e localExecutor) Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	return e.Client().Load(ctx, req, progress)
}

func (e localExecutor) OpenSteps(ctx context.Context) (sdk.StepClient, error) {
	steps, err := e.Client().OpenSteps(ctx)
	if err != nil {
		return nil, err
	}
	return steps, nil
}

func (e localExecutor) Health(ctx context.Context) error {
	_, err := e.Process.Health(ctx)
	return err
}

func (e localExecutor) Enter(phase Phase) { e.Process.Enter(executor.Phase(phase)) }
