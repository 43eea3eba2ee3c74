package schedule

import "fmt"

// GPipe is the forward schedule of one batch over all stages of a pipeline that is driven from one place: a
// micro-batch that a stage has forwarded arrives at the next stage at once. Stages that are driven apart, each
// by its own arrivals, use Stage.
type GPipe struct {
	stages []Stage
}

// NewGPipe returns the schedule of microBatches micro-batches over stages stages.
func NewGPipe(stages, microBatches int) (*GPipe, error) {
	if stages < 1 || microBatches < 1 {
		return nil, fmt.Errorf("a schedule of %d micro-batches over %d stages: want at least one of each", microBatches, stages)
	}
	g := &GPipe{stages: make([]Stage, stages)}
	for i := range g.stages {
		g.stages[i].Reset(i, stages, microBatches, 1)
	}
	return g, nil
}

// Next begins and returns the next action of a stage: Done once every micro-batch has been flushed, Idle while
// the stage must wait for others.
func (g *GPipe) Next(stage int) Action {
	a := g.stages[stage].Next()
	if a.Kind == Done && !g.Done() {
		return Action{Kind: Idle, Stage: stage}
	}
	return a
}

// Finish ends an action that Next began.
func (g *GPipe) Finish(a Action) error {
	if a.Stage < 0 || a.Stage >= len(g.stages) {
		return fmt.Errorf("%s finished in a pipeline of %d stages", a, len(g.stages))
	}
	if err := g.stages[a.Stage].Finish(a); err != nil {
		return err
	}
	if next := a.Stage + 1; a.Kind == Forward && next < len(g.stages) {
		return g.stages[next].Arrive(a.MicroBatch)
	}
	return nil
}

// Done reports whether every micro-batch has been flushed.
func (g *GPipe) Done() bool {
	return g.stages[len(g.stages)-1].left == 0
}
