// Sixteen float32 lanes in two AVX2 registers. Needs AVX2, FMA and F16C.
struct V16 {
  __m256 a, b;
};

static inline V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float *p, V16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V16 add(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V16 sub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V16 mul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V16 div(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V16 greater_of(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V16 lesser_of(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V16 if_less(V16 x, V16 y, V16 yes, V16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
static inline V16 keep_nan(V16 x, V16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
static inline V16 abs(V16 x) {
  __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline V16 copysign(V16 x, V16 s) {
  __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_or_ps(_mm256_andnot_ps(sign, x.a), _mm256_and_ps(sign, s.a)),
          _mm256_or_ps(_mm256_andnot_ps(sign, x.b), _mm256_and_ps(sign, s.b))};
}
static inline __m256 scale_by_power8(__m256 p, __m256 n) {
  __m256i e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1), bias = _mm256_set1_epi32(127);
  __m256i low = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  __m256i high = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high));
}
static inline V16 scale_by_power(V16 p, V16 n) { return {scale_by_power8(p.a, n.a), scale_by_power8(p.b, n.b)}; }
static inline V16 within(V16 x, int lo, int hi, V16 other) {
  if (lo <= 0 && hi >= 16)
    return x;
  __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), j = _mm256_add_epi32(i, _mm256_set1_epi32(8));
  __m256i l = _mm256_set1_epi32(lo - 1), h = _mm256_set1_epi32(hi);
  __m256i a = _mm256_and_si256(_mm256_cmpgt_epi32(i, l), _mm256_cmpgt_epi32(h, i));
  __m256i b = _mm256_and_si256(_mm256_cmpgt_epi32(j, l), _mm256_cmpgt_epi32(h, j));
  return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(a)), _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(b))};
}
static inline V16 pair_lanes(V16 x) { return x; }
static inline V16 unpair_lanes(V16 x) { return x; }

static inline V16 load(const Float *p) { return load(reinterpret_cast<const float *>(p)); }
static inline void store(Float *p, V16 a) { store(reinterpret_cast<float *>(p), a); }
static inline V16 load(const Half *p) {
  const __m128i *h = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
static inline __m256 widen_bfloat8(const __m128i *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
static inline V16 load(const BFloat *p) {
  const __m128i *h = reinterpret_cast<const __m128i *>(p);
  return {widen_bfloat8(h), widen_bfloat8(h + 1)};
}
static inline V16 canonical_nan(V16 x) {
  __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return {_mm256_blendv_ps(x.a, nan, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
          _mm256_blendv_ps(x.b, nan, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
static inline void store(Half *p, V16 x) {
  __m128i *h = reinterpret_cast<__m128i *>(p);
  _mm_storeu_si128(h, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(h + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline __m256i round_bfloat8(__m256 x) {
  __m256i b = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd), 16);
}
static inline void store(BFloat *p, V16 x) {
  __m256i packed = _mm256_packus_epi32(round_bfloat8(x.a), round_bfloat8(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline float sum(V16 x) {
  __m256 t = _mm256_add_ps(x.a, x.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static inline float greatest(V16 x) {
  __m256 t = _mm256_max_ps(x.a, x.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline __m256 bytes8(__m128i b) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)); }
// Eight values of 4 bits, as integers.
static inline __m256i nibbles8(const uint8_t *p) {
  const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(int(load_u32(p))), shift), _mm256_set1_epi32(15));
}

// Sixteen values of 3, 5 or 6 bits from a little-endian bit stream, as 16-bit integers. Reads exactly 2*BITS bytes.
template <int BITS> static inline __m256i unpack_odd(const uint8_t *p) {
  static_assert(BITS == 3 || BITS == 5 || BITS == 6);
  struct Plan {
    alignas(32) uint8_t bytes[32];
    alignas(32) uint16_t factor[16];
    constexpr Plan() : bytes{}, factor{} {
      for (int i = 0; i < 16; i++) {
        int bit = i * BITS;
        // A value may end in the byte where it starts; the window's second byte is then any byte that exists.
        bytes[2 * i] = uint8_t(bit / 8);
        bytes[2 * i + 1] = uint8_t(bit / 8 + 1);
        factor[i] = uint16_t(1 << (16 - BITS - bit % 8));
      }
    }
  };
  static constexpr Plan plan;
  uint64_t low = 0, high = 0;
  if constexpr (BITS == 3) {
    uint16_t end;
    memcpy(&end, p + 4, 2);
    low = load_u32(p) | uint64_t(end) << 32;
  } else {
    low = load_u64(p);
    if constexpr (BITS == 6) {
      high = load_u32(p + 8);
    } else {
      uint16_t end;
      memcpy(&end, p + 8, 2);
      high = end;
    }
  }
  __m256i stream = _mm256_broadcastsi128_si256(_mm_set_epi64x(int64_t(high), int64_t(low)));
  __m256i window = _mm256_shuffle_epi8(stream, _mm256_load_si256(reinterpret_cast<const __m256i *>(plan.bytes)));
  window = _mm256_mullo_epi16(window, _mm256_load_si256(reinterpret_cast<const __m256i *>(plan.factor)));
  return _mm256_srli_epi16(window, 16 - BITS);
}

template <int BITS> static inline V16 unpack(const uint8_t *p) {
  if constexpr (BITS == 8) {
    __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return {bytes8(b), bytes8(_mm_srli_si128(b, 8))};
  } else if constexpr (BITS == 4) {
    return {_mm256_cvtepi32_ps(nibbles8(p)), _mm256_cvtepi32_ps(nibbles8(p + 4))};
  } else if constexpr (BITS == 2) {
    __m256i q = _mm256_set1_epi32(int(load_u32(p))), mask = _mm256_set1_epi32(3);
    __m256i a = _mm256_srlv_epi32(q, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    __m256i b = _mm256_srlv_epi32(q, _mm256_setr_epi32(16, 18, 20, 22, 24, 26, 28, 30));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(a, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(b, mask))};
  } else {
    __m256i q = unpack_odd<BITS>(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(q))),
            _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(q, 1)))};
  }
}
static inline __m256 e2m1_8(const uint8_t *p) {
  const __m256 magnitude = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
  __m256i q = nibbles8(p);
  __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(q, 3), 31);
  return _mm256_or_ps(_mm256_permutevar8x32_ps(magnitude, q), _mm256_castsi256_ps(sign));
}
static inline V16 e2m1(const uint8_t *p) { return {e2m1_8(p), e2m1_8(p + 4)}; }
static inline V16 e4m3(const uint8_t *p) {
  __m256i h = e4m3_as_half(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
  __m256 c = _mm256_set1_ps(256.f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), c),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), c)};
}

constexpr int kPassRows = 5;
constexpr int64_t kPassesMost = 12;
constexpr int pass_features(int rows) { return rows <= 2 ? 2 : 1; }
constexpr int kTileM = 3, kTileN = 2;
constexpr int kScoreQ = 2;
constexpr int kValueQ = 3, kValueVecs = 2;
