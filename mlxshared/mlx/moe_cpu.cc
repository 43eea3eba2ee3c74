// Mixtures of experts on our CPU kernels.
#include "kernel_backend.h"
#include "moe.h"

#include "../kernels/cpu/moe.h"

namespace mlxcel {

namespace {

static_assert(int(MX_ROUTE_SOFTMAX_CHOSEN) == int(MK_ROUTE_SOFTMAX_CHOSEN) &&
              int(MX_ROUTE_SOFTMAX_ALL) == int(MK_ROUTE_SOFTMAX_ALL) && int(MX_ROUTE_SIGMOID) == int(MK_ROUTE_SIGMOID));

class KernelMoe final : public MoeBackend, KernelOps {
 public:
  using KernelOps::KernelOps;

  array linear_gather(const array& x, const Matrix& w, const std::optional<array>& bias, const array& ids) override {
    const int rows = ids.shape(0), k = ids.shape(1), experts = w.w.shape(0);
    array in = dense(x), chosen = dense(ids), y = fresh({rows, k, w.rows}, x.dtype());
    KernelMatrix m = dense(w);
    auto b = dense(bias);
    auto* id = chosen.data<int32_t>();
    for (int i = 0; i < rows * k; i++)
      if (id[i] < 0 || id[i] >= experts) throw std::out_of_range(format("expert %d, want 0 to %d", id[i], experts - 1));
    checked(mk_linear_gather(pool(), &m.kernel, experts, data(b), kernel_dtype(b), in.data<void>(), kernel_dtype(in),
                             in.ndim() == 3, id, rows, k, y.data<void>()));
    return y;
  }

  Arrays route(const array& logits, const Route& r) override {
    array in = dense(logits), ids = fresh({logits.shape(0), r.top_k}, mc::int32), weights = fresh(ids.shape(), mc::float32);
    auto bias = dense(r.bias);
    const mk_route_spec spec = {r.experts, r.top_k, static_cast<mk_route_scores>(r.scores), r.normalize, r.epsilon, r.scale,
                                static_cast<const float*>(data(bias)), r.groups, r.top_groups, r.high_ties};
    checked(mk_route(pool(), in.data<void>(), kernel_dtype(in), &spec, in.shape(0), ids.data<int32_t>(), weights.data<float>()));
    return {ids, weights};
  }

  array weighted_sum(const array& x, const array& weights) override {
    array in = dense(x), by = dense(weights), y = fresh({x.shape(0), x.shape(2)}, x.dtype());
    mk_weighted_sum(pool(), in.data<void>(), kernel_dtype(in), by.data<float>(), x.shape(0), x.shape(1), x.shape(2),
                    y.data<void>());
    return y;
  }

  array clamped_swiglu(const array& gate, const array& up, float alpha, float limit) override {
    array g = dense(gate), u = dense(up), y = fresh(gate.shape(), gate.dtype());
    mk_clamped_swiglu(pool(), g.data<void>(), u.data<void>(), kernel_dtype(g), alpha, limit, g.size(), y.data<void>());
    return y;
  }
};

} // namespace

std::unique_ptr<MoeBackend> make_kernel_moe(mc::Stream s, Pool pool) { return std::make_unique<KernelMoe>(s, std::move(pool)); }

} // namespace mlxcel
