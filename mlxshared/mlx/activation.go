package mlx

// #include "activation.h"
import "C"

// GeluMul is gelu(gate) · up, of equal shape and dtype, with the tanh approximation of GELU (Hendrycks and Gimpel 2016):
// gelu(x) = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
func (s *Scope) GeluMul(gate, up Array) Array { return s.own(C.mx_gelu_mul(s.p, gate.p, up.p)) }

// Softcap is limit · tanh(x / limit), element by element in x's dtype; limit is positive.
func (s *Scope) Softcap(x Array, limit float32) Array {
	return s.own(C.mx_softcap(s.p, x.p, C.float(limit)))
}
