package mlx

import (
	"math"
	"strings"
	"testing"
)

func TestActivations(t *testing.T) {
	const n = 301
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, d := range []Dtype{Float32, BFloat16, Float16} {
			t.Run(d.String(), func(t *testing.T) {
				c := scope(t, s)
				draw := func(seed uint64, scale float32) []float32 {
					v := normals(newRand(seed), n)
					for i := range v {
						v[i] *= scale
					}
					return v
				}
				g, gv := cast(t, c, draw(1, 3), d, n)
				u, uv := cast(t, c, draw(2, 1), d, n)
				x, xv := cast(t, c, draw(3, 40), d, n)
				gelu, capped := make([]float32, n), make([]float32, n)
				for i := range n {
					a := float64(gv[i])
					gelu[i] = float32(a / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(a+0.044715*a*a*a))) * float64(uv[i]))
					capped[i] = float32(30 * math.Tanh(float64(xv[i])/30))
				}
				close32(t, "gelu", values(t, c, c.GeluMul(g, u)), gelu, tolerance(d))
				close32(t, "softcap", values(t, c, c.Softcap(x, 30)), capped, tolerance(d))
			})
		}
	})
}

func TestActivationFaults(t *testing.T) {
	s := open(t, Options{})
	for want, run := range map[string]func(c *Scope, x Array){
		"gate and up differ":          func(c *Scope, x Array) { c.GeluMul(x, c.FromFloat32s(make([]float32, 3), 3)) },
		"want it positive":            func(c *Scope, x Array) { c.Softcap(x, 0) },
		"the input is the zero array": func(c *Scope, x Array) { c.Softcap(Array{}, 30) },
	} {
		c := s.NewScope()
		run(c, c.FromFloat32s(make([]float32, 2), 2))
		if err := c.Err(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		c.Close()
	}
}
