package nn

import (
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// append adds rows to a state by an attention over it, and settles.
func appendRows(t *testing.T, s *mlx.Stream, spec KVSpec, state State, from, n int) {
	t.Helper()
	scope := s.NewScope()
	defer scope.Close()
	p := &Pass{Scope: scope, Segments: []Segment{{Rows: n, Pos: from, States: []State{state}}}}
	k := full(scope, 1, spec.Dtype, n, spec.KVHeads*spec.KeyDim)
	var v mlx.Array
	if !spec.Latent {
		v = full(scope, 1, spec.Dtype, n, spec.KVHeads*spec.ValueDim)
	}
	a := mlx.AttentionSpec{Heads: spec.KVHeads, KVHeads: spec.KVHeads, HeadDim: spec.KeyDim, ValueDim: spec.ValueDim, Scale: 1, Window: spec.Sliding}
	if err := scope.Eval(scope.Attention(k, k, v, &a, p.kvSegments(0))); err != nil {
		t.Fatal(err)
	}
	if err := state.Settle(from + n); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T) *mlx.Stream {
	t.Helper()
	s, err := mlx.Open(mlx.Options{Device: mlx.DeviceCPU, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// What a spec says before a step is what the state holds after it, at every length.
func TestBytesAtIsExact(t *testing.T) {
	s := open(t)
	for name, spec := range map[string]KVSpec{
		"full":    {KVHeads: 2, KeyDim: 16, ValueDim: 32, Dtype: mlx.BFloat16},
		"float32": {KVHeads: 1, KeyDim: 16, ValueDim: 16, Dtype: mlx.Float32},
		"sliding": {KVHeads: 2, KeyDim: 16, ValueDim: 16, Sliding: 16, Dtype: mlx.BFloat16},
		"latent":  {KVHeads: 1, KeyDim: 48, ValueDim: 32, Latent: true, Dtype: mlx.BFloat16},
		"long":    {KVHeads: 2, KeyDim: 16, ValueDim: 16, Sliding: 100, Dtype: mlx.BFloat16},
	} {
		t.Run(name, func(t *testing.T) {
			state, err := spec.New(s)
			if err != nil {
				t.Fatal(err)
			}
			defer state.Free()
			length, most := 0, int64(0)
			for _, n := range []int{1, 62, 1, 1, 100, 1, 63, 64, 300, 1, 1, 1, 200} {
				appendRows(t, s, spec, state, length, n)
				length += n
				if got, want := state.Bytes(), spec.BytesAt(length); got != want {
					t.Errorf("at %d positions: %d bytes, foretold %d", length, got, want)
				}
				most = max(most, state.Bytes())
			}
			if w := spec.Window(); w > 0 && most > int64(w)*spec.BytesPerToken() {
				t.Errorf("%d bytes at most, the window of %d positions promises %d", most, w, int64(w)*spec.BytesPerToken())
			}
		})
	}
}

func TestTruncate(t *testing.T) {
	s := open(t)
	spec := KVSpec{KVHeads: 1, KeyDim: 16, ValueDim: 16, Sliding: 16, Dtype: mlx.Float32}
	state, err := spec.New(s)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Free()
	appendRows(t, s, spec, state, 0, 300)
	if err := state.Truncate(300 - windowSlack); err != nil {
		t.Errorf("within the slack: %v", err)
	}
	if err := state.CanTruncate(20); sdk.CodeOf(err) != sdk.CodeUnsupported {
		t.Errorf("into what is gone: %v", err)
	}
	copied, err := state.Fork()
	if err != nil {
		t.Fatal(err)
	}
	defer copied.Free()
	if err := copied.CanTruncate(20); sdk.CodeOf(err) != sdk.CodeUnsupported {
		t.Errorf("a copy forgot what is gone: %v", err)
	}
	appendRows(t, s, spec, copied, 300-windowSlack, 5)
	if got := state.(*kvState).cache.Len(); got != 300-windowSlack {
		t.Errorf("the original has %d positions after its copy grew", got)
	}
}
