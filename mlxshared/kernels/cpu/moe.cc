#include "moe.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "calls.h"

namespace mk {
namespace {

// Choices (row, slot) that go to one expert: [begin, end) of the order by expert.
struct ExpertGroup {
  mk_matrix w;
  const void *bias;
  int64_t begin, end;
  // A lone choice's result goes straight to its place.
  bool alone() const { return end - begin == 1; }
};

struct GatherCall {
  const Ops *ops;
  const unsigned char *x;
  mk_dtype dtype;
  int64_t cols, rows, stride;
  int k;
  bool per_choice, paired;
  mk_dtype bias_dtype;
  const int64_t *order; // choices by expert, those of one expert ascending
  int64_t first;        // of order, at the buffers' start
  float *wide;
  unsigned char *sorted; // results in the order by expert
  unsigned char *y;
  const ExpertGroup *groups;
  int64_t blocks; // of output features, of each group
};

void widen_choices(void *context, int64_t begin, int64_t end, Worker &) {
  const GatherCall &c = *static_cast<const GatherCall *>(context);
  for (int64_t i = begin; i < end; i++) {
    int64_t choice = c.order[c.first + i], row = c.per_choice ? choice : choice / c.k;
    c.ops->widen(c.x + row * c.cols * item_size(c.dtype), c.dtype, c.cols, c.paired, c.wide + i * c.stride);
  }
}

// A unit is sixteen output features of one group.
void multiply_groups(void *context, int64_t begin, int64_t end, Worker &worker) {
  const GatherCall &c = *static_cast<const GatherCall *>(context);
  while (begin < end) {
    const ExpertGroup &g = c.groups[begin / c.blocks];
    int64_t from = begin % c.blocks, to = end - (begin - from) < c.blocks ? end - (begin - from) : c.blocks;
    unsigned char *y = g.alone() ? c.y + c.order[g.begin] * c.rows * item_size(c.dtype)
                                 : c.sorted + (g.begin - c.first) * c.rows * item_size(c.dtype);
    LinearJob job = {&g.w, g.bias, c.bias_dtype, c.wide + (g.begin - c.first) * c.stride, c.stride, g.end - g.begin, y, c.dtype};
    c.ops->linear(job, from * 16, to * 16 < c.rows ? to * 16 : c.rows, worker);
    begin += to - from;
  }
}

void place_groups(void *context, int64_t begin, int64_t end, Worker &) {
  const GatherCall &c = *static_cast<const GatherCall *>(context);
  const size_t row = size_t(c.rows * item_size(c.dtype));
  for (int64_t at = begin; at < end; at++) {
    const ExpertGroup &g = c.groups[at];
    for (int64_t i = g.begin; !g.alone() && i < g.end; i++)
      memcpy(c.y + c.order[i] * row, c.sorted + (i - c.first) * row, row);
  }
}

// Choices handled in one go: bounds the memory of the widened inputs, yet leaves each expert many rows.
int64_t choices_at_once(int64_t stride) {
  int64_t n = (int64_t(1) << 22) / stride;
  return n < 256 ? 256 : n;
}

// The choices by expert, in one counting sort.
std::vector<int64_t> order_by_expert(const int32_t *ids, int64_t n, int64_t experts, std::vector<int64_t> &starts) {
  starts.assign(size_t(experts) + 1, 0);
  for (int64_t i = 0; i < n; i++)
    starts[size_t(ids[i]) + 1]++;
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  std::vector<int64_t> order(size_t(n), 0), next(starts.begin(), starts.end() - 1);
  for (int64_t i = 0; i < n; i++)
    order[size_t(next[size_t(ids[i])]++)] = i;
  return order;
}

} // namespace
} // namespace mk

using namespace mk;

extern "C" {

mk_matrix mk_expert(const mk_matrix *stack, int64_t e) {
  mk_matrix w = *stack;
  w.data = bytes(w.data) + e * w.rows * row_bytes(w);
  if (w.format != MK_DENSE) {
    int64_t offset = e * w.rows * (w.cols / w.group) * (w.format == MK_AFFINE ? item_size(w.dtype) : 1);
    w.scales = bytes(w.scales) + offset;
    w.biases = w.biases ? bytes(w.biases) + offset : nullptr;
  }
  return w;
}

static void linear_gather(mk_pool *p, const mk_matrix *stack, int64_t experts, const void *bias, mk_dtype bias_dtype,
                          const void *x, mk_dtype xt, int per_choice, const int32_t *ids, int64_t m, int k, void *y) {
  std::vector<int64_t> starts;
  const std::vector<int64_t> order = order_by_expert(ids, m * k, experts, starts);
  const int64_t stride = round16(stack->cols), at_once = choices_at_once(stride), all = m * k;
  const int64_t held = all < at_once ? all : at_once;
  Worker &own = p->team.workers[0]; // whose buffers Ops::linear leaves alone
  GatherCall c = {p->ops, bytes(x), xt, stack->cols, stack->rows, stride, k, per_choice != 0, p->ops->paired(*stack),
                  bias_dtype, order.data(), 0, scratch(own, kScratchInput, held * stride),
                  bytes(scratch_bytes(own, kScratchOutput, size_t(held * stack->rows * item_size(xt)))), bytes(y), nullptr,
                  (stack->rows + 15) / 16};
  std::vector<ExpertGroup> groups;
  for (int64_t e = 0; c.first < all; c.first += at_once) {
    const int64_t end = all - c.first < at_once ? all : c.first + at_once;
    groups.clear();
    for (int64_t at = c.first; at < end;) {
      while (starts[size_t(e) + 1] <= at)
        e++;
      int64_t last = starts[size_t(e) + 1] < end ? starts[size_t(e) + 1] : end;
      const void *b = bias ? bytes(bias) + e * stack->rows * item_size(bias_dtype) : nullptr;
      groups.push_back({mk_expert(stack, e), b, at, last});
      at = last;
    }
    c.groups = groups.data();
    const int64_t n = end - c.first, count = int64_t(groups.size());
    run(p->team, n, grain(p, n, stride / 4), widen_choices, &c);
    run(p->team, count * c.blocks, grain(p, count * c.blocks, (n / count + 1) * stride), multiply_groups, &c);
    run(p->team, count, grain(p, count, n / count * stack->rows / 16), place_groups, &c);
  }
}

mk_result mk_linear_gather(mk_pool *p, const mk_matrix *stack, int64_t experts, const void *bias, mk_dtype bias_dtype,
                           const void *x, mk_dtype xt, int per_choice, const int32_t *ids, int64_t m, int k, void *y) {
  return reported([&] { linear_gather(p, stack, experts, bias, bias_dtype, x, xt, per_choice, ids, m, k, y); });
}

mk_result mk_route(mk_pool *p, const void *logits, mk_dtype t, const mk_route_spec *spec, int64_t rows, int32_t *ids,
                   float *weights) {
  return reported([&] {
    run_job(p, p->ops->moe->route, {spec, bytes(logits), t, ids, weights}, rows, grain(p, rows, 4 * int64_t(spec->experts)));
  });
}

void mk_weighted_sum(mk_pool *p, const void *x, mk_dtype t, const float *weights, int64_t rows, int k, int64_t dim, void *y) {
  run_job(p, p->ops->moe->weighted_sum, {bytes(x), t, weights, k, dim, bytes(y)}, rows, grain(p, rows, k * dim / 4));
}

void mk_clamped_swiglu(mk_pool *p, const void *gate, const void *up, mk_dtype t, float alpha, float limit, int64_t n, void *y) {
  run_job(p, p->ops->moe->clamped_swiglu, {bytes(gate), bytes(up), t, alpha, limit, bytes(y)}, n, grain(p, n, 4, 16));
}

} // extern "C"
