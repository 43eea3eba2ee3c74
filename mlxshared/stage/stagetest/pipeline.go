// Package stagetest owns what families are tested with: a pipeline of stages in one process, and the comparison of
// checkpoints with their goldens.
package stagetest

import (
	"context"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
)

// Options say how a checkpoint is run.
type Options struct {
	Stages   int // at least 1; the legal cuts that spread them evenly
	Dtype    sdk.Dtype
	Threads  int // 0 means 1
	KVBudget int64
}

// Pipeline is a model cut into stages. Hidden rows pass between them as bytes, as they do between processes.
type Pipeline struct {
	t      testing.TB
	Stages []*stage.Executor
	Report *sdk.LoadReport // of the last stage
	step   uint64
}

// Open loads the checkpoint dir. The test's end unloads it and checks that nothing of MLX is left.
func Open(t testing.TB, families []stage.Family, dir string, o Options) *Pipeline {
	t.Helper()
	p := &Pipeline{t: t}
	for range max(1, o.Stages) {
		p.Stages = append(p.Stages, New(t, families))
	}
	profile, err := p.Stages[0].Inspect(t.Context(), sdk.InspectRequest{Dir: dir, Dtype: o.Dtype})
	if err != nil {
		t.Fatal(err)
	}
	bounds := cuts(profile, len(p.Stages))
	if bounds == nil {
		t.Fatalf("%s has no legal cut into %d stages", dir, len(p.Stages))
	}
	for i, e := range p.Stages {
		req := sdk.LoadRequest{
			Dir: dir, Family: profile.Family, Dtype: o.Dtype, Threads: max(1, o.Threads), KVBudget: o.KVBudget,
			Layers:       sdk.LayerRange{Start: bounds[i], End: bounds[i+1]},
			HasEmbedding: i == 0, HasHead: i == len(p.Stages)-1,
		}
		if p.Report, err = e.Load(t.Context(), req, nil); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// cuts spreads stages over the layers: where each begins, and the end. Every boundary that parts no adjacency group may be
// taken; nil if they are too few.
func cuts(profile *sdk.ModelProfile, stages int) []int {
	legal := []int{}
	for b := 1; b < len(profile.Layers); b++ {
		if !slices.ContainsFunc(profile.Adjacency, func(g sdk.AdjacencyGroup) bool { return g.Source < b && b <= g.Consumer }) {
			legal = append(legal, b)
		}
	}
	if stages > len(legal)+1 {
		return nil
	}
	bounds := []int{0}
	for i := 1; i < stages; i++ {
		bounds = append(bounds, legal[i*(len(legal)+1)/stages-1])
	}
	return append(bounds, len(profile.Layers))
}

// Reserve creates a sequence on every stage.
func (p *Pipeline) Reserve(r sdk.Reservation) {
	p.t.Helper()
	p.each(func(ctx context.Context, e *stage.Executor) error { return e.Reserve(ctx, r) })
}

// Release frees a sequence on every stage.
func (p *Pipeline) Release(seq sdk.SeqID) {
	p.t.Helper()
	p.each(func(ctx context.Context, e *stage.Executor) error { return e.Release(ctx, seq) })
}

func (p *Pipeline) each(f func(context.Context, *stage.Executor) error) {
	p.t.Helper()
	for i, e := range p.Stages {
		if err := f(p.t.Context(), e); err != nil {
			p.t.Fatalf("stage %d: %v", i, err)
		}
	}
}

// Step sends one micro-batch through all stages and returns the last one's results.
func (p *Pipeline) Step(seqs ...sdk.SeqStep) []sdk.SeqResult {
	p.t.Helper()
	out, err := p.TryStep(p.t.Context(), seqs...)
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

// TryStep is Step with the error returned.
func (p *Pipeline) TryStep(ctx context.Context, seqs ...sdk.SeqStep) ([]sdk.SeqResult, error) {
	p.step++
	s := &sdk.Step{ID: p.step, Seqs: seqs}
	for i, e := range p.Stages {
		s.Out = make([]byte, p.outBytes(s, i))
		r, err := e.Step(ctx, s)
		if err != nil {
			return nil, err
		}
		if i == len(p.Stages)-1 {
			return r.Seqs, nil
		}
		s.Hidden = r.Hidden
	}
	return nil, nil
}

func (p *Pipeline) outBytes(s *sdk.Step, i int) int {
	if i < len(p.Stages)-1 {
		return s.Rows() * p.Report.Boundary.Width * p.Report.Boundary.Dtype.Size()
	}
	return len(s.Seqs) * p.Report.VocabSize * sdk.DtypeFloat32.Size()
}

// Prefill feeds all but the last token of a prompt in chunks and returns that last token's step, for the caller to run.
func (p *Pipeline) Prefill(seq sdk.SeqID, ids []int32, chunk int) sdk.SeqStep {
	p.t.Helper()
	last := len(ids) - 1
	for at := 0; at < last; at += chunk {
		p.Step(sdk.SeqStep{Seq: seq, Pos: at, Rows: len(ids[at:min(at+chunk, last)]), Tokens: ids[at:min(at+chunk, last)], Prompt: true})
	}
	return sdk.SeqStep{Seq: seq, Pos: last, Rows: len(ids[last:]), Tokens: ids[last:], Prompt: true, Want: sdk.WantToken}
}

// Generate continues a prompt by n tokens and returns them.
func (p *Pipeline) Generate(seq sdk.SeqID, ids []int32, n, chunk int) []int32 {
	p.t.Helper()
	return p.Continue(p.Prefill(seq, ids, chunk), n)
}

// Continue runs a step that wants a token, and those that follow from it, until there are n tokens.
func (p *Pipeline) Continue(step sdk.SeqStep, n int) []int32 {
	p.t.Helper()
	tokens := make([]int32, 0, n)
	for {
		token := p.Step(step)[0].Token
		if tokens = append(tokens, token); len(tokens) == n {
			return tokens
		}
		step = sdk.SeqStep{Seq: step.Seq, Pos: step.Pos + len(step.Tokens), Rows: 1, Tokens: []int32{token}, Want: sdk.WantToken}
	}
}

// Logits continues a prompt by the given tokens and returns the bytes of the logits before each of them.
func (p *Pipeline) Logits(seq sdk.SeqID, ids, tokens []int32, chunk int) [][]byte {
	p.t.Helper()
	step := p.Prefill(seq, ids, chunk)
	var rows [][]byte
	for _, token := range tokens {
		step.Want = sdk.WantLogits
		rows = append(rows, p.Step(step)[0].Logits.Data)
		step = sdk.SeqStep{Seq: seq, Pos: step.Pos + len(step.Tokens), Rows: 1, Tokens: []int32{token}}
	}
	return rows
}
