package weights

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// kvB is [heads*(nope+value), rank] = [2*(2+1), 3] of the numbers from 0.
func kvB() safetensors.Entry {
	values := make([]float32, 18)
	for i := range values {
		values[i] = float32(i)
	}
	return floats("a.kv_b_proj.weight", values, 6, 3)
}

// Original and converted checkpoints give the same two stacks, and count the same bytes.
func TestLatentProjections(t *testing.T) {
	// Head 0 has rows 0 to 2, head 1 rows 3 to 5; the first two of each, transposed, are embed_q.
	embedQ := []float32{0, 3, 1, 4, 2, 5, 9, 12, 10, 13, 11, 14}
	unembedOut := []float32{6, 7, 8, 15, 16, 17}
	for name, entries := range map[string][]safetensors.Entry{
		"original":  {kvB()},
		"converted": {floats("a.embed_q.weight", embedQ, 2, 3, 2), floats("a.unembed_out.weight", unembedOut, 2, 1, 3)},
	} {
		t.Run(name, func(t *testing.T) {
			l, scope := sourced(t, nil, entries...)
			e, u := l.LatentProjections("a", 2, 3, 2, 1)
			if l.Err() != nil {
				t.Fatal(l.Err())
			}
			for what, c := range map[string]struct {
				got   *mlx.Experts
				want  []float32
				shape []int
			}{"embed_q": {e, embedQ, []int{2, 3, 2}}, "unembed_out": {u, unembedOut, []int{2, 1, 3}}} {
				got, err := scope.Float32s(c.got.W)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, c.want) || !slices.Equal(c.got.W.Shape(), c.shape) {
					t.Errorf("%s is %v %v, want %v %v", what, c.got.W.Shape(), got, c.shape, c.want)
				}
			}
			if l.Bytes() != 18*4 {
				t.Errorf("%d bytes, want %d", l.Bytes(), 18*4)
			}
			if err := l.CheckUnused(&Names{}); err != nil {
				t.Error(err)
			}
		})
	}
}

// A packed kv_b_proj is packed again in the same way, along the other dimension for embed_q.
func TestPackedLatentProjections(t *testing.T) {
	const heads, rank, nope, value = 2, 64, 32, 32
	rows := int64(heads * (nope + value))
	l, scope := sourced(t, nil,
		entry("a.kv_b_proj.weight", "U32", 1, rows, rank/8), entry("a.kv_b_proj.scales", "F16", 60, rows, rank/32), entry("a.kv_b_proj.biases", "F16", 50, rows, rank/32))
	e, u := l.LatentProjections("a", heads, rank, nope, value)
	if l.Err() != nil {
		t.Fatal(l.Err())
	}
	if !slices.Equal(e.W.Shape(), []int{heads, rank, nope / 8}) || !slices.Equal(u.Scales.Shape(), []int{heads, value, rank / 32}) {
		t.Errorf("embed_q is %v, unembed_out's scales %v", e.W.Shape(), u.Scales.Shape())
	}
	if want := rows * rank / 2 * 5 / 4; l.Bytes() != want { // 4 bits, and 32 for 32 values
		t.Errorf("%d bytes, want %d", l.Bytes(), want)
	}
	// unembed_out keeps its groups, so that packing again loses no more than a rounding of the scales.
	whole := NewLoader(Options{Store: l.o.Store, Scope: scope})
	t.Cleanup(whole.Free)
	original := scope.Dequantize(whole.Matrix("a.kv_b_proj", int(rows), rank), mlx.Float32)
	flat := func(a mlx.Array) mlx.Array { return scope.Reshape(a, heads*value, -1) }
	again := mlx.Matrix{Format: mlx.Affine, Bits: 4, Group: 32, W: flat(u.W), Scales: flat(u.Scales), Biases: flat(u.Biases)}
	want := scope.Reshape(scope.SliceAxis(scope.Reshape(original, heads, nope+value, rank), 1, nope, nope+value), heads*value, rank)
	difference := scope.Sub(scope.Dequantize(&again, mlx.Float32), want)
	if off, most := largest(t, scope, difference), largest(t, scope, want); off > most/15 {
		t.Errorf("unembed_out is off by %v of %v", off, most)
	}
}

// largest returns the greatest magnitude of a's elements.
func largest(t *testing.T, s *mlx.Scope, a mlx.Array) (most float64) {
	t.Helper()
	values, err := s.Float32s(a)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range values {
		most = max(most, math.Abs(float64(v)))
	}
	return most
}

func TestLatentProjectionsFaults(t *testing.T) {
	l, _ := sourced(t, nil, floats("a.kv_b_proj.weight", make([]float32, 12), 4, 3))
	l.LatentProjections("a", 2, 3, 2, 1)
	if err := l.Err(); err == nil || !strings.Contains(err.Error(), "kv_b_proj.weight: has shape [4 3]") {
		t.Errorf("%v", err)
	}
	rows := int64(2 * (16 + 16))
	l, _ = sourced(t, nil,
		entry("a.kv_b_proj.weight", "U32", 1, rows, 8), entry("a.kv_b_proj.scales", "F16", 60, rows, 2), entry("a.kv_b_proj.biases", "F16", 50, rows, 2))
	l.LatentProjections("a", 2, 64, 16, 16)
	if err := l.Err(); err == nil || !strings.Contains(err.Error(), "groups of 32") {
		t.Errorf("%v", err)
	}
	l, _ = sourced(t, nil)
	l.LatentProjections("a", 2, 3, 2, 1)
	if err := l.Err(); err == nil || !strings.Contains(err.Error(), "no tensor a.embed_q.weight") {
		t.Errorf("%v", err)
	}
}

func TestLayersPastTheEnd(t *testing.T) {
	names := Names{Layers: Layers{Prefix: "model.layers.", Count: 4}}
	for name, want := range map[string]bool{
		"model.layers.3.mlp.weight": false, "model.layers.4.eh_proj.weight": true, "model.layers.40.norm": true, "model.layers.x.norm": false,
		"other.layers.9.w": false, "model.norm": false,
	} {
		if got := names.drops(name); got != want {
			t.Errorf("%s is dropped: %v, want %v", name, got, want)
		}
	}
	none := Names{}
	if none.drops("7.w") {
		t.Error("without a prefix something is dropped")
	}
}
