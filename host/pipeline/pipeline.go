package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/schedule"
	"github.com/mlxcel/mlxcel/sdk"
)

// Config is what a pipeline is made of.
type Config struct {
	Plan     *partition.Plan   // what each stage holds
	Profile  *sdk.ModelProfile // of the model that Plan cuts
	Launcher Launcher          // of Start; Connect needs none
	ModelDir string
	Dtype    sdk.Dtype // of the activations, as Profile was asked for; DtypeAuto is the checkpoint's own
	Threads  int       // compute threads of each stage; 0 lets the executor choose

	// KVBudgets are the bytes that all sequences' state may use together, one for each stage; 0 of a stage, and nil
	// for all, means no limit.
	KVBudgets []int64

	// Device is what every stage loads on. Prompts are cut into pieces smaller than PrefillChunk, to fill the stages, where
	// results do not depend on that.
	Device sdk.Device

	PrefillChunk int    // rows of one sequence in a step, and of a micro-batch, at most; 0 means 512
	MicroBatch   int    // sequences per micro-batch at most; 0 means 1
	Slots        int    // micro-batches in flight on a stage at most; 0 means 2, the least that overlaps sending with computing
	Epoch        uint64 // grows with every restart

	// Progress, where set, is told how far each stage's load has come, from any goroutine.
	Progress func(stage int, p sdk.LoadProgress)

	// Observer, where set, is told what each stage of Start does with each micro-batch.
	Observer Observer
}

const (
	defaultPrefillChunk = 512
	defaultMicroBatch   = 1
	defaultSlots        = 2

	fixedRows = 8 // prompt rows that take as long as what a step costs besides, on a processor: 5, and a hop over a network

	stopTimeout = 10 * time.Second // for executors of a pipeline that did not come up
)

// Validate returns all faults at once.
func (c Config) Validate() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if c.Plan == nil || len(c.Plan.Stages) == 0 {
		fault("pipeline config has no plan")
	} else if n := len(c.Plan.Stages); c.KVBudgets != nil && len(c.KVBudgets) != n {
		fault("%d KV budgets for %d stages: give one for each stage, or none", len(c.KVBudgets), n)
	}
	for i, b := range c.KVBudgets {
		if b < 0 {
			fault("KV budget of stage %d is %d bytes: want 0 or more", i, b)
		}
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

// maskBytes is the size of one sequence's mask of allowed tokens.
func (c Config) maskBytes() int { return (c.Profile.VocabSize + 7) / 8 }

// layout sizes a stage's region: hidden rows in unless it has the embedding, hidden rows out or, from the head,
// float32 logits of every sequence, for which it also takes masks. Areas are whole cache lines, so that none straddles one.
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
		l.MaskBytes = align(c.MicroBatch * c.maskBytes())
	}
	return l
}

// LoadRequest says what a stage is to hold. A stage elsewhere puts its own model folder and threads in.
func (c Config) LoadRequest(stage int) sdk.LoadRequest {
	a := c.Plan.Stages[stage]
	r := sdk.LoadRequest{
		Dir: c.ModelDir, Family: c.Profile.Family, Layers: a.LayerRange,
		HasEmbedding: a.HasEmbedding, HasHead: a.HasLMHead,
		Dtype: c.Dtype, Device: c.Device.Index, Threads: c.Threads, Region: c.withDefaults().layout(a),
	}
	if c.KVBudgets != nil {
		r.KVBudget = c.KVBudgets[stage]
	}
	return r
}

func (c Config) stageConfig(i int) StageConfig {
	s := StageConfig{
		Epoch: c.Epoch, Assignment: c.Plan.Stages[i], Stages: len(c.Plan.Stages), Launcher: c.Launcher,
		Load: c.LoadRequest(i), Boundary: c.Profile.Boundary, VocabSize: c.Profile.VocabSize, Observer: c.Observer,
	}
	if c.Progress != nil {
		s.Progress = func(p sdk.LoadProgress) { c.Progress(i, p) }
	}
	return s
}

// Pipeline is a model that is loaded over one or more stages, ready for steps. It is safe for concurrent use.
type Pipeline struct {
	cfg     Config
	c       *coordinator
	running []*Stage      // of Start
	remote  []RemoteStage // of Connect
	lastSeq atomic.Uint64

	closeOnce sync.Once
	closeErr  error
}

// Start launches an executor for each stage of the plan and loads them all at the same time. When one fails, the
// others are stopped and the error, a *StageError, is the one of the first that failed. ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (*Pipeline, error) {
	if cfg.Launcher == nil {
		return nil, errors.Join(errors.New("pipeline config has no launcher"), cfg.Validate())
	}
	p, err := newPipeline(cfg)
	if err != nil {
		return nil, err
	}
	p.running = make([]*Stage, len(cfg.Plan.Stages))
	err = together(ctx, len(p.running), func(ctx context.Context, i int) (err error) {
		p.running[i], err = StartStage(ctx, p.cfg.stageConfig(i))
		return err
	})
	if err == nil {
		p.connect()
		err = p.Err() // of a stage that came up and died while the others still loaded
	}
	if err != nil {
		stop, done := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer done()
		return nil, errors.Join(err, p.Close(stop))
	}
	return p, nil
}

func newPipeline(cfg Config) (*Pipeline, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	return &Pipeline{cfg: cfg, c: newCoordinator(cfg.Epoch, cfg.MicroBatch, cfg.maxRows(), cfg.maskBytes())}, nil
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

// connect links the loaded stages, the last first, so that each finds its next.
func (p *Pipeline) connect() {
	n := len(p.running)
	var next []Link
	for i := n - 1; i >= 0; i-- {
		s := p.running[i]
		s.Join(next, p.c)
		next = []Link{s}
	}
	for _, s := range p.running {
		p.c.addPort(s, s.cfg.Place(), n)
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
	errs := make([]error, len(p.running)+len(p.remote))
	each := func(f func(s *Stage) error) {
		var wait sync.WaitGroup
		for i, s := range p.running {
			if s != nil {
				wait.Go(func() { errs[i] = errors.Join(errs[i], f(s)) })
			}
		}
		wait.Wait()
	}
	each((*Stage).halt)
	if lost {
		clear(errs) // a stream that broke with its executor can't be closed well
	}
	each(func(s *Stage) error { return s.executor.Stop(ctx) }) // only now: no stage touches a region any more
	return errors.Join(append(errs, p.closeRemote(ctx))...)
}

// Done is closed when the pipeline has lost a stage or was closed.
func (p *Pipeline) Done() <-chan struct{} { return p.c.isDown }

// Err tells why the pipeline takes no more work: a *StageError, ErrClosed, or nil while it does.
func (p *Pipeline) Err() error { return p.c.reason() }

// Stages returns what each stage holds, an entry for each of its places.
func (p *Pipeline) Stages() []StageInfo {
	var infos []StageInfo
	for _, s := range p.running {
		infos = append(infos, s.Info())
	}
	for _, r := range p.remote {
		infos = append(infos, r.Info)
	}
	return infos
}

// Busy returns how long each stage has computed so far, in the order of Stages.
func (p *Pipeline) Busy() []time.Duration {
	var busy []time.Duration
	for _, s := range p.running {
		busy = append(busy, s.Busy())
	}
	for _, r := range p.remote {
		busy = append(busy, r.busy())
	}
	return busy
}

// Report describes the plan with what each stage holds in fact.
func (p *Pipeline) Report() string {
	var actual []int64
	for _, s := range p.Stages() {
		actual = append(actual, s.Loaded.WeightBytes)
	}
	return p.cfg.Plan.Report(actual)
}

// NewSeq returns a name for a sequence that was not used before.
func (p *Pipeline) NewSeq() sdk.SeqID { return sdk.SeqID(p.lastSeq.Add(1)) }

// PrefillChunk returns the rows that a sequence may bring to one step.
func (p *Pipeline) PrefillChunk() int { return p.cfg.PrefillChunk }

// PromptPieces returns the rows of the pieces in which a prompt of so many had best go through an idle pipeline, and how many
// pieces fill it.
func (p *Pipeline) PromptPieces(rows int) (size, inFlight int) {
	size, stages := p.cfg.PrefillChunk, len(p.cfg.Plan.Stages)
	if p.AnyPieces() && stages > 1 {
		pieces := schedule.PromptPieces(rows, stages, fixedRows)
		size = min(size, (rows+pieces-1)/pieces)
	}
	return size, schedule.PiecesInFlight(stages)
}

// AnyPieces tells whether results do not depend on how prompts are cut: else the pieces of all but their ends have PrefillChunk
// rows.
func (p *Pipeline) AnyPieces() bool { return p.cfg.Device.Numerics.ChunkInvariant }

// KVBudgets returns the bytes that all sequences' state may use together on each stage, 0 for no limit; nil sets none on any.
func (p *Pipeline) KVBudgets() []int64 { return p.cfg.KVBudgets }

// Reserve creates a sequence on every stage, or on none. One that begins with positions of another has them as the steps
// begun before leave them, also where these are still under way.
func (p *Pipeline) Reserve(ctx context.Context, r sdk.Reservation) error { return p.c.Reserve(ctx, r) }

// Release frees a sequence on every stage; ctx bounds only the wait for it. Releasing one that is not reserved does
// nothing.
func (p *Pipeline) Release(ctx context.Context, seq sdk.SeqID) error { return p.c.Release(ctx, seq) }

// Step runs rows of one or more sequences through the pipeline and returns a result for each, in order. The batch is
// cut into micro-batches, which overlap on the stages; steps of other callers overlap as well.
//
// A micro-batch that fails costs its own sequences only: the error is then a *StepError, and the results of the
// other sequences are valid. The sequences of a failed micro-batch, or of the whole step when ctx ends, are
// released on every stage; Release, which is still to come, forgets why. A step whose position lies before the end of what a
// sequence holds drops the positions from there on first. seqs and what it points at must not change before
// Step returns, and after an error never.
func (p *Pipeline) Step(ctx context.Context, seqs []sdk.SeqStep) ([]sdk.SeqResult, error) {
	return p.c.Begin(ctx, seqs)()
}

// Begin is Step in two halves: it gives the order and does not wait; wait, to be called once, does. The pieces of a prompt
// can so follow each other through the stages: a step of which nothing is wanted for a sequence need not have ended before
// the sequence's next begins. When a piece fails, those after it fail as well: a step that begins later goes on without the
// sequence, and the others of a micro-batch that was under way fail with a *SpoiledError.
func (p *Pipeline) Begin(ctx context.Context, seqs []sdk.SeqStep) (wait func() ([]sdk.SeqResult, error)) {
	return p.c.Begin(ctx, seqs)
}
