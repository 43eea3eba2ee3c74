// The back end on our CPU kernels.
#include "block_cache.h"
#include "kernel_backend.h"

namespace mlxcel {

namespace {

class KernelBackend final : public Backend, KernelOps {
 public:
  using KernelOps::KernelOps;

  array linear(const array& x, const Matrix& w, const std::optional<array>& bias) override {
    mc::Shape shape = x.shape();
    shape.back() = w.rows;
    array in = dense(x), y = fresh(std::move(shape), x.dtype());
    KernelMatrix m = dense(w);
    auto b = dense(bias);
    checked(mk_linear(pool(), &m.kernel, data(b), kernel_dtype(b), in.data<void>(), kernel_dtype(in), y.data<void>(),
                      static_cast<int64_t>(in.size()) / w.cols));
    return y;
  }

  array embedding(const array& ids, const Matrix& w, mc::Dtype dtype) override {
    mc::Shape shape = ids.shape();
    shape.push_back(w.cols);
    array in = dense(ids), y = fresh(std::move(shape), dtype);
    KernelMatrix m = dense(w);
    auto* id = in.data<int32_t>();
    for (size_t i = 0; i < in.size(); i++)
      if (id[i] < 0 || id[i] >= w.rows) throw std::out_of_range(format("id %d, want 0 to %d", id[i], w.rows - 1));
    checked(mk_embed(pool(), &m.kernel, id, in.size(), y.data<void>(), kernel_dtype(y)));
    return y;
  }

  array rms_norm(const array& x, const std::optional<array>& weight, float eps, float offset) override {
    array in = dense(x), y = fresh(x.shape(), x.dtype());
    auto w = dense(weight);
    mk_rms_norm(pool(), in.data<void>(), kernel_dtype(in), data(w), kernel_dtype(w), offset, eps,
                static_cast<int64_t>(in.size()) / in.shape(-1), in.shape(-1), y.data<void>());
    return y;
  }

  Arrays add_rms_norm(const array& x, const array& y, const std::optional<array>& weight, float eps, float offset) override {
    array a = dense(x), b = dense(y), sum = fresh(x.shape(), x.dtype()), norm = fresh(x.shape(), x.dtype());
    auto w = dense(weight);
    mk_add_rms_norm(pool(), a.data<void>(), b.data<void>(), kernel_dtype(a), data(w), kernel_dtype(w), offset, eps,
                    static_cast<int64_t>(a.size()) / a.shape(-1), a.shape(-1), sum.data<void>(), norm.data<void>());
    return {sum, norm};
  }

  array rope(const array& x, const array& pos, const array& inv_freq, const Rope& r) override {
    array in = dense(x), at = dense(pos), rates = dense(inv_freq), y = fresh(x.shape(), x.dtype());
    checked(mk_rope(pool(), in.data<void>(), kernel_dtype(in), at.data<int32_t>(), rates.data<float>(), in.shape(0), r.heads, r.head_dim,
                    r.rot_dim, r.scale, r.traditional, y.data<void>()));
    return y;
  }

  array silu_mul(const array& gate, const array& up) override {
    array g = dense(gate), u = dense(up), y = fresh(gate.shape(), gate.dtype());
    mk_silu_mul(pool(), g.data<void>(), u.data<void>(), kernel_dtype(g), g.size(), y.data<void>());
    return y;
  }

  array attention(const array& q, const std::optional<array>& k, const std::optional<array>& v, const Attention& spec,
                  const std::vector<Segment>& segments) override {
    const mc::Dtype held = cache_dtype(segments);
    array query = dense(q), y = fresh({q.shape(0), spec.heads * spec.value_dim}, q.dtype());
    std::optional<array> key, value, sinks = dense(spec.sinks);
    if (k) key = dense_as(*k, held);
    if (v) value = dense_as(*v, held);
    auto parts = appended(segments, key ? &*key : nullptr, value ? &*value : nullptr);
    const auto n = static_cast<int64_t>(parts.size());
    if (spec.chunk > 0)
      checked(mk_chunked_attention(pool(), query.data<void>(), kernel_dtype(query), spec.heads, spec.scale, spec.chunk, parts.data(), n,
                                   y.data<void>()));
    else
      checked(mk_attention(pool(), query.data<void>(), kernel_dtype(query), spec.heads, spec.scale, spec.window, spec.softcap,
                           static_cast<const float*>(data(sinks)), parts.data(), n, y.data<void>()));
    return y;
  }

  array add(const array& a, const array& b) override { return elementwise(MK_ADD, a, b); }
  array multiply(const array& a, const array& b) override { return elementwise(MK_MUL, a, b); }

  array convert(const array& x, mc::Dtype dtype) override {
    if (!is_float(x.dtype()) || !is_float(dtype)) return mc::astype(x, dtype, stream_);
    return x.dtype() == dtype ? x : dense_as(x, dtype);
  }

  array concatenate(Arrays parts, int axis) override {
    array whole = mc::concatenate(parts, axis, stream_); // checks them
    if (whole.size() == 0 || std::any_of(parts.begin(), parts.end(), [&](const array& a) { return a.dtype() != whole.dtype(); }))
      return whole;
    array y = fresh(whole.shape(), whole.dtype());
    size_t rows = 1, at = 0;
    for (size_t i = 0; i < (axis < 0 ? axis + y.ndim() : axis); i++) rows *= y.shape(i);
    for (auto& part : parts) {
      array in = dense(part);
      const size_t n = in.nbytes() / rows;
      for (size_t i = 0; i < rows; i++) memcpy(y.data<char>() + i * (y.nbytes() / rows) + at, in.data<char>() + i * n, n);
      at += n;
    }
    return y;
  }

  array select_rows(const array& x, const int32_t* rows, int n) override {
    mc::Shape shape = x.shape();
    shape[0] = n;
    array in = dense(x), y = fresh(std::move(shape), x.dtype());
    const size_t row = in.nbytes() / in.shape(0);
    for (int i = 0; i < n; i++) memcpy(y.data<char>() + i * row, in.data<char>() + rows[i] * row, row);
    return y;
  }

  std::shared_ptr<Cache> new_cache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype) override {
    KernelCache own(mk_kv_new(kv_heads, k_dim, v_dim, kernel_dtype(dtype), held_.get()), mk_kv_free);
    return std::make_shared<BlockCache>(kv_heads, k_dim, v_dim, dtype, false, std::move(own), held_);
  }

  MoeBackend& moe() override { return *moe_; }
  RecurrentBackend& recurrent() override { return *recurrent_; }
  LatentBackend& latent() override { return *latent_; }
  ActivationBackend& activation() override { return *activation_; }

  std::optional<int64_t> held() const override { return *held_; }
  uint64_t scratch() const override { return mk_pool_scratch(pool()); }
  void release_scratch() override { mk_pool_release(pool()); }

 private:
  // A kernel's work where both have one dtype of floats and b is shaped like a or like a's last dimensions; MLX's otherwise.
  array elementwise(mk_binary_op op, const array& a, const array& b) {
    if (a.ndim() < b.ndim()) return elementwise(op, b, a); // both operations commute
    const bool suits = is_float(a.dtype()) && a.dtype() == b.dtype() && a.size() > 0 && b.size() > 0 &&
                       std::equal(b.shape().begin(), b.shape().end(), a.shape().end() - b.ndim());
    if (!suits) return op == MK_ADD ? mc::add(a, b, stream_) : mc::multiply(a, b, stream_);
    array x = dense(a), y = dense(b), z = fresh(a.shape(), a.dtype());
    mk_binary(pool(), op, x.data<void>(), y.data<void>(), kernel_dtype(x), x.size(), y.size(), z.data<void>());
    return z;
  }

  std::shared_ptr<int64_t> held_ = std::make_shared<int64_t>(0);
  std::unique_ptr<MoeBackend> moe_ = make_kernel_moe(stream_, pool_);
  std::unique_ptr<RecurrentBackend> recurrent_ = make_kernel_recurrent(stream_, pool_, held_);
  std::unique_ptr<LatentBackend> latent_ = make_kernel_latent(stream_, pool_, held_);
  std::unique_ptr<ActivationBackend> activation_ = make_kernel_activation(stream_, pool_);
};

} // namespace

static_assert(MX_ISA_AUTO == int(MK_ISA_AUTO) && MX_ISA_PLAIN == int(MK_ISA_PLAIN) && MX_ISA_AVX2 == int(MK_ISA_AVX2) &&
              MX_ISA_AVX512 == int(MK_ISA_AVX512) && MX_ISA_NEON == int(MK_ISA_NEON));

std::unique_ptr<Backend> make_kernel_backend(mc::Stream s, int threads, int isa) {
  Pool pool(mk_pool_new(threads, static_cast<mk_isa>(isa)), mk_pool_free);
  if (!pool) throw std::runtime_error(format("this machine cannot start %d kernel threads of that instruction set", threads));
  return std::make_unique<KernelBackend>(s, std::move(pool));
}

} // namespace mlxcel
