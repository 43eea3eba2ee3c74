// Multi-head latent attention on our CPU kernels.
#include "block_cache.h"
#include "kernel_backend.h"

namespace mlxcel {

namespace {

class KernelLatent final : public LatentBackend, KernelOps {
 public:
  KernelLatent(mc::Stream s, Pool pool, std::shared_ptr<int64_t> held) : KernelOps(s, std::move(pool)), held_(std::move(held)) {}

  array multi_linear(const array& x, const Matrix& w) override {
    const int heads = w.w.shape(0);
    array in = dense(x), y = fresh({x.shape(0), heads * w.rows}, x.dtype());
    KernelMatrix m = dense(w);
    m.kernel.rows *= heads;
    checked(mk_multi_linear(pool(), &m.kernel, heads, in.data<void>(), kernel_dtype(in), y.data<void>(), x.shape(0)));
    return y;
  }

  std::shared_ptr<Cache> new_cache(int k_dim, int v_dim, mc::Dtype dtype) override {
    KernelCache own(mk_kv_new_latent(k_dim, v_dim, kernel_dtype(dtype), held_.get()), mk_kv_free);
    return std::make_shared<BlockCache>(1, k_dim, v_dim, dtype, true, std::move(own), held_);
  }

  array sparse_attention(const array& q, const array& k, const Attention& spec, const std::vector<Segment>& segments,
                         const Index& x, const std::vector<Segment>& index) override {
    array query = dense(q), key = dense_as(k, cache_dtype(segments)), index_q = dense(x.q),
          index_key = dense_as(x.k, cache_dtype(index)), weights = dense(x.weights);
    array y = fresh({q.shape(0), spec.heads * spec.value_dim}, q.dtype());
    auto parts = appended(segments, &key, nullptr);
    std::vector<const mk_kv*> keys;
    for (const mk_segment& g : appended(index, &index_key, nullptr)) keys.push_back(g.kv);
    const mk_indexer indexer = {x.heads, x.dim, x.top_k, index_q.data<void>(), weights.data<float>(), keys.data()};
    checked(mk_sparse_attention(pool(), query.data<void>(), kernel_dtype(query), spec.heads, spec.scale, parts.data(),
                                static_cast<int64_t>(parts.size()), &indexer, y.data<void>()));
    return y;
  }

 private:
  std::shared_ptr<int64_t> held_;
};

} // namespace

std::unique_ptr<LatentBackend> make_kernel_latent(mc::Stream s, Pool pool, std::shared_ptr<int64_t> held) {
  return std::make_unique<KernelLatent>(s, std::move(pool), std::move(held));
}

} // namespace mlxcel
