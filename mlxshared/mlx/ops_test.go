package mlx

import (
	"math"
	"testing"
)

func TestElementwise(t *testing.T) {
	c := scope(t, open(t, Options{}))
	r := newRand(1)
	x, y := normals(r, 12), normals(r, 12)
	a, b := c.FromFloat32s(x, 3, 4), c.FromFloat32s(y, 3, 4)
	tests := []struct {
		name string
		got  Array
		want func(x, y float64) float64
	}{
		{"add", c.Add(a, b), func(x, y float64) float64 { return x + y }},
		{"sub", c.Sub(a, b), func(x, y float64) float64 { return x - y }},
		{"mul", c.Mul(a, b), func(x, y float64) float64 { return x * y }},
		{"maximum", c.Maximum(a, b), math.Max},
		{"minimum", c.Minimum(a, b), math.Min},
		{"neg", c.Neg(a), func(x, _ float64) float64 { return -x }},
		{"exp", c.Exp(a), func(x, _ float64) float64 { return math.Exp(x) }},
		{"square", c.Square(a), func(x, _ float64) float64 { return x * x }},
		{"contiguous", c.Contiguous(a), func(x, _ float64) float64 { return x }},
		{"astype", c.AsType(c.AsType(a, Int32), Float32), func(x, _ float64) float64 { return math.Trunc(x) }},
	}
	for _, test := range tests {
		want := make([]float32, len(x))
		for i := range want {
			want[i] = float32(test.want(float64(x[i]), float64(y[i])))
		}
		close32(t, test.name, values(t, c, test.got), want, 3e-6)
	}
}

func TestShapes(t *testing.T) {
	c := scope(t, open(t, Options{}))
	a := c.FromFloat32s([]float32{0, 1, 2, 3, 4, 5}, 2, 3)
	parts := c.SplitAxis(a, 1, 3)
	tests := []struct {
		name  string
		got   Array
		shape []int
		want  []float32
	}{
		{"reshape", c.Reshape(a, 3, -1), []int{3, 2}, []float32{0, 1, 2, 3, 4, 5}},
		{"transpose", c.Transpose(a), []int{3, 2}, []float32{0, 3, 1, 4, 2, 5}},
		{"transpose axes", c.Transpose(c.Reshape(a, 1, 2, 3), 2, 0, 1), []int{3, 1, 2}, []float32{0, 3, 1, 4, 2, 5}},
		{"squeeze", c.Squeeze(c.Reshape(a, 1, 6), 0), []int{6}, []float32{0, 1, 2, 3, 4, 5}},
		{"slice axis", c.SliceAxis(a, -1, 1, 3), []int{2, 2}, []float32{1, 2, 4, 5}},
		{"split", parts[2], []int{2, 1}, []float32{2, 5}},
		{"concat", c.Concat(1, parts[2], parts[0]), []int{2, 2}, []float32{2, 0, 5, 3}},
		{"take", c.Take(a, c.FromInt32s([]int32{2, 0}, 2), 1), []int{2, 2}, []float32{2, 0, 5, 3}},
		{"select rows", c.SelectRows(a, []int32{1, 1, 0}), []int{3, 3}, []float32{3, 4, 5, 3, 4, 5, 0, 1, 2}},
		{"scalar", c.Scalar(-2, Float16), nil, []float32{-2}},
	}
	for _, test := range tests {
		if got := test.got.Shape(); !equalInts(got, test.shape) {
			t.Errorf("%s: shape %v, want %v", test.name, got, test.shape)
		}
		close32(t, test.name, values(t, c, test.got), test.want, 0)
	}
}

// Sums, products and views of computed arrays are made at once, those of a graph join it: with the same results, for MLX's
// operations and for kernels that read them.
func TestComputedAndNot(t *testing.T) {
	r := newRand(3)
	x, y := normals(r, 24), normals(r, 24)
	tests := []struct {
		name string
		f    func(c *Scope, a, b Array) Array // a and b are [2,3,4]
	}{
		{"add", func(c *Scope, a, b Array) Array { return c.Add(a, b) }},
		{"mul", func(c *Scope, a, b Array) Array { return c.Mul(a, b) }},
		{"add a row", func(c *Scope, a, b Array) Array {
			return c.Add(a, c.Reshape(c.SliceAxis(c.SliceAxis(b, 0, 1, 2), 1, 1, 2), 4))
		}},
		{"add to a row", func(c *Scope, a, b Array) Array {
			return c.Add(c.Reshape(c.SliceAxis(c.SliceAxis(b, 0, 0, 1), 1, 2, 3), 4), a)
		}},
		{"mul by a scalar", func(c *Scope, a, b Array) Array { return c.Mul(c.Scalar(0.3, a.Dtype()), a) }},
		{"mul by a column", func(c *Scope, a, b Array) Array { return c.Mul(a, c.SliceAxis(b, 2, 1, 2)) }},
		{"mul two dtypes", func(c *Scope, a, b Array) Array { return c.Mul(a, c.AsType(b, Float32)) }},
		{"add nothing", func(c *Scope, a, b Array) Array { return c.Add(c.SliceAxis(a, 0, 1, 1), c.SliceAxis(b, 0, 0, 0)) }},
		{"add transposed", func(c *Scope, a, b Array) Array { return c.Add(c.Transpose(a), c.Transpose(b)) }},
		{"rows", func(c *Scope, a, _ Array) Array { return c.SliceAxis(a, 0, 1, 2) }},
		{"columns", func(c *Scope, a, _ Array) Array { return c.SliceAxis(a, 2, 1, 3) }},
		{"columns of columns", func(c *Scope, a, _ Array) Array { return c.SliceAxis(c.SliceAxis(a, 2, 1, 4), 1, 1, 3) }},
		{"reshaped columns", func(c *Scope, a, _ Array) Array { return c.Reshape(c.SliceAxis(a, 2, 1, 3), 4, 3) }},
		{"columns of the reshaped", func(c *Scope, a, _ Array) Array { return c.SliceAxis(c.Reshape(a, 6, -1), 1, 2, 4) }},
		{"a part of the transposed", func(c *Scope, a, _ Array) Array { return c.SliceAxis(c.Transpose(a), 0, 1, 3) }},
		{"joined rows", func(c *Scope, a, b Array) Array { return c.Concat(0, a, b, a) }},
		{"joined columns", func(c *Scope, a, b Array) Array {
			return c.Concat(-1, c.SliceAxis(a, 2, 1, 3), b, c.SliceAxis(b, 2, 0, 0))
		}},
		{"joined in the middle", func(c *Scope, a, b Array) Array { return c.Concat(1, c.SliceAxis(a, 1, 2, 3), b) }},
		{"joined dtypes", func(c *Scope, a, b Array) Array { return c.Concat(0, a, c.AsType(b, Int32)) }},
		{"other floats", func(c *Scope, a, _ Array) Array { return c.AsType(c.AsType(a, BFloat16), Float16) }},
		{"chosen rows", func(c *Scope, a, _ Array) Array { return c.SelectRows(c.Transpose(a), []int32{3, 0, 0}) }},
		{"nothing", func(c *Scope, a, _ Array) Array { return c.Reshape(c.SliceAxis(a, 2, 4, 4), 3, 0) }},
	}
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, dtype := range []Dtype{Float32, Float16, BFloat16} {
			for _, test := range tests {
				c := scope(t, s)
				lazy := func(v []float32) Array { return c.AsType(c.FromFloat32s(v, 2, 3, 4), dtype) }
				a, b := lazy(x), lazy(y)
				if dtype == Float32 { // AsType gave the computed array back
					a, b = c.Neg(c.Neg(a)), c.Neg(c.Neg(b))
				}
				want := test.f(c, a, b)
				wantValues := values(t, c, want) // computes a and b
				got := test.f(c, a, b)
				if !equalInts(got.Shape(), want.Shape()) || got.Dtype() != want.Dtype() {
					t.Errorf("%s of %s: %s%v, want %s%v", test.name, dtype, got.Dtype(), got.Shape(), want.Dtype(), want.Shape())
				}
				sameBits(t, test.name, values(t, c, got), wantValues)
				sameBits(t, test.name+", within a graph", values(t, c, c.Neg(c.Neg(got))), wantValues)
				if got.Size() > 0 {
					sameBits(t, test.name+", for a kernel", values(t, c, c.SiluMul(got, got)), values(t, c, c.SiluMul(want, want)))
				}
			}
		}
	})
}

func TestSoftmax(t *testing.T) {
	c := scope(t, open(t, Options{}))
	a := c.FromFloat32s([]float32{3, 1, 2, -1, 4, 4}, 2, 3)
	want := make([]float32, 6)
	for i, row := range [][]float64{{3, 1, 2}, {-1, 4, 4}} {
		sum := 0.0
		for _, x := range row {
			sum += math.Exp(x)
		}
		for j, x := range row {
			want[3*i+j] = float32(math.Exp(x) / sum)
		}
	}
	close32(t, "softmax", values(t, c, c.Softmax(a, 1, true)), want, 1e-6)
}
