package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// RemoteStage is a stage that runs elsewhere, or a rank of one, as the coordinator sees it.
type RemoteStage struct {
	Port  StagePort                   // takes orders there
	Info  StageInfo                   // DeviceID is the node, which errors name
	Busy  func() time.Duration        // how long it has computed so far; nil where nobody tells
	Close func(context.Context) error // ends the link to it
}

func (r RemoteStage) busy() time.Duration {
	if r.Busy == nil {
		return 0
	}
	return r.Busy()
}

// Connect makes a pipeline of stages that are loaded and joined elsewhere. Whatever brings their reports gives them to
// the pipeline's Reporter. Close calls theirs.
func Connect(cfg Config, stages []RemoteStage) (*Pipeline, error) {
	p, err := newPipeline(cfg)
	if err != nil {
		return nil, err
	}
	if err := checkPlaces(stages, len(cfg.Plan.Stages)); err != nil {
		return nil, err
	}
	p.remote = stages
	for _, s := range stages {
		p.c.addPort(s.Port, s.Info.Place(), len(cfg.Plan.Stages))
	}
	return p, nil
}

// checkPlaces wants every stage of a plan, in order, each with its ranks from 0 on.
func checkPlaces(remote []RemoteStage, stages int) error {
	var next sdk.Place
	for _, r := range remote {
		at := r.Info.Place()
		if at == (sdk.Place{Stage: next.Stage + 1}) && next.Rank > 0 {
			next = at
		}
		if at != next {
			return fmt.Errorf("stage %s to connect, want %s: give every stage with its ranks, in order", at, next)
		}
		next.Rank++
	}
	if next.Rank > 0 {
		next.Stage++
	}
	if next.Stage != stages {
		return fmt.Errorf("%d stages to connect, the plan has %d", next.Stage, stages)
	}
	return nil
}

// Reporter returns what takes the reports of the stages. It adds the node and the plugin of a stage where a report
// names the stage only, as that of a neighbour does.
func (p *Pipeline) Reporter() Reporter { return &namedReporter{p.c, p.remote} }

func (p *Pipeline) closeRemote(ctx context.Context) error {
	errs := make([]error, len(p.remote))
	var wait sync.WaitGroup
	for i, r := range p.remote {
		if r.Close != nil {
			wait.Go(func() { errs[i] = r.Close(ctx) })
		}
	}
	wait.Wait()
	return errors.Join(errs...)
}

type namedReporter struct {
	c      *coordinator
	stages []RemoteStage
}

func (r *namedReporter) Answered(at sdk.Place, epoch, order uint64, err error) {
	if e, ok := errors.AsType[*StageError](err); ok {
		err = r.named(e)
	}
	r.c.Answered(at, epoch, order, err)
}

func (r *namedReporter) Finished(t Tag, results []sdk.SeqResult) { r.c.Finished(t, results) }
func (r *namedReporter) Failed(t Tag, err *StageError)           { r.c.Failed(t, r.named(err)) }

func (r *namedReporter) Lost(epoch uint64, err *StageError) {
	named := r.named(err)
	if named.Phase == "" {
		named.Phase = r.c.phase()
	}
	r.c.Lost(epoch, named)
}

func (r *namedReporter) named(err *StageError) *StageError {
	named := *err
	for i := range r.stages {
		info := &r.stages[i].Info
		if info.Place() != err.Place {
			continue
		}
		if named.Node == "" {
			named.Node = info.DeviceID
		}
		if named.Plugin == "" {
			named.Plugin = info.Plugin
		}
	}
	return &named
}
