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

func open(t *testing.T) *mlx.Stream { return openOn(t, mlx.BackendAuto) }

func openOn(t *testing.T, backend mlx.Backend) *mlx.Stream {
	t.Helper()
	s, err := mlx.Open(mlx.Options{Device: mlx.DeviceCPU, Backend: backend, Threads: 1})
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

// What a spec says before a step is what the state holds after it, at every length, on both back ends.
func TestPriceIsExact(t *testing.T) {
	for _, backend := range []mlx.Backend{mlx.BackendKernels, mlx.BackendMLX} {
		s := openOn(t, backend)
		if got := s.Backend(); got != backend {
			t.Fatalf("the back end is %q, want %q", got, backend)
		}
		for name, spec := range map[string]KVSpec{
			"full":    {KVHeads: 2, KeyDim: 16, ValueDim: 32, Dtype: mlx.BFloat16},
			"float32": {KVHeads: 1, KeyDim: 16, ValueDim: 16, Dtype: mlx.Float32},
			"narrow":  {KVHeads: 2, KeyDim: 8, ValueDim: 8, Dtype: mlx.BFloat16},
			"sliding": {KVHeads: 2, KeyDim: 16, ValueDim: 16, Sliding: 16, Dtype: mlx.BFloat16},
			"latent":  {KVHeads: 1, KeyDim: 48, ValueDim: 32, Latent: true, Dtype: mlx.BFloat16},
			"long":    {KVHeads: 2, KeyDim: 16, ValueDim: 16, Sliding: 100, Dtype: mlx.BFloat16},
		} {
			t.Run(string(backend)+"/"+name, func(t *testing.T) { checkPrice(t, s, spec) })
		}
	}
}

func checkPrice(t *testing.T, s *mlx.Stream, spec KVSpec) {
	state, err := spec.New(s)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Free()
	price, length := spec.Profile(s.Backend()), 0
	if price.Block != s.CacheBlock() {
		t.Errorf("blocks of %d positions, the stream's are of %d", price.Block, s.CacheBlock())
	}
	full := price.Bytes(1 << 30)
	for _, n := range []int{1, 62, 1, 1, 100, 1, 63, 64, 300, 1, 1, 1, 200} {
		appendRows(t, s, spec, state, length, n)
		length += n
		got, want := state.Bytes(), price.Bytes(length)
		slack := int64(0) // what a full window may lack at either end
		if spec.Sliding > 0 && want == full {
			slack = 2 * int64(price.Block) * price.BytesPerPosition
		}
		if got > want || got < want-slack {
			t.Errorf("at %d positions: %d bytes, foretold %d to %d", length, got, want-slack, want)
		}
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
