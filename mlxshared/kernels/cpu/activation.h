// CPU kernels for activations made of tanh, under the same numerics as kernels.h.
#ifndef MLXCEL_KERNELS_CPU_ACTIVATION_H
#define MLXCEL_KERNELS_CPU_ACTIVATION_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// y[i] = gelu(gate[i]) * up[i], with the tanh approximation of GELU: gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
void mk_gelu_mul(mk_pool *, const void *gate, const void *up, mk_dtype t, int64_t n, void *y);

// y[i] = cap * tanh(x[i] / cap).
void mk_softcap(mk_pool *, const void *x, mk_dtype t, float cap, int64_t n, void *y);

#ifdef __cplusplus
}
#endif
#endif
