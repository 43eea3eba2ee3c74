// States and the operations on them, on our CPU kernels.
#include "kernel_backend.h"
#include "recurrent.h"

namespace mlxcel {

namespace {

class HeldState final : public State {
 public:
  HeldState(int rows, int cols, mc::Dtype dtype, std::shared_ptr<int64_t> held)
      : State(rows, cols, dtype), held_(std::move(held)) {
    may_fail();
    data_.resize(mk_state_bytes(rows, cols, kernel_dtype(dtype)));
    *held_ += static_cast<int64_t>(data_.size());
  }
  ~HeldState() override { *held_ -= static_cast<int64_t>(data_.size()); }

  uint64_t bytes() const override { return data_.size(); }

  std::shared_ptr<State> copy() override {
    auto copy = std::make_shared<HeldState>(rows, cols, dtype, held_);
    copy->data_ = data_;
    copy->length = length;
    return copy;
  }

  void read(char* data) override {
    for (int r = 0; r < rows; r++) memcpy(data + r * row(), data_.data() + r * padded(), row());
  }

  void write(const char* data) override {
    for (int r = 0; r < rows; r++) memcpy(data_.data() + r * padded(), data + r * row(), row());
  }

  void* data() { return data_.data(); }

 private:
  size_t row() const { return size_t(cols) * dtype.size(); }
  size_t padded() const { return data_.size() / rows; }

  std::vector<char> data_;
  std::shared_ptr<int64_t> held_;
};

// The segments as kernels take them. Their states count as advanced from here on.
std::vector<mk_recurrent_segment> entered(const StateSegments& segments) {
  std::vector<mk_recurrent_segment> parts;
  parts.reserve(segments.size());
  for (auto& g : segments) {
    parts.push_back({static_cast<HeldState&>(*g.state).data(), g.row0, g.rows});
    g.state->length += g.rows;
  }
  return parts;
}

class KernelRecurrent final : public RecurrentBackend, KernelOps {
 public:
  KernelRecurrent(mc::Stream s, Pool pool, std::shared_ptr<int64_t> held)
      : KernelOps(s, std::move(pool)), held_(std::move(held)) {}

  std::shared_ptr<State> new_state(int rows, int cols, mc::Dtype dtype) override {
    return std::make_shared<HeldState>(rows, cols, dtype, held_);
  }

  array conv(const array& x, const array& weight, const std::optional<array>& bias, bool silu,
             const StateSegments& segments) override {
    array in = dense(x), w = dense(weight), y = fresh({x.shape(0), x.shape(1)}, x.dtype());
    auto b = dense(bias);
    auto parts = entered(segments);
    const mk_conv spec = {w.shape(1), w.shape(0), silu};
    mk_causal_conv(pool(), &spec, w.data<float>(), static_cast<const float*>(data(b)), in.data<void>(), kernel_dtype(in),
                   parts.data(), count(parts), y.data<void>());
    return y;
  }

  array scan(const array& x, const array& dt, const array& b, const array& c, const array& a, const array& skip,
             const StateSegments& segments) override {
    array in = dense(x), step = dense(dt), enter = dense(b), leave = dense(c), rates = dense(a), through = dense(skip);
    array y = fresh({x.shape(0), x.shape(1)}, x.dtype());
    auto parts = entered(segments);
    const mk_scan spec = {rates.shape(1), rates.shape(0)};
    checked(mk_selective_scan(pool(), &spec, rates.data<float>(), through.data<float>(), in.data<void>(), step.data<void>(),
                              enter.data<void>(), leave.data<void>(), kernel_dtype(in), parts.data(), count(parts), y.data<void>()));
    return y;
  }

  array ssm(const array& xbc, const array& dt, const array& a, const array& skip, const array& dt_bias, const mx_ssm_spec& p,
            const StateSegments& segments) override {
    array in = dense(xbc), step = dense(dt), rates = dense(a), through = dense(skip), bias = dense(dt_bias);
    array y = fresh({xbc.shape(0), p.heads * p.head_dim}, xbc.dtype());
    auto parts = entered(segments);
    const mk_ssm spec = {p.heads, p.head_dim, p.groups, p.states, p.dt_min, p.dt_max};
    checked(mk_ssm_step(pool(), &spec, rates.data<float>(), through.data<float>(), bias.data<float>(), in.data<void>(),
                        step.data<void>(), kernel_dtype(in), parts.data(), count(parts), y.data<void>()));
    return y;
  }

  array delta(const array& qkv, const array& gate, const array& beta, const array& a, const array& gate_bias,
              const mx_delta_spec& p, const StateSegments& segments) override {
    array in = dense(qkv), gates = dense(gate), betas = dense(beta), rates = dense(a), bias = dense(gate_bias);
    array y = fresh({qkv.shape(0), p.value_heads * p.value_dim}, qkv.dtype());
    auto parts = entered(segments);
    const mk_delta spec = {p.key_heads, p.value_heads, p.key_dim, p.value_dim, p.channel_gate, p.lower_bound};
    checked(mk_gated_delta(pool(), &spec, rates.data<float>(), bias.data<float>(), in.data<void>(), gates.data<void>(),
                           betas.data<void>(), kernel_dtype(in), parts.data(), count(parts), y.data<void>()));
    return y;
  }

  array sigmoid_mul(const array& x, const array& gate) override {
    array in = dense(x), gates = dense(gate), y = fresh(x.shape(), x.dtype());
    mk_sigmoid_mul(pool(), in.data<void>(), gates.data<void>(), kernel_dtype(in), x.shape(0), x.shape(1), gate.shape(1),
                   y.data<void>());
    return y;
  }

 private:
  static int64_t count(const std::vector<mk_recurrent_segment>& parts) { return static_cast<int64_t>(parts.size()); }

  std::shared_ptr<int64_t> held_;
};

} // namespace

std::unique_ptr<RecurrentBackend> make_kernel_recurrent(mc::Stream s, Pool pool, std::shared_ptr<int64_t> held) {
  return std::make_unique<KernelRecurrent>(s, std::move(pool), std::move(held));
}

} // namespace mlxcel
