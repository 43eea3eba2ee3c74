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
	k := scope.Full(1, spec.Dtype, n, spec.KVHeads*spec.KeyDim)
	var v mlx.Array
	if !spec.Latent {
		v = scope.Full(1, spec.Dtype, n, spec.KVHeads*spec.ValueDim)
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
