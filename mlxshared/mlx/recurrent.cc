// States and the operations on them: every argument is checked here, the back ends trust them.
#include <algorithm>

#include "checks.h"

using namespace mlxcel;

namespace {

mx_state* handle(mx_stream* s, std::shared_ptr<State> state) {
  may_fail();
  auto h = std::make_unique<mx_state>(mx_state{std::move(state), s});
  s->states.push_back(h.get());
  return h.release();
}

void forget(std::vector<mx_state*>& list, mx_state* h) { list.erase(std::remove(list.begin(), list.end(), h), list.end()); }

void want_positive(std::initializer_list<int> sizes) {
  for (int n : sizes) want(n > 0, "every size must be positive");
}

void want_rows(const array& a, const char* name, int rows, int width) {
  want_float(a, name);
  want(a.ndim() == 2 && a.shape(0) == rows && a.shape(1) == width,
       format("%s is %s, want [%d,%d]", name, describe(a).c_str(), rows, width));
}

void want_numbers(const array& a, const char* name, const mc::Shape& shape) {
  std::string text;
  for (int n : shape) text += (text.empty() ? "" : ",") + std::to_string(n);
  want(a.dtype() == mc::float32 && a.shape() == shape,
       format("%s is %s, want float32[%s]", name, describe(a).c_str(), text.c_str()));
}

// Rows of the first input; the others' dtypes must be its own.
int rows_of(const array& first, std::initializer_list<const array*> others) {
  want_float(first, "the input");
  want(first.ndim() == 2 && first.size() > 0, format("the input is %s, want [rows, width]", describe(first).c_str()));
  for (auto* a : others)
    want(a->dtype() == first.dtype(), format("inputs are %s and %s, want one dtype", describe(first).c_str(), describe(*a).c_str()));
  return first.shape(0);
}

StateSegments checked(const mx_state_segment* segments, int n, int rows, int state_rows, int state_cols, mc::Dtype dtype,
                      mx_stream* stream) {
  want(n > 0, "no segments");
  StateSegments out;
  out.reserve(n);
  int64_t row = 0;
  for (int i = 0; i < n; i++) {
    const mx_state_segment& g = segments[i];
    want(g.state != nullptr, format("segment %d has no state", i));
    want(g.state->stream == stream, format("segment %d's state belongs to another stream", i));
    const State& s = *g.state->state;
    want(s.rows == state_rows && s.cols == state_cols && s.dtype == dtype,
         format("segment %d's state is [%d,%d] of %zu bytes each, want [%d,%d] of %zu", i, s.rows, s.cols, size_t(s.dtype.size()),
                state_rows, state_cols, size_t(dtype.size())));
    want(g.row0 == row && g.rows > 0 && g.rows <= rows - row,
         format("segment %d has rows [%lld, %lld), want it to start at %lld within %d", i, (long long)g.row0,
                (long long)(g.row0 + g.rows), (long long)row, rows));
    want(g.pos == s.length, format("segment %d is at position %lld, its state at %lld", i, (long long)g.pos, (long long)s.length));
    for (int j = 0; j < i; j++) want(segments[j].state != g.state, format("segments %d and %d share a state", j, i));
    row += g.rows;
    out.push_back({g.state->state, g.row0, g.rows, g.pos});
  }
  want(row == rows, format("segments end at row %lld of %d", (long long)row, rows));
  return out;
}

RecurrentBackend& backend(mx_scope* s) { return s->stream->backend->recurrent(); }

} // namespace

mx_state* mx_state_new(mx_stream* s, int rows, int cols, int dtype, mx_failure* failure) {
  if (s == nullptr) return nullptr;
  return reported(failure, [&] {
    auto t = dtype_of(dtype);
    want_positive({rows, cols});
    want(is_float(t), "the dtype must be float32, float16 or bfloat16");
    return handle(s, s->backend->recurrent().new_state(rows, cols, t));
  });
}

void mx_state_free(mx_state* h) {
  h->state->abandon();
  forget(h->stream->states, h);
  delete h;
}

int64_t mx_state_len(const mx_state* h) { return h ? h->state->length : 0; }

uint64_t mx_state_bytes(const mx_state* h) { return h ? h->state->bytes() : 0; }

mx_state* mx_state_copy(mx_state* h, mx_failure* failure) {
  if (h == nullptr) return nullptr;
  return reported(failure, [&] { return handle(h->stream, h->state->copy()); });
}

static void want_matrix(const State& s, size_t bytes) {
  const size_t size = size_t(s.rows) * s.cols * s.dtype.size();
  want(bytes == size, format("%zu bytes for a state of %zu", bytes, size));
}

bool mx_state_read(mx_state* h, void* data, size_t bytes, mx_failure* failure) {
  if (h == nullptr) return false;
  return reported(failure, [&] {
    want_matrix(*h->state, bytes);
    h->state->read(static_cast<char*>(data));
    return true;
  });
}

bool mx_state_write(mx_state* h, const void* data, size_t bytes, int64_t length, mx_failure* failure) {
  if (h == nullptr) return false;
  return reported(failure, [&] {
    want_matrix(*h->state, bytes);
    want(length >= 0, "a negative length");
    h->state->write(static_cast<const char*>(data));
    h->state->length = length;
    return true;
  });
}

mx_array* mx_causal_conv(mx_scope* s, mx_array* x, mx_array* weight, mx_array* bias, bool silu, const mx_state_segment* segments,
                         int n) {
  return guarded(s, "causal_conv", {x, weight, bias}, [&] {
    const array &in = need(x, "the input"), &w = need(weight, "the weight");
    int rows = rows_of(in, {}), channels = in.shape(1);
    want(w.ndim() == 2 && w.shape(0) > 1, format("the weight is %s, want [width, channels] of width 2 or more", describe(w).c_str()));
    want_numbers(w, "the weight", {w.shape(0), channels});
    if (bias) want_numbers(bias->value, "the bias", {channels});
    auto parts = checked(segments, n, rows, w.shape(0) - 1, channels, in.dtype(), s->stream);
    return s->own(backend(s).conv(in, w, maybe(bias), silu, parts));
  });
}

mx_array* mx_selective_scan(mx_scope* s, mx_array* x, mx_array* dt, mx_array* b, mx_array* c, mx_array* a, mx_array* skip,
                            const mx_state_segment* segments, int n) {
  return guarded(s, "selective_scan", {x, dt, b, c, a, skip}, [&] {
    const array &in = need(x, "the input"), &delta = need(dt, "dt"), &into = need(b, "b"), &from = need(c, "c");
    const array &decay = need(a, "a"), &direct = need(skip, "the skip");
    int rows = rows_of(in, {&delta, &into, &from}), channels = in.shape(1);
    want(decay.ndim() == 2 && decay.size() > 0, format("a is %s, want [states, channels]", describe(decay).c_str()));
    int states = decay.shape(0);
    want_numbers(decay, "a", {states, channels});
    want_numbers(direct, "the skip", {channels});
    want_rows(delta, "dt", rows, channels);
    want_rows(into, "b", rows, states);
    want_rows(from, "c", rows, states);
    auto parts = checked(segments, n, rows, states, channels, in.dtype(), s->stream);
    return s->own(backend(s).scan(in, delta, into, from, decay, direct, parts));
  });
}

mx_array* mx_ssm(mx_scope* s, mx_array* xbc, mx_array* dt, mx_array* a, mx_array* skip, mx_array* dt_bias,
                 const mx_ssm_spec* spec, const mx_state_segment* segments, int n) {
  return guarded(s, "ssm", {xbc, dt, a, skip, dt_bias}, [&] {
    const mx_ssm_spec& p = *spec;
    want_positive({p.heads, p.head_dim, p.groups, p.states});
    want(p.heads % p.groups == 0, format("%d heads in %d groups: want a multiple", p.heads, p.groups));
    want(p.dt_min <= p.dt_max, format("dt from %g to %g", p.dt_min, p.dt_max));
    const array &in = need(xbc, "the input"), &delta = need(dt, "dt"), &decay = need(a, "a");
    const array &direct = need(skip, "the skip"), &bias = need(dt_bias, "dt's bias");
    int rows = rows_of(in, {&delta});
    want_rows(in, "the input", rows, p.heads * p.head_dim + 2 * p.groups * p.states);
    want_rows(delta, "dt", rows, p.heads);
    want_numbers(decay, "a", {p.heads});
    want_numbers(direct, "the skip", {p.heads});
    want_numbers(bias, "dt's bias", {p.heads});
    auto parts = checked(segments, n, rows, p.heads * p.states, p.head_dim, mc::float32, s->stream);
    return s->own(backend(s).ssm(in, delta, decay, direct, bias, p, parts));
  });
}

mx_array* mx_gated_delta(mx_scope* s, mx_array* qkv, mx_array* gate, mx_array* beta, mx_array* a, mx_array* gate_bias,
                         const mx_delta_spec* spec, const mx_state_segment* segments, int n) {
  return guarded(s, "gated_delta", {qkv, gate, beta, a, gate_bias}, [&] {
    const mx_delta_spec& p = *spec;
    want_positive({p.key_heads, p.value_heads, p.key_dim, p.value_dim});
    want(p.value_heads % p.key_heads == 0, format("%d value heads over %d key heads: want a multiple", p.value_heads, p.key_heads));
    want(p.lower_bound <= 0, format("lower bound %g, want it negative, or 0 for none", p.lower_bound));
    const array &in = need(qkv, "the input"), &g = need(gate, "the gate"), &change = need(beta, "beta");
    const array &decay = need(a, "a"), &bias = need(gate_bias, "the gate's bias");
    int rows = rows_of(in, {&g, &change}), gates = p.channel_gate ? p.value_heads * p.key_dim : p.value_heads;
    want_rows(in, "the input", rows, 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim);
    want_rows(g, "the gate", rows, gates);
    want_rows(change, "beta", rows, p.value_heads);
    want_numbers(decay, "a", {p.value_heads});
    want_numbers(bias, "the gate's bias", {gates});
    auto parts = checked(segments, n, rows, p.value_heads * p.key_dim, p.value_dim, mc::float32, s->stream);
    return s->own(backend(s).delta(in, g, change, decay, bias, p, parts));
  });
}

mx_array* mx_sigmoid_mul(mx_scope* s, mx_array* x, mx_array* gate) {
  return guarded(s, "sigmoid_mul", {x, gate}, [&] {
    const array &in = need(x, "the input"), &g = need(gate, "the gate");
    int rows = rows_of(in, {&g});
    want(g.ndim() == 2 && (g.shape(1) == 1 || g.shape(1) == in.shape(1)) && g.shape(0) == rows,
         format("the gate is %s for an input of %s", describe(g).c_str(), describe(in).c_str()));
    return s->own(backend(s).sigmoid_mul(in, g));
  });
}
