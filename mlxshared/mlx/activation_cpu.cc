// Activations made of tanh on our CPU kernels.
#include "../kernels/cpu/activation.h"

#include "kernel_primitive.h"

namespace mlxcel {

namespace {

class GeluMul final : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override { return "gelu_mul"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void *gate = dense(in[0]), *up = dense(in[1]);
    encoder().dispatch([pool = pool_, gate, up, t = kernel_dtype(in[0].dtype()), n = static_cast<int64_t>(in[0].size()),
                        y = out[0].data<void>()] { mk_gelu_mul(pool.get(), gate, up, t, n, y); });
  }
};

class Softcap final : public KernelPrimitive {
 public:
  Softcap(mc::Stream s, Pool pool, float cap) : KernelPrimitive(s, std::move(pool)), cap_(cap) {}
  const char* name() const override { return "softcap"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void* x = dense(in[0]);
    encoder().dispatch([pool = pool_, x, t = kernel_dtype(in[0].dtype()), cap = cap_, n = static_cast<int64_t>(in[0].size()),
                        y = out[0].data<void>()] { mk_softcap(pool.get(), x, t, cap, n, y); });
  }

 private:
  float cap_;
};

class KernelActivation final : public ActivationBackend {
 public:
  KernelActivation(mc::Stream s, Pool pool) : stream_(s), pool_(std::move(pool)) {}

  array gelu_mul(const array& gate, const array& up) override {
    return array(gate.shape(), gate.dtype(), std::make_shared<GeluMul>(stream_, pool_), {gate, up});
  }

  array softcap(const array& x, float cap) override {
    return array(x.shape(), x.dtype(), std::make_shared<Softcap>(stream_, pool_, cap), {x});
  }

 private:
  mc::Stream stream_;
  Pool pool_;
};

} // namespace

std::unique_ptr<ActivationBackend> make_kernel_activation(mc::Stream s, Pool pool) {
  return std::make_unique<KernelActivation>(s, std::move(pool));
}

} // namespace mlxcel
