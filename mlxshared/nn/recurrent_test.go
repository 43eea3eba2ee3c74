package nn

import (
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// A recurrent state holds what its spec says at any length, and keeps no positions to go back to.
func TestRecurrentState(t *testing.T) {
	s := open(t)
	for _, spec := range []RecurrentSpec{{3, 16, mlx.BFloat16}, {3, 20, mlx.Float32}, {8, 1, mlx.Float16}} {
		state, err := spec.New(s)
		if err != nil {
			t.Fatal(err)
		}
		padded := (spec.Cols + 15) / 16 * 16
		want := int64(spec.Rows * padded * spec.Dtype.Size())
		if p := spec.Profile(s.Backend()); state.Bytes() != want || p.Bytes(0) != want || p.Bytes(1000) != want {
			t.Errorf("%+v: holds %d bytes, priced at %+v, want %d", spec, state.Bytes(), p, want)
		}
		if err := state.CanTruncate(0); err != nil {
			t.Errorf("truncation to its length: %v", err)
		}
		state.Free()
	}
	spec := RecurrentSpec{Rows: 1, Cols: 16, Dtype: mlx.Float32}
	state, err := spec.New(s)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Free()
	scope := s.NewScope()
	defer scope.Close()
	p := &Pass{Scope: scope, Dtype: mlx.Float32, Segments: []Segment{{Rows: 5, States: []State{state}}}}
	ones := func(shape ...int) mlx.Array { return full(scope, 1, mlx.Float32, shape...) }
	if err := scope.Eval(p.CausalConv(ones(5, 16), ones(2, 16), mlx.Array{}, true, p.stateSegments(0))); err != nil {
		t.Fatal(err)
	}
	for length, allowed := range map[int]bool{5: true, 4: false, 0: false} {
		if err := state.CanTruncate(length); (err == nil) != allowed || (err != nil && sdk.CodeOf(err) != sdk.CodeUnsupported) {
			t.Errorf("truncation of 5 positions to %d: %v", length, err)
		}
	}
}
