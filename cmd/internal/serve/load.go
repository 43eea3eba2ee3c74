package serve

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/host/api"
	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/partition"
)

// loadedModel is a model that answers. Its engine is another one after a stage was lost.
type loadedModel struct {
	log       hclog.Logger
	from      source
	scheduler *batch.Scheduler

	mu     sync.Mutex
	engine *engine.Engine // nil while a lost one is not replaced
}

// load takes the model to a scheduler, and makes the server ready.
func (p *program) load(ctx context.Context, from source) (m *loadedModel, err error) {
	m = &loadedModel{log: p.log, from: from}
	e, err := from.Open(ctx)
	if err != nil {
		return nil, err
	}
	m.engine = e
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close(ctx))
			m = nil
		}
	}()
	p.log.Info("loaded", "model", p.cfg.Aliases[0], "seconds", e.LoadSeconds, "stages", len(e.Plan()))
	p.log.Debug(e.Pipeline.Report())
	cfg, err := p.batchConfig(e)
	if err != nil {
		return m, err
	}
	if !p.cfg.NoWarmup {
		if cfg.Speeds, err = batch.Measure(ctx, e.Pipeline, batch.MeasureConfig{
			Stages: len(e.Plan()), MaxBatch: cfg.MaxBatch, VocabSize: cfg.VocabSize,
		}); err != nil {
			return m, fmt.Errorf("warm-up: %w", err)
		}
	}
	if !p.cfg.Cluster.NoAutoRestart {
		cfg.Relaunch = m.relaunch
	}
	cfg.RefuseWhileLost = p.cfg.Cluster.Mode == clusterflags.Coordinator // a machine may stay away for long
	if m.scheduler, err = batch.New(cfg); err != nil {
		return m, err
	}
	p.model.set(m)
	p.api.SetModel(p.served(e, m.scheduler))
	p.log.Info("ready", "context", m.scheduler.Limit(), "parallel", cfg.MaxActive)
	return m, nil
}

// engineConfig lets a step of the scheduler go to the stages as one micro-batch: the scheduler itself makes the groups.
func (p *program) engineConfig() engine.Config {
	cfg := p.cfg.Engine
	batch := p.maxBatch()
	cfg.Pipeline.MicroBatchSize = &batch
	cfg.KVBudgets = p.cfg.KVBudgets
	return cfg
}

func (p *program) maxBatch() int {
	if p.cfg.MaxBatch == 0 {
		return p.cfg.Parallel
	}
	return p.cfg.MaxBatch
}

func (p *program) batchConfig(e *engine.Engine) (batch.Config, error) {
	stages, budgets := e.Pipeline.Stages(), e.Pipeline.KVBudgets()
	if p.cfg.Preemption != batch.PreemptNone && budgets == nil {
		return batch.Config{}, errors.New("--enable-preemption needs a --kv-budget that can run short")
	}
	plan := &partition.Plan{}
	for _, s := range stages {
		plan.Stages = append(plan.Stages, s.StageAssignment)
	}
	return batch.Config{
		Runtime: e.Pipeline,
		Ledger: kvledger.Config{
			Stages:        kvledger.Stages(e.Profile, plan, budgets, p.cfg.Parallel),
			ContextLength: contextLength(p.cfg.ContextSize, e.Profile.ContextLength),
		},
		MaxActive: p.cfg.Parallel, MaxBatch: p.maxBatch(), MaxQueue: p.cfg.MaxQueue, MicroBatch: p.cfg.MicroBatch,
		VocabSize: e.Profile.VocabSize, Preemption: p.cfg.Preemption, Logger: p.log.Named("batch"),
	}, nil
}

// contextLength is the smaller of what was asked for and what the model has; 0 means no limit.
func contextLength(asked, model int) int {
	if asked == 0 {
		return model
	}
	if model == 0 {
		return asked
	}
	return min(asked, model)
}

func (p *program) served(e *engine.Engine, s *batch.Scheduler) *api.Model {
	m := &api.Model{
		IDs: p.cfg.Aliases, Created: time.Now(), VocabSize: e.Profile.VocabSize, EOS: e.Model.EOS,
		Tokenizer: e.Tokenizer, Template: e.Template, Scheduler: api.Batch{Scheduler: s},
	}
	for _, stage := range e.Plan() {
		m.Stages = append(m.Stages, api.Stage{Stage: stage.Stage, Layers: stage.Layers, Plugin: stage.Plugin, Bytes: stage.Bytes, Device: e.Device()})
	}
	return m
}

// relaunch brings the model up again after a stage was lost.
func (m *loadedModel) relaunch(ctx context.Context) (batch.Runtime, error) {
	if err := m.closeEngine(ctx); err != nil {
		m.log.Warn("the lost pipeline did not end in order", "error", err)
	}
	e, err := m.from.Open(ctx)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	m.engine = e
	m.mu.Unlock()
	return e.Pipeline, nil
}

func (m *loadedModel) closeEngine(ctx context.Context) error {
	m.mu.Lock()
	e := m.engine
	m.engine = nil
	m.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.Close(ctx)
}

// close ends the scheduler first: nobody uses the engine then.
func (m *loadedModel) close(ctx context.Context) error {
	if m.scheduler != nil {
		m.scheduler.Close()
	}
	return m.closeEngine(ctx)
}
