package pipeline

import (
	"context"
	"errors"
	"time"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// StageConfig is what one stage is made of, wherever it runs.
type StageConfig struct {
	Epoch      uint64 // of the pipeline
	Node       string // that the stage runs on, for messages; empty on a pipeline of one host
	Assignment partition.StageAssignment
	Rank       int // of the place in its stage; its layers are the stage's
	Stages     int // of the pipeline
	Launcher   Launcher
	Load       sdk.LoadRequest // Region.Slots is how many micro-batches are in flight at most
	Boundary   sdk.Boundary    // of the model's profile: what is loaded must agree with it
	VocabSize  int             // likewise

	// Progress, where set, is told how far the load has come.
	Progress func(sdk.LoadProgress)

	// Observer, where set, is told what the place does with each micro-batch.
	Observer Observer
}

// Place returns where the stage's executor is in the pipeline.
func (c StageConfig) Place() sdk.Place {
	return sdk.Place{Stage: c.Assignment.StageIndex, Rank: c.Rank}
}

func (c StageConfig) validate() error {
	var faults []error
	if c.Launcher == nil {
		faults = append(faults, errors.New("stage config has no launcher"))
	}
	if i := c.Assignment.StageIndex; i < 0 || i >= c.Stages {
		faults = append(faults, sdk.Errorf(sdk.CodeInvalid, "stage %d of %d: want 0 to %d", i, c.Stages, c.Stages-1))
	}
	if c.Rank < 0 {
		faults = append(faults, sdk.Errorf(sdk.CodeInvalid, "rank %d of stage %d: want at least 0", c.Rank, c.Assignment.StageIndex))
	}
	if c.Boundary.Width < 1 || c.Boundary.Dtype.Size() == 0 {
		faults = append(faults, sdk.Errorf(sdk.CodeInvalid, "boundary width %d in %s: want at least 1 and a concrete dtype", c.Boundary.Width, c.Boundary.Dtype))
	}
	return errors.Join(append(faults, c.Load.Region.Validate())...)
}

func (c StageConfig) stageError(phase Phase, plugin string, err error) *StageError {
	return &StageError{Place: c.Place(), Node: c.Node, Plugin: plugin, Phase: phase, Err: err}
}

// StageInfo is what a running stage holds.
type StageInfo struct {
	partition.StageAssignment
	Rank   int
	Plugin string
	Loaded sdk.LoadReport
}

// Place returns where the stage's executor is in the pipeline.
func (i StageInfo) Place() sdk.Place { return sdk.Place{Stage: i.StageIndex, Rank: i.Rank} }

// Stage is one loaded stage, or a rank of one: its executor, and the monitor that takes it through a coordinator's orders. It is a
// StagePort and, for the stage before it, a Link.
type Stage struct {
	cfg      StageConfig
	executor Executor
	report   sdk.LoadReport
	monitor  *monitor
	cancel   context.CancelFunc // of the step stream
}

// StartStage launches an executor and loads the stage's layers. Nothing is left of a stage that does not come up;
// the error is a *StageError then. ctx bounds the start only.
func StartStage(ctx context.Context, cfg StageConfig) (*Stage, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	live, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &Stage{cfg: cfg, cancel: cancel}
	steps, err := s.load(ctx, live)
	if err != nil {
		cancel()
		return nil, errors.Join(err, s.stopExecutor(ctx))
	}
	s.monitor = newMonitor(live, monitorConfig{
		core: coreConfig{
			epoch: cfg.Epoch, place: cfg.Place(), role: sdk.RoleOf(cfg.Place(), cfg.Stages), node: cfg.Node,
			boundary: cfg.Boundary, slots: cfg.Load.Region.Slots,
		},
		executor: s.executor, steps: steps, observer: cfg.Observer, clock: time.Now,
	})
	return s, nil
}

// load takes the stage from nothing to an open step stream, which lives as long as live.
func (s *Stage) load(ctx, live context.Context) (sdk.StepClient, error) {
	e, err := s.cfg.Launcher.Launch(ctx, s.cfg.Assignment)
	if err != nil {
		return nil, s.cfg.stageError(PhaseLaunch, s.cfg.Load.Family, err)
	}
	s.executor = e
	e.Enter(PhaseLoad)
	report, err := s.loadWatched(ctx)
	if err == nil {
		err = s.checkReport(report)
	}
	if err != nil {
		return nil, s.cfg.stageError(PhaseLoad, e.Plugin(), e.Explain(err))
	}
	s.report = *report
	steps, err := e.OpenSteps(live)
	if err != nil {
		return nil, s.cfg.stageError(PhaseLoad, e.Plugin(), e.Explain(err))
	}
	e.Enter(PhaseIdle)
	return steps, nil
}

// loadWatched gives a load up whose executor stands still.
func (s *Stage) loadWatched(ctx context.Context) (*sdk.LoadReport, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if err := superviseHealth(ctx, s.executor, nil); err != nil {
			cancel(err)
			_ = s.executor.Kill() // Stop, which follows, tells of one that can't be killed
		}
	}()
	report, err := s.executor.Load(ctx, s.cfg.Load, func(p sdk.LoadProgress) {
		if s.cfg.Progress != nil {
			s.cfg.Progress(p)
		}
	})
	cancel(nil)
	<-watched
	return report, err
}

// checkReport compares what was loaded with the profile that the region was laid out by.
func (s *Stage) checkReport(got *sdk.LoadReport) error {
	if want := s.cfg.Boundary; got.Boundary != want {
		return sdk.Errorf(sdk.CodeInternal, "executor hands over width %d in %s, its profile of the model says width %d in %s",
			got.Boundary.Width, got.Boundary.Dtype, want.Width, want.Dtype)
	}
	if s.cfg.Assignment.HasLMHead && got.VocabSize != s.cfg.VocabSize {
		return sdk.Errorf(sdk.CodeInternal, "executor has %d vocabulary rows, its profile of the model says %d", got.VocabSize, s.cfg.VocabSize)
	}
	return nil
}

// stopExecutor ends the executor of a stage that did not come up.
func (s *Stage) stopExecutor(ctx context.Context) error {
	if s.executor == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	return s.executor.Stop(ctx)
}

// Join tells the stage where its hidden rows go: to every place of the next stage, to none where it gives none. It comes
// before the first order and the first frame. A stage that is lost already reports that now.
func (s *Stage) Join(next []Link, reporter Reporter) { s.monitor.join(next, reporter) }

// Order is StagePort's.
func (s *Stage) Order(o Order) { s.monitor.Order(o) }

// Abort is StagePort's.
func (s *Stage) Abort(t Tag) { s.monitor.Abort(t) }

// Send is Link's.
func (s *Stage) Send(f Frame) { s.monitor.Send(f) }

// Claim lends the shared memory that the frame of a micro-batch would be copied to, where the stage would take that
// frame in at once, so that its bytes can be read straight into it; else it returns nil. The Releaser is to be the
// Owner of the frame that is then sent to the stage, or called when none will be. Close waits for that.
func (s *Stage) Claim(t Tag, bytes int) ([]byte, Releaser) { return s.monitor.claim(t, bytes) }

// Info returns what the stage holds.
func (s *Stage) Info() StageInfo {
	return StageInfo{StageAssignment: s.cfg.Assignment, Rank: s.cfg.Rank, Plugin: s.executor.Plugin(), Loaded: s.report}
}

// Role returns what the stage's executor does with a step.
func (s *Stage) Role() sdk.StageRole { return sdk.RoleOf(s.cfg.Place(), s.cfg.Stages) }

// Layout returns how the executor's shared memory is divided.
func (s *Stage) Layout() sdk.RegionLayout { return s.cfg.Load.Region }

// Node returns the name of the node that the stage runs on; empty on a pipeline of one host.
func (s *Stage) Node() string { return s.cfg.Node }

// Epoch returns the pipeline's epoch.
func (s *Stage) Epoch() uint64 { return s.cfg.Epoch }

// Busy returns how long the executor has computed steps so far.
func (s *Stage) Busy() time.Duration { return time.Duration(s.monitor.busy.Load()) }

// Done is closed when the stage is lost.
func (s *Stage) Done() <-chan struct{} { return s.monitor.lostDone }

// Err tells how the stage was lost, a *StageError; nil while it is not.
func (s *Stage) Err() error {
	select {
	case <-s.monitor.lostDone:
		return s.monitor.lost
	default:
		return nil
	}
}

// Close ends the stage, then its executor. Links to and from the stage must be closed before: they read and write the
// executor's memory. The end of ctx makes it ungentle, not incomplete.
func (s *Stage) Close(ctx context.Context) error {
	err := s.halt()
	if s.Err() != nil {
		err = nil // a stream that broke with its executor can't be closed well
	}
	return errors.Join(err, s.executor.Stop(ctx))
}

// halt ends the stage but not its executor: nothing of it touches a region any more.
func (s *Stage) halt() error {
	defer s.cancel()
	return s.monitor.close()
}
