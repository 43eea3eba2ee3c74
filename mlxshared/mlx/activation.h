// The C face of the activations made of tanh; activation.go describes them.
#ifndef MLXCEL_MLX_ACTIVATION_H
#define MLXCEL_MLX_ACTIVATION_H

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

mx_array *mx_gelu_mul(mx_scope *, mx_array *gate, mx_array *up);
mx_array *mx_softcap(mx_scope *, mx_array *x, float cap);

#ifdef __cplusplus
}
#endif
#endif
