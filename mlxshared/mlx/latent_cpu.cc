// Multi-head latent attention on our CPU kernels.
#include "block_cache.h"
#include "kernel_primitive.h"

namespace mlxcel {

namespace {

class MultiLinear final : public WeightPrimitive {
 public:
  using WeightPrimitive::WeightPrimitive;
  const char* name() const override { return "multi_linear"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    size_t i = 1;
    const void* x = dense(in[0]);
    int heads = in[1].shape(0);
    mk_matrix w = weight(in, i);
    w.rows *= heads;
    encoder().dispatch([pool = pool_, w, heads, x, t = kernel_dtype(in[0].dtype()), y = out[0].data<void>(),
                        rows = static_cast<int64_t>(in[0].shape(0))] { mk_multi_linear(pool.get(), &w, heads, x, t, y, rows); });
  }
};

class SparseAttention final : public KernelPrimitive {
 public:
  SparseAttention(mc::Stream s, Pool pool, const Attention& spec, const Index& x, std::vector<BlockSegment> segments,
                  std::vector<BlockSegment> index)
      : KernelPrimitive(s, std::move(pool)), heads_(spec.heads), scale_(spec.scale), index_heads_(x.heads), index_dim_(x.dim),
        top_k_(x.top_k), segments_(std::move(segments)), index_(std::move(index)) {}
  const char* name() const override { return "sparse_attention"; }

  // Inputs: q, k, the indexer's q, k and weights, then the attentions to run after.
  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    auto row = [](const array& a) { return a.nbytes() / a.shape(0); };
    const void *q = dense(in[0]), *index_q = dense(in[2]);
    const char *k = static_cast<const char*>(dense(in[1])), *index_k = static_cast<const char*>(dense(in[3]));
    auto* weights = static_cast<const float*>(dense(in[4]));
    encoder().dispatch([pool = pool_, q, t = kernel_dtype(in[0].dtype()), k, k_row = row(in[1]), index_k,
                        index_row = row(in[3]), x = mk_indexer{index_heads_, index_dim_, top_k_, index_q, weights, nullptr},
                        heads = heads_, scale = scale_, segments = std::move(segments_), index = std::move(index_),
                        y = out[0].data<void>()]() mutable {
      std::vector<mk_segment> parts = appended(segments, k, k_row, nullptr, 0);
      std::vector<const mk_kv*> keys;
      for (const mk_segment& g : appended(index, index_k, index_row, nullptr, 0)) keys.push_back(g.kv);
      x.keys = keys.data();
      mk_sparse_attention(pool.get(), q, t, heads, scale, parts.data(), static_cast<int64_t>(parts.size()), &x, y);
    });
  }

 private:
  int heads_;
  float scale_;
  int index_heads_, index_dim_;
  int64_t top_k_;
  std::vector<BlockSegment> segments_, index_;
};

class KernelLatent final : public LatentBackend {
 public:
  KernelLatent(mc::Stream s, Pool pool) : stream_(s), pool_(std::move(pool)) {}

  array multi_linear(const array& x, const Matrix& w) override {
    Arrays inputs{x};
    WeightInputs::append(w, inputs);
    return array({x.shape(0), w.w.shape(0) * w.rows}, x.dtype(), std::make_shared<MultiLinear>(stream_, pool_, w),
                 std::move(inputs));
  }

  std::shared_ptr<Cache> new_cache(int k_dim, int v_dim, mc::Dtype dtype) override {
    return std::make_shared<BlockCache>(1, k_dim, v_dim, dtype, true, mk_kv_new_latent(k_dim, v_dim, kernel_dtype(dtype)));
  }

  array sparse_attention(const array& q, const array& k, const Attention& spec, const std::vector<Segment>& segments,
                         const Index& x, const std::vector<Segment>& index) override {
    auto parts = block_segments(segments), keys = block_segments(index);
    Arrays inputs{q, mc::astype(k, parts[0].cache->dtype, stream_), x.q, mc::astype(x.k, keys[0].cache->dtype, stream_), x.weights};
    for (auto* list : {&parts, &keys})
      for (auto& g : *list)
        if (g.cache->last) inputs.push_back(*g.cache->last);
    auto out = array({q.shape(0), spec.heads * spec.value_dim}, q.dtype(),
                     std::make_shared<SparseAttention>(stream_, pool_, spec, x, parts, keys), std::move(inputs));
    for (auto* list : {&parts, &keys}) {
      for (auto& g : *list) {
        g.cache->last = out;
        g.cache->length += g.rows;
      }
    }
    return out;
  }

 private:
  mc::Stream stream_;
  Pool pool_;
};

} // namespace

std::unique_ptr<LatentBackend> make_kernel_latent(mc::Stream s, Pool pool) {
  return std::make_unique<KernelLatent>(s, std::move(pool));
}

} // namespace mlxcel
