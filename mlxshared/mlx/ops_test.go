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
	pos := c.Add(c.Square(a), c.Scalar(0.5, Float32)) // for logarithms and roots
	truth := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	binary := []struct {
		name string
		got  Array
		want func(x, y float64) float64
	}{
		{"add", c.Add(a, b), func(x, y float64) float64 { return x + y }},
		{"sub", c.Sub(a, b), func(x, y float64) float64 { return x - y }},
		{"mul", c.Mul(a, b), func(x, y float64) float64 { return x * y }},
		{"div", c.Div(a, b), func(x, y float64) float64 { return x / y }},
		{"maximum", c.Maximum(a, b), math.Max},
		{"minimum", c.Minimum(a, b), math.Min},
		{"power", c.Power(pos, b), func(x, y float64) float64 { return math.Pow(x*x+0.5, y) }},
		{"logaddexp", c.LogAddExp(a, b), func(x, y float64) float64 { return math.Log(math.Exp(x) + math.Exp(y)) }},
		{"equal", c.Equal(a, a), func(x, y float64) float64 { return 1 }},
		{"less", c.Less(a, b), func(x, y float64) float64 { return truth(x < y) }},
		{"less equal", c.LessEqual(a, a), func(x, y float64) float64 { return 1 }},
		{"greater", c.Greater(a, b), func(x, y float64) float64 { return truth(x > y) }},
		{"greater equal", c.GreaterEqual(a, b), func(x, y float64) float64 { return truth(x >= y) }},
		{"and", c.LogicalAnd(c.Less(a, b), c.Less(a, c.Scalar(0, Float32))), func(x, y float64) float64 { return truth(x < y && x < 0) }},
		{"or", c.LogicalOr(c.Less(a, b), c.Less(a, c.Scalar(0, Float32))), func(x, y float64) float64 { return truth(x < y || x < 0) }},
		{"where", c.Where(c.Less(a, b), a, b), math.Min},
		{"neg", c.Neg(a), func(x, _ float64) float64 { return -x }},
		{"abs", c.Abs(a), func(x, _ float64) float64 { return math.Abs(x) }},
		{"exp", c.Exp(a), func(x, _ float64) float64 { return math.Exp(x) }},
		{"log", c.Log(pos), func(x, _ float64) float64 { return math.Log(x*x + 0.5) }},
		{"log1p", c.Log1p(pos), func(x, _ float64) float64 { return math.Log1p(x*x + 0.5) }},
		{"sqrt", c.Sqrt(pos), func(x, _ float64) float64 { return math.Sqrt(x*x + 0.5) }},
		{"rsqrt", c.Rsqrt(pos), func(x, _ float64) float64 { return 1 / math.Sqrt(x*x+0.5) }},
		{"square", c.Square(a), func(x, _ float64) float64 { return x * x }},
		{"sigmoid", c.Sigmoid(a), func(x, _ float64) float64 { return 1 / (1 + math.Exp(-x)) }},
		{"tanh", c.Tanh(a), func(x, _ float64) float64 { return math.Tanh(x) }},
		{"erf", c.Erf(a), func(x, _ float64) float64 { return math.Erf(x) }},
		{"sin", c.Sin(a), func(x, _ float64) float64 { return math.Sin(x) }},
		{"cos", c.Cos(a), func(x, _ float64) float64 { return math.Cos(x) }},
		{"floor", c.Floor(a), func(x, _ float64) float64 { return math.Floor(x) }},
		{"not", c.LogicalNot(c.Less(a, b)), func(x, y float64) float64 { return truth(x >= y) }},
		{"contiguous", c.Contiguous(a), func(x, _ float64) float64 { return x }},
		{"astype", c.AsType(c.AsType(a, Int32), Float32), func(x, _ float64) float64 { return math.Trunc(x) }},
		{"broadcast", c.Mul(a, c.Full(2, Float32, 1, 4)), func(x, _ float64) float64 { return 2 * x }},
	}
	for _, test := range binary {
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
		{"expand", c.ExpandDims(a, 0, -1), []int{1, 2, 3, 1}, []float32{0, 1, 2, 3, 4, 5}},
		{"broadcast", c.BroadcastTo(c.SliceRows(a, 1, 2), 2, 3), []int{2, 3}, []float32{3, 4, 5, 3, 4, 5}},
		{"slice", c.Slice(a, []int{0, 1}, []int{2, 2}), []int{2, 1}, []float32{1, 4}},
		{"slice rows", c.SliceRows(a, 1, 2), []int{1, 3}, []float32{3, 4, 5}},
		{"slice axis", c.SliceAxis(a, -1, 1, 3), []int{2, 2}, []float32{1, 2, 4, 5}},
		{"split", parts[2], []int{2, 1}, []float32{2, 5}},
		{"concat", c.Concat(1, parts[2], parts[0]), []int{2, 2}, []float32{2, 0, 5, 3}},
		{"take", c.Take(a, c.FromInt32s([]int32{2, 0}, 2), 1), []int{2, 2}, []float32{2, 0, 5, 3}},
		{"take along", c.TakeAlong(a, c.FromInt32s([]int32{2, 1}, 2, 1), 1), []int{2, 1}, []float32{2, 4}},
		{"select rows", c.SelectRows(a, []int32{1, 1, 0}), []int{3, 3}, []float32{3, 4, 5, 3, 4, 5, 0, 1, 2}},
		{"repeat", c.Repeat(a, 2, 0), []int{4, 3}, []float32{0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5}},
		{"full", c.Full(1.5, BFloat16, 2), []int{2}, []float32{1.5, 1.5}},
		{"scalar", c.Scalar(-2, Float16), nil, []float32{-2}},
		{"arange", c.Arange(1, 4, 1, Int32), []int{3}, []float32{1, 2, 3}},
		{"view", c.View(c.FromInt32s([]int32{0x3f800000}, 1), Float32), []int{1}, []float32{1}},
		{"matmul", c.MatMul(a, c.Transpose(a)), []int{2, 2}, []float32{5, 14, 14, 50}},
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
			return c.Add(a, c.Reshape(c.Slice(b, []int{1, 1, 0}, []int{2, 2, 4}), 4))
		}},
		{"add to a row", func(c *Scope, a, b Array) Array {
			return c.Add(c.Reshape(c.Slice(b, []int{0, 2, 0}, []int{1, 3, 4}), 4), a)
		}},
		{"mul by a scalar", func(c *Scope, a, b Array) Array { return c.Mul(c.Scalar(0.3, a.Dtype()), a) }},
		{"mul by a column", func(c *Scope, a, b Array) Array { return c.Mul(a, c.SliceAxis(b, 2, 1, 2)) }},
		{"mul two dtypes", func(c *Scope, a, b Array) Array { return c.Mul(a, c.AsType(b, Float32)) }},
		{"add nothing", func(c *Scope, a, b Array) Array { return c.Add(c.SliceAxis(a, 0, 1, 1), c.SliceAxis(b, 0, 0, 0)) }},
		{"add transposed", func(c *Scope, a, b Array) Array { return c.Add(c.Transpose(a), c.Transpose(b)) }},
		{"rows", func(c *Scope, a, _ Array) Array { return c.SliceRows(a, 1, 2) }},
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

func TestReductions(t *testing.T) {
	c := scope(t, open(t, Options{}))
	a := c.FromFloat32s([]float32{3, 1, 2, -1, 4, 4}, 2, 3)
	e := func(v ...float64) float32 {
		sum := 0.0
		for _, x := range v {
			sum += math.Exp(x)
		}
		return float32(math.Log(sum))
	}
	s1 := float32(math.Exp(3) / (math.Exp(3) + math.Exp(1) + math.Exp(2)))
	tests := []struct {
		name string
		got  Array
		want []float32
	}{
		{"sum", c.Sum(a, 1, false), []float32{6, 7}},
		{"mean", c.Mean(a, 0, true), []float32{1, 2.5, 3}},
		{"max", c.Max(a, -1, true), []float32{3, 4}},
		{"min", c.Min(a, -1, false), []float32{1, -1}},
		{"logsumexp", c.LogSumExp(a, 1, false), []float32{e(3, 1, 2), e(-1, 4, 4)}},
		{"argmax", c.ArgMax(a, 1, false), []float32{0, 1}},
		{"argmin", c.ArgMin(a, 1, false), []float32{1, 0}},
		{"all", c.All(c.Greater(a, c.Scalar(0, Float32)), 1, false), []float32{1, 0}},
		{"any", c.Any(c.Greater(a, c.Scalar(3, Float32)), 1, false), []float32{0, 1}},
		{"softmax", c.SliceAxis(c.Softmax(a, 1, true), 1, 0, 1), []float32{s1, float32(math.Exp(-1) / (math.Exp(-1) + 2*math.Exp(4)))}},
		{"cumsum", c.CumSum(a, 1), []float32{3, 4, 6, -1, 3, 7}},
		{"sort", c.Sort(a, 1), []float32{1, 2, 3, -1, 4, 4}},
		{"argsort", c.SliceRows(c.ArgSort(a, 1), 0, 1), []float32{1, 2, 0}},
		{"argpartition", c.SliceAxis(c.ArgPartition(a, 0, 1), 1, 0, 1), []float32{1, 0}},
	}
	for _, test := range tests {
		close32(t, test.name, values(t, c, test.got), test.want, 1e-6)
	}
	if keep := c.Sum(a, 1, true).Shape(); !equalInts(keep, []int{2, 1}) {
		t.Errorf("kept dimension: %v", keep)
	}
}
