package batch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// fakeRuntime is a runtime whose tokens depend on everything that a sequence was fed, at which position and in which
// role, and on its sampler: state that is stale, shared or misplaced shows. Its stages take their time one after the
// other, and are taken one at a time.
type fakeRuntime struct {
	chunk    int
	maxBatch int
	cuts     bool // steps of many rows into micro-batches: their size is given
	stages   []chan struct{}
	fixed    time.Duration // of a step on each stage
	perRow   time.Duration
	hop      time.Duration
	capacity int // positions that all sequences may hold together; 0 means any
	back     int // positions that a state can go back without a snapshot; 0 means any, less than 0 none
	onStep   func(seqs []sdk.SeqStep) error

	lastSeq atomic.Uint64
	mu      sync.Mutex
	seqs    map[sdk.SeqID]*fakeSeq
	faults  []string // what a scheduler must never do
	steps   int
	rows    []int // of each step
	prompts int   // rows of prompts
	shares  int   // sequences that began with positions of another
	most    int   // sequences reserved at once
	err     error
	done    chan struct{}
}

type fakeSeq struct {
	reserved sdk.Reservation
	tokens   []int32
	prompt   []bool // role of each of tokens
	busy     bool   // in a step whose result must come first
	steps    int    // under way
	failed   error  // in a step; all that is left to do is to release it
	snapshot int    // positions at which it has one; 0 means none
}

func newFake(stages int) *fakeRuntime {
	f := &fakeRuntime{
		chunk: 64, maxBatch: 64, fixed: 4 * time.Millisecond, perRow: time.Millisecond, hop: 100 * time.Microsecond,
		seqs: map[sdk.SeqID]*fakeSeq{}, done: make(chan struct{}),
	}
	for range stages {
		f.stages = append(f.stages, make(chan struct{}, 1))
	}
	return f
}

func (f *fakeRuntime) NewSeq() sdk.SeqID     { return sdk.SeqID(f.lastSeq.Add(1)) }
func (f *fakeRuntime) PrefillChunk() int     { return f.chunk }
func (f *fakeRuntime) AnyPieces() bool       { return true }
func (f *fakeRuntime) Done() <-chan struct{} { return f.done }

func (f *fakeRuntime) Err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// lose is the end of the runtime.
func (f *fakeRuntime) lose(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
	clear(f.seqs)
	close(f.done)
}

func (f *fakeRuntime) fault(format string, args ...any) error {
	f.faults = append(f.faults, fmt.Sprintf(format, args...))
	return sdk.Errorf(sdk.CodeInvalid, format, args...)
}

// pass takes each stage for its time; it ends early with ctx or the runtime.
func (f *fakeRuntime) pass(ctx context.Context, took time.Duration) error {
	for _, stage := range f.stages {
		select {
		case stage <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-f.done:
			return f.Err()
		}
		err := f.wait(ctx, took)
		<-stage
		if err == nil {
			err = f.wait(ctx, f.hop)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (f *fakeRuntime) wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-f.done:
		return f.Err()
	}
}

func (f *fakeRuntime) Reserve(ctx context.Context, r sdk.Reservation) error {
	if err := f.canBegin(r); err != nil {
		return err
	}
	if err := f.pass(ctx, 0); err != nil {
		return err
	}
	if err := f.canBegin(r); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.seqs[r.Seq] != nil {
		return f.fault("sequence %d reserved twice", r.Seq)
	}
	if f.capacity > 0 && f.held()+max(r.MaxLen, 1) > f.capacity {
		return &pipeline.StageError{Place: sdk.Place{Stage: len(f.stages) - 1}, Plugin: "fake", Phase: pipeline.PhaseReserve, Err: sdk.Errorf(sdk.CodeOutOfMemory, "no room")}
	}
	s := &fakeSeq{reserved: r}
	if r.Keep > 0 {
		from := f.seqs[r.From]
		s.tokens, s.prompt = slices.Clone(from.tokens[:r.Keep]), slices.Clone(from.prompt[:r.Keep])
		f.shares++
	}
	f.seqs[r.Seq] = s
	f.most = max(f.most, len(f.seqs))
	return nil
}

// canBegin tells whether a sequence can begin with what it is to have of another. That must hold still until it has.
func (f *fakeRuntime) canBegin(r sdk.Reservation) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Keep == 0 {
		return nil
	}
	from := f.seqs[r.From]
	switch {
	case from == nil || from.failed != nil:
		return sdk.Errorf(sdk.CodeUnknownSequence, "sequence %d is not reserved", r.From)
	case from.steps > 0:
		return f.fault("sequence %d begins with sequence %d, which is in a step", r.Seq, r.From)
	case r.Keep >= len(r.Prompt) || r.Keep > len(from.tokens) || !slices.Equal(from.tokens[:r.Keep], r.Prompt[:r.Keep]) || slices.Contains(from.prompt[:r.Keep], false):
		return f.fault("sequence %d begins with %d positions of sequence %d, which has %d others", r.Seq, r.Keep, r.From, len(from.tokens))
	case r.Keep != len(from.tokens) && r.Keep != from.snapshot && f.back != 0 && len(from.tokens)-r.Keep > f.back:
		return &pipeline.StageError{Place: sdk.Place{Stage: len(f.stages) - 1}, Plugin: "fake", Phase: pipeline.PhaseReserve,
			Err: sdk.Errorf(sdk.CodeUnsupported, "sequence %d can't go back to %d, but to %d", r.From, r.Keep, len(from.tokens))}
	}
	return nil
}

func (f *fakeRuntime) held() int {
	n := 0
	for _, s := range f.seqs {
		if s.failed != nil {
			continue
		}
		n += max(len(s.tokens), s.reserved.MaxLen)
	}
	return n
}

func (f *fakeRuntime) Release(_ context.Context, seq sdk.SeqID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.seqs[seq]; s != nil && s.steps > 0 {
		f.fault("sequence %d released in a step", seq)
	}
	delete(f.seqs, seq)
	return f.err
}

// Begin feeds the sequences at once, in the order of the calls; what follows takes the time.
func (f *fakeRuntime) Begin(ctx context.Context, steps []sdk.SeqStep) func() ([]sdk.SeqResult, error) {
	var fault error
	if f.onStep != nil {
		fault = f.onStep(steps)
	}
	present, failures := f.leaveOut(steps)
	rows, results, err := f.begin(present)
	return func() ([]sdk.SeqResult, error) {
		if err != nil {
			return nil, err
		}
		if fault == nil && len(present) > 0 {
			fault = f.pass(ctx, f.fixed+time.Duration(rows)*f.perRow)
		}
		if err = f.end(present, failures, fault); err != nil && f.Err() != nil {
			return nil, err
		}
		all := make([]sdk.SeqResult, len(steps))
		for i, q := range steps {
			all[i] = sdk.SeqResult{Seq: q.Seq, Token: -1}
			if k := slices.IndexFunc(results, func(r sdk.SeqResult) bool { return r.Seq == q.Seq }); k >= 0 {
				all[i] = results[k]
			}
		}
		return all, err
	}
}

// leaveOut takes those out of a step that failed in one before.
func (f *fakeRuntime) leaveOut(steps []sdk.SeqStep) (present []sdk.SeqStep, failures []pipeline.StepFailure) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range steps {
		if s := f.seqs[q.Seq]; s != nil && s.failed != nil {
			failures = append(failures, pipeline.StepFailure{Seqs: []sdk.SeqID{q.Seq}, Err: s.failed})
		} else {
			present = append(present, q)
		}
	}
	return present, failures
}

func (f *fakeRuntime) begin(steps []sdk.SeqStep) (rows int, results []sdk.SeqResult, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return 0, nil, f.err
	}
	for _, q := range steps {
		s := f.seqs[q.Seq]
		switch {
		case s == nil:
			return 0, nil, f.fault("step of unknown sequence %d", q.Seq)
		case s.busy:
			return 0, nil, f.fault("step of sequence %d, which is in one", q.Seq)
		case q.Pos != len(s.tokens):
			return 0, nil, f.fault("sequence %d at %d, its state ends at %d", q.Seq, q.Pos, len(s.tokens))
		case q.Rows != len(q.Tokens) || q.Rows == 0 || q.Rows > f.chunk:
			return 0, nil, f.fault("sequence %d brings %d rows", q.Seq, len(q.Tokens))
		case s.reserved.MaxLen > 0 && q.Pos+len(q.Tokens) > s.reserved.MaxLen:
			return 0, nil, f.fault("sequence %d outgrows its reservation of %d", q.Seq, s.reserved.MaxLen)
		case q.Snapshot && s.reserved.Snapshots == 0:
			return 0, nil, f.fault("sequence %d keeps a snapshot that it has not reserved", q.Seq)
		case q.Want == sdk.WantScores && len(q.Targets) != len(q.Tokens):
			return 0, nil, f.fault("sequence %d has %d targets for %d rows", q.Seq, len(q.Targets), len(q.Tokens))
		}
		rows += len(q.Tokens)
	}
	if len(steps) > f.maxBatch || rows > max(f.chunk, f.maxBatch) && !f.cuts {
		return 0, nil, f.fault("a step of %d sequences and %d rows", len(steps), rows)
	}
	f.steps++
	f.rows = append(f.rows, rows)
	for _, q := range steps {
		s, r := f.seqs[q.Seq], sdk.SeqResult{Seq: q.Seq, Token: -1}
		s.busy = q.Want != sdk.WantNothing
		s.steps++
		s.feed(q, &r)
		if q.Prompt {
			f.prompts += q.Rows
		}
		results = append(results, r)
	}
	return rows, results, nil
}

// end ends the step: for all with err, or for those that a StepError names, or, where one of them had failed in a step before,
// for all because of that one.
func (f *fakeRuntime) end(steps []sdk.SeqStep, failures []pipeline.StepFailure, err error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return f.err
	}
	of := func(sdk.SeqID) error { return err }
	if partial, ok := errors.AsType[*pipeline.StepError](err); ok {
		of = partial.Of
	}
	for _, q := range steps {
		if s := f.seqs[q.Seq]; s.failed != nil {
			of = func(sdk.SeqID) error { return &pipeline.SpoiledError{By: q.Seq, Err: s.failed} }
		}
	}
	for _, q := range steps {
		s := f.seqs[q.Seq]
		s.steps--
		s.busy = s.busy && q.Want == sdk.WantNothing
		if s.failed == nil {
			s.failed = of(q.Seq)
		}
		if s.failed != nil {
			failures = append(failures, pipeline.StepFailure{Seqs: []sdk.SeqID{q.Seq}, Err: s.failed})
		}
	}
	if len(failures) == 0 {
		return nil
	}
	return &pipeline.StepError{Failures: failures}
}

func (s *fakeSeq) feed(q sdk.SeqStep, r *sdk.SeqResult) {
	if q.Snapshot {
		s.snapshot = q.End()
	}
	for i, t := range q.Tokens {
		s.tokens, s.prompt = append(s.tokens, t), append(s.prompt, q.Prompt)
		if q.Want == sdk.WantScores {
			r.Scores = append(r.Scores, fakeScore(s.tokens, q.Targets[i]))
		}
	}
	if q.Want == sdk.WantToken {
		r.Token = fakeToken(s.tokens, s.prompt, s.reserved)
		if q.Logprob || q.TopN > 0 {
			r.Logprob = -float32(r.Token)
		}
		for i := range q.TopN {
			r.Top = append(r.Top, sdk.TokenScore{Token: r.Token + int32(i)})
		}
	}
}

const fakeVocab = 500

func fakeToken(tokens []int32, prompt []bool, r sdk.Reservation) int32 {
	h := hash64(14695981039346656037)
	for i, t := range tokens {
		role := 0
		if prompt[i] {
			role = 1
		}
		h.add(uint64(t)<<1 + uint64(role))
	}
	if r.Sampler.Temperature > 0 {
		h.add(r.Sampler.Seed)
		h.add(uint64(r.Sampler.Choice))
		h.add(uint64(len(tokens)))
		for _, t := range r.Prompt {
			h.add(uint64(t))
		}
	}
	return int32((h >> 8) % fakeVocab)
}

func fakeScore(tokens []int32, target int32) float32 {
	h := hash64(14695981039346656037)
	for _, t := range tokens {
		h.add(uint64(t))
	}
	h.add(uint64(target))
	return -float32((h>>8)%10_000) / 1000
}

// hash64 is FNV-1a over 64-bit words, mixed well enough for tests.
type hash64 uint64

func (h *hash64) add(v uint64) {
	*h = (*h ^ hash64(v)) * 1099511628211
	*h ^= *h >> 29
}

// solo is what a request is answered when nothing else runs.
func solo(req Request) (tokens []int32, scores []float32, reason FinishReason) {
	history := slices.Clone(req.Prompt)
	prompt := make([]bool, len(history))
	for i := range prompt {
		prompt[i] = true
		if req.WantScores && i > 0 {
			scores = append(scores, fakeScore(history[:i], history[i]))
		}
	}
	for len(tokens) < req.MaxTokens {
		t := fakeToken(history, prompt, sdk.Reservation{Prompt: req.Prompt, Sampler: req.Sampler})
		tokens = append(tokens, t)
		if !req.IgnoreEOS && slices.Contains(req.EOS, t) {
			return tokens, scores, FinishStop
		}
		history, prompt = append(history, t), append(prompt, false)
	}
	return tokens, scores, FinishLength
}

func ids(tokens []Token) []int32 {
	var out []int32
	for _, t := range tokens {
		out = append(out, t.ID)
	}
	return out
}
