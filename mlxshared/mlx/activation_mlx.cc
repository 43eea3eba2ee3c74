// Activations made of tanh on MLX's own operations.
#include "internal.h"

namespace mlxcel {

namespace {

class MlxActivation final : public ActivationBackend {
 public:
  explicit MlxActivation(mc::Stream s) : s_(s) {}

  array gelu_mul(const array& gate, const array& up) override {
    array x = mc::astype(gate, mc::float32, s_);
    array cubic = mc::add(mc::multiply(array(0.044715f), mc::square(x, s_), s_), array(1.0f), s_);
    array inner = mc::multiply(mc::multiply(array(0.7978845608028654f), x, s_), cubic, s_); // sqrt(2/pi)
    array y = mc::multiply(mc::multiply(array(0.5f), x, s_), mc::add(mc::tanh(inner, s_), array(1.0f), s_), s_);
    return mc::astype(mc::multiply(y, mc::astype(up, mc::float32, s_), s_), gate.dtype(), s_);
  }

  array softcap(const array& x, float cap) override {
    array wide = mc::divide(mc::astype(x, mc::float32, s_), array(cap), s_);
    return mc::astype(mc::multiply(array(cap), mc::tanh(wide, s_), s_), x.dtype(), s_);
  }

 private:
  mc::Stream s_;
};

} // namespace

std::unique_ptr<ActivationBackend> make_mlx_activation(mc::Stream s) { return std::make_unique<MlxActivation>(s); }

} // namespace mlxcel
