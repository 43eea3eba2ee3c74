package stage

import (
	"context"
	"slices"
	"time"
	"unsafe"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/sample"
	"github.com/mlxcel/mlxcel/sdk"
)

const (
	// eagerRows is the number of rows from which each layer is evaluated by itself where operations queue up, so that a
	// cancellation is noticed within one layer and a long chunk does not hold every layer's activations.
	eagerRows = 32
	// headRows is the number of rows that go through the head together: logits are wide.
	headRows = 32
)

type clock func() time.Time

func (e *Executor) clock() clock {
	if e.o.Now != nil {
		return e.o.Now
	}
	return time.Now
}

// step runs a micro-batch. A step that fails before any layer ran leaves its sequences as they were, but for what lies past the
// positions that it begins at.
func (m *loaded) step(ctx context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	began := m.clock()
	if err := m.checkStep(s); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, canceled(ctx)
	}
	if err := m.makeRoom(s); err != nil {
		return nil, m.typed(err)
	}
	out, err := m.run(ctx, s)
	for i := range s.Seqs {
		q := &s.Seqs[i]
		if err == nil {
			err = m.settle(m.sequences[q.Seq], q.End(), q.Snapshot)
		}
	}
	if err != nil {
		m.giveUp(s, err)
		return nil, m.typed(err)
	}
	for i := range s.Seqs {
		m.account(m.sequences[s.Seqs[i].Seq])
	}
	m.notePeak()
	out.ComputeNanos = m.clock().Sub(began).Nanoseconds()
	return out, nil
}

// makeRoom drops what lies past the positions that the step begins at, and refuses what then goes beyond the budget.
func (m *loaded) makeRoom(s *sdk.Step) error {
	growth := int64(0)
	for i := range s.Seqs {
		q := &s.Seqs[i]
		state := m.sequences[q.Seq]
		if q.Pos < state.length {
			if err := m.rewind(state, q.Pos); err != nil {
				return err
			}
		}
		growth += max(0, m.bytesAt(q.End(), state.snapshots)-state.own()-state.growth())
		if err := m.spare(q.Seq, growth); err != nil {
			return err
		}
	}
	return nil
}

// settle ends a step for one sequence.
func (m *loaded) settle(q *sequence, length int, snapshot bool) error {
	q.length = length
	for _, state := range q.states {
		if err := state.Settle(length); err != nil {
			return err
		}
		if !snapshot {
			continue
		}
		if err := state.Snapshot(q.snapshots); err != nil {
			return err
		}
	}
	return nil
}

// giveUp ends a failed step. Where memory ran out, a sequence whose states can all go back to where the step began does so; any
// other is broken.
func (m *loaded) giveUp(s *sdk.Step, err error) {
	again := m.stream.AtOnce() && mlx.IsNoMemory(err) // else what was built on the states is still to be computed
	for i := range s.Seqs {
		q := m.sequences[s.Seqs[i].Seq]
		q.broken = true
		if pos := s.Seqs[i].Pos; again && q.before(pos) == pos && m.rewind(q, pos) == nil {
			q.broken = false
		}
		m.account(q)
	}
}

// checkStep refuses a step that does not fit the stage, before anything is computed.
func (m *loaded) checkStep(s *sdk.Step) error {
	if len(s.Seqs) == 0 {
		return sdk.Errorf(sdk.CodeInvalid, "step %d has no sequence", s.ID)
	}
	for i := range s.Seqs {
		if err := m.checkSeq(s, i); err != nil {
			return err
		}
	}
	if m.embed == nil {
		if err := m.checkHidden(s); err != nil {
			return err
		}
	}
	if need := m.outBytes(s); need > len(s.Out) {
		return sdk.Errorf(sdk.CodeInvalid, "step %d: the output of %d rows takes %d bytes, the slot has %d", s.ID, s.Rows(), need, len(s.Out))
	}
	return nil
}

func (m *loaded) checkSeq(s *sdk.Step, i int) error {
	q := &s.Seqs[i]
	state := m.sequences[q.Seq]
	switch {
	case state == nil:
		return unknown(q.Seq)
	case state.broken || state.imported != nil:
		return state.unusable(q.Seq)
	case q.Rows < 1 || len(q.Tokens) != q.Rows && (m.embed != nil || state.history != nil || len(q.Tokens) > 0):
		return sdk.Errorf(sdk.CodeInvalid, "step %d: sequence %d has %d rows and %d tokens", s.ID, q.Seq, q.Rows, len(q.Tokens))
	case q.Pos < 0 || q.Pos > state.length:
		return sdk.Errorf(sdk.CodeInvalid, "step %d: sequence %d starts at position %d, its state ends at %d", s.ID, q.Seq, q.Pos, state.length)
	case slices.ContainsFunc(s.Seqs[:i], func(o sdk.SeqStep) bool { return o.Seq == q.Seq }):
		return sdk.Errorf(sdk.CodeInvalid, "step %d names sequence %d twice", s.ID, q.Seq)
	}
	if err := state.reaches(q.Seq, q.Pos); err != nil {
		return err
	}
	if m.embed != nil {
		for _, t := range q.Tokens {
			if t < 0 || int(t) >= m.shape.Vocab {
				return sdk.Errorf(sdk.CodeInvalid, "step %d: sequence %d: token %d is outside the vocabulary of %d", s.ID, q.Seq, t, m.shape.Vocab)
			}
		}
	}
	if m.head == nil {
		return nil
	}
	switch q.Want {
	case sdk.WantNothing, sdk.WantToken, sdk.WantLogits:
	case sdk.WantScores:
		if len(q.Targets) != q.Rows {
			return sdk.Errorf(sdk.CodeInvalid, "step %d: sequence %d: %d targets for %d rows", s.ID, q.Seq, len(q.Targets), q.Rows)
		}
	default:
		return sdk.Errorf(sdk.CodeUnsupported, "step %d: sequence %d wants %d, which this executor does not know", s.ID, q.Seq, q.Want)
	}
	return nil
}

func (m *loaded) checkHidden(s *sdk.Step) error {
	h, want := &s.Hidden, contractDtype(m.dtype)
	rows, width := s.Rows(), m.shape.boundaryWidth()
	if h.Dtype != want || h.Rows != rows || h.Width != width || len(h.Data) != rows*width*want.Size() {
		return sdk.Errorf(sdk.CodeInvalid, "step %d: hidden rows are %v [%d, %d] in %d bytes, want %v [%d, %d]; stages need one --dtype",
			s.ID, h.Dtype, h.Rows, h.Width, len(h.Data), want, rows, width)
	}
	return nil
}

// outBytes is what the step writes to its slot.
func (m *loaded) outBytes(s *sdk.Step) int {
	if m.head == nil {
		return s.Rows() * m.shape.boundaryWidth() * m.dtype.Size()
	}
	n := 0
	for i := range s.Seqs {
		if s.Seqs[i].Want == sdk.WantLogits {
			n += m.logitsBytes()
		}
	}
	return n
}

func (m *loaded) logitsBytes() int { return m.shape.Vocab * mlx.Float32.Size() }

// run computes the step within a scope of its own.
func (m *loaded) run(ctx context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	scope := m.stream.NewScope()
	defer scope.Close()
	p := m.pass(scope, s)
	x, err := m.runLayers(ctx, p, m.enter(p, s))
	if err == nil {
		err = p.Err()
	}
	if err != nil {
		return nil, err
	}
	out := &sdk.StepResult{ID: s.ID}
	if m.head != nil {
		return out, m.answer(ctx, p, x, s, out)
	}
	out.Hidden = sdk.Tensor{Dtype: contractDtype(m.dtype), Rows: len(m.positions), Width: m.shape.boundaryWidth(), Data: s.Out[:m.outBytes(s)]}
	if m.shape.Carried > 0 {
		x = p.Concat(1, x, p.Carried)
	}
	return out, p.CopyTo(x, out.Hidden.Data)
}

// runLayers builds one graph of all layers where that pays, else runs them one by one: then what one layer leaves in memory, and
// in the processor's caches, serves the next.
func (m *loaded) runLayers(ctx context.Context, p *nn.Pass, x mlx.Array) (mlx.Array, error) {
	for _, layer := range m.layers {
		if len(m.positions) < eagerRows && !m.stream.AtOnce() {
			x = layer.Forward(p, x)
			continue
		}
		if ctx.Err() != nil {
			return mlx.Array{}, canceled(ctx)
		}
		var err error
		if x, err = m.runLayer(p, layer, x); err != nil {
			return mlx.Array{}, err
		}
	}
	return x, nil
}

// runLayer evaluates one layer in a scope of its own, so that nothing of it stays but its result.
func (m *loaded) runLayer(p *nn.Pass, layer nn.Layer, x mlx.Array) (mlx.Array, error) {
	outer := p.Scope
	if err := outer.Err(); err != nil { // of which the layer would only see that its input is missing
		return mlx.Array{}, err
	}
	p.Scope = m.stream.NewScope()
	defer func() {
		p.Scope.Close()
		p.Scope = outer
	}()
	p.Adopt(outer.Keep(x)) // the input ends with the layer
	y := layer.Forward(p, x)
	if err := p.Eval(y); err != nil {
		return mlx.Array{}, err
	}
	return outer.Adopt(p.Keep(y)), nil
}

// pass lays the step's sequences out as rows.
func (m *loaded) pass(scope *mlx.Scope, s *sdk.Step) *nn.Pass {
	p := &nn.Pass{Scope: scope, Dtype: m.dtype}
	m.positions, m.tokens = m.positions[:0], m.tokens[:0]
	for i := range s.Seqs {
		q := &s.Seqs[i]
		p.Segments = append(p.Segments, nn.Segment{Row0: len(m.positions), Rows: q.Rows, Pos: q.Pos, Prompt: q.Prompt, States: m.sequences[q.Seq].states})
		m.tokens = append(m.tokens, q.Tokens...)
		for j := range q.Rows {
			m.positions = append(m.positions, int32(q.Pos+j))
		}
	}
	p.Pos = scope.FromInt32s(m.positions, len(m.positions))
	return p
}

// enter is the residual stream before the stage's first layer.
func (m *loaded) enter(p *nn.Pass, s *sdk.Step) mlx.Array {
	if m.embed != nil {
		return m.embed.Forward(p, p.FromInt32s(m.tokens, len(m.tokens)))
	}
	x := p.FromBytes(s.Hidden.Data, m.dtype, s.Hidden.Rows, s.Hidden.Width)
	if m.shape.Carried == 0 {
		return x
	}
	p.Carried = p.SliceAxis(x, 1, m.shape.Width, s.Hidden.Width)
	return p.SliceAxis(x, 1, 0, m.shape.Width)
}

// wanted is a row that goes through the head.
type wanted struct {
	seq    int // index in Step.Seqs
	row    int // of the step
	offset int // of the row within its sequence
}

// answer runs the wanted rows through the head and turns their logits into results.
func (m *loaded) answer(ctx context.Context, p *nn.Pass, x mlx.Array, s *sdk.Step, out *sdk.StepResult) error {
	rows := m.wantedRows(p, s)
	out.Seqs = make([]sdk.SeqResult, len(s.Seqs))
	for i := range s.Seqs {
		out.Seqs[i] = sdk.SeqResult{Seq: s.Seqs[i].Seq, Token: -1}
		m.remember(&s.Seqs[i])
	}
	if len(rows) == 0 || len(rows) > headRows {
		if err := p.Eval(x); err != nil {
			return err
		}
	}
	free := s.Out
	for group := range slices.Chunk(rows, headRows) {
		if ctx.Err() != nil {
			return canceled(ctx)
		}
		if err := m.answerGroup(p, x, group, s, out, &free); err != nil {
			return err
		}
	}
	return nil
}

// answerGroup is answer for rows that go through the head together. free is what is left of the step's output.
func (m *loaded) answerGroup(p *nn.Pass, x mlx.Array, group []wanted, s *sdk.Step, out *sdk.StepResult, free *[]byte) error {
	all := m.headLogits(p, x, group)
	defer all.Free() // wide, and groups may be many
	logits, err := p.Elements(all)
	if err != nil {
		return err
	}
	for i, w := range group {
		row := logits[i*m.shape.Vocab : (i+1)*m.shape.Vocab]
		q, result := &s.Seqs[w.seq], &out.Seqs[w.seq]
		if q.Want == sdk.WantLogits {
			result.Logits = sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: 1, Width: m.shape.Vocab, Data: (*free)[:m.logitsBytes()]}
			copy(result.Logits.Data, floatBytes(row))
			*free = (*free)[m.logitsBytes():]
			continue
		}
		if err := m.answerRow(row, q, w.offset, result); err != nil {
			return err
		}
	}
	return nil
}

func (m *loaded) wantedRows(p *nn.Pass, s *sdk.Step) []wanted {
	var rows []wanted
	for i := range s.Seqs {
		g := &p.Segments[i]
		first := g.Rows - 1
		switch s.Seqs[i].Want {
		case sdk.WantNothing:
			continue
		case sdk.WantScores:
			first = 0
		}
		for j := first; j < g.Rows; j++ {
			rows = append(rows, wanted{seq: i, row: g.Row0 + j, offset: j})
		}
	}
	return rows
}

// headLogits is float32 [rows of group, vocabulary].
func (m *loaded) headLogits(p *nn.Pass, x mlx.Array, group []wanted) mlx.Array {
	if len(group) < x.Dim(0) {
		index := make([]int32, len(group))
		for i, w := range group {
			index[i] = int32(w.row)
		}
		x = p.SelectRows(x, index)
	}
	return m.head.Forward(p, x)
}

// floatBytes views float32 values as their bytes; the contract and every machine that is built for are little-endian.
func floatBytes(f []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(f))), 4*len(f))
}

// remember counts the generated tokens that a step feeds, for the penalties.
func (m *loaded) remember(q *sdk.SeqStep) {
	state := m.sequences[q.Seq]
	if state.history == nil || q.Prompt {
		return
	}
	state.remember(q.Pos, q.Tokens)
}

func (m *loaded) answerRow(logits []float32, q *sdk.SeqStep, offset int, result *sdk.SeqResult) error {
	if q.Want == sdk.WantScores {
		score, err := sample.Logprob(logits, q.Targets[offset])
		if err != nil {
			return sdk.Errorf(sdk.CodeInvalid, "sequence %d: %v", q.Seq, err)
		}
		result.Scores = append(result.Scores, score)
		return nil
	}
	state := m.sequences[q.Seq]
	choice, err := m.chooser.Choose(logits, &sample.Request{
		Sampler: &state.sampler, History: state.history, Position: q.End(), Allowed: q.Allowed,
		TopN: q.TopN, Logprob: q.Logprob,
	})
	if err != nil {
		return sdk.Errorf(sdk.CodeInternal, "sequence %d at position %d: %v", q.Seq, q.Pos+offset, err)
	}
	result.Token, result.Logprob, result.Top = choice.Token, choice.Logprob, choice.Top
	return nil
}
