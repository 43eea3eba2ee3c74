// The back end on our CPU kernels: each operation is one MLX primitive, so the rest of MLX works around it.
#include <algorithm>

#include "block_cache.h"
#include "kernel_primitive.h"

namespace mlxcel {

namespace {

class Linear final : public WeightPrimitive {
 public:
  using WeightPrimitive::WeightPrimitive;
  const char* name() const override { return "linear"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    size_t i = 1;
    const void* x = dense(in[0]);
    mk_matrix w = weight(in, i);
    const void* bias = i < in.size() ? dense(in[i]) : nullptr;
    mk_dtype bias_type = bias ? kernel_dtype(in[i].dtype()) : MK_F32;
    encoder().dispatch([pool = pool_, w, bias, bias_type, x, t = kernel_dtype(in[0].dtype()), y = out[0].data<void>(),
                        rows = static_cast<int64_t>(in[0].size()) / w.cols] {
      mk_linear(pool.get(), &w, bias, bias_type, x, t, y, rows);
    });
  }
};

class Embedding final : public WeightPrimitive {
 public:
  using WeightPrimitive::WeightPrimitive;
  const char* name() const override { return "embedding"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    size_t i = 1;
    auto* ids = static_cast<const int32_t*>(dense(in[0]));
    mk_matrix w = weight(in, i);
    encoder().dispatch([pool = pool_, w, ids, n = static_cast<int64_t>(in[0].size()), y = out[0].data<void>(),
                        t = kernel_dtype(out[0].dtype())] {
      for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= w.rows)
          throw std::out_of_range(format("embedding: id %d, want 0 to %lld", ids[i], static_cast<long long>(w.rows) - 1));
      mk_embed(pool.get(), &w, ids, n, y, t);
    });
  }
};

class RmsNorm final : public KernelPrimitive {
 public:
  RmsNorm(mc::Stream s, Pool pool, float eps, float offset)
      : KernelPrimitive(s, std::move(pool)), eps_(eps), offset_(offset) {}
  const char* name() const override { return "rms_norm"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void* x = dense(in[0]);
    const void* weight = in.size() > 1 ? dense(in[1]) : nullptr;
    int64_t dim = in[0].shape(-1);
    encoder().dispatch([pool = pool_, x, t = kernel_dtype(in[0].dtype()), weight,
                        wt = weight ? kernel_dtype(in[1].dtype()) : MK_F32, offset = offset_, eps = eps_, dim,
                        rows = static_cast<int64_t>(in[0].size()) / dim, y = out[0].data<void>()] {
      mk_rms_norm(pool.get(), x, t, weight, wt, offset, eps, rows, dim, y);
    });
  }

 private:
  float eps_, offset_;
};

template <class T>
void add_rows(const void* a, const void* b, void* sum, size_t n) {
  auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  auto* z = static_cast<T*>(sum);
  for (size_t i = 0; i < n; i++) z[i] = static_cast<T>(static_cast<float>(x[i]) + static_cast<float>(y[i]));
}

class AddRmsNorm final : public KernelPrimitive {
 public:
  AddRmsNorm(mc::Stream s, Pool pool, float eps, float offset)
      : KernelPrimitive(s, std::move(pool)), eps_(eps), offset_(offset) {}
  const char* name() const override { return "add_rms_norm"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    allocate(out[1]);
    const void *x = dense(in[0]), *y = dense(in[1]);
    const void* weight = in.size() > 2 ? dense(in[2]) : nullptr;
    int64_t dim = in[0].shape(-1);
    encoder().dispatch([pool = pool_, x, y, t = kernel_dtype(in[0].dtype()), weight,
                        wt = weight ? kernel_dtype(in[2].dtype()) : MK_F32, offset = offset_, eps = eps_, dim,
                        n = in[0].size(), sum = out[0].data<void>(), norm = out[1].data<void>()] {
      switch (t) {
        case MK_F32: add_rows<float>(x, y, sum, n); break;
        case MK_F16: add_rows<mc::float16_t>(x, y, sum, n); break;
        case MK_BF16: add_rows<mc::bfloat16_t>(x, y, sum, n); break;
      }
      mk_rms_norm(pool.get(), sum, t, weight, wt, offset, eps, static_cast<int64_t>(n) / dim, dim, norm);
    });
  }

 private:
  float eps_, offset_;
};

class Rotary final : public KernelPrimitive {
 public:
  Rotary(mc::Stream s, Pool pool, const Rope& rope) : KernelPrimitive(s, std::move(pool)), rope_(rope) {}
  const char* name() const override { return "rope"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate_or_donate(in[0], out[0]);
    const void* x = dense(in[0]);
    auto* pos = static_cast<const int32_t*>(dense(in[1]));
    auto* inv_freq = static_cast<const float*>(dense(in[2]));
    encoder().dispatch([pool = pool_, r = rope_, x, t = kernel_dtype(in[0].dtype()), pos, inv_freq,
                        rows = static_cast<int64_t>(in[0].shape(0)), y = out[0].data<void>()] {
      mk_rope(pool.get(), x, t, pos, inv_freq, rows, r.heads, r.head_dim, r.rot_dim, r.scale, r.traditional, y);
    });
  }

 private:
  Rope rope_;
};

class SiluMul final : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override { return "silu_mul"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void *gate = dense(in[0]), *up = dense(in[1]);
    encoder().dispatch([pool = pool_, gate, up, t = kernel_dtype(in[0].dtype()), n = static_cast<int64_t>(in[0].size()),
                        y = out[0].data<void>()] { mk_silu_mul(pool.get(), gate, up, t, n, y); });
  }
};

class CachedAttention final : public KernelPrimitive {
 public:
  CachedAttention(mc::Stream s, Pool pool, const Attention& spec, bool append, std::vector<BlockSegment> segments)
      : KernelPrimitive(s, std::move(pool)), heads_(spec.heads), scale_(spec.scale), window_(spec.window),
        softcap_(spec.softcap), chunk_(spec.chunk), append_(append), sinks_(spec.sinks.has_value()), segments_(std::move(segments)) {}
  const char* name() const override { return "attention"; }

  // Inputs: q, then k and v if it appends, then sinks if there are any, then the attentions to run after.
  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    size_t i = 0;
    const void* q = dense(in[i++]);
    const char *k = nullptr, *v = nullptr;
    size_t k_row = 0, v_row = 0; // bytes
    if (append_) {
      k_row = in[i].nbytes() / in[i].shape(0);
      k = static_cast<const char*>(dense(in[i++]));
    }
    if (append_ && !segments_[0].cache->latent) {
      v_row = in[i].nbytes() / in[i].shape(0);
      v = static_cast<const char*>(dense(in[i++]));
    }
    auto* sinks = sinks_ ? static_cast<const float*>(dense(in[i++])) : nullptr;
    encoder().dispatch([pool = pool_, q, t = kernel_dtype(in[0].dtype()), k, v, k_row, v_row, sinks, heads = heads_,
                        scale = scale_, window = window_, softcap = softcap_, chunk = chunk_, segments = std::move(segments_),
                        y = out[0].data<void>()] {
      std::vector<mk_segment> parts = appended(segments, k, k_row, v, v_row);
      auto n = static_cast<int64_t>(parts.size());
      if (chunk > 0)
        mk_chunked_attention(pool.get(), q, t, heads, scale, chunk, parts.data(), n, y);
      else
        mk_attention(pool.get(), q, t, heads, scale, window, softcap, sinks, parts.data(), n, y);
    });
  }

 private:
  int heads_;
  float scale_;
  int64_t window_;
  float softcap_;
  int64_t chunk_;
  bool append_, sinks_;
  std::vector<BlockSegment> segments_;
};

class KernelBackend final : public Backend {
 public:
  KernelBackend(mc::Stream s, Pool pool) : stream_(s), pool_(std::move(pool)) {}

  array linear(const array& x, const Matrix& w, const std::optional<array>& bias) override {
    mc::Shape shape = x.shape();
    shape.back() = w.rows;
    Arrays inputs{x};
    WeightInputs::append(w, inputs);
    if (bias) inputs.push_back(*bias);
    return array(std::move(shape), x.dtype(), std::make_shared<Linear>(stream_, pool_, w), std::move(inputs));
  }

  array embedding(const array& ids, const Matrix& w, mc::Dtype dtype) override {
    mc::Shape shape = ids.shape();
    shape.push_back(w.cols);
    Arrays inputs{ids};
    WeightInputs::append(w, inputs);
    return array(std::move(shape), dtype, std::make_shared<Embedding>(stream_, pool_, w), std::move(inputs));
  }

  array rms_norm(const array& x, const std::optional<array>& weight, float eps, float offset) override {
    Arrays inputs{x};
    if (weight) inputs.push_back(*weight);
    return array(x.shape(), x.dtype(), std::make_shared<RmsNorm>(stream_, pool_, eps, offset), std::move(inputs));
  }

  Arrays add_rms_norm(const array& x, const array& y, const std::optional<array>& weight, float eps,
                      float offset) override {
    Arrays inputs{x, y};
    if (weight) inputs.push_back(*weight);
    return array::make_arrays({x.shape(), x.shape()}, {x.dtype(), x.dtype()},
                              std::make_shared<AddRmsNorm>(stream_, pool_, eps, offset), inputs);
  }

  array rope(const array& x, const array& pos, const array& inv_freq, const Rope& rope) override {
    return array(x.shape(), x.dtype(), std::make_shared<Rotary>(stream_, pool_, rope), {x, pos, inv_freq});
  }

  array silu_mul(const array& gate, const array& up) override {
    return array(gate.shape(), gate.dtype(), std::make_shared<SiluMul>(stream_, pool_), {gate, up});
  }

  array attention(const array& q, const std::optional<array>& k, const std::optional<array>& v, const Attention& spec,
                  const std::vector<Segment>& segments) override {
    Arrays inputs{q};
    std::vector<BlockSegment> parts = block_segments(segments);
    if (k) inputs.push_back(mc::astype(*k, segments[0].cache->dtype, stream_));
    if (v) inputs.push_back(mc::astype(*v, segments[0].cache->dtype, stream_));
    if (spec.sinks) inputs.push_back(*spec.sinks);
    for (auto& g : parts) {
      if (g.cache->last) inputs.push_back(*g.cache->last);
    }
    auto out = array({q.shape(0), spec.heads * spec.value_dim}, q.dtype(),
                     std::make_shared<CachedAttention>(stream_, pool_, spec, k.has_value(), parts), std::move(inputs));
    for (auto& g : parts) {
      g.cache->last = out;
      if (k) g.cache->length += g.rows;
    }
    return out;
  }

  std::shared_ptr<Cache> new_cache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype) override {
    return std::make_shared<BlockCache>(kv_heads, k_dim, v_dim, dtype, false,
                                        mk_kv_new(kv_heads, k_dim, v_dim, kernel_dtype(dtype)));
  }

  MoeBackend& moe() override { return *moe_; }
  RecurrentBackend& recurrent() override { return *recurrent_; }
  LatentBackend& latent() override { return *latent_; }
  ActivationBackend& activation() override { return *activation_; }

 private:
  mc::Stream stream_;
  Pool pool_;
  std::unique_ptr<MoeBackend> moe_ = make_kernel_moe(stream_, pool_);
  std::unique_ptr<RecurrentBackend> recurrent_ = make_kernel_recurrent(stream_, pool_);
  std::unique_ptr<LatentBackend> latent_ = make_kernel_latent(stream_, pool_);
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
