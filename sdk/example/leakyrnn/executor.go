// Package leakyrnn owns one small model family and its executor: a recurrent language model in plain Go, to be copied
// by a team that adds a family of its own.
package leakyrnn

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/sdk"
)

// executor implements sdk.Executor. The step stream calls one operation at a time, but Stats comes in between,
// so the fields below mu are locked in short sections, never while a row is computed.
type executor struct {
	logger    hclog.Logger
	model     *model // nil when nothing is loaded
	budget    int64  // bytes of state at most; 0 means no limit
	seqs      map[sdk.SeqID]*sequence
	positions int // of all caches; one that several sequences share counts once

	mu    sync.Mutex
	stats sdk.Stats
}

// capabilities are those of contract 2: this executor has them all.
var capabilities = []string{
	sdk.CapabilityShare, sdk.CapabilityRewind, sdk.CapabilitySnapshots, sdk.CapabilityState,
	sdk.CapabilityMasks, sdk.CapabilityScores, sdk.CapabilityLogits,
}

// New returns an executor that holds nothing yet.
func New(logger hclog.Logger) sdk.Executor {
	return &executor{logger: logger, seqs: map[sdk.SeqID]*sequence{}}
}

func (e *executor) Describe(context.Context) (*sdk.Description, error) {
	total, free := sdk.SystemMemory()
	return &sdk.Description{
		Name:            "example",
		Version:         "1.0.0",
		ContractVersion: sdk.ContractVersion,
		Runtime:         "go",
		Devices: []sdk.Device{{
			Kind: "cpu", Name: runtime.GOARCH, TotalMemory: total, FreeMemory: free,
			Numerics: sdk.Numerics{BatchInvariant: true, ChunkInvariant: true}, // rows go one by one
		}},
		Families: []sdk.Family{{
			Name:          Family,
			ModelTypes:    []string{Family},
			Pipeline:      true,
			Quantizations: []string{"none"},
		}},
		Capabilities: slices.Clone(capabilities),
	}, nil
}

func (e *executor) Inspect(_ context.Context, req sdk.InspectRequest) (*sdk.ModelProfile, error) {
	if err := checkDtype(req.Dtype); err != nil {
		return nil, err
	}
	return profile(req.Dir)
}

func checkDtype(d sdk.Dtype) error {
	if d != sdk.DtypeAuto && d != sdk.DtypeFloat32 {
		return sdk.Errorf(sdk.CodeUnsupported, "%s computes in float32 only, not in %v: use --dtype auto", Family, d)
	}
	return nil
}

func (e *executor) Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	c, err := checkLoad(req)
	if err != nil {
		return nil, err
	}
	m, report, err := loadModel(ctx, c, req, progress)
	if err != nil {
		return nil, err
	}
	e.model, e.budget = m, req.KVBudget
	e.update(func(s *sdk.Stats) { s.Loaded, s.WeightBytes = true, report.WeightBytes })
	e.logger.Info("loaded", "dir", req.Dir, "first", req.Layers.Start, "last", req.Layers.End-1, "bytes", report.WeightBytes)
	return report, nil
}

func checkLoad(req sdk.LoadRequest) (*Config, error) {
	if err := checkDtype(req.Dtype); err != nil {
		return nil, err
	}
	if req.Family != Family {
		return nil, sdk.Errorf(sdk.CodeUnsupported, "family %q is not in this executor, it has %q", req.Family, Family)
	}
	if req.Device != 0 {
		return nil, sdk.Errorf(sdk.CodeInvalid, "there is no device %d, only device 0", req.Device)
	}
	if req.TPSize > 1 {
		return nil, sdk.Errorf(sdk.CodeUnsupported, "%s has no tensor-parallel ranks", Family)
	}
	if req.Adapter != "" {
		return nil, sdk.Errorf(sdk.CodeUnsupported, "%s takes no adapters", Family)
	}
	c, err := readConfig(req.Dir)
	if err != nil {
		return nil, err
	}
	if req.Layers.End > c.Layers {
		return nil, sdk.Errorf(sdk.CodeInvalid, "layers [%d, %d) asked for, the model has %d", req.Layers.Start, req.Layers.End, c.Layers)
	}
	return c, nil
}

func (e *executor) Reserve(_ context.Context, r sdk.Reservation) error {
	if _, ok := e.seqs[r.Seq]; ok {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is reserved already", r.Seq)
	}
	if r.Adapter != "" {
		return sdk.Errorf(sdk.CodeUnsupported, "%s takes no adapters", Family)
	}
	if limit := e.model.config.ContextLength; limit > 0 && max(r.MaxLen, len(r.Prompt)) > limit {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d wants %d positions, the context has %d", r.Seq, max(r.MaxLen, len(r.Prompt)), limit)
	}
	seq := newSequence(&r, e.model)
	if err := e.checkBudget(e.fixedBytes(r.Snapshots)); err != nil {
		return err
	}
	if r.Keep > 0 {
		if err := e.keep(seq, &r); err != nil {
			return err
		}
	}
	e.seqs[r.Seq] = seq
	e.count()
	return nil
}

// keep begins a new sequence with positions of another, which goes on unchanged.
func (e *executor) keep(seq *sequence, r *sdk.Reservation) error {
	from, err := e.sequence(r.From)
	if err != nil {
		return err
	}
	if from.arrived != nil {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is still being imported", r.From)
	}
	if r.Keep > from.length() {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is to keep %d positions of sequence %d, which has %d", r.Seq, r.Keep, r.From, from.length())
	}
	if err := seq.keep(from, r.Keep, e.model); err != nil {
		return fmt.Errorf("sequence %d can't keep %d positions of sequence %d: %w", r.Seq, r.Keep, r.From, err)
	}
	return nil
}

func (e *executor) Release(_ context.Context, id sdk.SeqID) error {
	if seq, ok := e.seqs[id]; ok {
		e.positions -= seq.drop(0)
		delete(e.seqs, id)
	}
	e.count()
	return nil
}

func (e *executor) sequence(id sdk.SeqID) (*sequence, error) {
	seq, ok := e.seqs[id]
	if !ok {
		return nil, sdk.Errorf(sdk.CodeUnknownSequence, "sequence %d is not reserved on this stage", id)
	}
	return seq, nil
}

func (e *executor) Step(ctx context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	start := time.Now()
	result := &sdk.StepResult{ID: s.ID}
	if err := e.checkStep(s); err != nil {
		return nil, err
	}
	var err error
	if e.model.head != nil {
		result.Seqs, err = e.answers(ctx, s)
	} else {
		result.Hidden, err = e.hidden(ctx, s)
	}
	result.ComputeNanos = int64(time.Since(start))
	e.count()
	e.update(func(stats *sdk.Stats) {
		stats.BusyNanos += result.ComputeNanos
		if err == nil {
			stats.Steps++
		}
	})
	return result, err
}

// checkStep refuses a step before any state changes. The transport has checked what needs no knowledge of the model.
func (e *executor) checkStep(s *sdk.Step) error {
	for i := range s.Seqs {
		q := &s.Seqs[i]
		seq, err := e.sequence(q.Seq)
		if err != nil {
			return err
		}
		if err := seq.check(q, e.model, e.model.head != nil); err != nil {
			return err
		}
	}
	return e.checkBudget(int64(s.Rows()) * e.positionBytes())
}

// hidden answers a step on a stage without the head.
func (e *executor) hidden(ctx context.Context, s *sdk.Step) (sdk.Tensor, error) {
	h := e.model.config.HiddenSize
	out := sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: s.Rows(), Width: h, Data: s.Out[:4*h*s.Rows()]}
	err := e.run(ctx, s, func(i int, _ *sdk.SeqStep, _ int, row []float32) error {
		putFloats(out.Data[4*h*i:], row)
		return nil
	})
	return out, err
}

// answers answers a step on the stage with the head. Rows that nobody asked about don't go through it.
func (e *executor) answers(ctx context.Context, s *sdk.Step) ([]sdk.SeqResult, error) {
	var results []sdk.SeqResult
	out := s.Out
	err := e.run(ctx, s, func(_ int, q *sdk.SeqStep, i int, row []float32) error {
		if i == 0 {
			results = append(results, sdk.SeqResult{Seq: q.Seq, Token: -1})
		}
		result := &results[len(results)-1]
		last := i == q.Rows-1
		switch {
		case q.Want == sdk.WantScores:
			result.Scores = append(result.Scores, logprobs(e.model.logits(row))[q.Targets[i]])
		case q.Want == sdk.WantLogits && last:
			logits := e.model.logits(row)
			result.Logits = sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: 1, Width: len(logits), Data: out[:4*len(logits)]}
			putFloats(result.Logits.Data, logits)
			out = out[4*len(logits):]
		case q.Want == sdk.WantToken && last:
			return e.choose(q, e.model.logits(row), result)
		}
		return nil
	})
	return results, err
}

// choose samples the token after a sequence's last row.
func (e *executor) choose(q *sdk.SeqStep, logits []float32, result *sdk.SeqResult) error {
	seq := e.seqs[q.Seq]
	token, err := sample(seq.sampler, logits, seq.seen(), q.Allowed, q.End())
	if err != nil {
		return err
	}
	result.Token = token
	if q.Logprob || q.TopN > 0 {
		scores := logprobs(logits)
		result.Logprob, result.Top = scores[token], topTokens(logits, scores, q.TopN)
	}
	return nil
}

// run takes every row of a step through the layers, in order, and hands each to done with its number in the step
// and in its sequence.
func (e *executor) run(ctx context.Context, s *sdk.Step, done func(row int, q *sdk.SeqStep, i int, hidden []float32) error) error {
	n := 0
	for k := range s.Seqs {
		q := &s.Seqs[k]
		seq := e.seqs[q.Seq]
		freed, err := seq.rewind(q.Pos, e.model)
		if err != nil {
			return err
		}
		e.positions -= freed
		for i := range q.Rows {
			if err := ctx.Err(); err != nil {
				return err
			}
			hidden := e.input(s, n, q, i)
			e.model.forward(hidden, seq)
			e.positions++
			if len(q.Tokens) > 0 && !q.Prompt {
				seq.generated = append(seq.generated, generatedToken{q.Pos + i, q.Tokens[i]})
			}
			if err := done(n, q, i, hidden); err != nil {
				return err
			}
			n++
		}
		if q.Snapshot {
			seq.snapshot()
		}
	}
	return nil
}

// input returns row n of a step, which is row i of its sequence, before the first layer.
func (e *executor) input(s *sdk.Step, n int, q *sdk.SeqStep, i int) []float32 {
	if e.model.embedding != nil {
		return e.model.embed(q.Tokens[i], q.Pos+i)
	}
	size := 4 * e.model.config.HiddenSize
	return getFloats(s.Hidden.Data[n*size : (n+1)*size])
}

func (e *executor) Import(_ context.Context, req sdk.ImportRequest) (*sdk.ImportPlan, error) {
	return nil, sdk.Errorf(sdk.CodeUnsupported, "%s imports no %s files", Family, req.Format)
}

func (e *executor) Unload(context.Context) error {
	e.model = nil
	clear(e.seqs)
	e.positions = 0
	e.update(func(s *sdk.Stats) { s.Loaded, s.WeightBytes, s.Sequences, s.StateBytes = false, 0, 0, 0 })
	return nil
}

func (e *executor) Stats(context.Context) (*sdk.Stats, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	stats := e.stats
	stats.ResidentBytes = sdk.ResidentBytes()
	return &stats, nil
}

func (e *executor) update(change func(*sdk.Stats)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(&e.stats)
}

// count brings the numbers of sequences and their bytes up to date.
func (e *executor) count() {
	sequences, bytes := len(e.seqs), e.stateBytes()
	e.update(func(s *sdk.Stats) { s.Sequences, s.StateBytes = sequences, bytes })
}

// positionBytes is what all caches of this stage keep of one position.
func (e *executor) positionBytes() int64 {
	return int64(len(e.model.layers)) * e.model.config.cacheBytes()
}

// fixedBytes is what one sequence holds at any length: its recurrent states, and as many snapshots of them.
func (e *executor) fixedBytes(snapshots int) int64 {
	return int64(1+snapshots) * int64(len(e.model.layers)) * e.model.config.recurrentBytes()
}

func (e *executor) stateBytes() int64 {
	if e.model == nil {
		return 0
	}
	n := int64(e.positions) * e.positionBytes()
	for _, seq := range e.seqs {
		n += e.fixedBytes(len(seq.snapshots))
	}
	return n
}
