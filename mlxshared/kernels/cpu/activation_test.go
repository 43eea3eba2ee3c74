package cpu_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

// gelu32 is the kernels' GELU in the same steps.
func gelu32(x float32) float32 {
	inner := mul32(mul32(0.7978845608028654, x), fma32(0.044715, mul32(x, x), 1))
	return mul32(mul32(0.5, x), add32(1, tanh32(inner)))
}

func TestGeluMul(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("gelu")
		for _, dt := range dtypes {
			for _, n := range []int{0, 1, 16, 301, 40001} {
				gate, up := normals(r, n, 4), normals(r, n, 1)
				copy(gate, []float32{0, inf, nan, 1e-40, 12, -12, 1e30, -1e30})
				g, u := unaligned(encode(dt, gate)), unaligned(encode(dt, up))
				gate, up = decode(dt, g), decode(dt, u)
				want := make([]float32, n)
				for i := range want {
					want[i] = mul32(gelu32(gate[i]), up[i])
				}
				y := unaligned(make([]byte, len(g)))
				p.GeluMul(g, u, dt, n, y)
				equal(t, fmt.Sprint(dt, " ", n), dt, y, encode(dt, want))
			}
		}
	})
	for x := -8.0; x < 8; x += 1.0 / 64 {
		want := x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
		if got := float64(gelu32(float32(x))); math.Abs(got-want) > 1e-6*(1+math.Abs(want)) {
			t.Fatalf("gelu(%v) = %v, want %v", x, got, want)
		}
	}
}

func TestSoftcap(t *testing.T) {
	const limit = 30
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("softcap")
		for _, dt := range dtypes {
			for _, n := range []int{0, 1, 16, 301, 40001} {
				x := normals(r, n, 40)
				copy(x, []float32{0, inf, -inf, nan})
				in := unaligned(encode(dt, x))
				want := decode(dt, in)
				for i := range want {
					want[i] = mul32(limit, tanh32(div32(want[i], limit)))
				}
				y := unaligned(make([]byte, len(in)))
				p.Softcap(in, dt, limit, n, y)
				equal(t, fmt.Sprint(dt, " ", n), dt, y, encode(dt, want))
			}
		}
	})
}
