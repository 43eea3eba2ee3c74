// Mixtures of experts on MLX's own operations.
#include "internal.h"
#include "moe.h"

namespace mlxcel {

namespace {

class MlxMoe final : public MoeBackend {
 public:
  explicit MlxMoe(mc::Stream s) : s_(s) {}

  array linear_gather(const array& x, const Matrix& w, const std::optional<array>& bias, const array& ids) override {
    int rows = ids.shape(0), k = ids.shape(1);
    array in = mc::reshape(x, {rows, x.ndim() == 2 ? 1 : k, 1, w.cols}, s_);
    array y = product(in, w, ids);
    y = mc::astype(mc::reshape(y, {rows, k, w.rows}, s_), x.dtype(), s_);
    if (bias) y = mc::astype(mc::add(y, mc::take(*bias, ids, 0, s_), s_), x.dtype(), s_);
    return y;
  }

  std::vector<array> route(const array& logits, const Route& r) override {
    array wide = mc::astype(logits, mc::float32, s_), own = wide, by = wide;
    if (r.scores == MX_ROUTE_SOFTMAX_ALL) own = mc::softmax(wide, -1, true, s_);
    if (r.scores == MX_ROUTE_SIGMOID) {
      own = mc::sigmoid(wide, s_);
      if (r.bias || r.groups > 1) by = r.bias ? mc::add(own, *r.bias, s_) : own;
      if (r.groups > 1) by = without_groups(by, r);
    }
    array ids = largest(by, r);
    array weights = mc::take_along_axis(own, ids, -1, s_);
    if (r.scores == MX_ROUTE_SOFTMAX_CHOSEN)
      weights = mc::softmax(weights, -1, true, s_);
    else if (r.normalize && r.top_k > 1)
      weights = mc::divide(weights, mc::add(mc::sum(weights, -1, true, s_), array(r.epsilon), s_), s_);
    return {ids, mc::multiply(weights, array(r.scale), s_)};
  }

  array weighted_sum(const array& x, const array& weights) override {
    array scaled = mc::multiply(mc::astype(x, mc::float32, s_), mc::expand_dims(weights, -1, s_), s_);
    return mc::astype(mc::sum(scaled, 1, false, s_), x.dtype(), s_);
  }

  array clamped_swiglu(const array& gate, const array& up, float alpha, float limit) override {
    array g = mc::minimum(mc::astype(gate, mc::float32, s_), array(limit), s_);
    array u = mc::clip(mc::astype(up, mc::float32, s_), array(-limit), array(limit), s_);
    array y = mc::multiply(mc::multiply(g, mc::sigmoid(mc::multiply(array(alpha), g, s_), s_), s_),
                           mc::add(u, array(1.0f), s_), s_);
    return mc::astype(y, gate.dtype(), s_);
  }

 private:
  array product(const array& x, const Matrix& w, const array& ids) {
    if (w.format != Format::dense)
      return mc::gather_qmm(x, w.w, *w.scales, w.biases, std::nullopt, ids, true, w.group, w.bits, w.mode(), std::nullopt, false, s_);
    array a = x, b = w.w;
    // MLX's CPU code knows float32 only.
    mc::Dtype t = s_.device == mc::Device::cpu ? mc::float32 : mc::promote_types(x.dtype(), w.w.dtype());
    a = mc::astype(a, t, s_);
    b = mc::swapaxes(mc::astype(b, t, s_), -1, -2, s_);
    return mc::gather_mm(a, b, std::nullopt, ids, false, s_);
  }

  // The top_k largest of each row, best first.
  array largest(const array& by, const Route& r) {
    array keys = mc::negative(by, s_);
    if (r.high_ties) keys = mc::take(keys, mc::arange(r.experts - 1, -1, -1, mc::int32, s_), 1, s_);
    array order = mc::astype(mc::argsort(keys, -1, s_), mc::int32, s_);
    array ids = mc::slice(order, {0, 0}, {by.shape(0), r.top_k}, s_);
    return r.high_ties ? mc::subtract(array(r.experts - 1, mc::int32), ids, s_) : ids;
  }

  // scores with those of all but the best groups set to 0.
  array without_groups(const array& scores, const Route& r) {
    int rows = scores.shape(0), size = r.experts / r.groups;
    array grouped = mc::reshape(scores, {rows, r.groups, size}, s_);
    array sorted = mc::sort(grouped, -1, s_);
    array sums = mc::sum(mc::slice(sorted, {0, 0, size - 2}, {rows, r.groups, size}, s_), -1, false, s_);
    array rank = mc::argsort(mc::argsort(sums, -1, s_), -1, s_);
    array kept = mc::greater_equal(mc::astype(rank, mc::int32, s_), array(r.groups - r.top_groups, mc::int32), s_);
    grouped = mc::where(mc::expand_dims(kept, -1, s_), grouped, array(0.0f), s_);
    return mc::reshape(grouped, {rows, r.experts}, s_);
  }

  mc::Stream s_;
};

} // namespace

std::unique_ptr<MoeBackend> make_mlx_moe(mc::Stream s) { return std::make_unique<MlxMoe>(s); }

} // namespace mlxcel
