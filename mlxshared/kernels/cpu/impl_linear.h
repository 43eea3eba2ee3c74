// Matrix times vectors, for every weight format.
//
// A format says how sixteen weights of a row become float32. It works by steps of kChunks vectors that share a scale.
// Each (x row, output feature) pair has one accumulator of sixteen lanes, fed in ascending order, whether weights are
// taken apart for every pass over a few rows of x or once for many.

struct Group {
  V16 scale, bias;
};

// The integers of BITS bits, over and over.
template <int BITS> struct Integers {
  float at[32];
  constexpr Integers() : at{} {
    for (int i = 0; i < 32; i++)
      at[i] = float(i % (1 << BITS));
  }
};

template <class T> struct Dense {
  static constexpr int kChunks = 1;
  static constexpr bool kPairs = false;
  using Scale = V16;
  static inline Scale scale(float, float) { return zero(); }
  static inline V16 weights(const uint8_t *row, int64_t chunk, const Scale &) {
    return load(reinterpret_cast<const T *>(row) + chunk * 16);
  }
  static inline V16 last_weights(const uint8_t *row, int64_t chunk, int64_t n) {
    return load_n(reinterpret_cast<const T *>(row) + chunk * 16, n);
  }
};

template <int BITS> struct Affine {
  static constexpr int kChunks = 2;
  static constexpr bool kPairs = MK_LOOKUP && BITS == 6; // where unpack's lanes are paired
  using Scale = Group;
  static inline Scale scale(float s, float b) { return {set1(s), set1(b)}; }
  static inline V16 weights(const uint8_t *row, int64_t chunk, const Scale &g) {
    return fma(unpack<BITS>(row + chunk * 2 * BITS), g.scale, g.bias);
  }
};

struct Mxfp8 {
  static constexpr int kChunks = 2;
  static constexpr bool kPairs = false;
  using Scale = V16;
  static inline Scale scale(float s, float) { return set1(s); }
  static inline V16 weights(const uint8_t *row, int64_t chunk, const Scale &g) { return mul(e4m3(row + chunk * 16), g); }
};

#if MK_LOOKUP
// The possible weights of a group, made by one instruction or two, then looked up.
template <int BITS> struct AffineTable {
  static constexpr int kChunks = 2;
  static constexpr bool kPairs = BITS != 2;
  using Scale = V16;
  static inline Scale scale(float s, float b) {
    static constexpr Integers<BITS> values;
    return fma(load(values.at), set1(s), set1(b));
  }
  static inline V16 weights(const uint8_t *row, int64_t chunk, const Scale &g) {
    return look_up<BITS>(row + chunk * 2 * BITS, g);
  }
};
struct AffineTable5 {
  static constexpr int kChunks = 2;
  static constexpr bool kPairs = true;
  struct Scale {
    V16 low, high;
  };
  static inline Scale scale(float s, float b) {
    static constexpr Integers<5> values;
    return {fma(load(values.at), set1(s), set1(b)), fma(load(values.at + 16), set1(s), set1(b))};
  }
  static inline V16 weights(const uint8_t *row, int64_t chunk, const Scale &g) {
    return look_up5(row + chunk * 10, g.low, g.high);
  }
};
template <int CHUNKS> struct Fp4 {
  static constexpr int kChunks = CHUNKS;
  static constexpr bool kPairs = true;
  using Scale = V16;
  static inline Scale scale(float s, float) {
    static const float values[16] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
    return mul(load(values), set1(s));
  }
  static inline V16 weights(const uint8_t *row, int64_t chunk, const Scale &g) { return look_up<4>(row + chunk * 8, g); }
};
template <int BITS> struct AffineFormat {
  using type = AffineTable<BITS>;
};
template <> struct AffineFormat<5> {
  using type = AffineTable5;
};
template <> struct AffineFormat<6> {
  using type = Affine<6>;
};
template <> struct AffineFormat<8> {
  using type = Affine<8>;
};
#else
template <int CHUNKS> struct Fp4 {
  static constexpr int kChunks = CHUNKS;
  static constexpr bool kPairs = false;
  using Scale = V16;
  static inline Scale scale(float s, float) { return set1(s); }
  static inline V16 weights(const uint8_t *row, int64_t chunk, const Scale &g) { return mul(e2m1(row + chunk * 8), g); }
};
template <int BITS> struct AffineFormat {
  using type = Affine<BITS>;
};
#endif

template <class T> constexpr bool kIsDense = false;
template <class T> constexpr bool kIsDense<Dense<T>> = true;

// Calls f with the format's type.
template <class F> static inline void with_format(const mk_matrix &w, F f) {
  switch (w.format) {
  case MK_DENSE:
    return with_type(w.dtype, [&](auto t) { f(Dense<TypeOf<decltype(t)>>{}); });
  case MK_AFFINE:
    switch (w.bits) {
    case 2:
      return f(AffineFormat<2>::type{});
    case 3:
      return f(AffineFormat<3>::type{});
    case 4:
      return f(AffineFormat<4>::type{});
    case 5:
      return f(AffineFormat<5>::type{});
    case 6:
      return f(AffineFormat<6>::type{});
    case 8:
      return f(AffineFormat<8>::type{});
    }
    return;
  case MK_MXFP4:
    return f(Fp4<2>{});
  case MK_MXFP8:
    return f(Mxfp8{});
  case MK_NVFP4:
    return f(Fp4<1>{});
  }
}

static bool paired(const mk_matrix &w) {
  bool pairs = false;
  with_format(w, [&](auto format) { pairs = decltype(format)::kPairs; });
  return pairs;
}

// Some neighbouring rows of a matrix with their scales as stored and widened.
struct Rows {
  const uint8_t *data;
  int64_t bytes; // of a row
  const uint8_t *stored_scales, *stored_biases;
  int64_t scale_bytes; // of a row's scales, and of its biases
  const float *scales, *biases;
  int64_t groups; // of a row; 0 when dense
  int shift;      // steps to groups, log2
  int64_t cols;
};

static void widen_scales(const mk_matrix &w, int64_t begin, int64_t n, Worker &worker, Rows *rows) {
  rows->data = static_cast<const uint8_t *>(w.data) + begin * rows->bytes;
  if (w.format == MK_DENSE)
    return;
  const int64_t count = n * rows->groups;
  rows->stored_scales = static_cast<const uint8_t *>(w.scales) + begin * rows->scale_bytes;
  float *scales = scratch(worker, kScratchScales, round16(count));
  rows->scales = scales;
  if (w.format == MK_AFFINE) {
    rows->stored_biases = static_cast<const uint8_t *>(w.biases) + begin * rows->scale_bytes;
    float *biases = scratch(worker, kScratchBiases, round16(count));
    rows->biases = biases;
    widen(rows->stored_scales, w.dtype, count, false, scales);
    widen(rows->stored_biases, w.dtype, count, false, biases);
    return;
  }
  rows->stored_biases = rows->stored_scales; // not used
  rows->biases = scales;                     // nor these
  const uint32_t *table = w.format == MK_NVFP4 ? kScaleBits.e4m3 : kScaleBits.e8m0;
  for (int64_t i = 0; i < count; i++)
    scales[i] = float_of(table[rows->stored_scales[i]]);
}

static Rows rows_of(const mk_matrix &w) {
  Rows r = {};
  r.bytes = row_bytes(w);
  r.cols = w.cols;
  if (w.format != MK_DENSE) {
    r.groups = w.cols / w.group;
    r.scale_bytes = r.groups * (w.format == MK_AFFINE ? item_size(w.dtype) : 1);
  }
  for (int g = w.group; w.format == MK_AFFINE && g > 32; g /= 2)
    r.shift++;
  return r;
}

template <class F> static inline typename F::Scale scale_at(const Rows &w, int64_t row, int64_t step) {
  if constexpr (kIsDense<F>)
    return F::scale(0, 0);
  else {
    int64_t i = row * w.groups + (step >> w.shift);
    return F::scale(w.scales[i], w.biases[i]);
  }
}

template <bool PAIRS> static inline float sum_of(V16 a) { return sum(PAIRS ? unpair_lanes(a) : a); }

// out[i] = the sum of a[i].
template <bool PAIRS, int N> static inline void sums(const V16 *a, float *out) {
#if MK_LOOKUP
  if constexpr (N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      if constexpr (PAIRS)
        sum4_paired(a[i], a[i + 1], a[i + 2], a[i + 3], out + i);
      else
        sum4(a[i], a[i + 1], a[i + 2], a[i + 3], out + i);
    }
    return;
  }
#endif
  for (int i = 0; i < N; i++)
    out[i] = sum_of<PAIRS>(a[i]);
}

// Outputs of a block are gathered sixteen features wide, so that they are biased, rounded and stored by vectors.
constexpr int64_t kBlock = 16;

// Rows of x beyond which weights are taken apart once for all. Dense ones are quick to widen, and then stay close by.
template <class F> constexpr int64_t kFusedMost = kIsDense<F> ? 4 : kPassesMost;

template <class T> static void finish_as(const LinearJob &j, const float *out, int64_t m0, int64_t m, int64_t n0, int64_t n) {
  V16 bias = zero();
  if (j.bias)
    with_type(j.bias_dtype, [&](auto t) { bias = get(static_cast<const TypeOf<decltype(t)> *>(j.bias) + n0, n); });
  T *y = reinterpret_cast<T *>(j.y) + m0 * j.w->rows + n0;
  for (int64_t i = 0; i < m; i++) {
    V16 v = load(out + i * kBlock);
    put(y + i * j.w->rows, j.bias ? add(v, bias) : v, n);
  }
}
static void finish(const LinearJob &j, const float *out, int64_t m0, int64_t m, int64_t n0, int64_t n) {
  with_type(j.y_dtype, [&](auto t) { finish_as<TypeOf<decltype(t)>>(j, out, m0, m, n0, n); });
}

// Weights come from memory once for each step, faster than the processor foresees: rows are asked for this many bytes
// before they are worked on, a little at a time, so that asking never waits. What lies past the matrix does no harm.
constexpr int64_t kFetchAhead = 4096;

// Always inline: a function that does nothing but prefetch is taken for one without effect, and left out.
__attribute__((always_inline)) static inline void fetch(const uint8_t *at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(at + i, 0, 3);
}

// The same for scales and biases, which are read for a block at a time: asks for those of n rows of the next block.
template <class F> __attribute__((always_inline)) static inline void fetch_scales(const Rows &w, int64_t row, int64_t n) {
  if constexpr (!kIsDense<F>) {
    const int64_t at = (kBlock + row) * w.scale_bytes;
    fetch(w.stored_scales + at, n * w.scale_bytes);
    fetch(w.stored_biases + at, n * w.scale_bytes);
  }
}

// m rows of x side by side: sixteen columns of each in turn, so that one pointer reaches them all.
static void interleave(const float *x, int64_t x_stride, int64_t m, float *out) {
  for (int64_t k = 0; k < x_stride; k += 16)
    for (int64_t i = 0; i < m; i++, out += 16)
      store(out, load(x + i * x_stride + k));
}

// M interleaved rows of x times R rows of w, weights taken apart on the fly.
template <class F, int M, int R>
static inline void fused(const Rows &w, int64_t row, const float *x, float *out) {
  V16 acc[M][R];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++)
      acc[m][r] = zero();
  const uint8_t *data = w.data + row * w.bytes;
  const int64_t steps = w.cols / (16 * F::kChunks);
  const int64_t step_bytes = steps ? R * w.bytes / steps : 0; // these rows' data, read once more in one piece
  fetch_scales<F>(w, row, R);
  for (int64_t step = 0; step < steps; step++) {
    fetch(data + kFetchAhead + step * step_bytes, step_bytes);
    typename F::Scale scale[R];
    for (int r = 0; r < R; r++)
      scale[r] = scale_at<F>(w, row + r, step);
    for (int c = 0; c < F::kChunks; c++) {
      const int64_t chunk = step * F::kChunks + c;
      V16 ws[R];
      for (int r = 0; r < R; r++)
        ws[r] = F::weights(data + r * w.bytes, chunk, scale[r]);
      for (int m = 0; m < M; m++) {
        V16 v = load(x + (chunk * M + m) * 16);
        for (int r = 0; r < R; r++)
          acc[m][r] = fma(ws[r], v, acc[m][r]);
      }
    }
  }
  if constexpr (kIsDense<F>) {
    if (int64_t rest = w.cols - steps * 16) {
      for (int r = 0; r < R; r++) {
        V16 v = F::last_weights(data + r * w.bytes, steps, rest);
        for (int m = 0; m < M; m++)
          acc[m][r] = fma(v, load(x + (steps * M + m) * 16), acc[m][r]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    sums<F::kPairs, R>(acc[m], out + m * kBlock);
}

template <class F, int M>
static void fused_block(const LinearJob &j, const Rows &w, const float *x, int64_t m0, int64_t n0, int64_t n) {
  constexpr int R = pass_features(M);
  alignas(64) float out[M * kBlock];
  int64_t r = 0;
  for (; r + R <= n; r += R)
    fused<F, M, R>(w, r, x, out + r);
  for (; r < n; r++)
    fused<F, M, 1>(w, r, x, out + r);
  for (int64_t m = 0; m < M; m++) // the lanes past n are stored nowhere, but must be defined
    for (int64_t i = n; i < kBlock; i++)
      out[m * kBlock + i] = 0;
  finish(j, out, m0, M, n0, n);
}

// One row as float32 in the format's lane layout, zero up to a multiple of 16.
template <class F, bool NATURAL> static inline void expand(const Rows &w, int64_t row, float *out) {
  const uint8_t *data = w.data + row * w.bytes;
  const int64_t steps = w.cols / (16 * F::kChunks);
  for (int64_t step = 0; step < steps; step++) {
    typename F::Scale scale = scale_at<F>(w, row, step);
    for (int c = 0; c < F::kChunks; c++) {
      const int64_t chunk = step * F::kChunks + c;
      V16 v = F::weights(data, chunk, scale);
      store(out + chunk * 16, NATURAL && F::kPairs ? unpair_lanes(v) : v);
    }
  }
  if constexpr (kIsDense<F>)
    if (int64_t rest = w.cols - steps * 16)
      store(out + steps * 16, F::last_weights(data, steps, rest));
}

// M rows of x times N rows of weights in float32.
template <bool PAIRS, int M, int N>
static inline void tile(const float *x, int64_t x_stride, const float *w, int64_t cols, float *out) {
  V16 acc[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      acc[m][n] = zero();
  for (int64_t k = 0; k < cols; k += 16) {
    V16 ws[N];
    for (int n = 0; n < N; n++)
      ws[n] = load(w + n * cols + k);
    for (int m = 0; m < M; m++) {
      V16 v = load(x + m * x_stride + k);
      for (int n = 0; n < N; n++)
        acc[m][n] = fma(ws[n], v, acc[m][n]);
    }
  }
  for (int m = 0; m < M; m++)
    sums<PAIRS, N>(acc[m], out + m * kBlock);
}

template <bool PAIRS, int M>
static void tile_rows(const LinearJob &j, const float *w, int64_t m0, int64_t n0, int64_t n) {
  alignas(64) float out[M * kBlock];
  for (int c = 0; c < kBlock; c += kTileN)
    tile<PAIRS, M, kTileN>(j.x + m0 * j.x_stride, j.x_stride, w + c * j.x_stride, j.x_stride, out + c);
  finish(j, out, m0, M, n0, n);
}

// The last m < kTileM rows.
template <bool PAIRS, int M>
static void tile_rest(const LinearJob &j, const float *w, int64_t m0, int64_t m, int64_t n0, int64_t n) {
  if constexpr (M > 0) {
    if (m == M)
      tile_rows<PAIRS, M>(j, w, m0, n0, n);
    else
      tile_rest<PAIRS, M - 1>(j, w, m0, m, n0, n);
  }
}

template <class F> static void linear_tiled(const LinearJob &j, const Rows &w, int64_t n0, int64_t n, Worker &worker) {
  float *weights = scratch(worker, kScratchWeights, kBlock * j.x_stride);
  for (int64_t r = 0; r < n; r++)
    expand<F, false>(w, r, weights + r * j.x_stride);
  if (n < kBlock)
    memset(weights + n * j.x_stride, 0, size_t((kBlock - n) * j.x_stride) * sizeof(float));
  int64_t m = 0;
  for (; m + kTileM <= j.m; m += kTileM)
    tile_rows<F::kPairs, kTileM>(j, weights, m, n0, n);
  tile_rest<F::kPairs, kTileM - 1>(j, weights, m, j.m - m, n0, n);
}

// m <= M rows of x.
template <class F, int M>
static void fused_pass(const LinearJob &j, const Rows &w, const float *x, int64_t m0, int64_t m, int64_t n0, int64_t n) {
  if constexpr (M > 0) {
    if (m == M)
      fused_block<F, M>(j, w, x, m0, n0, n);
    else
      fused_pass<F, M - 1>(j, w, x, m0, m, n0, n);
  }
}

// The rows of the pass over x that begins at m: all passes are about as large.
static inline int64_t pass_rows(int64_t m, int64_t all) {
  const int64_t passes = (all + kPassRows - 1) / kPassRows;
  const int64_t least = all / passes, larger = all % passes; // so many passes have one row more
  return m < larger * (least + 1) ? least + 1 : least;
}

// The rows of x of each pass side by side.
static const float *interleave_passes(const LinearJob &j, Worker &worker) {
  if (j.m == 1)
    return j.x;
  float *out = scratch(worker, kScratchWeights, j.m * j.x_stride);
  for (int64_t m = 0, rows; m < j.m; m += rows) {
    rows = pass_rows(m, j.m);
    interleave(j.x + m * j.x_stride, j.x_stride, rows, out + m * j.x_stride);
  }
  return out;
}

template <class F> static void linear_in_passes(const LinearJob &j, const Rows &w, const float *x, int64_t n0, int64_t n) {
  for (int64_t m = 0, rows; m < j.m; m += rows) {
    rows = pass_rows(m, j.m);
    fused_pass<F, kPassRows>(j, w, x + m * j.x_stride, m, rows, n0, n);
  }
}

static void linear(const LinearJob &j, int64_t begin, int64_t end, Worker &worker) {
  with_format(*j.w, [&](auto format) {
    using F = decltype(format);
    const float *x = j.m <= kFusedMost<F> ? interleave_passes(j, worker) : nullptr;
    Rows rows = rows_of(*j.w);
    for (int64_t n0 = begin; n0 < end; n0 += kBlock) {
      int64_t n = end - n0 < kBlock ? end - n0 : kBlock;
      widen_scales(*j.w, n0, n, worker, &rows);
      if (x)
        linear_in_passes<F>(j, rows, x, n0, n);
      else
        linear_tiled<F>(j, rows, n0, n, worker);
    }
  });
}

static void dequantize(const mk_matrix &w, int64_t row, float *out, Worker &worker) {
  with_format(w, [&](auto format) {
    Rows rows = rows_of(w);
    widen_scales(w, row, 1, worker, &rows);
    expand<decltype(format), true>(rows, 0, out);
  });
}

static void embed(const EmbedJob &j, int64_t begin, int64_t end, Worker &worker) {
  float *row = scratch(worker, kScratchWeights, round16(j.w->cols));
  for (int64_t i = begin; i < end; i++) {
    dequantize(*j.w, j.ids[i], row, worker);
    narrow(row, j.y_dtype, j.w->cols, j.y + i * j.w->cols * item_size(j.y_dtype));
  }
}
