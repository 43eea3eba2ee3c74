// The back end on MLX's own kernels, for Metal and CUDA; it runs on the CPU too, where tests compare the two.
#include <algorithm>
#include <limits>

#include "array_cache.h"

namespace mlxcel {

namespace {

class MlxBackend final : public Backend {
 public:
  explicit MlxBackend(mc::Stream s) : s_(s) {}

  array linear(const array& x, const Matrix& w, const std::optional<array>& bias) override {
    std::optional<array> y;
    if (w.format == Format::dense) {
      array wt = mc::transpose(w.w, s_);
      y = bias ? mc::addmm(*bias, x, wt, 1.0f, 1.0f, s_) : mc::matmul(x, wt, s_);
    } else {
      y = mc::quantized_matmul(x, w.w, *w.scales, w.biases, true, w.group, w.bits, w.mode(), s_);
      if (bias) y = mc::add(*y, *bias, s_);
    }
    return mc::astype(*y, x.dtype(), s_);
  }

  array embedding(const array& ids, const Matrix& w, mc::Dtype dtype) override {
    auto row = [&](const array& a) { return mc::take(a, ids, 0, s_); };
    if (w.format == Format::dense) return mc::astype(row(w.w), dtype, s_);
    std::optional<array> biases;
    if (w.biases) biases = row(*w.biases);
    return mc::astype(
        mc::dequantize(row(w.w), row(*w.scales), biases, w.group, w.bits, w.mode(), std::nullopt, std::nullopt, s_), dtype, s_);
  }

  array rms_norm(const array& x, const std::optional<array>& weight, float eps, float offset) override {
    std::optional<array> scaled = weight;
    if (weight && offset != 0) scaled = mc::add(*weight, array(offset, weight->dtype()), s_);
    if (scaled) scaled = mc::astype(*scaled, x.dtype(), s_);
    return mc::fast::rms_norm(x, scaled, eps, s_);
  }

  std::vector<array> add_rms_norm(const array& x, const array& y, const std::optional<array>& weight, float eps,
                                  float offset) override {
    array sum = mc::add(x, y, s_);
    return {sum, rms_norm(sum, weight, eps, offset)};
  }

  // Rows become MLX's batch, since its rope takes one position for each of that.
  array rope(const array& x, const array& pos, const array& inv_freq, const Rope& r) override {
    int rows = x.shape(0);
    array heads = mc::reshape(x, {rows, r.heads, 1, r.head_dim}, s_);
    if (r.scale != 1) {
      array scaled = mc::multiply(mc::slice(heads, {0, 0, 0, 0}, {rows, r.heads, 1, r.rot_dim}, s_), array(r.scale, x.dtype()), s_);
      heads = r.rot_dim == r.head_dim
                  ? scaled
                  : mc::concatenate({scaled, mc::slice(heads, {0, 0, 0, r.rot_dim}, heads.shape(), s_)}, -1, s_);
    }
    array turned = mc::fast::rope(heads, r.rot_dim, r.traditional, std::nullopt, 1.0f, pos, mc::reciprocal(inv_freq, s_), s_);
    return mc::reshape(turned, x.shape(), s_);
  }

  array add(const array& a, const array& b) override { return mc::add(a, b, s_); }
  array multiply(const array& a, const array& b) override { return mc::multiply(a, b, s_); }

  array convert(const array& x, mc::Dtype dtype) override { return mc::astype(x, dtype, s_); }
  array concatenate(std::vector<array> parts, int axis) override { return mc::concatenate(std::move(parts), axis, s_); }
  array select_rows(const array& x, const int32_t* rows, int n) override {
    return mc::take(x, array(rows, {n}, mc::int32), 0, s_);
  }

  array silu_mul(const array& gate, const array& up) override {
    return mc::multiply(mc::multiply(gate, mc::sigmoid(gate, s_), s_), up, s_);
  }

  array attention(const array& q, const std::optional<array>& k, const std::optional<array>& v, const Attention& spec,
                  const std::vector<Segment>& segments) override {
    std::vector<array> outs;
    outs.reserve(segments.size());
    for (auto& g : segments) {
      auto& cache = static_cast<ArrayCache&>(*g.cache);
      if (k) {
        std::optional<array> values;
        if (v) values = by_head(*v, g, spec.kv_heads, spec.value_dim);
        cache.append(by_head(*k, g, spec.kv_heads, spec.head_dim), values);
      }
      array y = attend(by_head(q, g, spec.heads, spec.head_dim), cache, g, spec);
      y = mc::transpose(y, {0, 2, 1, 3}, s_);
      outs.push_back(mc::reshape(y, {static_cast<int>(g.rows), spec.heads * spec.value_dim}, s_));
    }
    array all = outs.size() == 1 ? outs[0] : mc::concatenate(std::move(outs), 0, s_);
    return mc::astype(all, q.dtype(), s_);
  }

  std::shared_ptr<Cache> new_cache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype) override {
    return std::make_shared<ArrayCache>(kv_heads, k_dim, v_dim, dtype, false, s_);
  }

  MoeBackend& moe() override { return *moe_; }
  RecurrentBackend& recurrent() override { return *recurrent_; }
  LatentBackend& latent() override { return *latent_; }
  ActivationBackend& activation() override { return *activation_; }

 private:
  // The segment's rows of a flat [rows, heads*dim] as [1, heads, n, dim].
  array by_head(const array& a, const Segment& g, int heads, int dim) {
    int n = static_cast<int>(g.rows), from = static_cast<int>(g.row0);
    array flat = mc::reshape(a, {a.shape(0), heads * dim}, s_);
    if (n != a.shape(0)) flat = mc::slice(flat, {from, 0}, {from + n, heads * dim}, s_);
    return mc::transpose(mc::reshape(flat, {1, n, heads, dim}, s_), {0, 2, 1, 3}, s_);
  }

  // The positions that rows see: [n, end-from], true where seen.
  array mask(const Segment& g, int64_t from, const Attention& spec) {
    int64_t end = g.pos + g.rows;
    array row = mc::expand_dims(mc::arange(double(g.pos), double(end), 1.0, mc::int32, s_), 1, s_);
    array col = mc::expand_dims(mc::arange(double(from), double(end), 1.0, mc::int32, s_), 0, s_);
    array seen = mc::less_equal(col, row, s_);
    if (spec.chunk > 0) {
      array chunk(static_cast<int>(spec.chunk));
      seen = mc::logical_and(seen, mc::equal(mc::floor_divide(row, chunk, s_), mc::floor_divide(col, chunk, s_), s_), s_);
    }
    if (spec.window == 0) return seen;
    return mc::logical_and(seen, mc::less(mc::subtract(row, col, s_), array(static_cast<int>(spec.window)), s_), s_);
  }

  array attend(const array& q, const ArrayCache& cache, const Segment& g, const Attention& spec) {
    // No row sees what lies before the first one's window or chunk.
    int64_t from = cache.first;
    if (spec.chunk > 0) from = std::max(from, g.pos / spec.chunk * spec.chunk);
    if (spec.window > 0) from = std::max(from, g.pos + 1 - spec.window);
    array keys = cache.keys(from), values = cache.values(from);
    if (spec.softcap > 0) return capped(q, keys, values, mask(g, from, spec), spec);
    bool windowed = (spec.window > 0 || spec.chunk > 0) && g.rows > 1;
    std::optional<array> shown;
    if (windowed) shown = mask(g, from, spec);
    std::optional<array> sinks;
    if (spec.sinks) sinks = mc::astype(*spec.sinks, q.dtype(), s_);
    const char* mode = windowed ? "array" : g.rows > 1 ? "causal" : "";
    return mc::fast::scaled_dot_product_attention(q, keys, values, spec.scale, mode, shown, sinks, false, s_);
  }

  // MLX's fused attention has no soft cap.
  array capped(const array& q, const array& keys, const array& values, const array& seen, const Attention& spec) {
    int n = q.shape(2), ratio = spec.heads / spec.kv_heads;
    array grouped = mc::reshape(q, {spec.kv_heads, ratio, n, spec.head_dim}, s_);
    array k = mc::reshape(keys, {spec.kv_heads, 1, keys.shape(2), spec.head_dim}, s_);
    array v = mc::reshape(values, {spec.kv_heads, 1, values.shape(2), spec.value_dim}, s_);
    array scores = mc::astype(mc::matmul(grouped, mc::swapaxes(k, -1, -2, s_), s_), mc::float32, s_);
    array cap(spec.softcap);
    scores = mc::multiply(mc::tanh(mc::divide(mc::multiply(scores, array(spec.scale), s_), cap, s_), s_), cap, s_);
    scores = mc::where(seen, scores, array(-std::numeric_limits<float>::infinity()), s_);
    if (spec.sinks) {
      array sinks = mc::broadcast_to(mc::reshape(*spec.sinks, {spec.kv_heads, ratio, 1, 1}, s_), {spec.kv_heads, ratio, n, 1}, s_);
      scores = mc::concatenate({sinks, scores}, -1, s_);
    }
    array weights = mc::softmax(scores, -1, true, s_);
    if (spec.sinks) weights = mc::slice(weights, {0, 0, 0, 1}, weights.shape(), s_);
    array y = mc::matmul(mc::astype(weights, q.dtype(), s_), v, s_);
    return mc::reshape(y, {1, spec.heads, n, spec.value_dim}, s_);
  }

  mc::Stream s_;
  std::unique_ptr<MoeBackend> moe_ = make_mlx_moe(s_);
  std::unique_ptr<RecurrentBackend> recurrent_ = make_mlx_recurrent(s_);
  std::unique_ptr<LatentBackend> latent_ = make_mlx_latent(s_);
  std::unique_ptr<ActivationBackend> activation_ = make_mlx_activation(s_);
};

} // namespace

std::unique_ptr<Backend> make_mlx_backend(mc::Stream s) { return std::make_unique<MlxBackend>(s); }

} // namespace mlxcel
