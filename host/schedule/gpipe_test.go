package schedule

import (
	"fmt"

	"github.com/mlxcel/mlxcel/sdk"
)

// gpipe is the forward schedule of one batch over all stages of a pipeline that is driven from one place: a
// micro-batch that a stage has forwarded arrives at the next stage at once.
type gpipe struct {
	stages []Stage
}

// newGPipe returns the schedule of microBatches micro-batches over stages stages.
func newGPipe(stages, microBatches int) (*gpipe, error) {
	if stages < 1 || microBatches < 1 {
		return nil, fmt.Errorf("a schedule of %d micro-batches over %d stages: want at least one of each", microBatches, stages)
	}
	g := &gpipe{stages: make([]Stage, stages)}
	for i := range g.stages {
		at := sdk.Place{Stage: i}
		g.stages[i].Reset(at, sdk.RoleOf(at, stages), microBatches, 1)
	}
	return g, nil
}

// Next begins and returns the next action of a stage: Done once every micro-batch has been flushed, Idle while
// the stage must wait for others.
func (g *gpipe) Next(stage int) Action {
	a := g.stages[stage].Next()
	if a.Kind == Done && !g.Done() {
		return Action{Kind: Idle, At: sdk.Place{Stage: stage}}
	}
	return a
}

// Finish ends an action that Next began.
func (g *gpipe) Finish(a Action) error {
	if a.At.Stage < 0 || a.At.Stage >= len(g.stages) {
		return fmt.Errorf("%s finished in a pipeline of %d stages", a, len(g.stages))
	}
	if err := g.stages[a.At.Stage].Finish(a); err != nil {
		return err
	}
	if next := a.At.Stage + 1; a.Kind == Forward && next < len(g.stages) {
		return g.stages[next].Arrive(a.MicroBatch)
	}
	return nil
}

// Done reports whether every micro-batch has been flushed.
func (g *gpipe) Done() bool {
	return g.stages[len(g.stages)-1].left == 0
}
