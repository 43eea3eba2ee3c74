package stage

import (
	"bytes"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// carrier is a bigram whose embedding carries 2 elements per row, the token's id and one more, and whose layers add them to
// the stream. Its middle layers belong together.
type carrier struct{ bigram }

const carried = 2

func (c carrier) Model(o *config.Object) Model {
	c.bigram = c.bigram.Model(o).(bigram)
	return c
}

func (c carrier) Shape() Shape {
	s := c.bigram.Shape()
	s.Carried = carried
	s.Adjacency = []sdk.AdjacencyGroup{{Source: 1, Consumer: 2, Reason: "of the test"}}
	return s
}

type carrierEmbedding struct{ nn.Embedder }

func (c carrier) Embedding(b *nn.Builder) nn.Embedder {
	return carrierEmbedding{c.bigram.Embedding(b)}
}

func (e carrierEmbedding) Forward(p *nn.Pass, ids mlx.Array) mlx.Array {
	id := p.AsType(p.Reshape(ids, -1, 1), p.Dtype)
	p.Carried = p.Concat(1, id, p.Add(id, p.Scalar(1, p.Dtype)))
	return e.Embedder.Forward(p, ids)
}

type carrierLayer struct{ bigramLayer }

func (c carrier) Layer(*nn.Builder, int) nn.Layer { return carrierLayer{} }

func (carrierLayer) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	return p.Add(x, p.SliceAxis(p.Carried, 1, 1, carried))
}

// stageOf loads layers [start, end) of four.
func stageOf(t *testing.T, dir string, start, end int) (*Executor, error) {
	t.Helper()
	e := New(Options{Name: "test", Version: "test", Families: []Family{carrier{}}, Device: mlx.DeviceCPU})
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	req := sdk.LoadRequest{
		Dir: dir, Family: "bigram", Layers: sdk.LayerRange{Start: start, End: end}, HasEmbedding: start == 0, HasHead: end == 4, Threads: 1,
	}
	report, err := e.Load(t.Context(), req, nil)
	if err != nil {
		return nil, err
	}
	if report.Boundary.Width != bigramWidth+carried {
		t.Errorf("boundary of %d elements", report.Boundary.Width)
	}
	return e, e.Reserve(t.Context(), sdk.Reservation{Seq: 1})
}

// What the embedding carries reaches later stages beside the stream, in few rows as in many.
func TestCarriedCrossesTheBoundary(t *testing.T) {
	dir := bigramModel(t, 4)
	for _, tokens := range [][]int32{{7, 5}, ascending(40)} {
		first, err := stageOf(t, dir, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		second, err := stageOf(t, dir, 1, 3)
		if err != nil {
			t.Fatal(err)
		}
		s := step(tokens...)
		hidden := func(e *Executor) sdk.Tensor {
			s.Out = make([]byte, len(tokens)*(bigramWidth+carried)*4)
			r, err := e.Step(t.Context(), s)
			if err != nil {
				t.Fatal(err)
			}
			return r.Hidden
		}
		s.Hidden = hidden(first)
		before := s.Hidden
		after := hidden(second)
		for row, token := range tokens {
			for layers, h := range map[int]sdk.Tensor{1: before, 3: after} {
				want := make([]float32, bigramWidth, bigramWidth+carried)
				for i := range want { // the embedding is 0
					want[i] = float32(layers) * float32(token+1)
				}
				want = append(want, float32(token), float32(token+1))
				size := 4 * len(want)
				if got := h.Data[row*size : (row+1)*size]; !bytes.Equal(got, floatBytes(want)) {
					t.Fatalf("row %d after %d layers: %v, want %v", row, layers, got, floatBytes(want))
				}
			}
		}
	}
}

func ascending(n int) []int32 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(i)
	}
	return tokens
}

func TestCutOfAnAdjacencyGroup(t *testing.T) {
	dir := bigramModel(t, 4)
	for _, r := range [][2]int{{0, 2}, {2, 4}} {
		_, err := stageOf(t, dir, r[0], r[1])
		if sdk.CodeOf(err) != sdk.CodeInvalid || !strings.Contains(err.Error(), "part layer 1 from layer 2: of the test") {
			t.Errorf("layers %v: %v", r, err)
		}
	}
}
