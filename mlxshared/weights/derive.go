package weights

import "github.com/mlxcel/mlxcel/mlxshared/mlx"

// Shape returns a tensor's shape in the checkpoint's own layout, nil if there is no checkpoint or no tensor of that name: a
// family asks where the layout tells an original checkpoint from a converted one.
func (l *Loader) Shape(name string) []int64 {
	if l.o.Store == nil {
		return nil
	}
	t, ok := l.locate(name)
	if !ok {
		return nil
	}
	return t.first.Shape
}

// Derive keeps an array that a module computes from its tensors; f is not called while planning. It does not count as
// weights.
func (l *Loader) Derive(f func(s *mlx.Scope) mlx.Array) mlx.Array {
	if l.err != nil || l.Planning() {
		return mlx.Array{}
	}
	a := f(l.o.Scope)
	if err := l.o.Scope.Eval(a); err != nil {
		l.fail(err)
		return mlx.Array{}
	}
	return l.keep(a)
}
