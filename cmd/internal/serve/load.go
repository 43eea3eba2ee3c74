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
	books     func(*engine.Engine) kvledger.Config // of its stages
	reopened  func(*engine.Engine)                 // told of an engine that took the place of a lost one
	scheduler *batch.Scheduler

	opening sync.Mutex // held until there is a scheduler, and while an engine is replaced

	mu     sync.Mutex
	engine *engine.Engine // nil while a lost one is not replaced
}

// load takes the model to a scheduler, and makes the server ready.
func (p *program) load(ctx context.Context, from source) (m *loadedModel, err error) {
	m = &loadedModel{log: p.log, from: from, books: p.books}
	m.reopened = func(e *engine.Engine) { p.api.SetModel(p.served(e, m.scheduler)) }
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
	if cfg.Speeds, err = p.warmUp(ctx, e, cfg); err != nil {
		return m, fmt.Errorf("warm-up: %w", err)
	}
	if !p.cfg.Cluster.NoAutoRestart {
		cfg.Relaunch = m.relaunch
	}
	cfg.RefuseWhileLost = p.cfg.Cluster.Mode == clusterflags.Coordinator // a machine may stay away for long
	if err = m.schedule(cfg); err != nil {
		return m, err
	}
	p.model.set(m)
	p.api.SetModel(p.served(e, m.scheduler))
	p.log.Info("ready", "context", m.scheduler.Limit(), "parallel", cfg.MaxActive)
	return m, nil
}

// warmUp measures steps; nil where it was not asked for, or there is no room.
func (p *program) warmUp(ctx context.Context, e *engine.Engine, cfg batch.Config) (*batch.Speeds, error) {
	if p.cfg.NoWarmup {
		return nil, nil
	}
	var speeds *batch.Speeds
	var err error
	measure := batch.MeasureConfig{Stages: len(e.Plan()), MaxBatch: cfg.MaxBatch, VocabSize: cfg.VocabSize}
	if limit := e.Profile.ContextLength; limit == 0 || limit >= measure.Length() {
		speeds, err = batch.Measure(ctx, e.Pipeline, measure)
	}
	if speeds == nil && err == nil {
		p.log.Warn("the warm-up was left out, so steps run in one group at first: no stage has room for a sequence of so many tokens", "tokens", measure.Length())
	}
	return speeds, err
}

// schedule starts the scheduler. Until it has, an engine that is lost is not replaced.
func (m *loadedModel) schedule(cfg batch.Config) (err error) {
	m.opening.Lock()
	defer m.opening.Unlock()
	m.scheduler, err = batch.New(cfg)
	return err
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
	if p.cfg.Preemption != batch.PreemptNone && e.Pipeline.KVBudgets() == nil {
		return batch.Config{}, errors.New("--enable-preemption needs a --kv-budget that can run short")
	}
	return batch.Config{
		Runtime: e.Pipeline, Ledger: p.books(e),
		MaxActive: p.cfg.Parallel, MaxBatch: p.maxBatch(), MaxQueue: p.cfg.MaxQueue, MicroBatch: p.cfg.MicroBatch,
		VocabSize: e.Profile.VocabSize, Preemption: p.cfg.Preemption, Logger: p.log.Named("batch"),
	}, nil
}

// books is what the ledger is to know of the engine's stages.
func (p *program) books(e *engine.Engine) kvledger.Config {
	plan := &partition.Plan{}
	for _, s := range e.Pipeline.Stages() {
		plan.Stages = append(plan.Stages, s.StageAssignment)
	}
	return kvledger.Config{
		Stages:        kvledger.Stages(e.Profile, plan, e.Pipeline.KVBudgets(), p.cfg.Parallel),
		ContextLength: contextLength(p.cfg.ContextSize, e.Profile.ContextLength),
	}
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
	device := e.Device()
	for _, stage := range e.Plan() {
		m.Stages = append(m.Stages, api.Stage{
			Stage: stage.Stage, Layers: stage.Layers, Plugin: stage.Plugin, Bytes: stage.Bytes, Device: device.Kind, Numerics: device.Numerics,
		})
	}
	return m
}

// relaunch brings the model up again after a stage was lost.
func (m *loadedModel) relaunch(ctx context.Context) (batch.Runtime, *kvledger.Config, error) {
	m.opening.Lock()
	defer m.opening.Unlock()
	if err := m.closeEngine(ctx); err != nil {
		m.log.Warn("the lost pipeline did not end in order", "error", err)
	}
	e, err := m.from.Open(ctx)
	if err != nil {
		return nil, nil, err
	}
	m.mu.Lock()
	m.engine = e
	m.mu.Unlock()
	m.reopened(e)
	books := m.books(e)
	return e.Pipeline, &books, nil
}

// drain tells the stages; a model that is being opened again has none to tell.
func (m *loadedModel) drain(ctx context.Context) error {
	m.mu.Lock()
	e := m.engine
	m.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.Drain(ctx)
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
