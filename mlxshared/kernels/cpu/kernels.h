// CPU kernels for the operations that carry a transformer's work.
//
// Numerics. Every reduction runs in one canonical order that depends only on the row's own length and
// absolute positions, never on batch, chunk, thread count or instruction set: sixteen float32 lanes, lane
// i%16 accumulating element i in ascending order with fused multiply-add, then a fixed pairwise tree
// (8, 4, 2, 1). Attention's weighted sum of values is the exception: each of its elements is one ascending
// chain over absolute positions, cut into spans of a fixed number of positions that are merged in ascending
// order. Weights are dequantized to float32 (fma(q, scale, bias)) before they enter the sum, inputs of any
// dtype are widened to float32, and results are rounded once, to nearest even. AVX-512, AVX2+FMA, NEON and
// the plain path therefore give the same bits.
#ifndef MLXCEL_KERNELS_CPU_H
#define MLXCEL_KERNELS_CPU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { MK_F32 = 0, MK_F16 = 1, MK_BF16 = 2 } mk_dtype;

typedef enum {
  MK_ISA_AUTO = 0,
  MK_ISA_PLAIN = 1,
  MK_ISA_AVX2 = 2,
  MK_ISA_AVX512 = 3,
  MK_ISA_NEON = 4
} mk_isa;

// What a call that takes memory answers: 0, or how many bytes could not be had (1 if the number is not known), or
// MK_POSITION. Where it lacked memory its outputs are undefined and, but for a recurrent state, nothing else has changed.
typedef int64_t mk_result;
enum { MK_POSITION = -1 }; // positions that do not fit what the cache holds

// Lets the n-th allocation from now on fail, once; 0 lets none. Returns what was left of the last n. For tests: whoever
// else allocates for the kernels' callers counts by mk_allocation_fails, which says whether this is the one.
int64_t mk_fail_allocation(int64_t n);
int mk_allocation_fails(void);

// The best instruction set that this machine runs.
mk_isa mk_best_isa(void);

// A fixed team of threads that splits the rows of an operation. threads counts the caller: 1 starts none.
// Idle members spin for a bounded time, then sleep. One operation runs in a pool at a time.
typedef struct mk_pool mk_pool;
mk_pool *mk_pool_new(int threads, mk_isa isa); // isa MK_ISA_AUTO picks the best; NULL if the machine lacks it
void mk_pool_free(mk_pool *);
int mk_pool_threads(const mk_pool *);
mk_isa mk_pool_isa(const mk_pool *);
size_t mk_pool_scratch(const mk_pool *); // bytes of working memory that the threads keep; not while an operation runs
void mk_pool_release(mk_pool *);         // frees that memory; the same

typedef enum {
  MK_DENSE = 0,   // data [rows, cols] in dtype
  MK_AFFINE = 1,  // data uint32 [rows, cols*bits/32], scales and biases [rows, cols/group] in dtype; bits 2,3,4,5,6,8
  MK_MXFP4 = 2,   // data uint32 [rows, cols/8] of E2M1, scales uint8 E8M0 [rows, cols/32]
  MK_MXFP8 = 3,   // data uint32 [rows, cols/4] of E4M3, scales uint8 E8M0 [rows, cols/32]
  MK_NVFP4 = 4    // data uint32 [rows, cols/8] of E2M1, scales uint8 E4M3 [rows, cols/16]
} mk_format;

// A weight matrix in MLX's layout: row-major, output features by input features. Pointers are borrowed and
// need no alignment beyond that of one byte.
typedef struct {
  mk_format format;
  mk_dtype dtype; // of data (dense) or of scales and biases (affine)
  int bits;
  int group;
  int64_t rows;
  int64_t cols;
  const void *data;
  const void *scales;
  const void *biases;
} mk_matrix;

// NULL, or why this matrix cannot be run (a static string).
const char *mk_matrix_check(const mk_matrix *);

// y[m, rows] = x[m, cols] . w^T + bias. x and y are dense in xt; bias is [rows] in bias_dtype or NULL and is
// added in float32 before the one rounding.
mk_result mk_linear(mk_pool *, const mk_matrix *w, const void *bias, mk_dtype bias_dtype, const void *x, mk_dtype xt,
                    void *y, int64_t m);

// y[i, cols] = row ids[i] of w, dequantized and rounded to yt. ids lie in [0, rows).
mk_result mk_embed(mk_pool *, const mk_matrix *w, const int32_t *ids, int64_t n, void *y, mk_dtype yt);

// y[r, dim] = x / sqrt(mean(x^2) + eps) * weight, all in float32, rounded once. weight [dim] in wt; NULL means ones.
// weight_offset is added to the weight (1 for families that store weight-1).
void mk_rms_norm(mk_pool *, const void *x, mk_dtype xt, const void *weight, mk_dtype wt, float weight_offset, float eps,
                 int64_t rows, int64_t dim, void *y);

// sum = x + y, rounded to t, and norm = mk_rms_norm of that sum. sum may be x or y.
void mk_add_rms_norm(mk_pool *, const void *x, const void *y, mk_dtype t, const void *weight, mk_dtype wt,
                     float weight_offset, float eps, int64_t rows, int64_t dim, void *sum, void *norm);

// Rotary embedding of x [rows, heads, head_dim] by each row's absolute position. inv_freq [rot_dim/2] holds the angle
// per position; scale multiplies the rotated part of the input (yarn's mscale; 1 otherwise). traditional rotates
// neighbours (2i, 2i+1), else halves (i, i + rot_dim/2). Elements past rot_dim are copied. x and y may alias.
mk_result mk_rope(mk_pool *, const void *x, mk_dtype xt, const int32_t *pos, const float *inv_freq, int64_t rows, int heads,
                  int head_dim, int rot_dim, float scale, int traditional, void *y);

// y[i] = silu(gate[i]) * up[i].
void mk_silu_mul(mk_pool *, const void *gate, const void *up, mk_dtype t, int64_t n, void *y);

// y = x in another dtype.
void mk_convert(mk_pool *, const void *x, mk_dtype xt, int64_t n, void *y, mk_dtype yt);

typedef enum { MK_ADD = 0, MK_MUL = 1 } mk_binary_op;

// y[i] = a[i] op b[i % period], in float32, rounded once. period divides n: n pairs every element with its own, a row's
// length repeats a row, 1 repeats a scalar. y may be a.
void mk_binary(mk_pool *, mk_binary_op op, const void *a, const void *b, mk_dtype t, int64_t n, int64_t period, void *y);

// Keys and values of one sequence in one layer, in blocks of MK_KV_BLOCK positions that never move. Blocks may be shared
// between caches. held, if not NULL, is raised by what lives in blocks: each counts once, however many caches share it. It
// must outlive the cache and those that share with it.
#define MK_KV_BLOCK 64
typedef struct mk_kv mk_kv;
mk_kv *mk_kv_new(int kv_heads, int k_dim, int v_dim, mk_dtype t, int64_t *held);
// A cache with one head whose values are the first v_dim elements of its keys and take no memory (the latent of
// multi-head latent attention). v_dim <= k_dim. v is ignored wherever keys and values are passed.
mk_kv *mk_kv_new_latent(int k_dim, int v_dim, mk_dtype t, int64_t *held);
void mk_kv_free(mk_kv *);
int64_t mk_kv_len(const mk_kv *);             // positions held, absolute: one past the last
int64_t mk_kv_first(const mk_kv *);           // the first position that was not dropped
size_t mk_kv_bytes(const mk_kv *);            // memory of its blocks, shared ones in full
size_t mk_kv_owed(const mk_kv *);             // of these, what the next append copies because others share it
void mk_kv_truncate(mk_kv *, int64_t len);    // drops positions >= len and frees blocks past it
void mk_kv_drop_before(mk_kv *, int64_t pos); // frees whole blocks that lie before pos (sliding windows)
// A cache with the first keep positions, in the same blocks: one is copied when either writes to it. NULL when memory
// ran out or keep is more than there are.
mk_kv *mk_kv_share(const mk_kv *, int64_t keep);
// Lets an empty cache begin at a position, as if those before it had been dropped.
mk_result mk_kv_begin(mk_kv *, int64_t first);
// Copies positions [pos, pos+n), none of them dropped, to rows k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim], of which
// either may be NULL.
mk_result mk_kv_read(const mk_kv *, int64_t pos, int64_t n, void *k, void *v);
// Appends rows [n, kv_heads, dim] at positions pos..pos+n; pos must equal the length. Nothing is changed where it fails.
mk_result mk_kv_append(mk_kv *, int64_t pos, const void *k, const void *v, int64_t n);

// One sequence's share of an attention call: rows q[row0, row0+n) at absolute positions pos..pos+n over the
// first pos+n positions of kv (already appended), causal.
typedef struct {
  const mk_kv *kv;
  int64_t row0;
  int64_t n;
  int64_t pos;
} mk_segment;

// y[rows, heads, v_dim] = softmax(scale * q.k, masked causally and to the last `window` positions if window > 0) . v.
// Grouped query heads: head h reads kv head h / (heads / kv_heads). sinks [heads] float32 or NULL joins the softmax's denominator
// as one more logit. softcap > 0 applies softcap*tanh(score/softcap) before the mask.
mk_result mk_attention(mk_pool *, const void *q, mk_dtype t, int heads, float scale, int64_t window, float softcap,
                       const float *sinks, const mk_segment *segs, int64_t nsegs, void *y);

// One matrix per head: y[i, h] = x[i, h] . w[h]^T for x [m, heads, cols] and y [m, heads, rows / heads], where w stacks
// the heads' matrices. x and y are dense in xt.
mk_result mk_multi_linear(mk_pool *, const mk_matrix *w, int heads, const void *x, mk_dtype xt, void *y, int64_t m);

// What picks the positions that a row attends to. Position p scores sum over h of weights[h] * max(0, q[h] . key[p]), in
// float32 and ascending h; the top_k largest are taken, of equals the later positions, NaN above all. A row that sees no
// more than top_k positions takes them all.
typedef struct {
  int heads, dim;
  int64_t top_k;
  const void *q;             // [rows, heads, dim] in the attention's dtype
  const float *weights;      // [rows, heads]
  const mk_kv *const *keys;  // per segment: a latent cache of k_dim = dim that holds its positions
} mk_indexer;

// mk_attention over latent caches, each row over the positions that the indexer picks.
mk_result mk_sparse_attention(mk_pool *, const void *q, mk_dtype t, int heads, float scale, const mk_segment *segs,
                              int64_t nsegs, const mk_indexer *, void *y);

// mk_attention over the positions of a row's own chunk: those from chunk * (position / chunk) on (Llama 4).
mk_result mk_chunked_attention(mk_pool *, const void *q, mk_dtype t, int heads, float scale, int64_t chunk,
                               const mk_segment *segs, int64_t nsegs, void *y);

// The dequantized float32 value of every element of row r (for tests and for tools).
void mk_dequantize_row(const mk_matrix *w, int64_t r, float *out);

#ifdef __cplusplus
}
#endif
#endif
