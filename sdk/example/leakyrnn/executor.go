// Package leakyrnn owns one small model family and its executor: a recurrent language model in plain Go, to be copied
// by a team that adds a family of its own.
package leakyrnn

import (
	"context"
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
	logger hclog.Logger
	model  *model // nil when nothing is loaded
	budget int64  // bytes of state at most; 0 means no limit
	seqs   map[sdk.SeqID]*sequence

	mu    sync.Mutex
	stats sdk.Stats
}

// sequence is the state of one sequence.
type sequence struct {
	sampler sdk.Sampler
	maxLen  int
	prompt  []int32        // as reserved
	history []historyToken // one a position
	states  [][][]float32  // by position, then layer: kept for every position, so that Truncate can go back
}

// historyToken is a token that a sequence has seen.
type historyToken struct {
	token  int32
	prompt bool
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
	e.seqs[r.Seq] = &sequence{sampler: r.Sampler, maxLen: r.MaxLen, prompt: r.Prompt}
	e.count()
	return nil
}

func (e *executor) Release(_ context.Context, seq sdk.SeqID) error {
	delete(e.seqs, seq)
	e.count()
	return nil
}

func (e *executor) Truncate(_ context.Context, id sdk.SeqID, length int) error {
	seq, err := e.sequence(id)
	if err != nil {
		return err
	}
	if length < len(seq.history) {
		seq.history = seq.history[:length:length]
		seq.states = seq.states[:length:length]
	}
	e.count()
	return nil
}

func (e *executor) Fork(_ context.Context, from, to sdk.SeqID) error {
	seq, err := e.sequence(from)
	if err != nil {
		return err
	}
	if _, ok := e.seqs[to]; ok {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is reserved already", to)
	}
	fork := *seq
	fork.history = slices.Clone(seq.history)
	fork.states = slices.Clone(seq.states) // the rows never change, so they can be shared
	e.seqs[to] = &fork
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
		if q.Pos != len(seq.history) {
			return sdk.Errorf(sdk.CodeInvalid, "sequence %d continues at position %d, but its state ends at %d", q.Seq, q.Pos, len(seq.history))
		}
		end, limit := q.Pos+len(q.Tokens), e.model.config.ContextLength
		if limit > 0 && end > limit || seq.maxLen > 0 && end > seq.maxLen {
			return sdk.Errorf(sdk.CodeInvalid, "sequence %d would grow to %d positions, past its %d or the context's %d", q.Seq, end, seq.maxLen, limit)
		}
		for _, token := range slices.Concat(q.Tokens, q.Targets) {
			if int(token) >= e.model.config.VocabSize {
				return sdk.Errorf(sdk.CodeInvalid, "token id %d is not in the vocabulary of %d", token, e.model.config.VocabSize)
			}
		}
	}
	more := int64(s.Rows()) * e.positionBytes()
	if held := e.stateBytes(); e.budget > 0 && held+more > e.budget {
		return sdk.Errorf(sdk.CodeOutOfMemory, "%d bytes of state and %d more pass the budget of %d", held, more, e.budget)
	}
	return nil
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
		last := i == len(q.Tokens)-1
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
	token, err := sample(seq.sampler, logits, seq.seen(), q.Allowed, q.Pos+len(q.Tokens))
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

// seen returns what the penalties count: the prompt, whether it has come or not, and what was generated.
func (s *sequence) seen() []historyToken {
	var list []historyToken
	for _, token := range s.prompt {
		list = append(list, historyToken{token, true})
	}
	for _, h := range s.history {
		if !h.prompt {
			list = append(list, h)
		}
	}
	return list
}

// run takes every row of a step through the layers, in order, and hands each to done with its number in the step
// and in its sequence.
func (e *executor) run(ctx context.Context, s *sdk.Step, done func(row int, q *sdk.SeqStep, i int, hidden []float32) error) error {
	n := 0
	for k := range s.Seqs {
		q := &s.Seqs[k]
		seq := e.seqs[q.Seq]
		for i, token := range q.Tokens {
			if err := ctx.Err(); err != nil {
				return err
			}
			hidden := e.input(s, n, token, q.Pos+i)
			seq.states = append(seq.states, e.model.forward(hidden, seq.last(e.model)))
			seq.history = append(seq.history, historyToken{token, q.Prompt})
			if err := done(n, q, i, hidden); err != nil {
				return err
			}
			n++
		}
	}
	return nil
}

// input returns row n of a step before the first layer.
func (e *executor) input(s *sdk.Step, n int, token int32, pos int) []float32 {
	if e.model.embedding != nil {
		return e.model.embed(token, pos)
	}
	size := 4 * e.model.config.HiddenSize
	return getFloats(s.Hidden.Data[n*size : (n+1)*size])
}

// last returns the states after the last position, zeros before the first.
func (s *sequence) last(m *model) [][]float32 {
	if n := len(s.states); n > 0 {
		return s.states[n-1]
	}
	states := make([][]float32, len(m.layers))
	for i := range states {
		states[i] = make([]float32, m.config.HiddenSize)
	}
	return states
}

func (e *executor) Import(_ context.Context, req sdk.ImportRequest) (*sdk.ImportPlan, error) {
	return nil, sdk.Errorf(sdk.CodeUnsupported, "%s imports no %s files", Family, req.Format)
}

func (e *executor) Unload(context.Context) error {
	e.model = nil
	clear(e.seqs)
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

// positionBytes is the state of one position of one sequence on this stage.
func (e *executor) positionBytes() int64 {
	return int64(len(e.model.layers)) * e.model.config.stateBytes()
}

func (e *executor) stateBytes() int64 {
	if e.model == nil {
		return 0
	}
	positions := 0
	for _, seq := range e.seqs {
		positions += len(seq.history)
	}
	return int64(positions) * e.positionBytes()
}
