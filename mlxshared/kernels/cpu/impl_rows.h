// Loads and stores of tails and of any dtype, and the operations over single rows.

// n < 16 elements, zero past them.
template <class T> static inline V16 load_n(const T *p, int64_t n) {
  T lanes[16];
  memset(static_cast<void *>(lanes), 0, sizeof lanes);
  memcpy(static_cast<void *>(lanes), p, size_t(n) * sizeof(T));
  return load(lanes);
}
template <class T> static inline void store_n(T *p, V16 a, int64_t n) {
  T lanes[16];
  store(lanes, a);
  memcpy(static_cast<void *>(p), lanes, size_t(n) * sizeof(T));
}
// A result: rounded to nearest even, NaN as the one quiet NaN.
template <class T> static inline void put(T *p, V16 a, int64_t n) {
  if (n >= 16)
    store(p, canonical_nan(a));
  else
    store_n(p, canonical_nan(a), n);
}
template <class T> static inline V16 get(const T *p, int64_t n) { return n >= 16 ? load(p) : load_n(p, n); }

// An element type as a value.
template <class T> struct Type {
  using type = T;
};
template <class T> using TypeOf = typename T::type;

// Calls f with the element type that t stands for.
template <class F> static inline void with_type(mk_dtype t, F f) {
  switch (t) {
  case MK_F32:
    return f(Type<Float>{});
  case MK_F16:
    return f(Type<Half>{});
  case MK_BF16:
    return f(Type<BFloat>{});
  }
}

template <class T> static void widen_as(const T *x, int64_t n, bool paired, float *out) {
  for (int64_t i = 0; i < n; i += 16) {
    V16 v = get(x + i, n - i);
    store(out + i, paired ? pair_lanes(v) : v);
  }
}
static void widen(const void *x, mk_dtype t, int64_t n, bool paired, float *out) {
  with_type(t, [&](auto type) { widen_as(static_cast<const TypeOf<decltype(type)> *>(x), n, paired, out); });
}

template <class X, class Y> static void convert_as(const X *x, int64_t n, Y *y) {
  for (int64_t i = 0; i < n; i += 16)
    put(y + i, get(x + i, n - i), n - i);
}
static void narrow(const float *x, mk_dtype t, int64_t n, void *out) {
  with_type(t, [&](auto type) { convert_as(x, n, static_cast<TypeOf<decltype(type)> *>(out)); });
}

template <class T, class W> static void norm_row(const NormJob &j, const T *x, const W *weight, T *y) {
  V16 squares = zero();
  for (int64_t i = 0; i < j.dim; i += 16) {
    V16 v = get(x + i, j.dim - i);
    squares = fma(v, v, squares);
  }
  float mean = sum(squares) / float(j.dim);
  V16 inverse = set1(1.f / __builtin_sqrtf(mean + j.eps)), offset = set1(j.weight_offset);
  for (int64_t i = 0; i < j.dim; i += 16) {
    V16 v = mul(get(x + i, j.dim - i), inverse);
    if (weight)
      v = mul(v, add(get(weight + i, j.dim - i), offset));
    put(y + i, v, j.dim - i);
  }
}
static void rms_norm(const NormJob &j, int64_t begin, int64_t end) {
  with_type(j.dtype, [&](auto x) {
    using T = TypeOf<decltype(x)>;
    with_type(j.weight_dtype, [&](auto w) {
      using W = TypeOf<decltype(w)>;
      for (int64_t r = begin; r < end; r++)
        norm_row(j, reinterpret_cast<const T *>(j.x) + r * j.dim, reinterpret_cast<const W *>(j.weight),
                 reinterpret_cast<T *>(j.y) + r * j.dim);
    });
  });
}

// sin and cos of `angle` to well under a float32 ulp, in double precision and without fma, so that every instruction set
// gives the same bits. |angle| below 2^20: one reduction by pi/2 in two parts, then fdlibm's kernels.
static inline void sincos_double(double angle, double *sine, double *cosine) {
  const double magic = 0x1.8p52;
  double n = (angle * 0x1.45f306dc9c883p-1 + magic) - magic;
  double r = (angle - n * 0x1.921fb544p0) - n * 0x1.0b4611a626331p-34;
  int64_t quadrant = int64_t(n) & 3;
  double z = r * r;
  double s = 1.58969099521155010221e-10;
  s = s * z - 2.50507602534068634195e-08;
  s = s * z + 2.75573137070700676789e-06;
  s = s * z - 1.98412698298579493134e-04;
  s = s * z + 8.33333333332248946124e-03;
  s = s * z - 1.66666666666666324348e-01;
  s = r + r * z * s;
  double c = -1.13596475577881948265e-11;
  c = c * z + 2.08757232129817482790e-09;
  c = c * z - 2.75573143513906633035e-07;
  c = c * z + 2.48015872894767294178e-05;
  c = c * z - 1.38888888888741095749e-03;
  c = c * z + 4.16666666666666019037e-02;
  c = 1.0 - 0.5 * z + z * z * c;
  double a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
  *sine = quadrant & 2 ? -a : a;
  *cosine = (quadrant + 1) & 2 ? -b : b;
}

// The float32 angle's cosine and sine.
static inline void rotation(float angle, float *cosine, float *sine) {
  double s, c;
  if (angle < 0x1p20f && angle > -0x1p20f) {
    sincos_double(double(angle), &s, &c);
  } else { // the C library's, whose last bit of a double may differ between systems
    s = __builtin_sin(double(angle));
    c = __builtin_cos(double(angle));
  }
  *cosine = float(c);
  *sine = float(s);
}

template <class T> static void rope_rows(const RopeJob &j, int64_t begin, int64_t end, Worker &worker) {
  const int half = j.rot_dim / 2;
  const int64_t pad = round16(half);
  // One row's cosines and sines, then the two inputs of every rotated pair, then the two outputs.
  float *cosine = scratch(worker, kScratchState, 6 * pad);
  float *sine = cosine + pad, *a = sine + pad, *b = a + pad, *c = b + pad, *d = c + pad;
  memset(a, 0, size_t(2 * pad) * sizeof(float));
  const V16 scale = set1(j.scale);
  for (int64_t r = begin; r < end; r++) {
    for (int i = 0; i < half; i++)
      rotation(float(j.pos[r]) * j.inv_freq[i], cosine + i, sine + i);
    for (int i = half; i < pad; i++)
      cosine[i] = sine[i] = 0;
    for (int h = 0; h < j.heads; h++) {
      int64_t at = (r * j.heads + h) * j.head_dim;
      const T *x = reinterpret_cast<const T *>(j.x) + at;
      T *y = reinterpret_cast<T *>(j.y) + at;
      if (j.traditional) {
        for (int i = 0; i < half; i += 8) { // sixteen elements are eight pairs
          float both[16];
          store(both, get(x + 2 * i, 2 * int64_t(half - i)));
          for (int k = 0; k < 8 && i + k < half; k++) {
            a[i + k] = both[2 * k];
            b[i + k] = both[2 * k + 1];
          }
        }
      } else {
        widen_as(x, half, false, a);
        widen_as(x + half, half, false, b);
      }
      for (int64_t i = 0; i < pad; i += 16) {
        V16 p = mul(load(a + i), scale), q = mul(load(b + i), scale), cs = load(cosine + i), sn = load(sine + i);
        store(c + i, fma(p, cs, sub(zero(), mul(q, sn))));
        store(d + i, fma(p, sn, mul(q, cs)));
      }
      if (x != y)
        memmove(static_cast<void *>(y), x, size_t(j.head_dim) * sizeof(T));
      if (j.traditional) {
        for (int i = 0; i < half; i += 8) {
          float both[16] = {};
          for (int k = 0; k < 8 && i + k < half; k++) {
            both[2 * k] = c[i + k];
            both[2 * k + 1] = d[i + k];
          }
          put(y + 2 * i, load(both), 2 * int64_t(half - i));
        }
      } else {
        convert_as(c, half, y);
        convert_as(d, half, y + half);
      }
    }
  }
}
static void rope(const RopeJob &j, int64_t begin, int64_t end, Worker &worker) {
  with_type(j.dtype, [&](auto x) { rope_rows<TypeOf<decltype(x)>>(j, begin, end, worker); });
}

template <class T> static void silu_mul_as(const SiluMulJob &j, int64_t begin, int64_t end) {
  const T *gate = reinterpret_cast<const T *>(j.gate), *up = reinterpret_cast<const T *>(j.up);
  T *y = reinterpret_cast<T *>(j.y);
  for (int64_t i = begin; i < end; i += 16)
    put(y + i, mul(silu(get(gate + i, end - i)), get(up + i, end - i)), end - i);
}
static void silu_mul(const SiluMulJob &j, int64_t begin, int64_t end) {
  with_type(j.dtype, [&](auto x) { silu_mul_as<TypeOf<decltype(x)>>(j, begin, end); });
}

static void convert(const ConvertJob &j, int64_t begin, int64_t end) {
  with_type(j.x_dtype, [&](auto xt) {
    with_type(j.y_dtype, [&](auto yt) {
      using X = TypeOf<decltype(xt)>;
      using Y = TypeOf<decltype(yt)>;
      convert_as(reinterpret_cast<const X *>(j.x) + begin, end - begin, reinterpret_cast<Y *>(j.y) + begin);
    });
  });
}

// Calls f with the operation's function.
template <class F> static inline void with_op(mk_binary_op op, F f) {
  switch (op) {
  case MK_ADD:
    return f([](V16 a, V16 b) { return add(a, b); });
  case MK_MUL:
    return f([](V16 a, V16 b) { return mul(a, b); });
  }
}

template <class T, class Op> static void binary_as(const BinaryJob &j, int64_t begin, int64_t end, Op op) {
  const T *a = reinterpret_cast<const T *>(j.a), *b = reinterpret_cast<const T *>(j.b);
  T *y = reinterpret_cast<T *>(j.y);
  if (j.period == 1) {
    float scalar[16];
    store(scalar, load_n(b, 1));
    for (int64_t i = begin; i < end; i += 16)
      put(y + i, op(get(a + i, end - i), set1(scalar[0])), end - i);
    return;
  }
  for (int64_t i = begin; i < end;) {
    const int64_t at = i % j.period, n = end - i < j.period - at ? end - i : j.period - at;
    for (int64_t k = 0; k < n; k += 16)
      put(y + i + k, op(get(a + i + k, n - k), get(b + at + k, n - k)), n - k);
    i += n;
  }
}
static void binary(const BinaryJob &j, int64_t begin, int64_t end) {
  with_type(j.dtype, [&](auto t) {
    with_op(j.op, [&](auto op) { binary_as<TypeOf<decltype(t)>>(j, begin, end, op); });
  });
}
