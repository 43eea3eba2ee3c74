package nn

import (
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
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

// A sliding window goes back as far as it still sees its whole window, to 0, and nowhere between.
func TestRewind(t *testing.T) {
	s := open(t)
	spec := KVSpec{KVHeads: 1, KeyDim: 16, ValueDim: 16, Sliding: 16, Dtype: mlx.Float32}
	state, err := spec.New(s)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Free()
	appendRows(t, s, spec, state, 0, 300)
	const least = 192 + 16 - 1 // those before 192 are gone
	for at, want := range map[int][2]int{300: {300, 300}, 299: {299, 299}, 300 - windowSlack: {236, 236}, least: {least, least}, least - 1: {0, least}, 1: {0, least}, 0: {0, 0}} {
		if before, after := state.Nearest(at); before != want[0] || after != want[1] {
			t.Errorf("near %d: %d and %d, want %v", at, before, after, want)
		}
	}
	shared, err := state.Share(least)
	if err != nil {
		t.Fatal(err)
	}
	defer shared.Free()
	if shared.Len() != least || shared.Owed() == 0 || state.Owed() != 0 {
		t.Errorf("%d positions shared, owing %d; the first owes %d", shared.Len(), shared.Owed(), state.Owed())
	}
	if before, after := shared.Nearest(100); before != 0 || after != least {
		t.Errorf("the second forgot what is gone: %d and %d are near 100", before, after)
	}
	appendRows(t, s, spec, shared, least, 5)
	if state.Len() != 300 || shared.Owed() != 0 {
		t.Errorf("the first has %d positions after the second grew, which owes %d", state.Len(), shared.Owed())
	}
	if err := state.Rewind(300 - windowSlack); err != nil || state.Len() != 236 {
		t.Errorf("within the slack: %v, %d positions", err, state.Len())
	}
	if err := state.Rewind(0); err != nil || state.Len() != 0 || state.Bytes() != 0 {
		t.Errorf("to the beginning: %v, %d positions in %d bytes", err, state.Len(), state.Bytes())
	}
	appendRows(t, s, spec, state, 0, 40)
	if before, after := state.Nearest(3); before != 3 || after != 3 {
		t.Errorf("a new beginning can't go back to 3: %d and %d", before, after)
	}
}
