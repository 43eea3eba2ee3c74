// What every instruction set implements: one table of functions, each over a range of rows or units.
//
// The files isa_*.cc compile the same source (impl_*.h) over different vectors. Such a file may use no inline or
// template function of the standard library: the linker would be free to keep that file's copy for everyone.
#ifndef MLXCEL_KERNELS_CPU_OPS_H
#define MLXCEL_KERNELS_CPU_OPS_H

#include <stdint.h>

#include "kernels.h"
#include "kv.h"
#include "moe.h"
#include "pool.h"
#include "recurrent_ops.h"

namespace mk {

static inline int64_t round16(int64_t n) { return (n + 15) & ~int64_t(15); }
static inline int64_t item_size(mk_dtype t) { return t == MK_F32 ? 4 : 2; }
// Bytes of one row of data.
int64_t row_bytes(const mk_matrix &w);

// m rows of x, already widened to float32 in the matrix's lane layout, times w.
struct LinearJob {
  const mk_matrix *w;
  const void *bias;
  mk_dtype bias_dtype;
  const float *x;
  int64_t x_stride; // floats; a multiple of 16, zero past cols
  int64_t m;
  unsigned char *y; // [m, w->rows]
  mk_dtype y_dtype;
};

struct NormJob {
  const unsigned char *x;
  mk_dtype dtype;
  const unsigned char *weight;
  mk_dtype weight_dtype;
  float weight_offset, eps;
  int64_t dim;
  unsigned char *y;
};

struct RopeJob {
  const unsigned char *x;
  mk_dtype dtype;
  const int32_t *pos;
  const float *inv_freq;
  int heads, head_dim, rot_dim;
  float scale;
  bool traditional;
  unsigned char *y;
};

struct SiluMulJob {
  const unsigned char *gate, *up;
  mk_dtype dtype;
  unsigned char *y;
};

struct ConvertJob {
  const unsigned char *x;
  mk_dtype x_dtype;
  unsigned char *y;
  mk_dtype y_dtype;
};

struct BinaryJob {
  mk_binary_op op;
  const unsigned char *a, *b;
  mk_dtype dtype;
  int64_t period; // of b
  unsigned char *y;
};

struct SoftcapJob {
  const unsigned char *x;
  mk_dtype dtype;
  float cap;
  unsigned char *y;
};

struct EmbedJob {
  const mk_matrix *w;
  const int32_t *ids;
  unsigned char *y;
  mk_dtype y_dtype;
};

// Attention splits into units: some neighbouring rows of one segment with some query heads of one kv head. The
// positions are cut into spans of kSpan (absolute), each reduced on its own and merged in ascending order, so that spans
// can run on different members without a change in the result.
constexpr int64_t kSpan = 1024;
// Queries (a row's head each) of one unit: enough that a block of keys, once in the cache, serves many, and few enough
// that one row with many heads over one kv head still feeds every member.
constexpr int64_t kUnitQueries = 24;

struct AttentionUnit {
  const mk_segment *segment;
  const KvView *kv;
  int64_t row, rows; // within the segment
  int kv_head;
  int first_head, heads;         // of the query
  int64_t first_span, last_span; // inclusive
  float *partials;               // of the unit's spans when they run apart, else null
};

struct AttentionJob {
  const unsigned char *q;
  mk_dtype dtype;
  int heads;
  float scale;
  int64_t window;
  float softcap;
  const float *sinks;
  unsigned char *y;
  int64_t chunk;

  // The first position that a row at `position` sees.
  int64_t first_seen(int64_t position) const {
    int64_t low = window > 0 && position >= window ? position + 1 - window : 0;
    int64_t start = chunk > 0 ? position - position % chunk : 0;
    return start > low ? start : low;
  }
};

// Scores of positions by an indexer's heads (mk_indexer).
struct IndexJob {
  const unsigned char *q;
  mk_dtype dtype;
  const float *weights;
  int heads, dim;
};

struct RouteJob {
  const mk_route_spec *spec;
  const unsigned char *logits; // [rows, experts]
  mk_dtype dtype;
  int32_t *ids;
  float *weights;
};

struct WeightedSumJob {
  const unsigned char *x; // [rows, k, dim]
  mk_dtype dtype;
  const float *weights;
  int k;
  int64_t dim;
  unsigned char *y;
};

struct ClampedSwigluJob {
  const unsigned char *gate, *up;
  mk_dtype dtype;
  float alpha, limit;
  unsigned char *y;
};

struct MoeOps {
  void (*route)(const RouteJob &, int64_t begin, int64_t end, Worker &);         // over rows
  void (*weighted_sum)(const WeightedSumJob &, int64_t begin, int64_t end);      // over rows
  void (*clamped_swiglu)(const ClampedSwigluJob &, int64_t begin, int64_t end);  // over elements
};

struct Ops {
  // Whether rows of w want x with neighbours (i, i+8) interleaved within each sixteen.
  bool (*paired)(const mk_matrix &w);
  // n elements to float32, zero up to a multiple of 16.
  void (*widen)(const void *x, mk_dtype t, int64_t n, bool paired, float *out);
  void (*linear)(const LinearJob &, int64_t begin, int64_t end, Worker &); // over output features
  void (*embed)(const EmbedJob &, int64_t begin, int64_t end, Worker &);   // over ids
  void (*dequantize)(const mk_matrix &w, int64_t row, float *out, Worker &);
  void (*rms_norm)(const NormJob &, int64_t begin, int64_t end); // over rows
  void (*rope)(const RopeJob &, int64_t begin, int64_t end, Worker &); // over rows
  void (*silu_mul)(const SiluMulJob &, int64_t begin, int64_t end);    // over elements
  // Floats that one span's partial result of a unit takes.
  int64_t (*attention_partial)(const AttentionJob &, const AttentionUnit &);
  void (*attention_unit)(const AttentionJob &, const AttentionUnit &, Worker &);               // all spans, to y
  void (*attention_span)(const AttentionJob &, const AttentionUnit &, int64_t span, Worker &); // into partials
  void (*attention_merge)(const AttentionJob &, const AttentionUnit &, Worker &);              // partials to y
  const MoeOps *moe;
  const RecurrentOps *recurrent;
  // One row against the MK_KV_BLOCK positions of a block of a latent cache.
  void (*index_scores)(const IndexJob &, int64_t row, const KvView &, int64_t block, float *out, Worker &);
  void (*gelu_mul)(const SiluMulJob &, int64_t begin, int64_t end); // over elements
  void (*softcap)(const SoftcapJob &, int64_t begin, int64_t end);  // over elements
  void (*binary)(const BinaryJob &, int64_t begin, int64_t end);    // over elements
  void (*convert)(const ConvertJob &, int64_t begin, int64_t end);  // over elements
};

// Null when this build or this machine lacks it.
const Ops *ops_for(mk_isa isa);
const Ops *ops_plain();
const Ops *ops_avx2();
const Ops *ops_avx512();
const Ops *ops_neon();

} // namespace mk

#endif
