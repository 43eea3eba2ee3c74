package weights

import (
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
)

func TestShape(t *testing.T) {
	l := NewLoader(Options{Store: openModel(t)})
	if got := l.Shape("plain.weight"); !slices.Equal(got, []int64{8, 3}) {
		t.Errorf("shape %v, want [8 3]", got)
	}
	if got := l.Shape("none.weight"); got != nil {
		t.Errorf("shape %v of a tensor that is not there", got)
	}
	if got := NewLoader(Options{}).Shape("plain.weight"); got != nil {
		t.Errorf("shape %v without a checkpoint", got)
	}
	if err := l.Err(); err != nil || l.Tensors() != 0 {
		t.Errorf("asking for shapes gave out %d tensors (%v)", l.Tensors(), err)
	}
}

// What is derived outlives the scope's step and is no weight; planning derives nothing.
func TestDerive(t *testing.T) {
	scope := newScope(t)
	l := NewLoader(Options{Store: openModel(t), Scope: scope})
	t.Cleanup(l.Free)
	norm := l.Tensor("norm.weight", 6)
	bytes := l.Bytes()
	double := l.Derive(func(s *mlx.Scope) mlx.Array { return s.Add(s.AsType(norm, mlx.Float32), s.AsType(norm, mlx.Float32)) })
	if l.Err() != nil || l.Bytes() != bytes {
		t.Fatalf("%d bytes of weights after %d (%v)", l.Bytes(), bytes, l.Err())
	}
	got, err := scope.Float32s(double)
	if err != nil {
		t.Fatal(err)
	}
	own, err := scope.Float32s(norm)
	if err != nil {
		t.Fatal(err)
	}
	for i := range own {
		if got[i] != 2*own[i] {
			t.Errorf("element %d is %v, want %v", i, got[i], 2*own[i])
		}
	}
	if a := NewLoader(Options{Store: openModel(t)}).Derive(func(*mlx.Scope) mlx.Array { t.Error("called while planning"); return mlx.Array{} }); !a.IsZero() {
		t.Error("planning derived an array")
	}
	l.Derive(func(s *mlx.Scope) mlx.Array { return s.Add(norm, mlx.Array{}) })
	if l.Err() == nil {
		t.Error("a failed operation is no error")
	}
}
