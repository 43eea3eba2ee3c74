// CPU kernels for mixtures of experts, under the same numerics as kernels.h.
#ifndef MLXCEL_KERNELS_CPU_MOE_H
#define MLXCEL_KERNELS_CPU_MOE_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// Expert e's matrix in a stack [experts, rows, cols] that stack describes as one of its matrices.
mk_matrix mk_expert(const mk_matrix *stack, int64_t e);

// y[r, j, rows] = x . w[ids[r, j]]^T + bias[ids[r, j]] for r < m, j < k. x is [m, cols], or [m, k, cols] if per_choice; ids
// [m, k] lie in [0, experts); bias is [experts, rows] or NULL. Each result is that of mk_linear on its row alone.
mk_result mk_linear_gather(mk_pool *, const mk_matrix *stack, int64_t experts, const void *bias, mk_dtype bias_dtype,
                           const void *x, mk_dtype xt, int per_choice, const int32_t *ids, int64_t m, int k, void *y);

typedef enum {
  MK_ROUTE_SOFTMAX_CHOSEN = 0, // by logit; weights are the softmax over the chosen
  MK_ROUTE_SOFTMAX_ALL = 1,    // by logit; weights are their share of the softmax over all
  MK_ROUTE_SIGMOID = 2         // by sigmoid + bias, weights are the sigmoid; by logit where there is neither bias nor group
} mk_route_scores;

typedef struct {
  int experts, top_k;
  mk_route_scores scores;
  int normalize;        // weights are divided by their sum + epsilon, if top_k > 1
  float epsilon, scale; // scale multiplies the weights
  const float *bias;    // [experts] or NULL
  int groups;           // 1, or a divisor of experts with at least two in each
  int top_groups;       // groups that keep their scores; the others' become 0. A group's score is the sum of its two best
  int high_ties;        // among equal scores the higher number wins, else the lower
} mk_route_spec;

// ids [rows, top_k] and weights [rows, top_k] of the experts with the largest scores, best first. A NaN score loses to
// every other.
mk_result mk_route(mk_pool *, const void *logits, mk_dtype t, const mk_route_spec *, int64_t rows, int32_t *ids, float *weights);

// y[r, dim] = sum over j < k of weights[r, j] * x[r, j, dim], in float32 by ascending j, rounded once.
void mk_weighted_sum(mk_pool *, const void *x, mk_dtype t, const float *weights, int64_t rows, int k, int64_t dim, void *y);

// y[i] = g * sigmoid(alpha * g) * (u + 1), with g = min(gate[i], limit) and u = up[i] clipped to [-limit, limit].
void mk_clamped_swiglu(mk_pool *, const void *gate, const void *up, mk_dtype t, float alpha, float limit, int64_t n, void *y);

#ifdef __cplusplus
}
#endif
#endif
