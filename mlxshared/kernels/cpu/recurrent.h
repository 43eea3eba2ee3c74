// CPU kernels of layers that keep a state of fixed size: causal convolutions and linear recurrences.
//
// Numerics. A row's result and the state after it depend on the row and on the state before it alone: rows run one after the
// other in the order of their positions, with one formula for prompt and generated tokens, so that no batch, chunk or
// thread count changes a bit. Sixteen channels of one row share a vector; sums over a head's state run in ascending
// order with fused multiply-add. Everything is computed in float32; outputs are rounded once.
//
// A state is a matrix [rows, cols] whose rows are padded to a multiple of sixteen elements. It belongs to the caller, who
// starts with zeros.
#ifndef MLXCEL_KERNELS_CPU_RECURRENT_H
#define MLXCEL_KERNELS_CPU_RECURRENT_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

size_t mk_state_bytes(int64_t rows, int64_t cols, mk_dtype t);

// One sequence's share of a call: rows [row0, row0+n) follow on what state holds, and state then holds them.
typedef struct {
  void *state;
  int64_t row0;
  int64_t n;
} mk_recurrent_segment;

// A depthwise causal convolution: y[r, c] = act(bias[c] + sum over k < width of weight[k, c] * x[r-width+1+k, c]), act
// being silu or nothing. x and y are [rows, channels] in t, weight [width, channels] and bias [channels] (or NULL)
// float32. The state [width-1, channels] in t holds the last rows of x.
typedef struct {
  int channels, width;
  int silu;
} mk_conv;
void mk_causal_conv(mk_pool *, const mk_conv *, const float *weight, const float *bias, const void *x, mk_dtype t,
                    const mk_recurrent_segment *segs, int64_t nsegs, void *y);

// Mamba's selective scan (Gu and Dao 2023). With d = softplus(dt[r, c]), for each of a channel's states s:
//   state[s, c] = exp(d * a[s, c]) * state[s, c] + d * x[r, c] * b[r, s]
//   y[r, c] = sum over s of state[s, c] * c[r, s] + skip[c] * x[r, c]
// x, dt and y are [rows, channels], b and c [rows, states], all in t; a [states, channels] and skip [channels] float32. The
// state [states, channels] is kept in t, rounded after every row.
typedef struct {
  int channels, states;
} mk_scan;
mk_result mk_selective_scan(mk_pool *, const mk_scan *, const float *a, const float *skip, const void *x, const void *dt,
                            const void *b, const void *c, mk_dtype t, const mk_recurrent_segment *segs, int64_t nsegs, void *y);

// Mamba-2's recurrence (Dao and Gu 2024), token by token. With d = softplus(dt[r, h] + dt_bias[h]) cut to [dt_min,
// dt_max], for each state s and element p of a head:
//   state[h, s, p] = exp(d * a[h]) * state[h, s, p] + d * x[r, h, p] * b[r, g, s]
//   y[r, h, p] = sum over s of state[h, s, p] * c[r, g, s] + skip[h] * x[r, h, p]
// where g is the head's group. xbc is [rows, heads*head_dim + 2*groups*states]: x, b and c beside each other; dt is [rows,
// heads]; both in t, as is y [rows, heads*head_dim]. a, skip and dt_bias are [heads] float32, the state
// [heads*states, head_dim] float32.
typedef struct {
  int heads, head_dim, groups, states;
  float dt_min, dt_max;
} mk_ssm;
mk_result mk_ssm_step(mk_pool *, const mk_ssm *, const float *a, const float *skip, const float *dt_bias, const void *xbc,
                      const void *dt, mk_dtype t, const mk_recurrent_segment *segs, int64_t nsegs, void *y);

// The gated delta rule (Yang et al. 2024, "Gated delta networks"), token by token. For a head with queries and keys of
// unit length (x / sqrt(sum(x^2) + 1e-6), queries also times key_dim^-0.5), values v and state S [key_dim, value_dim]:
//   S = decay * S;  S = S + k (sigmoid(beta) * (v - k.S));  y = q.S
// decay is exp(-a[h] * softplus(gate + gate_bias)), or with lower_bound < 0 exp(lower_bound * sigmoid(a[h] * (gate +
// gate_bias))): one number for each head, or with channel_gate one for each of its keys' elements (Kimi's delta attention).
// qkv is [rows, 2*key_heads*key_dim + value_heads*value_dim], gate [rows, value_heads] or [rows, value_heads*key_dim],
// beta [rows, value_heads], y [rows, value_heads*value_dim], all in t. a [value_heads] and gate_bias (as a row of
// gate) are float32, as is the state [value_heads*key_dim, value_dim]. Value head h reads key head h / (value_heads / key_heads).
typedef struct {
  int key_heads, value_heads, key_dim, value_dim;
  int channel_gate;
  float lower_bound; // 0 for none
} mk_delta;
mk_result mk_gated_delta(mk_pool *, const mk_delta *, const float *a, const float *gate_bias, const void *qkv, const void *gate,
                         const void *beta, mk_dtype t, const mk_recurrent_segment *segs, int64_t nsegs, void *y);

// y[r, i] = x[r, i] * sigmoid(gate[r, i]), or sigmoid(gate[r]) where gate_dim is 1 instead of dim.
void mk_sigmoid_mul(mk_pool *, const void *x, const void *gate, mk_dtype t, int64_t rows, int64_t dim, int64_t gate_dim,
                    void *y);

#ifdef __cplusplus
}
#endif
#endif
