// Sixteen float32 lanes in one AVX-512 register. Needs F, BW, VL, DQ.
struct V16 {
  __m512 v;
};

static inline V16 zero() { return {_mm512_setzero_ps()}; }
static inline V16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline V16 load(const float *p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float *p, V16 a) { _mm512_storeu_ps(p, a.v); }
static inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline V16 greater_of(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline V16 lesser_of(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline V16 if_less(V16 a, V16 b, V16 yes, V16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
static inline V16 keep_nan(V16 x, V16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), y.v, x.v)};
}
static inline V16 abs(V16 a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.f), a.v)}; }
static inline V16 copysign(V16 a, V16 s) {
  __m512 sign = _mm512_set1_ps(-0.f);
  return {_mm512_or_ps(_mm512_andnot_ps(sign, a.v), _mm512_and_ps(sign, s.v))};
}
static inline V16 scale_by_power(V16 p, V16 n) { return {_mm512_scalef_ps(p.v, n.v)}; }
static inline V16 within(V16 a, int lo, int hi, V16 other) {
  if (lo <= 0 && hi >= 16)
    return a;
  uint32_t below_hi = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1;
  uint32_t below_lo = lo >= 16 ? 0xffffu : lo <= 0 ? 0u : (1u << lo) - 1;
  return {_mm512_mask_blend_ps(__mmask16(below_hi & ~below_lo), other.v, a.v)};
}

// Paired layout: lane 2i holds element i and lane 2i+1 element i+8, which is the order in which one 64-bit shift per lane
// pair takes sixteen 4-bit values apart.
static inline V16 pair_lanes(V16 a) {
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), a.v)};
}
static inline V16 unpair_lanes(V16 a) {
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), a.v)};
}

static inline V16 load(const Float *p) { return load(reinterpret_cast<const float *>(p)); }
static inline void store(Float *p, V16 a) { store(reinterpret_cast<float *>(p), a); }
static inline V16 load(const Half *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
static inline V16 load(const BFloat *p) {
  __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(h, 16))};
}
static inline V16 canonical_nan(V16 a) {
  __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v, nan)};
}
static inline void store(Half *p, V16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void store(BFloat *p, V16 a) {
  __m512i b = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  b = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(b));
}

static inline float finish_sum(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
static inline float sum(V16 a) {
  __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  return finish_sum(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
static inline float greatest(V16 a) {
  __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}

// The sums of four vectors, each in the canonical tree.
static inline void sum4(V16 a, V16 b, V16 c, V16 d, float *out) {
  __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee)); // i, i+8
  __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xee));
  __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)); // i, i+4
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));                                                 // i, i+2
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
  x = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), x);
  _mm_storeu_ps(out, _mm512_castps512_ps128(x));
}
// The same for the paired layout.
static inline void sum4_paired(V16 a, V16 b, V16 c, V16 d, float *out) {
  __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a.v, b.v, 0x88), _mm512_shuffle_ps(a.v, b.v, 0xdd)); // i, i+8
  __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(c.v, d.v, 0x88), _mm512_shuffle_ps(c.v, d.v, 0xdd));
  __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x44), _mm512_shuffle_f32x4(ab, cd, 0xee)); // i, i+4
  // Now lanes: [a0 a1 b0 b1] [a2 a3 b2 b3] [c0 c1 d0 d1] [c2 c3 d2 d3].
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1)); // i, i+2
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
  x = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 8, 10, 0, 2, 8, 10, 0, 2, 8, 10, 0, 2, 8, 10), x);
  _mm_storeu_ps(out, _mm512_castps512_ps128(x));
}

// The integers of sixteen values: 4 bits and odd widths in paired lanes, 2 and 8 in natural ones. Bits above the value
// are left in place where MASK is false. Reads exactly 2*BITS bytes.
template <int BITS, bool MASK> static inline __m512i integers(const uint8_t *p) {
  if constexpr (BITS == 8) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  } else if constexpr (BITS == 2) {
    const __m512i shift = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i q = _mm512_srlv_epi32(_mm512_set1_epi32(int(load_u32(p))), shift);
    return MASK ? _mm512_and_si512(q, _mm512_set1_epi32(3)) : q;
  } else {
    const __m512i shift = _mm512_setr_epi64(0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS);
    __m512i q;
    if constexpr (BITS == 4) {
      q = _mm512_srlv_epi64(_mm512_set1_epi64(int64_t(load_u64(p))), shift);
    } else if constexpr (BITS == 3) { // values 0-7 lie in the first 24 bits, 8-15 in the other 24
      uint64_t both = load_u32(p) | uint64_t(load_u32(p + 2) >> 8) << 32;
      q = _mm512_srlv_epi64(_mm512_set1_epi64(int64_t(both)), shift);
    } else {
      // Value i+8 starts at bit 8*BITS+BITS*i of the stream; in the second window, which ends with the stream, it is
      // turned to the upper half of its lane pair.
      constexpr int skip = 2 * BITS - 8, at = 8 * BITS - 8 * skip - 32;
      const __m512i turn = _mm512_add_epi64(shift, _mm512_set1_epi64(at));
      __m512i low = _mm512_srlv_epi64(_mm512_set1_epi64(int64_t(load_u64(p))), shift);
      __m512i high = _mm512_rorv_epi64(_mm512_set1_epi64(int64_t(load_u64(p + skip))), turn);
      q = _mm512_mask_blend_epi32(0xaaaa, low, high);
    }
    return MASK ? _mm512_and_si512(q, _mm512_set1_epi32((1 << BITS) - 1)) : q;
  }
}
template <int BITS> static inline V16 unpack(const uint8_t *p) { return {_mm512_cvtepi32_ps(integers<BITS, true>(p))}; }

// The values at p looked up in a table of sixteen or, with 5 bits, thirty-two. The instructions look at as many low bits
// of a lane as the table needs, so what is above a value does no harm if the table repeats.
template <int BITS> static inline V16 look_up(const uint8_t *p, V16 table) {
  return {_mm512_permutexvar_ps(integers<BITS, false>(p), table.v)};
}
static inline V16 look_up5(const uint8_t *p, V16 low, V16 high) {
  return {_mm512_permutex2var_ps(low.v, integers<5, false>(p), high.v)};
}

static inline V16 e4m3(const uint8_t *p) {
  __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  __m512 h = _mm512_cvtph_ps(e4m3_as_half(b));
  return {_mm512_mul_ps(h, _mm512_set1_ps(256.f))};
}

constexpr int kPassRows = 6;
constexpr int64_t kPassesMost = 24;
constexpr int pass_features(int) { return 4; }
constexpr int kTileM = 6, kTileN = 4;
constexpr int kScoreQ = 4;
constexpr int kValueQ = 4, kValueVecs = 4;
