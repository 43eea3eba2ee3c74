// The C face of the operations of multi-head latent attention; latent.go describes them.
#ifndef MLXCEL_MLX_LATENT_H
#define MLXCEL_MLX_LATENT_H

#include "shim.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int heads, dim;
  int64_t top_k;
  mx_array *q, *k, *weights;
} mx_index;

mx_kv *mx_kv_new_latent(mx_stream *, int k_dim, int v_dim, int dtype, mx_failure *);
mx_array *mx_multi_linear(mx_scope *, mx_array *x, const mx_matrix *);
// index_kv holds the indexer's cache of each segment.
mx_array *mx_sparse_attention(mx_scope *, mx_array *q, mx_array *k, const mx_attention_spec *, const mx_index *,
                              const mx_segment *, mx_kv *const *index_kv, int n);

#ifdef __cplusplus
}
#endif
#endif
