#include "kernels.h"

#include <cmath>
#include <vector>

#include "calls.h"

namespace mk {

const Ops *ops_for(mk_isa isa) {
  switch (isa) {
  case MK_ISA_PLAIN:
    return ops_plain();
  case MK_ISA_AVX2:
    return ops_avx2();
  case MK_ISA_AVX512:
    return ops_avx512();
  case MK_ISA_NEON:
    return ops_neon();
  case MK_ISA_AUTO:
    break;
  }
  return nullptr;
}

int64_t row_bytes(const mk_matrix &w) {
  switch (w.format) {
  case MK_DENSE:
    return w.cols * item_size(w.dtype);
  case MK_AFFINE:
    return w.cols / 8 * w.bits;
  case MK_MXFP4:
  case MK_NVFP4:
    return w.cols / 2;
  case MK_MXFP8:
    return w.cols;
  }
  return 0;
}

namespace {

// x as float32 in the layout that w's kernel wants, for rows at a time.
struct WidenJob {
  const Ops *ops;
  const unsigned char *x;
  mk_dtype dtype;
  int64_t cols, stride;
  bool paired;
  float *out;
};

void widen_task(void *context, int64_t begin, int64_t end, Worker &) {
  const WidenJob &j = *static_cast<const WidenJob *>(context);
  for (int64_t r = begin; r < end; r++)
    j.ops->widen(j.x + r * j.cols * item_size(j.dtype), j.dtype, j.cols, j.paired, j.out + r * j.stride);
}

void linear_task(void *context, int64_t begin, int64_t end, Worker &w) {
  auto *c = static_cast<const Call<LinearJob> *>(context);
  // A unit is a block of sixteen output features.
  int64_t last = end * 16 < c->job.w->rows ? end * 16 : c->job.w->rows;
  c->ops->linear(c->job, begin * 16, last, w);
}

struct AddNormCall {
  const Ops *ops;
  BinaryJob add;
  NormJob norm;
};

void add_norm_task(void *context, int64_t begin, int64_t end, Worker &) {
  auto *c = static_cast<const AddNormCall *>(context);
  for (int64_t r = begin; r < end; r++) { // row by row: the sum is read where it was just written
    c->ops->binary(c->add, r * c->norm.dim, (r + 1) * c->norm.dim);
    c->ops->rms_norm(c->norm, r, r + 1);
  }
}

// Rows of x handled in one go: enough to pay for taking the weights apart, few enough for the second-level cache.
int64_t rows_at_once(int64_t stride) {
  int64_t n = (int64_t(1) << 18) / stride;
  return n < 48 ? 48 : n > 528 ? 528 : n / 48 * 48;
}

} // namespace
} // namespace mk

using namespace mk;

extern "C" {

mk_isa mk_best_isa(void) {
  for (mk_isa isa : {MK_ISA_AVX512, MK_ISA_AVX2, MK_ISA_NEON})
    if (ops_for(isa))
      return isa;
  return MK_ISA_PLAIN;
}

const char *mk_matrix_check(const mk_matrix *w) {
  if (w->rows < 0 || w->cols < 1)
    return "a matrix needs at least one column";
  if (!w->data && w->rows > 0)
    return "a matrix needs data";
  if (w->dtype != MK_F32 && w->dtype != MK_F16 && w->dtype != MK_BF16)
    return "dtype must be float32, float16 or bfloat16";
  int group = 0, bits = 0;
  switch (w->format) {
  case MK_DENSE:
    return nullptr;
  case MK_AFFINE:
    if (w->bits < 2 || w->bits > 8 || w->bits == 7)
      return "affine bits must be 2, 3, 4, 5, 6 or 8";
    if (w->group != 32 && w->group != 64 && w->group != 128)
      return "affine group must be 32, 64 or 128";
    if (!w->biases && w->rows > 0)
      return "an affine matrix needs biases";
    group = w->group;
    bits = w->bits;
    break;
  case MK_MXFP4:
    group = 32;
    bits = 4;
    break;
  case MK_MXFP8:
    group = 32;
    bits = 8;
    break;
  case MK_NVFP4:
    group = 16;
    bits = 4;
    break;
  default:
    return "unknown format";
  }
  if (w->group != group)
    return w->format == MK_NVFP4 ? "nvfp4's group must be 16" : "mxfp4's and mxfp8's group must be 32";
  if (w->bits != bits)
    return w->format == MK_MXFP8 ? "mxfp8's bits must be 8" : "mxfp4's and nvfp4's bits must be 4";
  if (w->cols % group != 0)
    return "columns must be a multiple of the group";
  if (!w->scales && w->rows > 0)
    return "a quantized matrix needs scales";
  return nullptr;
}

static void linear(mk_pool *p, const mk_matrix *w, const void *bias, mk_dtype bias_dtype, const void *x, mk_dtype xt, void *y,
                   int64_t m) {
  const int64_t stride = round16(w->cols), at_once = rows_at_once(stride);
  const bool paired = p->ops->paired(*w);
  float *wide = scratch(p->team.workers[0], kScratchInput, (m < at_once ? m : at_once) * stride);
  for (int64_t m0 = 0; m0 < m; m0 += at_once) {
    const int64_t rows = m - m0 < at_once ? m - m0 : at_once;
    WidenJob widen = {p->ops, bytes(x) + m0 * w->cols * item_size(xt), xt, w->cols, stride, paired, wide};
    run(p->team, rows, grain(p, rows, stride / 4), widen_task, &widen);
    Call<LinearJob> call = {p->ops,
                            {w, bias, bias_dtype, wide, stride, rows, bytes(y) + m0 * w->rows * item_size(xt), xt}};
    const int64_t blocks = (w->rows + 15) / 16;
    run(p->team, blocks, grain(p, blocks, (rows + 1) * stride), linear_task, &call);
  }
}

mk_result mk_linear(mk_pool *p, const mk_matrix *w, const void *bias, mk_dtype bias_dtype, const void *x, mk_dtype xt, void *y,
                    int64_t m) {
  return reported([&] { linear(p, w, bias, bias_dtype, x, xt, y, m); });
}

mk_result mk_embed(mk_pool *p, const mk_matrix *w, const int32_t *ids, int64_t n, void *y, mk_dtype yt) {
  return reported([&] { run_job(p, p->ops->embed, {w, ids, bytes(y), yt}, n, grain(p, n, w->cols)); });
}

void mk_rms_norm(mk_pool *p, const void *x, mk_dtype xt, const void *weight, mk_dtype wt, float weight_offset, float eps,
                 int64_t rows, int64_t dim, void *y) {
  run_job(p, p->ops->rms_norm, {bytes(x), xt, bytes(weight), wt, weight_offset, eps, dim, bytes(y)},
          rows, grain(p, rows, dim));
}

void mk_add_rms_norm(mk_pool *p, const void *x, const void *y, mk_dtype t, const void *weight, mk_dtype wt,
                     float weight_offset, float eps, int64_t rows, int64_t dim, void *sum, void *norm) {
  AddNormCall call = {p->ops,
                      {MK_ADD, bytes(x), bytes(y), t, rows * dim, bytes(sum)},
                      {bytes(sum), t, bytes(weight), wt, weight_offset, eps, dim, bytes(norm)}};
  run(p->team, rows, grain(p, rows, 2 * dim), add_norm_task, &call);
}

mk_result mk_rope(mk_pool *p, const void *x, mk_dtype xt, const int32_t *pos, const float *inv_freq, int64_t rows, int heads,
                  int head_dim, int rot_dim, float scale, int traditional, void *y) {
  return reported([&] {
    run_job(p, p->ops->rope, {bytes(x), xt, pos, inv_freq, heads, head_dim, rot_dim, scale, traditional != 0, bytes(y)},
            rows, grain(p, rows, int64_t(heads) * head_dim + 16 * rot_dim));
  });
}

void mk_silu_mul(mk_pool *p, const void *gate, const void *up, mk_dtype t, int64_t n, void *y) {
  run_job(p, p->ops->silu_mul, {bytes(gate), bytes(up), t, bytes(y)}, n, grain(p, n, 4, 16));
}

void mk_convert(mk_pool *p, const void *x, mk_dtype xt, int64_t n, void *y, mk_dtype yt) {
  run_job(p, p->ops->convert, {bytes(x), xt, bytes(y), yt}, n, grain(p, n, 1, 16));
}

void mk_binary(mk_pool *p, mk_binary_op op, const void *a, const void *b, mk_dtype t, int64_t n, int64_t period, void *y) {
  run_job(p, p->ops->binary, {op, bytes(a), bytes(b), t, period, bytes(y)}, n, grain(p, n, 1, 16));
}

void mk_dequantize_row(const mk_matrix *w, int64_t r, float *out) {
  Worker worker;
  mk_matrix row = *w;
  row.rows = 1;
  row.data = bytes(w->data) + r * row_bytes(*w);
  if (w->format != MK_DENSE) {
    int64_t item = w->format == MK_AFFINE ? item_size(w->dtype) : 1, offset = r * (w->cols / w->group) * item;
    row.scales = bytes(w->scales) + offset;
    row.biases = w->biases ? bytes(w->biases) + offset : nullptr;
  }
  const int32_t id = 0;
  ops_for(mk_best_isa())->embed({&row, &id, bytes(out), MK_F32}, 0, 1, worker);
}

} // extern "C"

namespace mk {
namespace {

struct SpanOfUnit {
  int64_t unit, span;
};

struct AttentionCall {
  const Ops *ops;
  AttentionJob job;
  const AttentionUnit *units;
  const SpanOfUnit *spans;
};

std::vector<AttentionUnit> cut_units(const AttentionJob &j, const mk_segment *segments, int64_t n) {
  std::vector<AttentionUnit> units;
  for (int64_t s = 0; s < n; s++) {
    const mk_segment &segment = segments[s];
    const KvView &kv = view_of(segment.kv);
    const int per_head = j.heads / kv.kv_heads, heads = per_head < kUnitQueries ? per_head : int(kUnitQueries);
    const int64_t rows = kUnitQueries / heads;
    for (int64_t row = 0; row < segment.n; row += rows) {
      int64_t count = segment.n - row < rows ? segment.n - row : rows;
      int64_t first = segment.pos + row, low = j.first_seen(first);
      if (low < kv.first)
        low = kv.first;
      int64_t last_span = (first + count - 1) / kSpan, first_span = low / kSpan < last_span ? low / kSpan : last_span;
      for (int h = 0, n; h < j.heads; h += n) {
        const int rest = per_head - h % per_head;
        n = rest < heads ? rest : heads;
        units.push_back({&segment, &kv, row, count, h / per_head, h, n, first_span, last_span, nullptr});
      }
    }
  }
  return units;
}

// Multiplications that a unit takes.
int64_t steps_of(const AttentionJob &j, const AttentionUnit &u) {
  const KvView &kv = *u.kv;
  int64_t first = u.segment->pos + u.row, positions = first + u.rows - j.first_seen(first);
  return positions * u.rows * u.heads * (kv.k_pad + kv.v_pad);
}

void unit_task(void *context, int64_t begin, int64_t end, Worker &w) {
  auto *c = static_cast<const AttentionCall *>(context);
  for (int64_t i = begin; i < end; i++)
    c->ops->attention_unit(c->job, c->units[i], w);
}
void span_task(void *context, int64_t begin, int64_t end, Worker &w) {
  auto *c = static_cast<const AttentionCall *>(context);
  for (int64_t i = begin; i < end; i++)
    c->ops->attention_span(c->job, c->units[c->spans[i].unit], c->spans[i].span, w);
}
void merge_task(void *context, int64_t begin, int64_t end, Worker &w) {
  auto *c = static_cast<const AttentionCall *>(context);
  for (int64_t i = begin; i < end; i++)
    c->ops->attention_merge(c->job, c->units[i], w);
}

// Few units over a long context: their spans run apart and are merged afterwards, in the order in which one member
// would take them.
void run_by_spans(mk_pool *p, AttentionCall &call, std::vector<AttentionUnit> &units) {
  int64_t floats = 0;
  std::vector<SpanOfUnit> spans;
  for (size_t i = 0; i < units.size(); i++) {
    for (int64_t s = units[i].first_span; s <= units[i].last_span; s++) {
      spans.push_back({int64_t(i), s});
      floats += p->ops->attention_partial(call.job, units[i]);
    }
  }
  float *partials = scratch(p->team.workers[0], kScratchWeights, floats);
  for (AttentionUnit &u : units) {
    u.partials = partials;
    partials += (u.last_span - u.first_span + 1) * p->ops->attention_partial(call.job, u);
  }
  call.spans = spans.data();
  run(p->team, int64_t(spans.size()), 1, span_task, &call);
  run(p->team, int64_t(units.size()), int64_t(units.size()), merge_task, &call);
}

void attend_all(mk_pool *p, const AttentionJob &job, const mk_segment *segs, int64_t nsegs) {
  AttentionCall call = {p->ops, job, nullptr, nullptr};
  std::vector<AttentionUnit> units = cut_units(call.job, segs, nsegs);
  if (units.empty())
    return;
  call.units = units.data();
  int64_t steps = 0, longest = 0;
  for (const AttentionUnit &u : units) {
    steps += steps_of(call.job, u);
    longest = u.last_span - u.first_span > longest ? u.last_span - u.first_span : longest;
  }
  int64_t threads = int64_t(p->team.workers.size()), n = int64_t(units.size());
  if (threads > 1 && longest > 0 && n < 8 * threads)
    return run_by_spans(p, call, units);
  int64_t g = grain(p, n, steps / n / 8);
  run(p->team, n, g, unit_task, &call);
}

mk_result attend(mk_pool *p, const AttentionJob &job, const mk_segment *segs, int64_t nsegs) {
  return reported([&] { attend_all(p, job, segs, nsegs); });
}

} // namespace
} // namespace mk

extern "C" mk_result mk_attention(mk_pool *p, const void *q, mk_dtype t, int heads, float scale, int64_t window,
                                  float softcap, const float *sinks, const mk_segment *segs, int64_t nsegs, void *y) {
  return attend(p, {bytes(q), t, heads, scale, window, softcap, sinks, bytes(y), 0}, segs, nsegs);
}

extern "C" mk_result mk_chunked_attention(mk_pool *p, const void *q, mk_dtype t, int heads, float scale, int64_t chunk,
                                          const mk_segment *segs, int64_t nsegs, void *y) {
  return attend(p, {bytes(q), t, heads, scale, 0, 0, nullptr, bytes(y), chunk}, segs, nsegs);
}
