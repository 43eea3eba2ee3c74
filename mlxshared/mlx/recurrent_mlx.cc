// States and the operations on them, composed of MLX's own.
#include <algorithm>
#include <cmath>

#include "internal.h"

namespace mlxcel {

namespace {

class ArrayState final : public State {
 public:
  ArrayState(int rows, int cols, mc::Dtype dtype, mc::Stream s)
      : State(rows, cols, dtype), value(mc::zeros({rows, cols}, dtype, s)), stream_(s) {}
  uint64_t bytes() const override { return uint64_t(rows) * cols * dtype.size(); }
  const mc::array* array() const override { return &value; }
  std::shared_ptr<State> copy() override { return std::make_shared<ArrayState>(*this); }
  void abandon() override { value = mc::array(0.0f); }

  void read(char* data) override {
    value = row_major(stream_, value);
    std::copy_n(value.data<char>(), value.nbytes(), data);
  }

  void write(const char* data) override {
    auto memory = allocated(bytes());
    std::copy_n(data, bytes(), static_cast<char*>(memory_of(memory)));
    value = mc::array(std::move(memory), {rows, cols}, dtype);
  }

  mc::array value;

 private:
  mc::Stream stream_;
};

class MlxRecurrent final : public RecurrentBackend {
 public:
  explicit MlxRecurrent(mc::Stream s) : s_(s) {}

  std::shared_ptr<State> new_state(int rows, int cols, mc::Dtype dtype) override {
    return std::make_shared<ArrayState>(rows, cols, dtype, s_);
  }

  array conv(const array& x, const array& weight, const std::optional<array>& bias, bool silu,
             const StateSegments& segments) override {
    int width = weight.shape(0), channels = weight.shape(1);
    return by_segment(x, segments, [&](ArrayState& state, const StateSegment& g) {
      array all = mc::concatenate({state.value, rows(x, g)}, 0, s_), wide = mc::astype(all, mc::float32, s_);
      int n = static_cast<int>(g.rows);
      array y = mc::zeros({n, channels}, mc::float32, s_);
      for (int k = 0; k < width; k++) y = mc::add(y, mc::multiply(cut(wide, k, k + n), cut(weight, k, k + 1), s_), s_);
      if (bias) y = mc::add(y, *bias, s_);
      state.value = mc::contiguous(cut(all, n, n + width - 1), false, s_);
      return silu ? mc::multiply(y, mc::sigmoid(y, s_), s_) : y;
    });
  }

  array scan(const array& x, const array& dt, const array& b, const array& c, const array& a, const array& skip,
             const StateSegments& segments) override {
    return by_segment(x, segments, [&](ArrayState& state, const StateSegment& g) {
      array in = wide_rows(x, g), d = softplus(wide_rows(dt, g)), into = wide_rows(b, g), from = wide_rows(c, g);
      array added = mc::multiply(mc::expand_dims(mc::multiply(d, in, s_), 1, s_), mc::expand_dims(into, 2, s_), s_);
      array decay = mc::exp(mc::multiply(mc::expand_dims(d, 1, s_), a, s_), s_); // [n, states, channels]
      std::vector<array> ys;
      for (int t = 0; t < g.rows; t++) {
        array held = mc::astype(state.value, mc::float32, s_);
        state.value = mc::astype(mc::add(mc::multiply(held, at(decay, t), s_), at(added, t), s_), state.dtype, s_);
        array seen = mc::multiply(mc::astype(state.value, mc::float32, s_), mc::expand_dims(at(from, t), 1, s_), s_);
        ys.push_back(mc::sum(seen, 0, false, s_));
      }
      return mc::add(mc::stack(ys, 0, s_), mc::multiply(in, skip, s_), s_);
    });
  }

  array ssm(const array& xbc, const array& dt, const array& a, const array& skip, const array& dt_bias, const mx_ssm_spec& p,
            const StateSegments& segments) override {
    int inner = p.heads * p.head_dim, shared = p.groups * p.states;
    return by_segment(xbc, segments, [&](ArrayState& state, const StateSegment& g) {
      int n = static_cast<int>(g.rows);
      array in = wide_rows(xbc, g);
      array x = mc::reshape(columns(in, 0, inner), {n, p.heads, p.head_dim}, s_);
      auto grouped = [&](int from) { // [n, heads, states, 1]
        array each = mc::reshape(columns(in, from, from + shared), {n, p.groups, p.states, 1}, s_);
        return mc::repeat(each, p.heads / p.groups, 1, s_);
      };
      array b = grouped(inner), c = grouped(inner + shared);
      array d = softplus(mc::add(wide_rows(dt, g), dt_bias, s_));
      d = mc::minimum(mc::maximum(d, array(p.dt_min), s_), array(p.dt_max), s_); // [n, heads]
      array decay = mc::reshape(mc::exp(mc::multiply(d, a, s_), s_), {n, p.heads, 1, 1}, s_);
      array dx = mc::multiply(mc::expand_dims(d, 2, s_), x, s_);
      array added = mc::multiply(b, mc::expand_dims(dx, 2, s_), s_); // [n, heads, states, head_dim]
      array held = mc::reshape(state.value, {p.heads, p.states, p.head_dim}, s_);
      std::vector<array> ys;
      for (int t = 0; t < n; t++) {
        held = mc::add(mc::multiply(held, at(decay, t), s_), at(added, t), s_);
        ys.push_back(mc::sum(mc::multiply(held, at(c, t), s_), 1, false, s_));
      }
      state.value = mc::reshape(held, {p.heads * p.states, p.head_dim}, s_);
      array direct = mc::multiply(x, mc::reshape(skip, {p.heads, 1}, s_), s_);
      return mc::reshape(mc::add(mc::stack(ys, 0, s_), direct, s_), {n, inner}, s_);
    });
  }

  array delta(const array& qkv, const array& gate, const array& beta, const array& a, const array& gate_bias,
              const mx_delta_spec& p, const StateSegments& segments) override {
    int keys = p.key_heads * p.key_dim, values = p.value_heads * p.value_dim;
    return by_segment(qkv, segments, [&](ArrayState& state, const StateSegment& g) {
      int n = static_cast<int>(g.rows);
      array in = wide_rows(qkv, g);
      auto unit = [&](int from) { // [n, value_heads, key_dim, 1]
        array each = mc::reshape(columns(in, from, from + keys), {n, p.key_heads, p.key_dim, 1}, s_);
        array length = mc::add(mc::sum(mc::square(each, s_), 2, true, s_), array(1e-6f), s_);
        return mc::repeat(mc::multiply(each, mc::rsqrt(length, s_), s_), p.value_heads / p.key_heads, 1, s_);
      };
      array q = mc::multiply(unit(0), array(1.0f / std::sqrt(static_cast<float>(p.key_dim))), s_), k = unit(keys);
      array v = mc::reshape(columns(in, 2 * keys, 2 * keys + values), {n, p.value_heads, p.value_dim}, s_);
      array change = mc::expand_dims(mc::sigmoid(wide_rows(beta, g), s_), 2, s_); // [n, value_heads, 1]
      array x = mc::reshape(mc::add(wide_rows(gate, g), gate_bias, s_), {n, p.value_heads, -1, 1}, s_);
      array rate = mc::reshape(a, {p.value_heads, 1, 1}, s_);
      array decay = p.lower_bound < 0
                        ? mc::exp(mc::multiply(array(p.lower_bound), mc::sigmoid(mc::multiply(rate, x, s_), s_), s_), s_)
                        : mc::exp(mc::multiply(mc::negative(rate, s_), softplus(x), s_), s_);
      array held = mc::reshape(state.value, {p.value_heads, p.key_dim, p.value_dim}, s_);
      std::vector<array> ys;
      for (int t = 0; t < n; t++) {
        held = mc::multiply(held, at(decay, t), s_);
        array seen = mc::sum(mc::multiply(held, at(k, t), s_), 1, false, s_);
        array moved = mc::multiply(mc::subtract(at(v, t), seen, s_), at(change, t), s_);
        held = mc::add(held, mc::multiply(at(k, t), mc::expand_dims(moved, 1, s_), s_), s_);
        ys.push_back(mc::sum(mc::multiply(held, at(q, t), s_), 1, false, s_));
      }
      state.value = mc::reshape(held, {p.value_heads * p.key_dim, p.value_dim}, s_);
      return mc::reshape(mc::stack(ys, 0, s_), {n, values}, s_);
    });
  }

  array sigmoid_mul(const array& x, const array& gate) override { return mc::multiply(x, mc::sigmoid(gate, s_), s_); }

 private:
  // Joins f's results for each segment, rounded to like's dtype.
  template <class F>
  array by_segment(const array& like, const StateSegments& segments, F f) {
    std::vector<array> outs;
    outs.reserve(segments.size());
    for (auto& g : segments) {
      outs.push_back(mc::astype(f(static_cast<ArrayState&>(*g.state), g), like.dtype(), s_));
      g.state->length += g.rows;
    }
    return outs.size() == 1 ? outs[0] : mc::concatenate(std::move(outs), 0, s_);
  }

  array cut(const array& a, int from, int to) { return mc::slice(a, {from, 0}, {to, a.shape(1)}, s_); }
  array columns(const array& a, int from, int to) { return mc::slice(a, {0, from}, {a.shape(0), to}, s_); }
  array rows(const array& a, const StateSegment& g) { return cut(a, static_cast<int>(g.row0), static_cast<int>(g.row0 + g.rows)); }
  array wide_rows(const array& a, const StateSegment& g) { return mc::astype(rows(a, g), mc::float32, s_); }
  array at(const array& a, int t) { return mc::take(a, t, 0, s_); }
  array softplus(const array& x) { return mc::logaddexp(x, array(0.0f), s_); }

  mc::Stream s_;
};

} // namespace

std::unique_ptr<RecurrentBackend> make_mlx_recurrent(mc::Stream s) { return std::make_unique<MlxRecurrent>(s); }

} // namespace mlxcel
