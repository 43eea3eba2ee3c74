package mlx

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

// experts stacks random matrices of a format, and their values.
func experts(t testing.TB, c *Scope, n, rows, cols int, f Matrix, d Dtype) (*Experts, []float32) {
	t.Helper()
	flat, w := weight(t, c, 3, n*rows, cols, f, d)
	stack := Experts{*flat}
	stacked := func(a Array) Array {
		if a.IsZero() {
			return a
		}
		return c.Reshape(a, n, rows, -1)
	}
	stack.W, stack.Scales, stack.Biases = stacked(flat.W), stacked(flat.Scales), stacked(flat.Biases)
	if stack.Count() != n || stack.Rows() != rows {
		t.Fatalf("%d experts of %d rows, want %d of %d: %v", stack.Count(), stack.Rows(), n, rows, c.Err())
	}
	return &stack, w
}

func TestLinearGather(t *testing.T) {
	const n, rows, cols, k = 4, 24, 128, 2
	ids := []int32{3, 0, 2, 2, 0, 1}
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, f := range formats {
			for _, d := range []Dtype{Float32, BFloat16, Float16} {
				t.Run(fmt.Sprintf("%s/%s", f.name, d), func(t *testing.T) {
					c := scope(t, s)
					w, wv := experts(t, c, n, rows, cols, f.m, d)
					choice := c.FromInt32s(ids, 3, k)
					x, xv := cast(t, c, normals(newRand(4), 3*cols), d, 3, cols)
					each, ev := cast(t, c, normals(newRand(5), 3*k*cols), d, 3, k, cols)
					b, bv := cast(t, c, normals(newRand(6), n*rows), d, n, rows)
					shared, apart := c.LinearGather(x, w, Array{}, choice), c.LinearGather(each, w, b, choice)
					var wantShared, wantApart []float32
					for i, id := range ids {
						m := wv[int(id)*rows*cols:][:rows*cols]
						wantShared = append(wantShared, naiveLinear(xv[i/k*cols:][:cols], m, nil, cols)...)
						wantApart = append(wantApart, naiveLinear(ev[i*cols:][:cols], m, bv[int(id)*rows:][:rows], cols)...)
					}
					if !equalInts(shared.Shape(), []int{3, k, rows}) || shared.Dtype() != d {
						t.Fatalf("output is %v %v: %v", shared.Dtype(), shared.Shape(), c.Err())
					}
					tol := 20 * tolerance(d)
					if d != Float32 && strings.Contains(t.Name(), "/mlx/") {
						tol *= 10 // MLX's CPU kernels also add in the half type
					}
					close32(t, "shared rows", values(t, c, shared), wantShared, tol)
					close32(t, "rows of their own, with bias", values(t, c, apart), wantApart, tol)
				})
			}
		}
	})
}

var routes = []struct {
	name   string
	spec   RouteSpec
	bias   []float32
	logits []float32
	ids    []int32
}{
	{"chosen", RouteSpec{TopK: 2}, nil, []float32{1, 3, 2, 3, 0, -1}, []int32{1, 3}},
	{"chosen, high ties", RouteSpec{TopK: 3, HighTies: true}, nil, []float32{1, 3, 2, 3, 1, -1}, []int32{3, 1, 2}},
	{"all", RouteSpec{TopK: 2, Scores: RouteSoftmaxAll}, nil, []float32{0, 1, -1, 5, 2, 2}, []int32{3, 4}},
	{"all, shares", RouteSpec{TopK: 3, Scores: RouteSoftmaxAll, Normalize: true}, nil, []float32{0, 1, -1, 5, 2, 2}, []int32{3, 4, 5}},
	{"sigmoid", RouteSpec{TopK: 1, Scores: RouteSigmoid, Normalize: true}, nil, []float32{-3, 20, 21, 0, 1, 2}, []int32{2}},
	{"corrected", RouteSpec{TopK: 2, Scores: RouteSigmoid, Normalize: true, Scale: 2.5, Epsilon: 1e-20}, []float32{0.9, 0, 0, 0, 0, -5}, []float32{0, 1, 2, -1, -1, 9}, []int32{0, 2}},
	{"groups", RouteSpec{TopK: 3, Scores: RouteSigmoid, Groups: 3, TopGroups: 1}, nil, []float32{0, 3, 2, 2, 9, -9}, []int32{2, 3, 0}},
	{"a dropped group beats a negative score", RouteSpec{TopK: 2, Scores: RouteSigmoid, Groups: 2, TopGroups: 1}, []float32{0, -2, 0, 0, 0, 0}, []float32{9, 1, 9, -3, -4, -5}, []int32{0, 2}},
	{"dropped groups score zero", RouteSpec{TopK: 3, Scores: RouteSigmoid, Groups: 2, TopGroups: 1}, []float32{0, -2, 0, 0, 0, 0}, []float32{9, 1, 9, -3, -4, -5}, []int32{0, 2, 3}},
}

func TestRoute(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, test := range routes {
			t.Run(test.name, func(t *testing.T) {
				c := scope(t, s)
				spec := test.spec
				if test.bias != nil {
					spec.Bias = c.FromFloat32s(test.bias, len(test.bias))
				}
				rows := slices.Concat(test.logits, test.logits)
				ids, weights := c.Route(c.FromFloat32s(rows, 2, len(test.logits)), &spec)
				got, err := c.Int32s(ids)
				if err != nil {
					t.Fatal(err)
				}
				if want := slices.Concat(test.ids, test.ids); !slices.Equal(got, want) {
					t.Fatalf("experts %v, want %v", got, want)
				}
				want := routeWeights(&spec, test.logits, test.ids)
				close32(t, "weights", values(t, c, weights), slices.Concat(want, want), 1e-6)
			})
		}
	})
}

// routeWeights is the weights of chosen experts in float64.
func routeWeights(r *RouteSpec, logits []float32, ids []int32) []float32 {
	value := func(i int) float64 {
		if r.Scores == RouteSigmoid {
			return 1 / (1 + math.Exp(-float64(logits[i])))
		}
		return math.Exp(float64(logits[i]))
	}
	var chosen, all float64
	for i := range logits {
		all += value(i)
	}
	for _, id := range ids {
		chosen += value(int(id))
	}
	divisor := 1.0
	switch {
	case r.Scores == RouteSoftmaxChosen, r.Normalize && r.TopK > 1:
		divisor = chosen
	case r.Scores == RouteSoftmaxAll:
		divisor = all
	}
	scale := 1.0
	if r.Scale != 0 {
		scale = float64(r.Scale)
	}
	var out []float32
	for _, id := range ids {
		out = append(out, float32(value(int(id))/divisor*scale))
	}
	return out
}

func TestWeightedSum(t *testing.T) {
	const rows, k, width = 3, 4, 40
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, d := range []Dtype{Float32, BFloat16, Float16} {
			t.Run(d.String(), func(t *testing.T) {
				c := scope(t, s)
				x, xv := cast(t, c, normals(newRand(1), rows*k*width), d, rows, k, width)
				weights := normals(newRand(2), rows*k)
				y := c.WeightedSum(x, c.FromFloat32s(weights, rows, k))
				want := make([]float32, rows*width)
				for i := range want {
					sum := 0.0
					for j := range k {
						sum += float64(weights[i/width*k+j]) * float64(xv[(i/width*k+j)*width+i%width])
					}
					want[i] = float32(sum)
				}
				close32(t, "sum", values(t, c, y), want, tolerance(d))
				if y.Dtype() != d {
					t.Errorf("output is %v", y.Dtype())
				}
			})
		}
	})
}

func TestClampedSwiGLU(t *testing.T) {
	const n = 300
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, d := range []Dtype{Float32, BFloat16, Float16} {
			t.Run(d.String(), func(t *testing.T) {
				c := scope(t, s)
				draw := func(seed uint64) []float32 {
					v := normals(newRand(seed), n)
					for i := range v {
						v[i] *= 6
					}
					return v
				}
				g, gv := cast(t, c, draw(1), d, n)
				u, uv := cast(t, c, draw(2), d, n)
				want := make([]float32, n)
				for i := range want {
					x, y := math.Min(float64(gv[i]), 7), math.Max(-7, math.Min(float64(uv[i]), 7))
					want[i] = float32(x / (1 + math.Exp(-1.702*x)) * (y + 1))
				}
				close32(t, "activation", values(t, c, c.ClampedSwiGLU(g, u, 1.702, 7)), want, tolerance(d))
			})
		}
	})
}

func TestExpertFaults(t *testing.T) {
	s := open(t, Options{})
	cases := []struct {
		name string
		want string
		run  func(c *Scope)
	}{
		{"expert beyond the last", "expert 4, want 0 to 3", func(c *Scope) { gather(t, c, []int32{1, 4}, 64) }},
		{"negative expert", "expert -1, want 0 to 3", func(c *Scope) { gather(t, c, []int32{-1, 0}, 64) }},
		{"other width", "want rows of 64", func(c *Scope) { gather(t, c, []int32{1, 0}, 32) }},
		{"two-dimensional weight", "want [experts, rows, cols]", func(c *Scope) {
			m, _ := weight(t, c, 1, 8, 64, Matrix{}, Float32)
			c.LinearGather(c.FromFloat32s(make([]float32, 64), 1, 64), &Experts{*m}, Array{}, c.FromInt32s([]int32{0}, 1, 1))
		}},
		{"more experts asked than there are", "top 4 of 3 experts", func(c *Scope) { c.Route(c.FromFloat32s(make([]float32, 3), 1, 3), &RouteSpec{TopK: 4}) }},
		{"uneven groups", "2 groups of 3 experts", func(c *Scope) {
			c.Route(c.FromFloat32s(make([]float32, 3), 1, 3), &RouteSpec{TopK: 1, Scores: RouteSigmoid, Groups: 2})
		}},
		{"groups under a softmax", "belong to the sigmoid router", func(c *Scope) { c.Route(c.FromFloat32s(make([]float32, 4), 1, 4), &RouteSpec{TopK: 1, Groups: 2}) }},
		{"weights of another shape", "want float32[2,3]", func(c *Scope) {
			c.WeightedSum(c.FromFloat32s(make([]float32, 6), 2, 3, 1), c.FromFloat32s(make([]float32, 4), 2, 2))
		}},
	}
	for _, test := range cases {
		t.Run(test.name, func(t *testing.T) {
			c := scope(t, s)
			test.run(c)
			if err := c.Err(); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}

// gather evaluates one row of the given width over two of four experts of 64 inputs.
func gather(t *testing.T, c *Scope, ids []int32, width int) {
	w, _ := experts(t, c, 4, 8, 64, Matrix{}, Float32)
	y := c.LinearGather(c.FromFloat32s(make([]float32, width), 1, width), w, Array{}, c.FromInt32s(ids, 1, 2))
	_ = c.Eval(y) // the scope holds the error
}
