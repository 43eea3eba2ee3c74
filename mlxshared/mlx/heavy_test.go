package mlx

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
)

// weight makes a random matrix of a format, and its values.
func weight(t testing.TB, c *Scope, seed uint64, rows, cols int, m Matrix, dtype Dtype) (*Matrix, []float32) {
	t.Helper()
	w := c.AsType(c.FromFloat32s(normals(newRand(seed), rows*cols), rows, cols), dtype)
	if m.Format == Dense {
		m.W = w
	} else {
		m = c.Quantize(w, m.Format, m.Bits, m.Group)
	}
	if m.Rows() != rows || m.Cols() != cols {
		t.Fatalf("matrix is [%d,%d], want [%d,%d]: %v", m.Rows(), m.Cols(), rows, cols, c.Err())
	}
	return &m, values(t, c, c.Dequantize(&m, Float32))
}

var formats = []struct {
	name string
	m    Matrix
}{
	{"dense", Matrix{}},
	{"affine 2/128", Matrix{Format: Affine, Bits: 2, Group: 128}},
	{"affine 3/64", Matrix{Format: Affine, Bits: 3, Group: 64}},
	{"affine 4/32", Matrix{Format: Affine, Bits: 4, Group: 32}},
	{"affine 5/64", Matrix{Format: Affine, Bits: 5, Group: 64}},
	{"affine 6/64", Matrix{Format: Affine, Bits: 6, Group: 64}},
	{"affine 8/64", Matrix{Format: Affine, Bits: 8, Group: 64}},
	{"mxfp4", Matrix{Format: MXFP4}},
	{"mxfp8", Matrix{Format: MXFP8}},
	{"nvfp4", Matrix{Format: NVFP4}},
}

func naiveLinear(x, w, bias []float32, cols int) []float32 {
	rows := len(w) / cols
	y := make([]float32, len(x)/cols*rows)
	for i := range y {
		sum := 0.0
		for k := range cols {
			sum += float64(x[i/rows*cols+k]) * float64(w[i%rows*cols+k])
		}
		if bias != nil {
			sum += float64(bias[i%rows])
		}
		y[i] = float32(sum)
	}
	return y
}

func TestLinear(t *testing.T) {
	const rows, cols, n = 24, 256, 5
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, f := range formats {
			for _, d := range []Dtype{Float32, BFloat16, Float16} {
				t.Run(fmt.Sprintf("%s/%s", f.name, d), func(t *testing.T) {
					c := scope(t, s)
					m, w := weight(t, c, 3, rows, cols, f.m, d)
					x, xv := cast(t, c, normals(newRand(4), n*cols), d, n, cols)
					b, bv := cast(t, c, normals(newRand(5), rows), d, rows)
					y := c.Linear(x, m, Array{})
					z := c.Linear(c.Reshape(x, 1, n, cols), m, b)
					if err := c.Eval(y, z); err != nil {
						t.Fatal(err)
					}
					if y.Dtype() != d || !equalInts(z.Shape(), []int{1, n, rows}) {
						t.Errorf("output is %s, %v", y.Dtype(), z.Shape())
					}
					tol := 20 * tolerance(d) // sums of 256 terms of size 1
					if d != Float32 && strings.Contains(t.Name(), "/mlx/") {
						tol *= 10 // MLX's CPU kernels also add in the half type
					}
					close32(t, "linear", values(t, c, y), naiveLinear(xv, w, nil, cols), tol)
					close32(t, "with bias", values(t, c, z), naiveLinear(xv, w, bv, cols), tol)
				})
			}
		}
	})
}

func TestEmbedding(t *testing.T) {
	const rows, cols = 11, 128
	ids := []int32{10, 0, 3, 3}
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, f := range formats {
			t.Run(f.name, func(t *testing.T) {
				c := scope(t, s)
				m, w := weight(t, c, 6, rows, cols, f.m, Float32)
				y := c.Embedding(c.FromInt32s(ids, 2, 2), m, Float32)
				if !equalInts(y.Shape(), []int{2, 2, cols}) {
					t.Errorf("shape %v", y.Shape())
				}
				var want []float32
				for _, id := range ids {
					want = append(want, w[int(id)*cols:][:cols]...)
				}
				close32(t, "rows", values(t, c, y), want, 1e-6)
				if half := c.Embedding(c.FromInt32s(ids, 4), m, BFloat16); half.Dtype() != BFloat16 {
					t.Errorf("output is %s", half.Dtype())
				}
			})
		}
	})
}

func naiveNorm(x, w []float32, dim int, eps, offset float64) []float32 {
	y := make([]float32, len(x))
	for r := 0; r < len(x); r += dim {
		sum := 0.0
		for _, v := range x[r : r+dim] {
			sum += float64(v) * float64(v)
		}
		scale := 1 / math.Sqrt(sum/float64(dim)+eps)
		for i, v := range x[r : r+dim] {
			g := 1.0
			if w != nil {
				g = float64(w[i]) + offset
			}
			y[r+i] = float32(float64(v) * scale * g)
		}
	}
	return y
}

func TestRMSNorm(t *testing.T) {
	const n, dim = 3, 40
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, d := range []Dtype{Float32, BFloat16, Float16} {
			c := scope(t, s)
			x, xv := cast(t, c, normals(newRand(1), n*dim), d, n, dim)
			y, _ := cast(t, c, normals(newRand(2), n*dim), d, n, dim)
			w, wv := cast(t, c, normals(newRand(3), dim), d, dim)
			tol := tolerance(d)
			close32(t, "weighted", values(t, c, c.RMSNorm(x, w, 1e-5, 0)), naiveNorm(xv, wv, dim, 1e-5, 0), tol)
			close32(t, "offset", values(t, c, c.RMSNorm(x, w, 1e-5, 1)), naiveNorm(xv, wv, dim, 1e-5, 1), tol)
			close32(t, "bare", values(t, c, c.RMSNorm(x, Array{}, 1e-3, 0)), naiveNorm(xv, nil, dim, 1e-3, 0), tol)
			sum, norm := c.AddRMSNorm(x, y, w, 1e-5, 0)
			plain := c.Add(x, y)
			again := c.RMSNorm(plain, w, 1e-5, 0)
			if err := c.Eval(sum, norm, plain, again); err != nil {
				t.Fatal(err)
			}
			sameBits(t, "sum", values(t, c, sum), values(t, c, plain))
			sameBits(t, "norm of sum", values(t, c, norm), values(t, c, again))
		}
	})
}

func TestSiluMul(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, d := range []Dtype{Float32, BFloat16, Float16} {
			c := scope(t, s)
			g, gv := cast(t, c, normals(newRand(1), 70), d, 2, 35)
			u, uv := cast(t, c, normals(newRand(2), 70), d, 2, 35)
			want := make([]float32, len(gv))
			for i := range want {
				want[i] = float32(float64(gv[i]) / (1 + math.Exp(-float64(gv[i]))) * float64(uv[i]))
			}
			close32(t, d.String(), values(t, c, c.SiluMul(g, u)), want, tolerance(d))
		}
	})
}

func naiveRoPE(x []float32, pos []int32, freq []float32, r *RopeSpec) []float32 {
	y := append([]float32(nil), x...)
	width, half := len(x)/len(pos), r.RotDim/2
	for row, p := range pos {
		for h := 0; h < width; h += r.HeadDim {
			for i := range half {
				a, b := i, i+half
				if r.Traditional {
					a, b = 2*i, 2*i+1
				}
				o := row*width + h
				sin, cos := math.Sincos(float64(float32(p) * freq[i]))
				va, vb := float64(x[o+a])*float64(r.Scale), float64(x[o+b])*float64(r.Scale)
				y[o+a] = float32(va*cos - vb*sin)
				y[o+b] = float32(vb*cos + va*sin)
			}
		}
	}
	return y
}

func TestRoPE(t *testing.T) {
	const heads, dim = 3, 16
	pos := []int32{0, 7, 7, 1000, 31}
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, rot := range []int{dim, 8} {
			for _, traditional := range []bool{false, true} {
				for _, scale := range []float32{1, 1.25} {
					for _, d := range []Dtype{Float32, BFloat16} {
						c := scope(t, s)
						freq := make([]float32, rot/2)
						for i := range freq {
							freq[i] = float32(math.Pow(10000, -2*float64(i)/float64(rot)))
						}
						spec := &RopeSpec{HeadDim: dim, RotDim: rot, InvFreq: c.FromFloat32s(freq, rot/2), Scale: scale, Traditional: traditional}
						x, xv := cast(t, c, normals(newRand(9), len(pos)*heads*dim), d, len(pos), heads*dim)
						y := c.RoPE(x, c.FromInt32s(pos, len(pos)), spec)
						name := fmt.Sprintf("rot %d, traditional %t, scale %g, %s", rot, traditional, scale, d)
						close32(t, name, values(t, c, y), naiveRoPE(xv, pos, freq, spec), 10*tolerance(d))
						one := c.RoPE(c.SliceAxis(x, 0, 3, 4), c.FromInt32s(pos[3:4], 1), spec)
						sameBits(t, name+", one row", values(t, c, one), values(t, c, y)[3*heads*dim:4*heads*dim])
					}
				}
			}
		}
	})
}

// naiveAttention attends with q at positions pos.. over all keys and values, flat by position.
func naiveAttention(q, k, v []float32, pos int, a *AttentionSpec, sinks []float32) []float32 {
	n := len(q) / (a.Heads * a.HeadDim)
	y := make([]float32, n*a.Heads*a.ValueDim)
	for i := range n {
		for h := range a.Heads {
			kh := h / (a.Heads / a.KVHeads)
			first := 0
			if a.Window > 0 {
				first = max(0, pos+i+1-a.Window)
			}
			if a.Chunk > 0 {
				first = (pos + i) / a.Chunk * a.Chunk
			}
			var weights []float64
			total, top := 0.0, math.Inf(-1)
			for p := first; p <= pos+i; p++ {
				dot := 0.0
				for e := range a.HeadDim {
					dot += float64(q[(i*a.Heads+h)*a.HeadDim+e]) * float64(k[(p*a.KVHeads+kh)*a.HeadDim+e])
				}
				dot *= float64(a.Scale)
				if a.Softcap > 0 {
					dot = float64(a.Softcap) * math.Tanh(dot/float64(a.Softcap))
				}
				weights = append(weights, dot)
				top = math.Max(top, dot)
			}
			for j := range weights {
				weights[j] = math.Exp(weights[j] - top)
				total += weights[j]
			}
			if sinks != nil {
				total += math.Exp(float64(sinks[h]) - top)
			}
			for e := range a.ValueDim {
				sum := 0.0
				for j, w := range weights {
					sum += w / total * float64(v[((first+j)*a.KVHeads+kh)*a.ValueDim+e])
				}
				y[(i*a.Heads+h)*a.ValueDim+e] = float32(sum)
			}
		}
	}
	return y
}

func newCache(t testing.TB, s *Stream, a *AttentionSpec, d Dtype) *KVCache {
	t.Helper()
	kv, err := s.NewKVCache(a.KVHeads, a.HeadDim, a.ValueDim, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kv.Free)
	return kv
}

var attentions = []struct {
	name  string
	spec  AttentionSpec
	sinks bool
}{
	{"plain", AttentionSpec{Heads: 4, KVHeads: 4, HeadDim: 16, ValueDim: 16, Scale: 0.25}, false},
	{"grouped", AttentionSpec{Heads: 6, KVHeads: 2, HeadDim: 16, ValueDim: 16, Scale: 0.25}, false},
	{"narrow values", AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 24, ValueDim: 8, Scale: 0.2}, false},
	{"window", AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 16, ValueDim: 16, Scale: 0.25, Window: 5}, false},
	{"softcap", AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 16, ValueDim: 16, Scale: 0.5, Softcap: 2}, false},
	{"chunk", AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 16, ValueDim: 16, Scale: 0.25, Chunk: 12}, false},
	{"sinks", AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 16, ValueDim: 16, Scale: 0.25}, true},
	{"all", AttentionSpec{Heads: 4, KVHeads: 2, HeadDim: 16, ValueDim: 8, Scale: 0.5, Window: 9, Softcap: 3}, true},
}

// Two sequences of unequal length, in chunks that share calls, against the reference.
func TestAttention(t *testing.T) {
	lengths := [2]int{70, 41}
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, test := range attentions {
			for _, d := range []Dtype{Float32, BFloat16, Float16} {
				t.Run(test.name+"/"+d.String(), func(t *testing.T) {
					c := scope(t, s)
					spec := test.spec
					var sinks []float32
					if test.sinks {
						sinks = normals(newRand(8), spec.Heads)
						spec.Sinks = c.FromFloat32s(sinks, spec.Heads)
					}
					kw, vw, qw := spec.KVHeads*spec.HeadDim, spec.KVHeads*spec.ValueDim, spec.Heads*spec.HeadDim
					var q, k, v [2]Array
					var want [2][]float32
					var caches [2]*KVCache
					for i, n := range lengths {
						var qv, kv, vv []float32
						q[i], qv = cast(t, c, normals(newRand(uint64(10+i)), n*qw), d, n, qw)
						k[i], kv = cast(t, c, normals(newRand(uint64(20+i)), n*kw), d, n, kw)
						v[i], vv = cast(t, c, normals(newRand(uint64(30+i)), n*vw), d, n, vw)
						want[i] = naiveAttention(qv, kv, vv, 0, &spec, sinks)
						caches[i] = newCache(t, s, &spec, d)
					}
					var got [2][]float32
					yw := spec.Heads * spec.ValueDim
					for at, chunk := [2]int{}, 0; at != lengths; chunk++ {
						var segs []Segment
						var qs, ks, vs []Array
						rows := 0
						for i, n := range lengths {
							step := min([...]int{1, 7, 20}[(chunk+i)%3], n-at[i])
							if step == 0 {
								continue
							}
							segs = append(segs, Segment{caches[i], rows, step, at[i]})
							qs = append(qs, c.SliceAxis(q[i], 0, at[i], at[i]+step))
							ks = append(ks, c.SliceAxis(k[i], 0, at[i], at[i]+step))
							vs = append(vs, c.SliceAxis(v[i], 0, at[i], at[i]+step))
							at[i] += step
							rows += step
						}
						y := c.Attention(c.Concat(0, qs...), c.Concat(0, ks...), c.Concat(0, vs...), &spec, segs)
						if y.Dtype() != d || !equalInts(y.Shape(), []int{rows, yw}) {
							t.Fatalf("output is %s %v: %v", y.Dtype(), y.Shape(), c.Err())
						}
						out := values(t, c, y)
						for _, g := range segs {
							i := 0
							if g.Cache == caches[1] {
								i = 1
							}
							got[i] = append(got[i], out[g.Row0*yw:(g.Row0+g.Rows)*yw]...)
						}
					}
					for i := range lengths {
						close32(t, fmt.Sprint("sequence ", i), got[i], want[i], 4*tolerance(d))
						if caches[i].Len() != lengths[i] || caches[i].Bytes() == 0 {
							t.Errorf("cache holds %d positions in %d bytes", caches[i].Len(), caches[i].Bytes())
						}
					}
				})
			}
		}
	})
}

// On our kernels a row's result does not depend on what shares its call.
func TestKernelsAreBatchInvariant(t *testing.T) {
	const n, cols, rows = 37, 64, 48
	for _, threads := range []int{1, 2} {
		s := open(t, Options{Backend: BackendKernels, Threads: threads})
		c := scope(t, s)
		x := c.FromFloat32s(normals(newRand(1), n*cols), n, cols)
		m, _ := weight(t, c, 2, rows, cols, Matrix{Format: Affine, Bits: 4, Group: 32}, Float32)
		spec := &AttentionSpec{Heads: 4, KVHeads: 1, HeadDim: 16, ValueDim: 16, Scale: 0.25}
		k := c.FromFloat32s(normals(newRand(3), n*16), n, 16)
		whole := values(t, c, c.Linear(x, m, Array{}))
		attended := values(t, c, c.Attention(x, k, k, spec, []Segment{{newCache(t, s, spec, Float32), 0, n, 0}}))
		kv := newCache(t, s, spec, Float32)
		for i := range n {
			row := c.SliceAxis(x, 0, i, i+1)
			sameBits(t, "linear", values(t, c, c.Linear(row, m, Array{})), whole[i*rows:(i+1)*rows])
			ki := c.SliceAxis(k, 0, i, i+1)
			y := c.Attention(row, ki, ki, spec, []Segment{{kv, 0, 1, i}})
			sameBits(t, "attention", values(t, c, y), attended[i*64:(i+1)*64])
		}
	}
}

// Heavy operations take views: columns of a fused projection, transposes.
func TestStridedInputs(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		c := scope(t, s)
		fused := c.FromFloat32s(normals(newRand(1), 6*80), 6, 80)
		left, right := c.SliceAxis(fused, 1, 0, 32), c.SliceAxis(fused, 1, 32, 64)
		turned := c.Transpose(c.FromFloat32s(normals(newRand(2), 32*6), 32, 6))
		m, _ := weight(t, c, 3, 8, 32, Matrix{}, Float32)
		pos := c.FromInt32s([]int32{0, 1, 2, 3, 4, 5}, 6)
		rope := &RopeSpec{HeadDim: 16, RotDim: 16, InvFreq: full(c, 0.1, Float32, 8), Scale: 1}
		spec := &AttentionSpec{Heads: 2, KVHeads: 2, HeadDim: 16, ValueDim: 16, Scale: 0.25}
		attend := func(q, k, v Array) Array {
			return c.Attention(q, k, v, spec, []Segment{{newCache(t, s, spec, Float32), 0, 6, 0}})
		}
		tests := []struct {
			name string
			run  func(copy func(Array) Array) Array
		}{
			{"linear", func(f func(Array) Array) Array { return c.Linear(f(left), m, Array{}) }},
			{"linear transposed", func(f func(Array) Array) Array { return c.Linear(f(turned), m, Array{}) }},
			{"norm", func(f func(Array) Array) Array { return c.RMSNorm(f(left), Array{}, 1e-5, 0) }},
			{"silu", func(f func(Array) Array) Array { return c.SiluMul(f(left), f(turned)) }},
			{"rope", func(f func(Array) Array) Array { return c.RoPE(f(right), pos, rope) }},
			{"attention", func(f func(Array) Array) Array { return attend(f(left), f(right), f(turned)) }},
		}
		for _, test := range tests {
			view := values(t, c, test.run(func(a Array) Array { return a }))
			dense := values(t, c, test.run(c.Contiguous))
			close32(t, test.name, view, dense, 1e-6)
		}
	})
}

// An output may take over its input's memory only if nobody else reads that.
func TestRoPEKeepsSharedInput(t *testing.T) {
	c := scope(t, open(t, Options{}))
	x := c.Add(full(c, 1, Float32, 2, 8), c.Scalar(1, Float32))
	rope := &RopeSpec{HeadDim: 8, RotDim: 8, InvFreq: full(c, 1, Float32, 4), Scale: 1}
	y := c.RoPE(x, c.FromInt32s([]int32{3, 4}, 2), rope)
	if err := c.Eval(y, x); err != nil {
		t.Fatal(err)
	}
	for _, v := range values(t, c, x) {
		if v != 2 {
			t.Fatalf("input became %g", v)
		}
	}
}

func TestIdOutOfRange(t *testing.T) {
	s := open(t, Options{Backend: BackendKernels})
	for _, id := range []int32{-1, 5} {
		c := scope(t, s)
		m, _ := weight(t, c, 1, 5, 32, Matrix{}, Float32)
		bad := c.Embedding(c.FromInt32s([]int32{0, id}, 2), m, Float32)
		err := c.Eval(c.RMSNorm(bad, Array{}, 1e-5, 0))
		var op *OpError
		if !errors.As(err, &op) || !strings.Contains(err.Error(), fmt.Sprintf("id %d, want 0 to 4", id)) {
			t.Fatalf("id %d: %v", id, err)
		}
		next := scope(t, s)
		if err := next.Eval(full(next, 1, Float32, 4)); err != nil {
			t.Fatalf("the stream fails after an error: %v", err)
		}
	}
}

// A decode step makes hundreds of operations: the Go side must not add garbage to each.
func TestOperationsDoNotAllocate(t *testing.T) {
	s := open(t, Options{})
	c := scope(t, s)
	m, _ := weight(t, c, 1, 32, 32, Matrix{}, Float32)
	x, k := full(c, 1, Float32, 2, 32), full(c, 1, Float32, 2, 16)
	pos := c.FromInt32s([]int32{0, 1}, 2)
	rope := &RopeSpec{HeadDim: 16, RotDim: 16, InvFreq: full(c, 1, Float32, 8), Scale: 1}
	kv := newCache(t, s, cacheSpec, Float32)
	segs := []Segment{{kv, 0, 2, 0}}
	n := testing.AllocsPerRun(20, func() {
		c.RoPE(c.Linear(x, m, Array{}), pos, rope)
		c.Reshape(x, 4, 16)
		c.Add(x, c.Mul(x, x))
		c.SliceAxis(x, 1, 0, 16)
		c.AddRMSNorm(x, x, Array{}, 1e-5, 0)
		c.Embedding(pos, m, Float32)
		segs[0].Pos = kv.Len()
		c.Attention(x, k, k, cacheSpec, segs)
	})
	if err := c.Err(); err != nil {
		t.Fatal(err)
	}
	if n != 0 {
		t.Errorf("%g allocations", n)
	}
}
