package cpu_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

func sigmoid32(x float32) float32 { return div32(1, add32(1, exp32(sub32(0, x)))) }

func softplus32(x float32) float32 {
	u := exp32(sub32(0, float32(math.Abs(float64(x)))))
	s := div32(u, add32(u, 2))
	z := mul32(s, s)
	p := float32(1. / 15)
	for _, c := range []float32{1. / 13, 1. / 11, 1. / 9, 1. / 7, 1. / 5, 1. / 3} {
		p = fma32(p, z, c)
	}
	return add32(max(x, 0), mul32(2, fma32(mul32(p, z), s, s)))
}

func TestSoftplus(t *testing.T) {
	r := source("softplus")
	for range 200000 {
		x := float32(r.NormFloat64() * 20)
		want := math.Log1p(math.Exp(-math.Abs(float64(x)))) + max(float64(x), 0)
		if e := math.Abs(float64(softplus32(x))/want - 1); e > 3e-7 && want > 1e-37 {
			t.Fatalf("softplus(%v) = %v, want %v", x, softplus32(x), want)
		}
	}
}

// recurrence is one operation with some sizes and weights: run feeds it rows, next is the reference's step of one row.
type recurrence struct {
	name       string
	rows, cols int // of the state
	stateType  func(cpu.DType) cpu.DType
	inputs     []int // widths
	width      int   // of the output
	run        func(p *cpu.Pool, in [][]byte, t cpu.DType, segments []cpu.StateSegment, y []byte)
	next       func(state []float32, round func(float32) float32, in [][]float32) []float32
}

func own(t cpu.DType) cpu.DType    { return t }
func float32s(cpu.DType) cpu.DType { return cpu.F32 }

func convolution(r *rand.Rand, channels, width int, silu, bias bool) recurrence {
	c := cpu.Conv{Channels: channels, Width: width, SiLU: silu, Weight: normals(r, width*channels, 1)}
	if bias {
		c.Bias = normals(r, channels, 1)
	}
	return recurrence{
		name: fmt.Sprintf("conv %d of %d, silu %v, bias %v", width, channels, silu, bias), rows: width - 1, cols: channels, stateType: own,
		inputs: []int{channels}, width: channels,
		run: func(p *cpu.Pool, in [][]byte, t cpu.DType, segments []cpu.StateSegment, y []byte) {
			p.CausalConv(c, in[0], t, segments, y)
		},
		next: func(state []float32, _ func(float32) float32, in [][]float32) []float32 {
			y := make([]float32, channels)
			for i := range y {
				sum := float32(0)
				for k := range width - 1 {
					sum = fma32(c.Weight[k*channels+i], state[k*channels+i], sum)
				}
				sum = fma32(c.Weight[(width-1)*channels+i], in[0][i], sum)
				if bias {
					sum = add32(sum, c.Bias[i])
				}
				if silu {
					sum = silu32(sum)
				}
				y[i] = sum
			}
			copy(state, state[channels:])
			copy(state[len(state)-channels:], in[0])
			return y
		},
	}
}

func negative(v []float32) []float32 {
	for i := range v {
		v[i] = -exp32(v[i])
	}
	return v
}

func selectiveScan(r *rand.Rand, channels, states int) recurrence {
	s := cpu.Scan{Channels: channels, States: states, A: negative(normals(r, states*channels, 1)), Skip: normals(r, channels, 1)}
	return recurrence{
		name: fmt.Sprintf("scan of %d by %d", channels, states), rows: states, cols: channels, stateType: own,
		inputs: []int{channels, channels, states, states}, width: channels,
		run: func(p *cpu.Pool, in [][]byte, t cpu.DType, segments []cpu.StateSegment, y []byte) {
			p.SelectiveScan(s, in[0], in[1], in[2], in[3], t, segments, y)
		},
		next: func(state []float32, round func(float32) float32, in [][]float32) []float32 {
			y := make([]float32, channels)
			for c := range y {
				d := softplus32(in[1][c])
				dx := mul32(d, in[0][c])
				for i := range states {
					at := i*channels + c
					state[at] = round(fma32(state[at], exp32(mul32(d, s.A[at])), mul32(dx, in[2][i])))
					y[c] = fma32(state[at], in[3][i], y[c])
				}
				y[c] = fma32(s.Skip[c], in[0][c], y[c])
			}
			return y
		},
	}
}

func ssm(r *rand.Rand, s cpu.SSM) recurrence {
	s.A, s.Skip, s.DtBias = negative(normals(r, s.Heads, 1)), normals(r, s.Heads, 1), normals(r, s.Heads, 1)
	inner, shared := s.Heads*s.HeadDim, s.Groups*s.States
	return recurrence{
		name: fmt.Sprintf("ssm of %d heads of %d, %d groups of %d", s.Heads, s.HeadDim, s.Groups, s.States),
		rows: s.Heads * s.States, cols: s.HeadDim, stateType: float32s, inputs: []int{inner + 2*shared, s.Heads}, width: inner,
		run: func(p *cpu.Pool, in [][]byte, t cpu.DType, segments []cpu.StateSegment, y []byte) {
			p.SSM(s, in[0], in[1], t, segments, y)
		},
		next: func(state []float32, _ func(float32) float32, in [][]float32) []float32 {
			y := make([]float32, inner)
			x, b, c := in[0][:inner], in[0][inner:inner+shared], in[0][inner+shared:]
			for h := range s.Heads {
				d := min(max(softplus32(add32(in[1][h], s.DtBias[h])), s.MinDt), s.MaxDt)
				decay := exp32(mul32(d, s.A[h]))
				group := h / (s.Heads / s.Groups) * s.States
				for i := range s.States {
					for p := range s.HeadDim {
						at, out := (h*s.States+i)*s.HeadDim+p, h*s.HeadDim+p
						state[at] = fma32(state[at], decay, mul32(mul32(d, x[out]), b[group+i]))
						y[out] = fma32(state[at], c[group+i], y[out])
					}
				}
				for p := range s.HeadDim {
					y[h*s.HeadDim+p] = fma32(s.Skip[h], x[h*s.HeadDim+p], y[h*s.HeadDim+p])
				}
			}
			return y
		},
	}
}

// unitLength is x / sqrt(sum(x²) + 1e-6) · scale.
func unitLength(x []float32, scale float32) []float32 {
	factor := div32(scale, float32(math.Sqrt(float64(add32(dot(x, x), 1e-6)))))
	y := make([]float32, len(x))
	for i := range x {
		y[i] = mul32(x[i], factor)
	}
	return y
}

func gatedDelta(r *rand.Rand, d cpu.Delta) recurrence {
	gates := d.ValueHeads
	if d.ChannelGate {
		gates *= d.KeyDim
	}
	d.A, d.GateBias = normals(r, d.ValueHeads, 1), normals(r, gates, 1)
	for i := range d.A {
		d.A[i] = exp32(d.A[i])
	}
	keys, values := d.KeyHeads*d.KeyDim, d.ValueHeads*d.ValueDim
	decay := func(gate, a float32) float32 {
		if d.LowerBound < 0 {
			return exp32(mul32(d.LowerBound, sigmoid32(mul32(a, gate))))
		}
		return exp32(mul32(sub32(0, a), softplus32(gate)))
	}
	return recurrence{
		name: fmt.Sprintf("delta of %d/%d heads of %d/%d, by channel %v, bound %v", d.KeyHeads, d.ValueHeads, d.KeyDim, d.ValueDim, d.ChannelGate, d.LowerBound),
		rows: d.ValueHeads * d.KeyDim, cols: d.ValueDim, stateType: float32s, inputs: []int{2*keys + values, gates, d.ValueHeads}, width: values,
		run: func(p *cpu.Pool, in [][]byte, t cpu.DType, segments []cpu.StateSegment, y []byte) {
			p.GatedDelta(d, in[0], in[1], in[2], t, segments, y)
		},
		next: func(state []float32, _ func(float32) float32, in [][]float32) []float32 {
			y := make([]float32, values)
			for h := range d.ValueHeads {
				from := h / (d.ValueHeads / d.KeyHeads) * d.KeyDim
				q := unitLength(in[0][from:from+d.KeyDim], div32(1, float32(math.Sqrt(float64(d.KeyDim)))))
				k := unitLength(in[0][keys+from:keys+from+d.KeyDim], 1)
				keep := make([]float32, d.KeyDim)
				for i := range keep {
					g := h
					if d.ChannelGate {
						g = h*d.KeyDim + i
					}
					keep[i] = decay(add32(in[1][g], d.GateBias[g]), d.A[h])
				}
				beta := sigmoid32(in[2][h])
				for v := range d.ValueDim {
					seen := float32(0)
					at := func(i int) *float32 { return &state[(h*d.KeyDim+i)*d.ValueDim+v] }
					for i := range k {
						seen = fma32(mul32(*at(i), keep[i]), k[i], seen)
					}
					change := mul32(sub32(in[0][2*keys+h*d.ValueDim+v], seen), beta)
					for i := range k {
						*at(i) = fma32(k[i], change, mul32(*at(i), keep[i]))
						y[h*d.ValueDim+v] = fma32(*at(i), q[i], y[h*d.ValueDim+v])
					}
				}
			}
			return y
		},
	}
}

func recurrences() []recurrence {
	r := source("recurrences")
	inf := float32(math.Inf(1))
	return []recurrence{
		convolution(r, 5, 2, false, false),
		convolution(r, 40, 4, true, true),
		convolution(r, 64, 3, true, false),
		selectiveScan(r, 7, 5),
		selectiveScan(r, 48, 16),
		ssm(r, cpu.SSM{Heads: 4, HeadDim: 20, Groups: 2, States: 19, MaxDt: inf}),
		ssm(r, cpu.SSM{Heads: 2, HeadDim: 96, Groups: 1, States: 16, MinDt: 0.5, MaxDt: 1}),
		ssm(r, cpu.SSM{Heads: 3, HeadDim: 48, Groups: 3, States: 8, MaxDt: inf}),
		gatedDelta(r, cpu.Delta{KeyHeads: 2, ValueHeads: 4, KeyDim: 24, ValueDim: 40}),
		gatedDelta(r, cpu.Delta{KeyHeads: 1, ValueHeads: 1, KeyDim: 5, ValueDim: 100}),
		gatedDelta(r, cpu.Delta{KeyHeads: 2, ValueHeads: 2, KeyDim: 32, ValueDim: 64, ChannelGate: true}),
		gatedDelta(r, cpu.Delta{KeyHeads: 1, ValueHeads: 2, KeyDim: 16, ValueDim: 17, ChannelGate: true, LowerBound: -5}),
	}
}

// Two sequences side by side in one call, the first fed in two chunks, equal the reference bit for bit.
func TestRecurrences(t *testing.T) {
	const first, second, rows = 3, 4, 9 // rows of the first sequence's chunks, and of both sequences in all
	all := recurrences()
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("rows")
		for _, c := range all {
			for _, dt := range dtypes {
				in := make([][]byte, len(c.inputs))
				for i, width := range c.inputs {
					in[i] = unaligned(encode(dt, normals(r, rows*width, 1)))
				}
				part := func(from, to int) [][]byte {
					out := make([][]byte, len(in))
					for i, width := range c.inputs {
						out[i] = in[i][from*width*dt.Size() : to*width*dt.Size()]
					}
					return out
				}
				a, b := cpu.NewState(c.rows, c.cols, c.stateType(dt)), cpu.NewState(c.rows, c.cols, c.stateType(dt))
				y := unaligned(make([]byte, rows*c.width*dt.Size()))
				c.run(p, part(0, first), dt, []cpu.StateSegment{{State: a, N: first}}, y)
				const both = rows - first
				c.run(p, part(first, rows), dt, []cpu.StateSegment{{State: a, N: second}, {State: b, Row: second, N: both - second}}, y[first*c.width*dt.Size():])
				want := append(steps(c, dt, in, 0, first+second), steps(c, dt, in, first+second, rows)...)
				equal(t, fmt.Sprint(c.name, " ", dt), dt, y, encode(dt, want))
				a.Free()
				b.Free()
			}
		}
	})
}

// steps runs the reference from an empty state over the rows [from, to).
func steps(c recurrence, dt cpu.DType, in [][]byte, from, to int) []float32 {
	state := make([]float32, c.rows*c.cols)
	round := func(x float32) float32 { return decode(dt, encode(dt, []float32{x}))[0] }
	var y []float32
	for r := from; r < to; r++ {
		row := make([][]float32, len(in))
		for i, width := range c.inputs {
			row[i] = decode(dt, in[i][r*width*dt.Size():(r+1)*width*dt.Size()])
		}
		y = append(y, c.next(state, round, row)...)
	}
	return y
}

func TestSigmoidMul(t *testing.T) {
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("sigmoid")
		for _, dt := range dtypes {
			for _, dim := range []int{1, 15, 48, 3000} {
				for _, gates := range []int{1, dim} {
					const rows = 5
					x, g := unaligned(encode(dt, normals(r, rows*dim, 1))), unaligned(encode(dt, normals(r, rows*gates, 3)))
					wide, gate := decode(dt, x), decode(dt, g)
					want := make([]float32, rows*dim)
					for i := range want {
						want[i] = mul32(wide[i], sigmoid32(gate[i/dim*gates+i%dim%gates]))
					}
					y := unaligned(make([]byte, len(x)))
					p.SigmoidMul(x, g, dt, rows, dim, gates, y)
					equal(t, fmt.Sprint(dt, " ", dim, "/", gates), dt, y, encode(dt, want))
				}
			}
		}
	})
}

// BenchmarkRecurrences runs published models' layers, a token a step: Qwen3-Next's gated delta net, Nemotron-H's Mamba-2 (8B)
// and Jamba's Mamba.
func BenchmarkRecurrences(b *testing.B) {
	r := source("bench")
	for _, c := range []recurrence{
		convolution(r, 8192, 4, true, false),
		gatedDelta(r, cpu.Delta{KeyHeads: 16, ValueHeads: 32, KeyDim: 128, ValueDim: 128}),
		ssm(r, cpu.SSM{Heads: 128, HeadDim: 64, Groups: 8, States: 128, MaxDt: float32(math.Inf(1))}),
		selectiveScan(r, 8192, 16),
	} {
		b.Run(c.name, func(b *testing.B) {
			in := make([][]byte, len(c.inputs))
			for i, width := range c.inputs {
				in[i] = encode(cpu.BF16, normals(r, width, 1))
			}
			state := cpu.NewState(c.rows, c.cols, c.stateType(cpu.BF16))
			defer state.Free()
			y := make([]byte, 2*c.width)
			benchISAs(b, func(b *testing.B, p *cpu.Pool) {
				for b.Loop() {
					c.run(p, in, cpu.BF16, []cpu.StateSegment{{State: state, N: 1}}, y)
				}
			})
		})
	}
}
