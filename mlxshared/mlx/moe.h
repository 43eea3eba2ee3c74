// The C face of the mixture-of-experts operations; moe.go describes them.
#ifndef MLXCEL_MLX_MOE_H
#define MLXCEL_MLX_MOE_H

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MX_ROUTE_SOFTMAX_CHOSEN, MX_ROUTE_SOFTMAX_ALL, MX_ROUTE_SIGMOID };
typedef struct {
  int top_k, scores;
  bool normalize;
  float epsilon, scale;
  int groups, top_groups;
  bool high_ties;
  mx_array *bias;
} mx_route_spec;

mx_array *mx_linear_gather(mx_scope *, mx_array *x, const mx_matrix *, mx_array *bias, mx_array *ids);
mx_array *mx_route(mx_scope *, mx_array *logits, const mx_route_spec *, mx_array **weights);
mx_array *mx_weighted_sum(mx_scope *, mx_array *x, mx_array *weights);
mx_array *mx_clamped_swiglu(mx_scope *, mx_array *gate, mx_array *up, float alpha, float limit);

#ifdef __cplusplus
}
#endif
#endif
