package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// Config is what a pipeline is made of.
type Config struct {
	Plan     *partition.Plan   // what each stage holds
	Profile  *sdk.ModelProfile // of the model that Plan cuts
	Launcher Launcher
	ModelDir string
	Dtype    sdk.Dtype // of the activations, as Profile was asked for; DtypeAuto is the checkpoint's own
	Threads  int       // compute threads of each stage; 0 lets the executor choose
	KVBudget int64     // bytes of each stage that all sequences' state may use together; 0 means no limit

	PrefillChunk int    // rows of one sequence in a step, and of a micro-batch, at most; 0 means 512
	MicroBatch   int    // sequences per micro-batch at most; 0 means 1
	Slots        int    // micro-batches in flight on a stage at most; 0 means 2, the least that overlaps sending with computing
	Epoch        uint64 // grows with every restart

	// Progress, where set, is told how far each stage's load has come, from any goroutine.
	Progress func(stage int, p sdk.LoadProgress)
}

const (
	defaultPrefillChunk = 512
	defaultMicroBatch   = 1
	defaultSlots        = 2

	stopTimeout = 10 * time.Second // for executors of a pipeline that did not come up
)

// Validate returns all faults at once.
func (c Config) Validate() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if c.Launcher == nil {
		fault("pipeline config has no launcher")
	}
	if c.Plan == nil || len(c.Plan.Stages) == 0 {
		fault("pipeline config has no plan")
	}
	if c.Profile == nil {
		fault("pipeline config has no model profile")
	} else if b := c.Profile.Boundary; b.Width < 1 || b.Dtype.Size() == 0 || c.Profile.VocabSize < 1 {
		fault("profile of %s has boundary width %d in %s and %d vocabulary rows: want at least 1 and a concrete dtype", c.ModelDir, b.Width, b.Dtype, c.Profile.VocabSize)
	}
	for _, f := range []struct {
		name  string
		value int
	}{{"--prefill-chunk-size", c.PrefillChunk}, {"--pp-micro-batch-size", c.MicroBatch}, {"slots", c.Slots}, {"--threads", c.Threads}} {
		if f.value < 0 {
			fault("%s %d: want at least 1, or 0 for the default", f.name, f.value)
		}
	}
	return errors.Join(faults...)
}

func (c Config) withDefaults() Config {
	orDefault := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	orDefault(&c.PrefillChunk, defaultPrefillChunk)
	orDefault(&c.MicroBatch, defaultMicroBatch)
	orDefault(&c.Slots, defaultSlots)
	return c
}

// maxRows is how many rows a micro-batch may have: a prefill chunk, or one row of each of its sequences.
func (c Config) maxRows() int { return max(c.PrefillChunk, c.MicroBatch) }

// layout sizes a stage's region: hidden rows in unless it has the embedding, hidden rows out or, from the head,
// float32 logits of every sequence. Areas are whole cache lines, so that none straddles one.
func (c Config) layout(stage partition.StageAssignment) sdk.RegionLayout {
	const line = 64
	align := func(n int) int { return (n + line - 1) / line * line }
	hidden := align(c.maxRows() * c.Profile.Boundary.Width * c.Profile.Boundary.Dtype.Size())
	l := sdk.RegionLayout{Slots: c.Slots, InBytes: hidden, OutBytes: hidden}
	if stage.HasEmbedding {
		l.InBytes = 0
	}
	if stage.HasLMHead {
		l.OutBytes = align(c.MicroBatch * c.Profile.VocabSize * sdk.DtypeFloat32.Size())
	}
	return l
}

func (c Config) loadRequest(stage partition.StageAssignment) sdk.LoadRequest {
	return sdk.LoadRequest{
		Dir: c.ModelDir, Family: c.Profile.Family, Layers: stage.LayerRange,
		HasEmbedding: stage.HasEmbedding, HasHead: stage.HasLMHead,
		Dtype: c.Dtype, Threads: c.Threads, KVBudget: c.KVBudget, Region: c.layout(stage),
	}
}

// StageInfo is what a running stage holds.
type StageInfo struct {
	partition.StageAssignment
	Plugin string
	Loaded sdk.LoadReport
}

// Pipeline is a model that is loaded over one or more stages, ready for steps. It is safe for concurrent use.
type Pipeline struct {
	cfg     Config
	c       *coordinator
	running []*member
	cancel  context.CancelFunc // of the step streams
	lastSeq atomic.Uint64

	closeOnce sync.Once
	closeErr  error
}

// member is one stage with its executor.
type member struct {
	executor Executor
	steps    sdk.StepClient
	report   sdk.LoadReport
	stage    *stage
}

// Start launches an executor for each stage of the plan and loads them all at the same time. When one fails, the
// others are stopped and the error, a *StageError, is the one of the first that failed. ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Pipeline, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	n := len(cfg.Plan.Stages)
	live, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p := &Pipeline{cfg: cfg, cancel: cancel, c: newCoordinator(cfg.Epoch, cfg.MicroBatch, cfg.maxRows()), running: make([]*member, n)}
	for i := range p.running {
		p.running[i] = &member{}
	}
	if err := together(ctx, n, func(ctx context.Context, i int) error { return p.bringUp(ctx, live, i) }); err != nil {
		stop, done := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer done()
		return nil, errors.Join(err, p.Close(stop))
	}
	p.connect(live)
	return p, nil
}

// together runs f for 0 to n-1 at the same time, waits for all, and returns the first error, upon which the
// context of the others ends.
func together(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wait sync.WaitGroup
	var once sync.Once
	var first error
	for i := range n {
		wait.Go(func() {
			if err := f(ctx, i); err != nil {
				once.Do(func() { first = err })
				cancel(err)
			}
		})
	}
	wait.Wait()
	return first
}

// bringUp launches and loads stage i.
func (p *Pipeline) bringUp(ctx, live context.Context, i int) error {
	a, m := p.cfg.Plan.Stages[i], p.running[i]
	failed := func(phase Phase, plugin string, err error) error {
		return &StageError{Stage: i, Plugin: plugin, Phase: phase, Err: err}
	}
	e, err := p.cfg.Launcher.Launch(ctx, a)
	if err != nil {
		return failed(PhaseLaunch, p.cfg.Profile.Family, err)
	}
	m.executor = e
	e.Enter(PhaseLoad)
	report, err := e.Load(ctx, p.cfg.loadRequest(a), func(progress sdk.LoadProgress) {
		if p.cfg.Progress != nil {
			p.cfg.Progress(i, progress)
		}
	})
	if err == nil {
		err = checkReport(report, p.cfg.Profile, a)
	}
	if err != nil {
		return failed(PhaseLoad, e.Plugin(), e.Explain(err))
	}
	m.report = *report
	if m.steps, err = e.OpenSteps(live); err != nil {
		return failed(PhaseLoad, e.Plugin(), e.Explain(err))
	}
	e.Enter(PhaseIdle)
	return nil
}

// checkReport compares what was loaded with the profile that the region was laid out by.
func checkReport(got *sdk.LoadReport, want *sdk.ModelProfile, a partition.StageAssignment) error {
	if got.Boundary != want.Boundary {
		return sdk.Errorf(sdk.CodeInternal, "executor hands over width %d in %s, its profile of the model says width %d in %s",
			got.Boundary.Width, got.Boundary.Dtype, want.Boundary.Width, want.Boundary.Dtype)
	}
	if a.HasLMHead && got.VocabSize != want.VocabSize {
		return sdk.Errorf(sdk.CodeInternal, "executor has %d vocabulary rows, its profile of the model says %d", got.VocabSize, want.VocabSize)
	}
	return nil
}

// connect links the loaded stages, the last first, so that each finds its next.
func (p *Pipeline) connect(live context.Context) {
	n := len(p.running)
	p.c.stages = make([]StagePort, n)
	var next Link
	for i := n - 1; i >= 0; i-- {
		m := p.running[i]
		m.stage = newStage(live, stageConfig{
			epoch: p.cfg.Epoch, index: i, stages: n, boundary: p.cfg.Profile.Boundary, slots: p.cfg.Slots,
			executor: m.executor, steps: m.steps, next: next, reporter: p.c,
		})
		p.c.stages[i], next = m.stage, m.stage
	}
}

// Close ends what is in flight with ErrClosed, then the stages, then the executors. It may be called more than
// once. The end of ctx makes it ungentle, not incomplete.
func (p *Pipeline) Close(ctx context.Context) error {
	p.closeOnce.Do(func() { p.closeErr = p.close(ctx) })
	return p.closeErr
}

func (p *Pipeline) close(ctx context.Context) error {
	lost := p.Err() != nil
	p.c.shutDown(ErrClosed)
	p.cancel()
	n := len(p.running)
	errs := make([]error, n)
	each := func(f func(m *member) error) {
		var wait sync.WaitGroup
		for i, m := range p.running {
			wait.Go(func() { errs[i] = errors.Join(errs[i], f(m)) })
		}
		wait.Wait()
	}
	each((*member).closeSteps)
	if lost {
		clear(errs) // a stream that broke with its executor can't be closed well
	}
	each(func(m *member) error { // only now: no stage touches a region any more
		if m.executor == nil {
			return nil
		}
		return m.executor.Stop(ctx)
	})
	return errors.Join(errs...)
}

func (m *member) closeSteps() error {
	switch {
	case m.stage != nil:
		return m.stage.close()
	case m.steps != nil:
		return m.steps.Close()
	}
	return nil
}

// Done is closed when the pipeline has lost a stage or was closed.
func (p *Pipeline) Done() <-chan struct{} { return p.c.isDown }

// Err tells why the pipeline takes no more work: a *StageError, ErrClosed, or nil while it does.
func (p *Pipeline) Err() error {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	return p.c.down
}

// Stages returns what each stage holds.
func (p *Pipeline) Stages() []StageInfo {
	infos := make([]StageInfo, len(p.running))
	for i, m := range p.running {
		infos[i] = StageInfo{StageAssignment: p.cfg.Plan.Stages[i], Plugin: m.executor.Plugin(), Loaded: m.report}
	}
	return infos
}

// Report describes the plan with what each stage holds in fact.
func (p *Pipeline) Report() string {
	actual := make([]int64, len(p.running))
	for i, m := range p.running {
		actual[i] = m.report.WeightBytes
	}
	return p.cfg.Plan.Report(actual)
}

// NewSeq returns a name for a sequence that was not used before.
func (p *Pipeline) NewSeq() sdk.SeqID { return sdk.SeqID(p.lastSeq.Add(1)) }

// PrefillChunk returns the rows that a sequence may bring to one step.
func (p *Pipeline) PrefillChunk() int { return p.cfg.PrefillChunk }

// Reserve creates a sequence on every stage, or on none.
func (p *Pipeline) Reserve(ctx context.Context, r sdk.Reservation) error { return p.c.Reserve(ctx, r) }

// Release frees a sequence on every stage; ctx bounds only the wait for it. Releasing one that is not reserved does
// nothing.
func (p *Pipeline) Release(ctx context.Context, seq sdk.SeqID) error { return p.c.Release(ctx, seq) }

// Truncate drops the state of every position at or past length. Where a stage can't, the sequence is released on
// every stage, as its stages would no longer agree.
func (p *Pipeline) Truncate(ctx context.Context, seq sdk.SeqID, length int) error {
	return p.c.Truncate(ctx, seq, length)
}

// Fork creates sequence to as a copy of from on every stage, or on none.
func (p *Pipeline) Fork(ctx context.Context, from, to sdk.SeqID) error {
	return p.c.Fork(ctx, from, to)
}

// Step runs rows of one or more sequences through the pipeline and returns a result for each, in order. The batch is
// cut into micro-batches, which overlap on the stages; steps of other callers overlap as well.
//
// A micro-batch that fails costs its own sequences only: the error is then a *StepError, and the results of the
// other sequences are valid. The sequences of a failed micro-batch, or of the whole step when ctx ends, are
// released on every stage. seqs and what it points at must not change before Step returns, and after an error never.
func (p *Pipeline) Step(ctx context.Context, seqs []sdk.SeqStep) ([]sdk.SeqResult, error) {
	return p.c.Step(ctx, seqs)
}
