// Mixtures of experts on our CPU kernels.
#include "kernel_primitive.h"
#include "moe.h"

#include "../kernels/cpu/moe.h"

namespace mlxcel {

namespace {

class LinearGather final : public WeightPrimitive {
 public:
  using WeightPrimitive::WeightPrimitive;
  const char* name() const override { return "linear_gather"; }

  // Inputs: x, ids, the weight's, then the bias if there is one.
  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    size_t i = 2;
    const void* x = dense(in[0]);
    auto* ids = static_cast<const int32_t*>(dense(in[1]));
    int64_t experts = in[2].shape(0);
    mk_matrix w = weight(in, i);
    const void* bias = i < in.size() ? dense(in[i]) : nullptr;
    mk_dtype bias_type = bias ? kernel_dtype(in[i].dtype()) : MK_F32;
    encoder().dispatch([pool = pool_, w, experts, bias, bias_type, x, t = kernel_dtype(in[0].dtype()), ids,
                        per_choice = in[0].ndim() == 3, m = static_cast<int64_t>(in[1].shape(0)), k = in[1].shape(1),
                        y = out[0].data<void>()] {
      for (int64_t i = 0; i < m * k; i++)
        if (ids[i] < 0 || ids[i] >= experts)
          throw std::out_of_range(format("linear_gather: expert %d, want 0 to %lld", ids[i], static_cast<long long>(experts) - 1));
      mk_linear_gather(pool.get(), &w, experts, bias, bias_type, x, t, per_choice, ids, m, k, y);
    });
  }
};

class Router final : public KernelPrimitive {
 public:
  Router(mc::Stream s, Pool pool, const Route& r)
      : KernelPrimitive(s, std::move(pool)),
        spec_{r.experts, r.top_k, static_cast<mk_route_scores>(r.scores), r.normalize, r.epsilon,
              r.scale, nullptr, r.groups, r.top_groups, r.high_ties} {}
  const char* name() const override { return "route"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    allocate(out[1]);
    const void* logits = dense(in[0]);
    mk_route_spec spec = spec_;
    if (in.size() > 1) spec.bias = static_cast<const float*>(dense(in[1]));
    encoder().dispatch([pool = pool_, logits, t = kernel_dtype(in[0].dtype()), spec, rows = static_cast<int64_t>(in[0].shape(0)),
                        ids = out[0].data<int32_t>(), weights = out[1].data<float>()] {
      mk_route(pool.get(), logits, t, &spec, rows, ids, weights);
    });
  }

 private:
  mk_route_spec spec_;
};

static_assert(int(MX_ROUTE_SOFTMAX_CHOSEN) == int(MK_ROUTE_SOFTMAX_CHOSEN) &&
              int(MX_ROUTE_SOFTMAX_ALL) == int(MK_ROUTE_SOFTMAX_ALL) && int(MX_ROUTE_SIGMOID) == int(MK_ROUTE_SIGMOID));

class WeightedSum final : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override { return "weighted_sum"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void* x = dense(in[0]);
    auto* weights = static_cast<const float*>(dense(in[1]));
    encoder().dispatch([pool = pool_, x, t = kernel_dtype(in[0].dtype()), weights, rows = static_cast<int64_t>(in[0].shape(0)),
                        k = in[0].shape(1), dim = static_cast<int64_t>(in[0].shape(2)), y = out[0].data<void>()] {
      mk_weighted_sum(pool.get(), x, t, weights, rows, k, dim, y);
    });
  }
};

class ClampedSwiglu final : public KernelPrimitive {
 public:
  ClampedSwiglu(mc::Stream s, Pool pool, float alpha, float limit)
      : KernelPrimitive(s, std::move(pool)), alpha_(alpha), limit_(limit) {}
  const char* name() const override { return "clamped_swiglu"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void *gate = dense(in[0]), *up = dense(in[1]);
    encoder().dispatch([pool = pool_, gate, up, t = kernel_dtype(in[0].dtype()), alpha = alpha_, limit = limit_,
                        n = static_cast<int64_t>(in[0].size()), y = out[0].data<void>()] {
      mk_clamped_swiglu(pool.get(), gate, up, t, alpha, limit, n, y);
    });
  }

 private:
  float alpha_, limit_;
};

class KernelMoe final : public MoeBackend {
 public:
  KernelMoe(mc::Stream s, Pool pool) : stream_(s), pool_(std::move(pool)) {}

  array linear_gather(const array& x, const Matrix& w, const std::optional<array>& bias, const array& ids) override {
    Arrays inputs{x, ids};
    WeightInputs::append(w, inputs);
    if (bias) inputs.push_back(*bias);
    return array({ids.shape(0), ids.shape(1), w.rows}, x.dtype(), std::make_shared<LinearGather>(stream_, pool_, w),
                 std::move(inputs));
  }

  Arrays route(const array& logits, const Route& r) override {
    Arrays inputs{logits};
    if (r.bias) inputs.push_back(*r.bias);
    mc::Shape shape{logits.shape(0), r.top_k};
    return array::make_arrays({shape, shape}, {mc::int32, mc::float32}, std::make_shared<Router>(stream_, pool_, r), inputs);
  }

  array weighted_sum(const array& x, const array& weights) override {
    return array({x.shape(0), x.shape(2)}, x.dtype(), std::make_shared<WeightedSum>(stream_, pool_), {x, weights});
  }

  array clamped_swiglu(const array& gate, const array& up, float alpha, float limit) override {
    return array(gate.shape(), gate.dtype(), std::make_shared<ClampedSwiglu>(stream_, pool_, alpha, limit), {gate, up});
  }

 private:
  mc::Stream stream_;
  Pool pool_;
};

} // namespace

std::unique_ptr<MoeBackend> make_kernel_moe(mc::Stream s, Pool pool) { return std::make_unique<KernelMoe>(s, std::move(pool)); }

} // namespace mlxcel
