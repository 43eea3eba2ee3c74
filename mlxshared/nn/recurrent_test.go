package nn

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
)

// A recurrent state holds what its spec says at any length, and goes back to its snapshots and to the beginning.
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
		if before, after := state.Nearest(0); before != 0 || after != 0 {
			t.Errorf("an empty state is near %d and %d", before, after)
		}
		state.Free()
	}
	spec := RecurrentSpec{Rows: 1, Cols: 16, Dtype: mlx.Float32}
	state, err := spec.New(s)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Free()
	feed := func(n int) {
		t.Helper()
		scope := s.NewScope()
		defer scope.Close()
		p := &Pass{Scope: scope, Dtype: mlx.Float32, Segments: []Segment{{Rows: n, Pos: state.Len(), States: []State{state}}}}
		x := full(scope, float32(state.Len()+1), mlx.Float32, n, 16)
		if err := scope.Eval(p.CausalConv(x, full(scope, 1, mlx.Float32, 2, 16), mlx.Array{}, true, p.stateSegments(0))); err != nil {
			t.Fatal(err)
		}
	}
	value := func(s State) byte { // of its last input
		var b bytes.Buffer
		if err := s.Export(&b); err != nil {
			t.Fatal(err)
		}
		return byte(math.Float32frombits(binary.LittleEndian.Uint32(b.Bytes())))
	}
	near := func(at, before, after int) {
		t.Helper()
		if b, a := state.Nearest(at); b != before || a != after {
			t.Errorf("near %d: %d and %d, want %d and %d", at, b, a, before, after)
		}
	}
	one := state.Bytes()
	for _, n := range []int{5, 1, 1} { // of the lengths 5, 6 and 7 two stay
		feed(n)
		for range 2 { // twice is once
			if err := state.Snapshot(2); err != nil {
				t.Fatal(err)
			}
		}
	}
	feed(3)
	if state.Len() != 10 || state.Bytes() != 3*one {
		t.Fatalf("%d positions in %d bytes, want 10 in %d", state.Len(), state.Bytes(), 3*one)
	}
	for _, c := range [][3]int{{10, 10, 10}, {9, 7, 10}, {7, 7, 7}, {6, 6, 6}, {5, 0, 6}, {1, 0, 6}, {0, 0, 0}} {
		near(c[0], c[1], c[2])
	}
	shared, err := state.Share(6)
	if err != nil {
		t.Fatal(err)
	}
	defer shared.Free()
	if shared.Len() != 6 || shared.Bytes() != one || value(shared) != 6 {
		t.Errorf("%d positions shared in %d bytes, last input %d", shared.Len(), shared.Bytes(), value(shared))
	}
	for range 2 { // a snapshot serves again
		if err := state.Rewind(6); err != nil || state.Len() != 6 || value(state) != 6 {
			t.Fatalf("rewind to 6: %v, %d positions, last input %d", err, state.Len(), value(state))
		}
		near(7, 6, 6)
		feed(2)
	}
	if err := state.Rewind(0); err != nil || state.Len() != 0 || state.Bytes() != one || value(state) != 0 {
		t.Errorf("rewind to 0: %v, %d positions in %d bytes", err, state.Len(), state.Bytes())
	}
	if err := state.Snapshot(0); err != nil || state.Bytes() != one {
		t.Errorf("no snapshot: %v, %d bytes", err, state.Bytes())
	}
}
