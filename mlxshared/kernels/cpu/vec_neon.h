// Sixteen float32 lanes in four NEON registers (AArch64).
struct V16 {
  float32x4_t v[4];
};

#define MK_QUADS for (int i = 0; i < 4; i++)

static inline V16 set1(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
static inline V16 zero() { return set1(0); }
static inline V16 load(const float *p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
static inline void store(float *p, V16 a) { MK_QUADS vst1q_f32(p + 4 * i, a.v[i]); }
static inline V16 fma(V16 a, V16 b, V16 c) {
  V16 r;
  MK_QUADS r.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
  return r;
}
static inline V16 add(V16 a, V16 b) {
  V16 r;
  MK_QUADS r.v[i] = vaddq_f32(a.v[i], b.v[i]);
  return r;
}
static inline V16 sub(V16 a, V16 b) {
  V16 r;
  MK_QUADS r.v[i] = vsubq_f32(a.v[i], b.v[i]);
  return r;
}
static inline V16 mul(V16 a, V16 b) {
  V16 r;
  MK_QUADS r.v[i] = vmulq_f32(a.v[i], b.v[i]);
  return r;
}
static inline V16 div(V16 a, V16 b) {
  V16 r;
  MK_QUADS r.v[i] = vdivq_f32(a.v[i], b.v[i]);
  return r;
}
// Not fmax: b where either is NaN, as x86 does it.
static inline V16 greater_of(V16 a, V16 b) {
  V16 r;
  MK_QUADS r.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  return r;
}
static inline V16 lesser_of(V16 a, V16 b) {
  V16 r;
  MK_QUADS r.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  return r;
}
static inline V16 if_less(V16 a, V16 b, V16 yes, V16 no) {
  V16 r;
  MK_QUADS r.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i]);
  return r;
}
static inline V16 keep_nan(V16 x, V16 y) {
  V16 r;
  MK_QUADS r.v[i] = vbslq_f32(vceqq_f32(x.v[i], x.v[i]), y.v[i], x.v[i]);
  return r;
}
static inline V16 abs(V16 a) {
  V16 r;
  MK_QUADS r.v[i] = vabsq_f32(a.v[i]);
  return r;
}
static inline V16 copysign(V16 a, V16 s) {
  V16 r;
  MK_QUADS r.v[i] = vbslq_f32(vdupq_n_u32(0x80000000u), s.v[i], a.v[i]);
  return r;
}
static inline V16 scale_by_power(V16 p, V16 n) {
  V16 r;
  MK_QUADS {
    int32x4_t e = vcvtq_s32_f32(n.v[i]), half = vshrq_n_s32(e, 1), bias = vdupq_n_s32(127);
    int32x4_t low = vshlq_n_s32(vaddq_s32(half, bias), 23);
    int32x4_t high = vshlq_n_s32(vaddq_s32(vsubq_s32(e, half), bias), 23);
    r.v[i] = vmulq_f32(vmulq_f32(p.v[i], vreinterpretq_f32_s32(low)), vreinterpretq_f32_s32(high));
  }
  return r;
}
static inline V16 within(V16 a, int lo, int hi, V16 other) {
  if (lo <= 0 && hi >= 16)
    return a;
  static const int32_t first[4] = {0, 1, 2, 3};
  V16 r;
  MK_QUADS {
    int32x4_t lane = vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * i));
    uint32x4_t in = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi)));
    r.v[i] = vbslq_f32(in, a.v[i], other.v[i]);
  }
  return r;
}
static inline V16 pair_lanes(V16 a) { return a; }
static inline V16 unpair_lanes(V16 a) { return a; }

static inline uint16x8_t load_u16x8(const void *p) { return vreinterpretq_u16_u8(vld1q_u8(static_cast<const uint8_t *>(p))); }
static inline V16 halves_to_floats(uint16x8_t a, uint16x8_t b) {
  float16x8_t x = vreinterpretq_f16_u16(a), y = vreinterpretq_f16_u16(b);
  return {{vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x)), vcvt_f32_f16(vget_low_f16(y)),
           vcvt_f32_f16(vget_high_f16(y))}};
}
static inline V16 load(const Float *p) { return load(reinterpret_cast<const float *>(p)); }
static inline void store(Float *p, V16 a) { store(reinterpret_cast<float *>(p), a); }
static inline V16 load(const Half *p) { return halves_to_floats(load_u16x8(p), load_u16x8(p + 8)); }
static inline V16 load(const BFloat *p) {
  uint16x8_t a = load_u16x8(p), b = load_u16x8(p + 8);
  return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(a), 16)), vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(a), 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16)), vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(b), 16))}};
}
static inline V16 canonical_nan(V16 a) {
  float32x4_t nan = vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000u));
  V16 r;
  MK_QUADS r.v[i] = vbslq_f32(vceqq_f32(a.v[i], a.v[i]), a.v[i], nan);
  return r;
}
static inline void store(Half *p, V16 a) {
  uint8_t *out = reinterpret_cast<uint8_t *>(p);
  for (int i = 0; i < 4; i++)
    vst1_u8(out + 8 * i, vreinterpret_u8_f16(vcvt_f16_f32(a.v[i])));
}
static inline void store(BFloat *p, V16 a) {
  uint8_t *out = reinterpret_cast<uint8_t *>(p);
  for (int i = 0; i < 4; i++) {
    uint32x4_t b = vreinterpretq_u32_f32(a.v[i]);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(1));
    b = vaddq_u32(vaddq_u32(b, vdupq_n_u32(0x7fff)), odd);
    vst1_u8(out + 8 * i, vreinterpret_u8_u16(vshrn_n_u32(b, 16)));
  }
}

static inline float sum(V16 a) {
  float32x4_t s = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(vpadd_f32(t, t), 0);
}
static inline float greatest(V16 a) {
  float t[16];
  store(t, a);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++)
      t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}

static inline V16 shorts_to_floats(uint16x8_t a, uint16x8_t b) {
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(a))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(a))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(b))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(b)))}};
}
static inline V16 bytes_to_floats(uint8x16_t b) {
  return shorts_to_floats(vmovl_u8(vget_low_u8(b)), vmovl_u8(vget_high_u8(b)));
}
static inline uint8x16_t nibbles(const uint8_t *p) {
  uint8x8_t b = vld1_u8(p), low = vand_u8(b, vdup_n_u8(15)), high = vshr_n_u8(b, 4);
  return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
}

template <int BITS> static inline V16 unpack(const uint8_t *p) {
  if constexpr (BITS == 8) {
    return bytes_to_floats(vld1q_u8(p));
  } else if constexpr (BITS == 4) {
    return bytes_to_floats(nibbles(p));
  } else {
    // Each value lies in a 16-bit window; a shift to the left drops what is above it, one to the right what is below.
    struct Plan {
      uint8_t bytes[32];
      int16_t left[16];
      constexpr Plan() : bytes{}, left{} {
        for (int i = 0; i < 16; i++) {
          int bit = i * BITS;
          bytes[2 * i] = uint8_t(bit / 8);
          bytes[2 * i + 1] = uint8_t(bit / 8 + 1);
          left[i] = int16_t(16 - BITS - bit % 8);
        }
      }
    };
    static constexpr Plan plan;
    uint8_t stream[16] = {};
    memcpy(stream, p, 2 * BITS);
    uint8x16_t s = vld1q_u8(stream);
    uint16x8_t a = vreinterpretq_u16_u8(vqtbl1q_u8(s, vld1q_u8(plan.bytes)));
    uint16x8_t b = vreinterpretq_u16_u8(vqtbl1q_u8(s, vld1q_u8(plan.bytes + 16)));
    a = vshrq_n_u16(vshlq_u16(a, vld1q_s16(plan.left)), 16 - BITS);
    b = vshrq_n_u16(vshlq_u16(b, vld1q_s16(plan.left + 8)), 16 - BITS);
    return shorts_to_floats(a, b);
  }
}
static inline V16 e2m1(const uint8_t *p) {
  static const uint8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 1, 2, 3, 4, 6, 8, 12};
  uint8x16_t q = nibbles(p);
  V16 magnitude = mul(bytes_to_floats(vqtbl1q_u8(vld1q_u8(doubled), q)), set1(.5f));
  V16 sign = bytes_to_floats(vshrq_n_u8(q, 3)); // 0 or 1
  return copysign(magnitude, sub(set1(.5f), sign));
}
static inline V16 e4m3(const uint8_t *p) {
  uint8x16_t b = vld1q_u8(p);
  uint16x8_t wide[2] = {vmovl_u8(vget_low_u8(b)), vmovl_u8(vget_high_u8(b))};
  for (uint16x8_t &w : wide) {
    uint16x8_t magnitude = vandq_u16(w, vdupq_n_u16(0x7f));
    uint16x8_t nan = vandq_u16(vceqq_u16(magnitude, vdupq_n_u16(0x7f)), vdupq_n_u16(0x7e00));
    uint16x8_t sign = vshlq_n_u16(vandq_u16(w, vdupq_n_u16(0x80)), 8);
    w = vorrq_u16(vorrq_u16(vshlq_n_u16(magnitude, 7), sign), nan);
  }
  return mul(halves_to_floats(wide[0], wide[1]), set1(256.f));
}
#undef MK_QUADS

constexpr int kPassRows = 4;
constexpr int64_t kPassesMost = 8;
constexpr int pass_features(int rows) { return rows <= 2 ? 2 : 1; }
constexpr int kTileM = 3, kTileN = 2;
constexpr int kScoreQ = 1;
constexpr int kValueQ = 2, kValueVecs = 2;
