package cpu

// #include "activation.h"
import "C"

// GeluMul writes y = gelu(gate) * up over n elements, GELU by its tanh approximation.
func (p *Pool) GeluMul(gate, up []byte, t DType, n int, y []byte) {
	C.mk_gelu_mul(p.p, pointer(gate), pointer(up), C.mk_dtype(t), C.int64_t(n), pointer(y))
}

// Softcap writes y = limit * tanh(x / limit) over n elements.
func (p *Pool) Softcap(x []byte, t DType, limit float32, n int, y []byte) {
	C.mk_softcap(p.p, pointer(x), C.mk_dtype(t), C.float(limit), C.int64_t(n), pointer(y))
}
