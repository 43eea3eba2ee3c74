package sdktest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// model is what an executor tells of the model before it loads it.
type model struct {
	dtype   sdk.Dtype  // of the activations that were asked for
	device  sdk.Device // that the checks load on
	family  sdk.Family
	profile *sdk.ModelProfile
	prompt  []int32
	able    []string // the executor's capabilities
}

// has tells whether the executor says that it has the capability.
func (m *model) has(capability string) bool { return slices.Contains(m.able, capability) }

// need skips a check where the executor lacks a capability.
func (m *model) need(capabilities ...string) error {
	for _, c := range capabilities {
		if !m.has(c) {
			return fmt.Errorf("%w: it lacks the capability %q", errSkipped, c)
		}
	}
	return nil
}

// rig is what one check works with: the model, and the executors that it started.
type rig struct {
	*model
	cfg     Config
	lastSeq sdk.SeqID
	stops   []func() error
}

// What the checks of states and penalties need.
const (
	leastContext    = 64
	leastVocabulary = 32
)

// learn asks an executor for its family and the model's profile.
func learn(ctx context.Context, cfg Config, dtype sdk.Dtype) (m *model, err error) {
	client, stop, err := cfg.Launch()
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	defer func() { err = errors.Join(err, stop()) }()
	d, err := client.Describe(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(d.Families, func(f sdk.Family) bool { return f.Name == cfg.Family })
	if i < 0 {
		return nil, fmt.Errorf("describe does not list the family %q", cfg.Family)
	}
	if len(d.Devices) == 0 {
		return nil, errors.New("describe names no device")
	}
	m = &model{dtype: dtype, device: d.Devices[0], family: d.Families[i], prompt: cfg.Prompt}
	m.profile, err = client.Inspect(ctx, sdk.InspectRequest{Dir: cfg.ModelDir, Dtype: dtype})
	if err != nil {
		return nil, err
	}
	if len(m.profile.Layers) == 0 || m.profile.VocabSize < leastVocabulary {
		return nil, fmt.Errorf("inspect found %d layers and a vocabulary of %d", len(m.profile.Layers), m.profile.VocabSize)
	}
	if len(m.prompt) == 0 {
		m.prompt = m.madeUp(11, 3)
	}
	m.able = d.Capabilities
	if limit, need := m.profile.ContextLength, max(leastContext, 2*len(m.prompt)+2*cfg.Generate); limit > 0 && limit < need {
		return nil, fmt.Errorf("the model's context of %d is too short for the checks, which need %d", limit, need)
	}
	return m, nil
}

// madeUp returns n token ids that jump about in the vocabulary.
func (m *model) madeUp(n, seed int) []int32 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32((i*i*7 + i*seed + seed) % m.profile.VocabSize)
	}
	return tokens
}

func (r *rig) start() (*sdk.Client, error) {
	client, stop, err := r.cfg.Launch()
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	r.stops = append(r.stops, stop)
	return client, nil
}

// stop ends the executor started last.
func (r *rig) stop() error {
	last := len(r.stops) - 1
	stop := r.stops[last]
	r.stops = r.stops[:last]
	return stop()
}

func (r *rig) close() error {
	var errs []error
	for len(r.stops) > 0 {
		errs = append(errs, r.stop())
	}
	return errors.Join(errs...)
}

// seq returns a sequence ID that was not used before.
func (r *rig) seq() sdk.SeqID {
	r.lastSeq++
	return r.lastSeq
}

const (
	slots   = 3
	maxRows = 64 // of one step
	maxSeqs = 4  // of one step
)

// request asks for layers of the model, with the ends that belong to them.
func (r *rig) request(layers sdk.LayerRange) sdk.LoadRequest {
	b := r.profile.Boundary
	rows := maxRows * b.Width * max(b.Dtype.Size(), 4)
	return sdk.LoadRequest{
		Dir:          r.cfg.ModelDir,
		Family:       r.cfg.Family,
		Layers:       layers,
		HasEmbedding: layers.Start == 0,
		HasHead:      layers.End == len(r.profile.Layers),
		Dtype:        r.dtype,
		Device:       r.device.Index,
		Region:       sdk.RegionLayout{Slots: slots, InBytes: rows, OutBytes: max(rows, maxSeqs*4*r.profile.VocabSize), MaskBytes: maxSeqs * r.maskBytes()},
	}
}

// maskBytes is the size of a mask.
func (r *rig) maskBytes() int { return (r.profile.VocabSize + 7) / 8 }

// stage is a loaded executor with its step stream.
type stage struct {
	client *sdk.Client
	stream *sdk.StepStream
	report *sdk.LoadReport
	layers sdk.LayerRange
	role   sdk.StageRole
}

// load starts an executor and loads it.
func (r *rig) load(ctx context.Context, req sdk.LoadRequest) (*stage, error) {
	client, err := r.start()
	if err != nil {
		return nil, err
	}
	s := &stage{client: client}
	return s, s.load(ctx, req)
}

func (s *stage) load(ctx context.Context, req sdk.LoadRequest) error {
	var err error
	s.layers = req.Layers
	s.role = sdk.StageRole{TakesTokens: req.HasEmbedding, TakesHidden: !req.HasEmbedding, GivesHidden: !req.HasHead, Answers: req.HasHead}
	if s.report, err = s.client.Load(ctx, req, nil); err != nil {
		return fmt.Errorf("load layers [%d, %d): %w", req.Layers.Start, req.Layers.End, err)
	}
	s.stream, err = s.client.OpenSteps(ctx)
	return err
}

// pipe is a whole model: one stage, or several behind each other.
type pipe struct {
	stages   []*stage
	lastStep uint64
	counting map[sdk.SeqID]bool // sequences whose sampler counts tokens
}

// open loads the model, split before each of the layers in cuts.
func (r *rig) open(ctx context.Context, cuts ...int) (*pipe, error) {
	p := &pipe{}
	start := 0
	for _, end := range append(slices.Clone(cuts), len(r.profile.Layers)) {
		s, err := r.load(ctx, r.request(sdk.LayerRange{Start: start, End: end}))
		if err != nil {
			return nil, err
		}
		p.stages = append(p.stages, s)
		start = end
	}
	return p, nil
}

// do applies an operation on every stage, which gets of it what it needs.
func (p *pipe) do(ctx context.Context, op sdk.Op) error {
	for _, s := range p.stages {
		if _, err := s.do(ctx, p.share(s, op)); err != nil {
			return err
		}
	}
	return nil
}

// share is what a stage needs of an operation: prompt and sampler matter only where tokens are chosen.
func (p *pipe) share(s *stage, op sdk.Op) sdk.Op {
	reservation, ok := op.(sdk.Reservation)
	if !ok {
		return op
	}
	if p.counting == nil {
		p.counting = map[sdk.SeqID]bool{}
	}
	p.counting[reservation.Seq] = reservation.Sampler.CountsTokens()
	if !s.role.Answers {
		reservation.Prompt, reservation.Generated, reservation.Sampler = nil, nil, sdk.Sampler{}
	}
	return reservation
}

// rows is what a stage needs of a sequence's rows.
func (p *pipe) rows(s *stage, q sdk.SeqStep) sdk.SeqStep {
	if q.Rows == 0 {
		q.Rows = len(q.Tokens)
	}
	if !s.role.TakesTokens && !(s.role.Answers && p.counting[q.Seq]) {
		q.Tokens = nil
	}
	if !s.role.Answers {
		q.Want, q.TopN, q.Logprob, q.Targets, q.Allowed = sdk.WantNothing, 0, false, nil, nil
	}
	return q
}

func (s *stage) do(ctx context.Context, op sdk.Op) (*sdk.StepResult, error) {
	answer, err := s.stream.Send(op)
	if err != nil {
		return nil, err
	}
	return answer.Wait(ctx)
}

// step takes one micro-batch through all stages and returns what the last one answers, copied out of the region.
func (p *pipe) step(ctx context.Context, seqs ...sdk.SeqStep) ([]sdk.SeqResult, error) {
	p.lastStep++
	var hidden sdk.Tensor
	for i, s := range p.stages {
		step := &sdk.Step{ID: p.lastStep}
		for _, q := range seqs {
			step.Seqs = append(step.Seqs, p.rows(s, q))
		}
		if i > 0 {
			step.Hidden = hidden
			step.Hidden.Data = s.client.Region().In(step.Slot)[:len(hidden.Data)]
			copy(step.Hidden.Data, hidden.Data)
		}
		result, err := s.do(ctx, step)
		if err != nil {
			return nil, err
		}
		if result.ID != step.ID {
			return nil, fmt.Errorf("the answer to step %d names step %d", step.ID, result.ID)
		}
		if i == len(p.stages)-1 {
			return copied(result.Seqs), nil
		}
		hidden = result.Hidden
	}
	return nil, errors.New("a model without stages")
}

func copied(results []sdk.SeqResult) []sdk.SeqResult {
	results = slices.Clone(results)
	for i := range results {
		results[i].Logits.Data = bytes.Clone(results[i].Logits.Data)
	}
	return results
}

// ask runs a step of one sequence.
func (p *pipe) ask(ctx context.Context, q sdk.SeqStep) (*sdk.SeqResult, error) {
	results, err := p.step(ctx, q)
	if err != nil {
		return nil, err
	}
	return answerOf(results, q.Seq)
}

func answerOf(results []sdk.SeqResult, seq sdk.SeqID) (*sdk.SeqResult, error) {
	for i := range results {
		if results[i].Seq == seq {
			return &results[i], nil
		}
	}
	return nil, fmt.Errorf("no answer for sequence %d", seq)
}

// feed runs tokens in chunks as prompt, wanting nothing.
func (p *pipe) feed(ctx context.Context, seq sdk.SeqID, pos int, tokens []int32, chunk int) error {
	for len(tokens) > 0 {
		n := min(chunk, len(tokens))
		if _, err := p.step(ctx, sdk.SeqStep{Seq: seq, Pos: pos, Tokens: tokens[:n], Prompt: true}); err != nil {
			return err
		}
		pos, tokens = pos+n, tokens[n:]
	}
	return nil
}

// trace is everything that a sequence answered.
type trace struct {
	tokens  []int32
	answers []sdk.SeqResult // with WantToken
	logits  []byte          // after the last token
}

// plan is how a sequence is run.
type plan struct {
	prompt   []int32
	sampler  sdk.Sampler
	chunk    int // rows of a prefill step; 0 means all at once
	generate int
}

func (r *rig) greedy() plan { return plan{prompt: r.prompt, generate: r.cfg.Generate} }

// run reserves a sequence, prefills its prompt, generates, reads the logits at the end, and releases it.
func (r *rig) run(ctx context.Context, p *pipe, pl plan) (*trace, error) {
	seq := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: pl.prompt, Sampler: pl.sampler}); err != nil {
		return nil, err
	}
	t, err := r.generate(ctx, p, seq, pl)
	if err != nil {
		return nil, err
	}
	return t, p.do(ctx, sdk.Release{Seq: seq})
}

// topN is how many top tokens the traces compare.
const topN = 2

func (r *rig) generate(ctx context.Context, p *pipe, seq sdk.SeqID, pl plan) (*trace, error) {
	chunk := pl.chunk
	if chunk == 0 {
		chunk = maxRows
	}
	last := (len(pl.prompt) - 1) / chunk * chunk
	if err := p.feed(ctx, seq, 0, pl.prompt[:last], chunk); err != nil {
		return nil, err
	}
	return r.walk(p, seq, last, pl.prompt[last:]).goOn(ctx, pl.generate)
}

// walker generates a sequence's tokens, one a step.
type walker struct {
	r    *rig
	p    *pipe
	next sdk.SeqStep
	t    trace
}

// walk begins with the rest of a prompt, from pos on.
func (r *rig) walk(p *pipe, seq sdk.SeqID, pos int, rest []int32) *walker {
	return &walker{r: r, p: p, next: sdk.SeqStep{Seq: seq, Pos: pos, Tokens: rest, Prompt: true, Want: sdk.WantToken, TopN: topN}}
}

func (w *walker) step(ctx context.Context) error {
	a, err := w.p.ask(ctx, w.next)
	if err != nil {
		return err
	}
	w.t.answers = append(w.t.answers, *a)
	w.t.tokens = append(w.t.tokens, a.Token)
	w.next.Pos += len(w.next.Tokens)
	w.next.Tokens, w.next.Prompt = []int32{a.Token}, false
	return nil
}

// goOn takes n steps, and asks for the logits at their end where the executor gives any.
func (w *walker) goOn(ctx context.Context, n int) (*trace, error) {
	for range n {
		if err := w.step(ctx); err != nil {
			return nil, err
		}
	}
	if !w.r.has(sdk.CapabilityLogits) {
		return &w.t, nil
	}
	q := w.next
	q.Want, q.TopN = sdk.WantLogits, 0
	a, err := w.p.ask(ctx, q)
	if err != nil {
		return nil, err
	}
	w.t.logits = a.Logits.Data
	return &w.t, nil
}

// equal compares two traces bit for bit.
func (t *trace) equal(other *trace) error {
	if !slices.Equal(t.tokens, other.tokens) {
		return fmt.Errorf("tokens %v became %v", t.tokens, other.tokens)
	}
	for i := range t.answers {
		if err := sameAnswer(&t.answers[i], &other.answers[i]); err != nil {
			return fmt.Errorf("token %d: %w", i, err)
		}
	}
	return sameLogits(t.logits, other.logits)
}

func sameAnswer(a, b *sdk.SeqResult) error {
	if math.Float32bits(a.Logprob) != math.Float32bits(b.Logprob) {
		return fmt.Errorf("log-probability %v became %v", a.Logprob, b.Logprob)
	}
	if !slices.Equal(a.Top, b.Top) {
		return fmt.Errorf("top tokens %v became %v", a.Top, b.Top)
	}
	return nil
}

func sameLogits(a, b []byte) error {
	if bytes.Equal(a, b) {
		return nil
	}
	x, y := floats(a), floats(b)
	if len(x) != len(y) {
		return fmt.Errorf("%d logits became %d", len(x), len(y))
	}
	for i := range x {
		if math.Float32bits(x[i]) != math.Float32bits(y[i]) {
			return fmt.Errorf("the logit of token %d, %v, became %v", i, x[i], y[i])
		}
	}
	return nil
}

func floats(raw []byte) []float32 {
	out := make([]float32, len(raw)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return out
}

// wantCode checks that err is the executor's own error, of one of the codes, with a text.
func wantCode(what string, err error, codes ...sdk.Code) error {
	if err == nil {
		return fmt.Errorf("%s went well, want an error of code %v", what, codes)
	}
	e, ok := errors.AsType[*sdk.Error](err)
	if !ok {
		return fmt.Errorf("%s: the error is no *sdk.Error: %w", what, err)
	}
	if !slices.Contains(codes, e.Code) {
		return fmt.Errorf("%s: the error has the code %v, want one of %v: %w", what, e.Code, codes, err)
	}
	if e.Message == "" {
		return fmt.Errorf("%s: the error has no text", what)
	}
	return nil
}
