// One matrix per head (mk_multi_linear): a linear of every head over its own share of the rows.
#include "kernels.h"
#include "memory.h"
#include "ops.h"
#include "team.h"

namespace mk {
namespace {

struct MultiCall {
  const Ops *ops;
  const mk_matrix *w;
  int heads;
  const unsigned char *x;
  mk_dtype dtype;
  int64_t m;      // rows at hand
  int64_t stride; // floats of a widened row
  bool paired;
  float *wide; // [heads, m, stride]
  unsigned char *y;
};

void widen_heads(void *context, int64_t begin, int64_t end, Worker &) {
  const MultiCall &c = *static_cast<const MultiCall *>(context);
  for (int64_t u = begin; u < end; u++) {
    const int64_t head = u / c.m, row = u % c.m;
    c.ops->widen(c.x + (row * c.heads + head) * c.w->cols * item_size(c.dtype), c.dtype, c.w->cols, c.paired,
                 c.wide + u * c.stride);
  }
}

// A unit is a block of sixteen output features of one head. A head's outputs lie in y as if the stack were one matrix.
void multiply_heads(void *context, int64_t begin, int64_t end, Worker &w) {
  const MultiCall &c = *static_cast<const MultiCall *>(context);
  const int64_t out = c.w->rows / c.heads, blocks = (out + 15) / 16;
  for (int64_t u = begin; u < end; u++) {
    const int64_t head = u / blocks, first = u % blocks * 16, last = first + 16 < out ? first + 16 : out;
    const LinearJob job = {c.w, nullptr, MK_F32, c.wide + head * c.m * c.stride, c.stride, c.m, c.y, c.dtype};
    c.ops->linear(job, head * out + first, head * out + last, w);
  }
}

void multi_linear(mk_pool *p, const mk_matrix *w, int heads, const void *x, mk_dtype xt, void *y, int64_t m) {
  constexpr int64_t kAtOnce = 64; // rows: bounds the widened input
  MultiCall c = {p->ops, w, heads, nullptr, xt, 0, round16(w->cols), p->ops->paired(*w), nullptr, nullptr};
  c.wide = scratch(p->team.workers[0], kScratchInput, heads * (m < kAtOnce ? m : kAtOnce) * c.stride);
  const int64_t blocks = heads * ((w->rows / heads + 15) / 16);
  for (int64_t m0 = 0; m0 < m; m0 += kAtOnce) {
    c.m = m - m0 < kAtOnce ? m - m0 : kAtOnce;
    c.x = static_cast<const unsigned char *>(x) + m0 * heads * w->cols * item_size(xt);
    c.y = static_cast<unsigned char *>(y) + m0 * w->rows * item_size(xt);
    run(p->team, heads * c.m, grain(p, heads * c.m, c.stride / 4), widen_heads, &c);
    run(p->team, blocks, grain(p, blocks, (c.m + 1) * c.stride), multiply_heads, &c);
  }
}

} // namespace
} // namespace mk

extern "C" mk_result mk_multi_linear(mk_pool *p, const mk_matrix *w, int heads, const void *x, mk_dtype xt, void *y, int64_t m) {
  return mk::reported([&] { mk::multi_linear(p, w, heads, x, xt, y, m); });
}
