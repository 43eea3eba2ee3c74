// Multi-head latent attention of MLX's own operations.
#include <limits>

#include "array_cache.h"

namespace mlxcel {

namespace {

class MlxLatent final : public LatentBackend {
 public:
  explicit MlxLatent(mc::Stream s) : s_(s) {}

  array multi_linear(const array& x, const Matrix& w) override {
    int rows = x.shape(0), heads = w.w.shape(0);
    array by_head = mc::transpose(mc::reshape(x, {rows, heads, w.cols}, s_), {1, 0, 2}, s_);
    array y = w.format == Format::dense
                  ? mc::matmul(by_head, mc::swapaxes(w.w, -1, -2, s_), s_)
                  : mc::quantized_matmul(by_head, w.w, *w.scales, w.biases, true, w.group, w.bits, w.mode(), s_);
    y = mc::reshape(mc::transpose(y, {1, 0, 2}, s_), {rows, heads * w.rows}, s_);
    return mc::astype(y, x.dtype(), s_);
  }

  std::shared_ptr<Cache> new_cache(int k_dim, int v_dim, mc::Dtype dtype) override {
    return std::make_shared<ArrayCache>(1, k_dim, v_dim, dtype, true, s_);
  }

  array sparse_attention(const array& q, const array& k, const Attention& spec, const std::vector<Segment>& segments,
                         const Index& x, const std::vector<Segment>& index) override {
    std::vector<array> outs;
    outs.reserve(segments.size());
    for (size_t i = 0; i < segments.size(); i++) {
      const Segment& g = segments[i];
      auto &cache = static_cast<ArrayCache&>(*g.cache), &keys = static_cast<ArrayCache&>(*index[i].cache);
      cache.append(by_head(k, g, 1, spec.head_dim), std::nullopt);
      keys.append(by_head(x.k, g, 1, x.dim), std::nullopt);
      array seen = picked(x, keys, g);
      array y = mc::fast::scaled_dot_product_attention(by_head(q, g, spec.heads, spec.head_dim), cache.keys(0), cache.values(0),
                                                       spec.scale, "array", seen, std::nullopt, false, s_);
      outs.push_back(mc::reshape(mc::transpose(y, {0, 2, 1, 3}, s_), {static_cast<int>(g.rows), spec.heads * spec.value_dim}, s_));
    }
    array all = outs.size() == 1 ? outs[0] : mc::concatenate(std::move(outs), 0, s_);
    return mc::astype(all, q.dtype(), s_);
  }

 private:
  // The segment's rows of a flat [rows, heads*dim] as [1, heads, n, dim].
  array by_head(const array& a, const Segment& g, int heads, int dim) {
    int n = static_cast<int>(g.rows), from = static_cast<int>(g.row0);
    array flat = mc::slice(mc::reshape(a, {a.shape(0), heads * dim}, s_), {from, 0}, {from + n, heads * dim}, s_);
    return mc::transpose(mc::reshape(flat, {1, n, heads, dim}, s_), {0, 2, 1, 3}, s_);
  }

  // Whether a row attends to a position: [1, 1, n, positions].
  array picked(const Index& x, const ArrayCache& keys, const Segment& g) {
    int n = static_cast<int>(g.rows), positions = static_cast<int>(g.pos) + n;
    array row = mc::reshape(mc::arange(double(g.pos), double(positions), 1.0, mc::int32, s_), {1, 1, n, 1}, s_);
    array col = mc::reshape(mc::arange(0.0, double(positions), 1.0, mc::int32, s_), {1, 1, 1, positions}, s_);
    array seen = mc::less_equal(col, row, s_);
    if (positions <= x.top_k) return seen;
    array scores = mc::matmul(by_head(x.q, g, x.heads, x.dim), mc::swapaxes(keys.keys(0), -1, -2, s_), s_);
    scores = mc::maximum(mc::astype(scores, mc::float32, s_), array(0.0f), s_);
    array weights = by_head(x.weights, g, x.heads, 1); // [1, heads, n, 1]
    scores = mc::sum(mc::multiply(scores, weights, s_), 1, true, s_);
    scores = mc::where(seen, scores, array(-std::numeric_limits<float>::infinity()), s_);
    // A stable sort of the negated, reversed positions takes the later of equal scores first.
    int top = static_cast<int>(x.top_k);
    array backwards = mc::slice(scores, {0, 0, 0, positions - 1}, {1, 1, n, -positions - 1}, {1, 1, 1, -1}, s_);
    array order = mc::slice(mc::argsort(mc::negative(backwards, s_), -1, s_), {0, 0, 0, 0}, {1, 1, n, top}, s_);
    array chosen = mc::subtract(array(positions - 1), mc::astype(order, mc::int32, s_), s_);
    array mask = mc::put_along_axis(mc::zeros({1, 1, n, positions}, mc::bool_, s_), chosen, array(true), -1, s_);
    return mc::logical_and(mask, seen, s_);
  }

  mc::Stream s_;
};

} // namespace

std::unique_ptr<LatentBackend> make_mlx_latent(mc::Stream s) { return std::make_unique<MlxLatent>(s); }

} // namespace mlxcel
