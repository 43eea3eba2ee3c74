// States and the operations on them, on our CPU kernels.
#include "kernel_primitive.h"
#include "recurrent.h"

namespace mlxcel {

namespace {

class HeldState final : public State {
 public:
  HeldState(int rows, int cols, mc::Dtype dtype)
      : State(rows, cols, dtype), data_(mk_state_bytes(rows, cols, kernel_dtype(dtype))) {}

  uint64_t bytes() const override { return data_.size(); }

  std::shared_ptr<State> fork() override {
    if (done != length)
      throw std::runtime_error(format("%lld positions were not evaluated yet", static_cast<long long>(length - done)));
    auto copy = std::make_shared<HeldState>(rows, cols, dtype);
    copy->data_ = data_;
    copy->length = copy->done = length;
    return copy;
  }

  void evaluated() override {
    if (last && last->status() != array::Status::unscheduled) last.reset();
  }
  void abandon() override { last.reset(); }

  // The state for the rows from pos on; it must be where they begin.
  void* enter(int64_t pos, int64_t rows) {
    if (done != pos)
      throw std::runtime_error(format("the state is at position %lld, want %lld", static_cast<long long>(done), static_cast<long long>(pos)));
    done = pos + rows;
    return data_.data();
  }

  int64_t done = 0; // rows that were evaluated
  // The last operation built on this state and not evaluated yet. The next one takes it as an input, since MLX would
  // else be free to run them in any order.
  std::optional<array> last;

 private:
  std::vector<char> data_;
};

struct HeldSegment {
  std::shared_ptr<HeldState> state;
  int64_t row0, rows, pos;
};

// An operation on states. Its inputs end with the operations to run after.
class Recurrence : public KernelPrimitive {
 public:
  Recurrence(mc::Stream s, Pool pool, std::vector<HeldSegment> segments)
      : KernelPrimitive(s, std::move(pool)), segments_(std::move(segments)) {}

 protected:
  using Parts = std::vector<mk_recurrent_segment>;

  // Hands f, on MLX's thread, the pool and the segments with their states.
  template <class F>
  void run(F f) {
    encoder().dispatch([pool = pool_, segments = std::move(segments_), f = std::move(f)] {
      Parts parts;
      parts.reserve(segments.size());
      for (auto& g : segments) parts.push_back({g.state->enter(g.pos, g.rows), g.row0, g.rows});
      f(pool.get(), parts.data(), static_cast<int64_t>(parts.size()));
    });
  }

  const float* numbers(const array& a) { return static_cast<const float*>(dense(a)); }

 private:
  std::vector<HeldSegment> segments_;
};

class Conv final : public Recurrence {
 public:
  Conv(mc::Stream s, Pool pool, std::vector<HeldSegment> segments, bool silu, bool bias)
      : Recurrence(s, std::move(pool), std::move(segments)), silu_(silu), bias_(bias) {}
  const char* name() const override { return "causal_conv"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    run([spec = mk_conv{in[1].shape(1), in[1].shape(0), silu_}, x = dense(in[0]), weight = numbers(in[1]),
         bias = bias_ ? numbers(in[2]) : nullptr, t = kernel_dtype(in[0].dtype()), y = out[0].data<void>()](
            mk_pool* pool, const mk_recurrent_segment* parts, int64_t n) {
      mk_causal_conv(pool, &spec, weight, bias, x, t, parts, n, y);
    });
  }

 private:
  bool silu_, bias_;
};

class Scan final : public Recurrence {
 public:
  using Recurrence::Recurrence;
  const char* name() const override { return "selective_scan"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    run([spec = mk_scan{in[4].shape(1), in[4].shape(0)}, x = dense(in[0]), dt = dense(in[1]), b = dense(in[2]), c = dense(in[3]),
         a = numbers(in[4]), skip = numbers(in[5]), t = kernel_dtype(in[0].dtype()), y = out[0].data<void>()](
            mk_pool* pool, const mk_recurrent_segment* parts, int64_t n) {
      mk_selective_scan(pool, &spec, a, skip, x, dt, b, c, t, parts, n, y);
    });
  }
};

class Ssm final : public Recurrence {
 public:
  Ssm(mc::Stream s, Pool pool, std::vector<HeldSegment> segments, const mx_ssm_spec& p)
      : Recurrence(s, std::move(pool), std::move(segments)), spec_{p.heads, p.head_dim, p.groups, p.states, p.dt_min, p.dt_max} {}
  const char* name() const override { return "ssm"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    run([spec = spec_, xbc = dense(in[0]), dt = dense(in[1]), a = numbers(in[2]), skip = numbers(in[3]), bias = numbers(in[4]),
         t = kernel_dtype(in[0].dtype()), y = out[0].data<void>()](mk_pool* pool, const mk_recurrent_segment* parts, int64_t n) {
      mk_ssm_step(pool, &spec, a, skip, bias, xbc, dt, t, parts, n, y);
    });
  }

 private:
  mk_ssm spec_;
};

class Delta final : public Recurrence {
 public:
  Delta(mc::Stream s, Pool pool, std::vector<HeldSegment> segments, const mx_delta_spec& p)
      : Recurrence(s, std::move(pool), std::move(segments)),
        spec_{p.key_heads, p.value_heads, p.key_dim, p.value_dim, p.channel_gate, p.lower_bound} {}
  const char* name() const override { return "gated_delta"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    run([spec = spec_, qkv = dense(in[0]), gate = dense(in[1]), beta = dense(in[2]), a = numbers(in[3]), bias = numbers(in[4]),
         t = kernel_dtype(in[0].dtype()), y = out[0].data<void>()](mk_pool* pool, const mk_recurrent_segment* parts, int64_t n) {
      mk_gated_delta(pool, &spec, a, bias, qkv, gate, beta, t, parts, n, y);
    });
  }

 private:
  mk_delta spec_;
};

class SigmoidMul final : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override { return "sigmoid_mul"; }

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    const void *x = dense(in[0]), *gate = dense(in[1]);
    encoder().dispatch([pool = pool_, x, gate, t = kernel_dtype(in[0].dtype()), rows = static_cast<int64_t>(in[0].shape(0)),
                        dim = static_cast<int64_t>(in[0].shape(1)), gates = static_cast<int64_t>(in[1].shape(1)),
                        y = out[0].data<void>()] { mk_sigmoid_mul(pool.get(), x, gate, t, rows, dim, gates, y); });
  }
};

class KernelRecurrent final : public RecurrentBackend {
 public:
  KernelRecurrent(mc::Stream s, Pool pool) : stream_(s), pool_(std::move(pool)) {}

  std::shared_ptr<State> new_state(int rows, int cols, mc::Dtype dtype) override {
    return std::make_shared<HeldState>(rows, cols, dtype);
  }

  array conv(const array& x, const array& weight, const std::optional<array>& bias, bool silu,
             const StateSegments& segments) override {
    Arrays inputs{x, weight};
    if (bias) inputs.push_back(*bias);
    return build<Conv>(x, x.shape(1), std::move(inputs), segments, silu, bias.has_value());
  }

  array scan(const array& x, const array& dt, const array& b, const array& c, const array& a, const array& skip,
             const StateSegments& segments) override {
    return build<Scan>(x, x.shape(1), {x, dt, b, c, a, skip}, segments);
  }

  array ssm(const array& xbc, const array& dt, const array& a, const array& skip, const array& dt_bias, const mx_ssm_spec& spec,
            const StateSegments& segments) override {
    return build<Ssm>(xbc, spec.heads * spec.head_dim, {xbc, dt, a, skip, dt_bias}, segments, spec);
  }

  array delta(const array& qkv, const array& gate, const array& beta, const array& a, const array& gate_bias,
              const mx_delta_spec& spec, const StateSegments& segments) override {
    return build<Delta>(qkv, spec.value_heads * spec.value_dim, {qkv, gate, beta, a, gate_bias}, segments, spec);
  }

  array sigmoid_mul(const array& x, const array& gate) override {
    return array(x.shape(), x.dtype(), std::make_shared<SigmoidMul>(stream_, pool_), {x, gate});
  }

 private:
  // An operation P of `width` outputs a row in like's dtype, ordered after those that the states wait for.
  template <class P, class... Args>
  array build(const array& like, int width, Arrays inputs, const StateSegments& segments, Args... args) {
    std::vector<HeldSegment> held;
    held.reserve(segments.size());
    for (auto& g : segments) {
      auto state = std::static_pointer_cast<HeldState>(g.state);
      if (state->last) inputs.push_back(*state->last);
      held.push_back({std::move(state), g.row0, g.rows, g.pos});
    }
    auto primitive = std::make_shared<P>(stream_, pool_, held, args...);
    array out({like.shape(0), width}, like.dtype(), std::move(primitive), std::move(inputs));
    for (auto& g : held) {
      g.state->last = out;
      g.state->length += g.rows;
    }
    return out;
  }

  mc::Stream stream_;
  Pool pool_;
};

} // namespace

std::unique_ptr<RecurrentBackend> make_kernel_recurrent(mc::Stream s, Pool pool) {
  return std::make_unique<KernelRecurrent>(s, std::move(pool));
}

} // namespace mlxcel
