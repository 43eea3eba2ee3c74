// The C face of states of fixed size and of the operations on them; state.go and recurrent.go describe them.
#ifndef MLXCEL_MLX_STATE_H
#define MLXCEL_MLX_STATE_H

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mx_state mx_state;
mx_state *mx_state_new(mx_stream *, int rows, int cols, int dtype, mx_failure *);
void mx_state_free(mx_state *);
int64_t mx_state_len(const mx_state *);
uint64_t mx_state_bytes(const mx_state *);
mx_state *mx_state_copy(mx_state *, mx_failure *);
// The matrix, row-major without padding. Writing sets the length.
bool mx_state_read(mx_state *, void *data, size_t bytes, mx_failure *);
bool mx_state_write(mx_state *, const void *data, size_t bytes, int64_t length, mx_failure *);

typedef struct {
  mx_state *state;
  int64_t row0, rows, pos;
} mx_state_segment;

mx_array *mx_causal_conv(mx_scope *, mx_array *x, mx_array *weight, mx_array *bias, bool silu, const mx_state_segment *, int n);
mx_array *mx_selective_scan(mx_scope *, mx_array *x, mx_array *dt, mx_array *b, mx_array *c, mx_array *a, mx_array *skip,
                            const mx_state_segment *, int n);

typedef struct {
  int heads, head_dim, groups, states;
  float dt_min, dt_max;
} mx_ssm_spec;
mx_array *mx_ssm(mx_scope *, mx_array *xbc, mx_array *dt, mx_array *a, mx_array *skip, mx_array *dt_bias,
                 const mx_ssm_spec *, const mx_state_segment *, int n);

typedef struct {
  int key_heads, value_heads, key_dim, value_dim;
  bool channel_gate;
  float lower_bound;
} mx_delta_spec;
mx_array *mx_gated_delta(mx_scope *, mx_array *qkv, mx_array *gate, mx_array *beta, mx_array *a, mx_array *gate_bias,
                         const mx_delta_spec *, const mx_state_segment *, int n);

mx_array *mx_sigmoid_mul(mx_scope *, mx_array *x, mx_array *gate);

#ifdef __cplusplus
}
#endif
#endif
