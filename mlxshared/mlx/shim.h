// The C face of the C++ shim. Nothing here throws: an operation returns NULL (or false) and leaves its error in the
// scope; other calls describe it in *failure, whose text the caller frees.
#ifndef MLXCEL_MLX_SHIM_H
#define MLXCEL_MLX_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mx_stream mx_stream;
typedef struct mx_scope mx_scope;
typedef struct mx_array mx_array;
typedef struct mx_kv mx_kv;

// What kind of error it was: a wrong argument or use; memory that could not be had; anything else.
enum { MX_INVALID, MX_NO_MEMORY, MX_DEVICE };
typedef struct {
  char *text; // NULL if there was no memory for it
  int kind;
} mx_failure;

// Streams and memory.
enum { MX_ISA_AUTO, MX_ISA_PLAIN, MX_ISA_AVX2, MX_ISA_AVX512, MX_ISA_NEON };
mx_stream *mx_stream_open(bool gpu, bool kernels, int threads, int isa, mx_failure *);
bool mx_stream_close(mx_stream *, mx_failure *);
// Bytes of the stream's caches and states; what several share counts once.
uint64_t mx_stream_held(mx_stream *);
// Bytes of working memory that the stream's kernels keep from one operation to the next, and letting go of it.
uint64_t mx_stream_scratch(mx_stream *);
void mx_stream_release_scratch(mx_stream *);
const char *mx_version(void);
bool mx_gpu_available(void);
char *mx_device_name(bool gpu); // the caller frees it
uint64_t mx_device_total_memory(bool gpu);
uint64_t mx_device_free_memory(bool gpu);
uint64_t mx_memory_in_use(mx_stream *);
uint64_t mx_memory_peak(mx_stream *);
uint64_t mx_memory_cached(void);
void mx_memory_reset_peak(void);
void mx_memory_clear_cache(void);
void mx_memory_trim(void);
void mx_memory_set_limit(size_t);
void mx_memory_set_cache_limit(size_t);

// Arrays.
int64_t mx_live_arrays(void); // arrays that exist, over all scopes and callers
int mx_array_ndim(const mx_array *);
int mx_array_dim(const mx_array *, int);
size_t mx_array_size(const mx_array *);
int mx_array_dtype(const mx_array *);
void mx_array_free(mx_array *);

// Scopes.
mx_scope *mx_scope_new(mx_stream *); // NULL if there is no memory
void mx_scope_free(mx_scope *);
void mx_scope_release(mx_scope *, mx_array *);
bool mx_scope_adopt(mx_scope *, mx_array *);
const char *mx_scope_error(mx_scope *, int part); // 0 the operation, 1 its inputs, 2 the reason
int mx_scope_error_kind(const mx_scope *);
bool mx_eval(mx_scope *, mx_array *const *, int n);
// *size is the bytes that the caller wants to write, or SIZE_MAX to be told how many there are.
mx_array *mx_uninitialized(mx_scope *, int dtype, const int *shape, int ndim, void **data, size_t *size);
mx_array *mx_from_bytes(mx_scope *, const void *data, size_t bytes, int dtype, const int *shape, int ndim);
bool mx_copy_to(mx_scope *, mx_array *, void *dst, size_t bytes);
bool mx_elements(mx_scope *, mx_array *, void **data); // row-major; valid as long as the array

// Operations.
enum { MX_ADD, MX_SUB, MX_MUL, MX_MAXIMUM, MX_MINIMUM };
mx_array *mx_binary(mx_scope *, int op, mx_array *, mx_array *);
enum { MX_NEG, MX_EXP, MX_SQUARE, MX_CONTIGUOUS };
mx_array *mx_unary(mx_scope *, int op, mx_array *);
mx_array *mx_astype(mx_scope *, mx_array *, int dtype);
mx_array *mx_scalar(mx_scope *, double, int dtype);
enum { MX_RESHAPE, MX_TRANSPOSE, MX_SQUEEZE };
mx_array *mx_shaped(mx_scope *, int op, mx_array *, const int *values, int n);
mx_array *mx_slice_axis(mx_scope *, mx_array *, int axis, int from, int to);
mx_array *mx_concat(mx_scope *, mx_array *const *, int n, int axis);
mx_array *mx_take(mx_scope *, mx_array *, mx_array *indices, int axis);
mx_array *mx_select_rows(mx_scope *, mx_array *, const int32_t *rows, int n);
mx_array *mx_softmax(mx_scope *, mx_array *, int axis, bool precise);

// Transformer operations; heavy.go describes them.
typedef struct {
  int format, bits, group;
  mx_array *w, *scales, *biases;
} mx_matrix;
mx_array *mx_quantize(mx_scope *, mx_array *, int format, int bits, int group, mx_array **scales, mx_array **biases);
mx_array *mx_dequantize(mx_scope *, const mx_matrix *, int dtype);
mx_array *mx_linear(mx_scope *, mx_array *x, const mx_matrix *, mx_array *bias);
mx_array *mx_embedding(mx_scope *, mx_array *ids, const mx_matrix *, int dtype);
mx_array *mx_rms_norm(mx_scope *, mx_array *x, mx_array *weight, float eps, float offset);
mx_array *mx_add_rms_norm(mx_scope *, mx_array *x, mx_array *y, mx_array *weight, float eps, float offset,
                          mx_array **norm);
mx_array *mx_rope(mx_scope *, mx_array *x, mx_array *pos, mx_array *inv_freq, int head_dim, int rot_dim, float scale,
                  bool traditional);
mx_array *mx_silu_mul(mx_scope *, mx_array *gate, mx_array *up);

typedef struct {
  int heads, kv_heads, head_dim, value_dim;
  float scale;
  int64_t window;
  float softcap;
  int64_t chunk;
  mx_array *sinks;
} mx_attention_spec;
typedef struct {
  mx_kv *kv;
  int64_t row0, rows, pos;
} mx_segment;
mx_array *mx_attention(mx_scope *, mx_array *q, mx_array *k, mx_array *v, const mx_attention_spec *,
                       const mx_segment *, int n);

// Caches.
mx_kv *mx_kv_new(mx_stream *, int kv_heads, int k_dim, int v_dim, int dtype, mx_failure *);
void mx_kv_free(mx_kv *);
int64_t mx_kv_len(const mx_kv *);
int64_t mx_kv_first(const mx_kv *);
uint64_t mx_kv_bytes(const mx_kv *);
uint64_t mx_kv_owed(const mx_kv *);
bool mx_kv_truncate(mx_kv *, int64_t len, mx_failure *);
bool mx_kv_drop_before(mx_kv *, int64_t pos, mx_failure *);
mx_kv *mx_kv_share(mx_kv *, int64_t keep, mx_failure *);
bool mx_kv_begin(mx_kv *, int64_t first, mx_failure *);
// Rows of positions, row-major; a latent cache has no v. k_bytes and v_bytes must be theirs, or 0 for one not to be read.
bool mx_kv_read(mx_kv *, int64_t pos, int64_t n, void *k, size_t k_bytes, void *v, size_t v_bytes, mx_failure *);
bool mx_kv_append(mx_kv *, int64_t n, const void *k, size_t k_bytes, const void *v, size_t v_bytes, mx_failure *);

#ifdef __cplusplus
}
#endif
#endif
