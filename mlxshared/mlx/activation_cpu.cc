// Activations made of tanh on our CPU kernels.
#include "../kernels/cpu/activation.h"

#include "kernel_backend.h"

namespace mlxcel {

namespace {

class KernelActivation final : public ActivationBackend, KernelOps {
 public:
  using KernelOps::KernelOps;

  array gelu_mul(const array& gate, const array& up) override {
    array g = dense(gate), u = dense(up), y = fresh(gate.shape(), gate.dtype());
    mk_gelu_mul(pool(), g.data<void>(), u.data<void>(), kernel_dtype(g), g.size(), y.data<void>());
    return y;
  }

  array softcap(const array& x, float cap) override {
    array in = dense(x), y = fresh(x.shape(), x.dtype());
    mk_softcap(pool(), in.data<void>(), kernel_dtype(in), cap, in.size(), y.data<void>());
    return y;
  }
};

} // namespace

std::unique_ptr<ActivationBackend> make_kernel_activation(mc::Stream s, Pool pool) {
  return std::make_unique<KernelActivation>(s, std::move(pool));
}

} // namespace mlxcel
