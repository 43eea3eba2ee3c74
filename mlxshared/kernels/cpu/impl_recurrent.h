// Causal convolutions and linear recurrences. A unit walks through all rows of its segment for some channels or a head.

static inline float first_lane(V16 a) {
  float lanes[16];
  store(lanes, a);
  return lanes[0];
}
template <class T> static inline float get1(const T *p) { return first_lane(load_n(p, 1)); }

// Channels [c, c+n) of row r of a segment's input, where rows before it come from the state.
template <class T> static inline const T *conv_row(const mk_conv &s, const T *state, const T *x, int64_t r, int64_t c) {
  return r < 0 ? state + (r + s.width - 1) * round16(s.channels) + c : x + r * s.channels + c;
}

template <class T> static void conv_unit(const ConvJob &j, const mk_recurrent_segment &g, int64_t c) {
  const mk_conv &s = j.spec;
  const int64_t n = s.channels - c < 16 ? s.channels - c : 16;
  T *state = static_cast<T *>(g.state);
  const T *x = reinterpret_cast<const T *>(j.x) + g.row0 * s.channels;
  T *y = reinterpret_cast<T *>(j.y) + g.row0 * s.channels;
  for (int64_t r = 0; r < g.n; r++) {
    V16 sum = zero();
    for (int k = 0; k < s.width; k++) {
      V16 w = n == 16 ? load(j.weight + k * s.channels + c) : load_n(j.weight + k * s.channels + c, n);
      sum = fma(w, get(conv_row(s, state, x, r - s.width + 1 + k, c), n), sum);
    }
    if (j.bias)
      sum = add(sum, n == 16 ? load(j.bias + c) : load_n(j.bias + c, n));
    put(y + r * s.channels + c, s.silu ? silu(sum) : sum, n);
  }
  for (int64_t k = 0; k < s.width - 1; k++)
    memmove(static_cast<void *>(state + k * round16(s.channels) + c), conv_row(s, state, x, g.n - s.width + 1 + k, c),
            size_t(n) * sizeof(T));
}
static void conv(const ConvJob &j, int64_t begin, int64_t end) {
  const int64_t blocks = (j.spec.channels + 15) / 16;
  with_type(j.dtype, [&](auto t) {
    for (int64_t u = begin; u < end; u++)
      conv_unit<TypeOf<decltype(t)>>(j, j.segments[u / blocks], u % blocks * 16);
  });
}

template <class T> static void scan_unit(const ScanJob &j, const mk_recurrent_segment &g, int64_t c, Worker &w) {
  const mk_scan &s = j.spec;
  const int64_t n = s.channels - c < 16 ? s.channels - c : 16, pad = round16(s.channels);
  const int64_t wide = round16(s.states);
  float *b = scratch(w, kScratchState, 2 * wide), *out = b + wide;
  T *state = static_cast<T *>(g.state) + c;
  const V16 skip = load_n(j.skip + c, n);
  for (int64_t r = g.row0; r < g.row0 + g.n; r++) {
    const int64_t at = r * s.channels + c;
    widen_as(reinterpret_cast<const T *>(j.b) + r * s.states, s.states, false, b);
    widen_as(reinterpret_cast<const T *>(j.c) + r * s.states, s.states, false, out);
    V16 x = get(reinterpret_cast<const T *>(j.x) + at, n), d = softplus(get(reinterpret_cast<const T *>(j.dt) + at, n));
    V16 dx = mul(d, x), y = zero();
    for (int i = 0; i < s.states; i++) {
      T *held = state + i * pad;
      V16 a = n == 16 ? load(j.a + i * s.channels + c) : load_n(j.a + i * s.channels + c, n);
      V16 next = fma(load(held), exp(mul(d, a)), mul(dx, set1(b[i])));
      store(held, canonical_nan(next));
      y = fma(load(held), set1(out[i]), y);
    }
    put(reinterpret_cast<T *>(j.y) + at, fma(skip, x, y), n);
  }
}
static void scan(const ScanJob &j, int64_t begin, int64_t end, Worker &w) {
  const int64_t blocks = (j.spec.channels + 15) / 16;
  with_type(j.dtype, [&](auto t) {
    for (int64_t u = begin; u < end; u++)
      scan_unit<TypeOf<decltype(t)>>(j, j.segments[u / blocks], u % blocks * 16, w);
  });
}

// NV vectors of a head's elements, through one row: all of its states.
template <int NV>
static inline void ssm_row(float *state, int64_t stride, int states, float decay, const float *b, const float *c, const V16 *dx,
                           V16 *y) {
  V16 sum[NV];
  for (int v = 0; v < NV; v++)
    sum[v] = zero();
  const V16 keep = set1(decay);
  for (int i = 0; i < states; i++) {
    float *held = state + i * stride;
    const V16 in = set1(b[i]), out = set1(c[i]);
    for (int v = 0; v < NV; v++) {
      V16 next = fma(load(held + 16 * v), keep, mul(dx[v], in));
      store(held + 16 * v, next);
      sum[v] = fma(next, out, sum[v]);
    }
  }
  for (int v = 0; v < NV; v++)
    y[v] = sum[v];
}

template <class T> static void ssm_unit(const SsmJob &j, const mk_recurrent_segment &g, int h, Worker &w) {
  const mk_ssm &s = j.spec;
  const int64_t stride = round16(s.head_dim), wide = round16(s.states), inner = int64_t(s.heads) * s.head_dim;
  const int64_t row = inner + 2 * int64_t(s.groups) * s.states;
  const int64_t b_at = inner + int64_t(h / (s.heads / s.groups)) * s.states, c_at = b_at + int64_t(s.groups) * s.states;
  float *b = scratch(w, kScratchState, 2 * wide), *c = b + wide;
  float *state = static_cast<float *>(g.state) + int64_t(h) * s.states * stride;
  const V16 skip = set1(j.skip[h]);
  for (int64_t r = g.row0; r < g.row0 + g.n; r++) {
    const T *in = reinterpret_cast<const T *>(j.xbc) + r * row;
    widen_as(in + b_at, s.states, false, b);
    widen_as(in + c_at, s.states, false, c);
    V16 dt = add(set1(get1(reinterpret_cast<const T *>(j.dt) + r * s.heads + h)), set1(j.dt_bias[h]));
    dt = softplus(dt);
    dt = keep_nan(dt, lesser_of(greater_of(dt, set1(s.dt_min)), set1(s.dt_max)));
    const float decay = first_lane(exp(mul(dt, set1(j.a[h]))));
    T *y = reinterpret_cast<T *>(j.y) + r * inner + int64_t(h) * s.head_dim;
    const T *x = in + int64_t(h) * s.head_dim;
    for (int64_t p = 0; p < s.head_dim; p += 64) {
      V16 xs[4], dx[4], out[4];
      const int64_t left = s.head_dim - p;
      const int vectors = left >= 64 ? 4 : int((left + 15) / 16);
      for (int v = 0; v < vectors; v++) {
        xs[v] = get(x + p + 16 * v, left - 16 * v);
        dx[v] = mul(dt, xs[v]);
      }
      switch (vectors) {
      case 1:
        ssm_row<1>(state + p, stride, s.states, decay, b, c, dx, out);
        break;
      case 2:
        ssm_row<2>(state + p, stride, s.states, decay, b, c, dx, out);
        break;
      case 3:
        ssm_row<3>(state + p, stride, s.states, decay, b, c, dx, out);
        break;
      default:
        ssm_row<4>(state + p, stride, s.states, decay, b, c, dx, out);
      }
      for (int v = 0; v < vectors; v++)
        put(y + p + 16 * v, fma(skip, xs[v], out[v]), left - 16 * v);
    }
  }
}
static void ssm(const SsmJob &j, int64_t begin, int64_t end, Worker &w) {
  with_type(j.dtype, [&](auto t) {
    for (int64_t u = begin; u < end; u++)
      ssm_unit<TypeOf<decltype(t)>>(j, j.segments[u / j.spec.heads], int(u % j.spec.heads), w);
  });
}

// x / sqrt(sum(x^2) + eps) * scale, zero past n.
template <class T> static void unit_length(const T *x, int64_t n, float scale, float *out) {
  V16 squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    V16 v = get(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const V16 factor = set1(scale / __builtin_sqrtf(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < n; i += 16)
    store(out + i, mul(get(x + i, n - i), factor));
}

// The decay of sixteen gates.
static inline V16 delta_decay(const mk_delta &s, V16 gate, V16 a) {
  if (s.lower_bound < 0)
    return exp(mul(set1(s.lower_bound), sigmoid(mul(a, gate))));
  return exp(mul(sub(zero(), a), softplus(gate)));
}

// NV vectors of a head's values, through one row. step is 1 with a decay for each key element, else 0.
template <int NV>
static inline void delta_row(float *state, int64_t stride, int keys, const float *q, const float *k, const float *decay,
                             int step, V16 beta, const V16 *value, V16 *y) {
  V16 seen[NV], change[NV];
  for (int v = 0; v < NV; v++)
    seen[v] = zero();
  for (int i = 0; i < keys; i++) {
    const V16 key = set1(k[i]), keep = set1(decay[i * step]);
    for (int v = 0; v < NV; v++)
      seen[v] = fma(mul(load(state + i * stride + 16 * v), keep), key, seen[v]);
  }
  for (int v = 0; v < NV; v++) {
    change[v] = mul(sub(value[v], seen[v]), beta);
    y[v] = zero();
  }
  for (int i = 0; i < keys; i++) {
    const V16 key = set1(k[i]), query = set1(q[i]), keep = set1(decay[i * step]);
    for (int v = 0; v < NV; v++) {
      float *held = state + i * stride + 16 * v;
      V16 next = fma(key, change[v], mul(load(held), keep));
      store(held, next);
      y[v] = fma(next, query, y[v]);
    }
  }
}

template <class T>
static void delta_unit(const DeltaJob &j, const mk_recurrent_segment &g, int h, int64_t first, Worker &w) {
  const mk_delta &s = j.spec;
  const int64_t stride = round16(s.value_dim), wide = round16(s.key_dim), key_width = int64_t(s.key_heads) * s.key_dim;
  const int64_t value_width = int64_t(s.value_heads) * s.value_dim, row = 2 * key_width + value_width;
  const int64_t key_at = int64_t(h / (s.value_heads / s.key_heads)) * s.key_dim;
  const int64_t gates = s.channel_gate ? int64_t(s.value_heads) * s.key_dim : s.value_heads;
  const int64_t gate_n = s.channel_gate ? s.key_dim : 1, gate_at = h * gate_n;
  const int64_t left = s.value_dim - first;
  const int vectors = left >= kDeltaValues ? kDeltaValues / 16 : int((left + 15) / 16);
  float *q = scratch(w, kScratchState, 3 * wide), *k = q + wide, *decay = k + wide;
  float *state = static_cast<float *>(g.state) + int64_t(h) * s.key_dim * stride + first;
  const V16 a = set1(j.a[h]);
  const float scale = 1.f / __builtin_sqrtf(float(s.key_dim));
  for (int64_t r = g.row0; r < g.row0 + g.n; r++) {
    const T *in = reinterpret_cast<const T *>(j.qkv) + r * row;
    unit_length(in + key_at, s.key_dim, scale, q);
    unit_length(in + key_width + key_at, s.key_dim, 1.f, k);
    const T *gate = reinterpret_cast<const T *>(j.gate) + r * gates + gate_at;
    for (int64_t i = 0; i < gate_n; i += 16) {
      V16 x = add(get(gate + i, gate_n - i), load_n(j.gate_bias + gate_at + i, gate_n - i < 16 ? gate_n - i : 16));
      store(decay + i, delta_decay(s, x, a));
    }
    const V16 beta = sigmoid(set1(get1(reinterpret_cast<const T *>(j.beta) + r * s.value_heads + h)));
    const int64_t at = int64_t(h) * s.value_dim + first;
    V16 value[kDeltaValues / 16], out[kDeltaValues / 16];
    for (int v = 0; v < vectors; v++)
      value[v] = get(in + 2 * key_width + at + 16 * v, left - 16 * v);
    const int step = s.channel_gate ? 1 : 0;
    switch (vectors) {
    case 1:
      delta_row<1>(state, stride, s.key_dim, q, k, decay, step, beta, value, out);
      break;
    case 2:
      delta_row<2>(state, stride, s.key_dim, q, k, decay, step, beta, value, out);
      break;
    case 3:
      delta_row<3>(state, stride, s.key_dim, q, k, decay, step, beta, value, out);
      break;
    default:
      delta_row<4>(state, stride, s.key_dim, q, k, decay, step, beta, value, out);
    }
    T *y = reinterpret_cast<T *>(j.y) + r * value_width + at;
    for (int v = 0; v < vectors; v++)
      put(y + 16 * v, out[v], left - 16 * v);
  }
}
static void delta(const DeltaJob &j, int64_t begin, int64_t end, Worker &w) {
  const int64_t parts = (j.spec.value_dim + kDeltaValues - 1) / kDeltaValues, blocks = j.spec.value_heads * parts;
  with_type(j.dtype, [&](auto t) {
    for (int64_t u = begin; u < end; u++) {
      const int64_t block = u % blocks;
      delta_unit<TypeOf<decltype(t)>>(j, j.segments[u / blocks], int(block / parts), block % parts * kDeltaValues, w);
    }
  });
}

template <class T> static void sigmoid_mul_row(const T *x, const T *gate, int64_t dim, bool one, T *y) {
  const V16 common = one ? sigmoid(set1(get1(gate))) : zero();
  for (int64_t i = 0; i < dim; i += 16) {
    V16 factor = one ? common : sigmoid(get(gate + i, dim - i));
    put(y + i, mul(get(x + i, dim - i), factor), dim - i);
  }
}
static void sigmoid_mul(const SigmoidMulJob &j, int64_t begin, int64_t end) {
  with_type(j.dtype, [&](auto t) {
    using T = TypeOf<decltype(t)>;
    for (int64_t r = begin; r < end; r++)
      sigmoid_mul_row(reinterpret_cast<const T *>(j.x) + r * j.dim, reinterpret_cast<const T *>(j.gate) + r * j.gate_dim, j.dim,
                      j.gate_dim == 1 && j.dim != 1, reinterpret_cast<T *>(j.y) + r * j.dim);
  });
}

static const RecurrentOps kRecurrentOps = {conv, scan, ssm, delta, sigmoid_mul};
