// Sixteen float32 lanes in plain C++.
struct V16 {
  float v[16];
};

#define MK_LANES for (int i = 0; i < 16; i++)

static inline V16 zero() {
  V16 r;
  MK_LANES r.v[i] = 0;
  return r;
}
static inline V16 set1(float x) {
  V16 r;
  MK_LANES r.v[i] = x;
  return r;
}
static inline V16 load(const float *p) {
  V16 r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
static inline void store(float *p, const V16 &a) { memcpy(p, a.v, sizeof a.v); }
static inline V16 fma(const V16 &a, const V16 &b, const V16 &c) {
  V16 r;
  MK_LANES r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
}
static inline V16 add(const V16 &a, const V16 &b) {
  V16 r;
  MK_LANES r.v[i] = a.v[i] + b.v[i];
  return r;
}
static inline V16 sub(const V16 &a, const V16 &b) {
  V16 r;
  MK_LANES r.v[i] = a.v[i] - b.v[i];
  return r;
}
static inline V16 mul(const V16 &a, const V16 &b) {
  V16 r;
  MK_LANES r.v[i] = a.v[i] * b.v[i];
  return r;
}
static inline V16 div(const V16 &a, const V16 &b) {
  V16 r;
  MK_LANES r.v[i] = a.v[i] / b.v[i];
  return r;
}
static inline V16 greater_of(const V16 &a, const V16 &b) {
  V16 r;
  MK_LANES r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return r;
}
static inline V16 lesser_of(const V16 &a, const V16 &b) {
  V16 r;
  MK_LANES r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return r;
}
static inline V16 if_less(const V16 &a, const V16 &b, const V16 &yes, const V16 &no) {
  V16 r;
  MK_LANES r.v[i] = a.v[i] < b.v[i] ? yes.v[i] : no.v[i];
  return r;
}
static inline V16 keep_nan(const V16 &x, const V16 &y) {
  V16 r;
  MK_LANES r.v[i] = x.v[i] == x.v[i] ? y.v[i] : x.v[i];
  return r;
}
static inline V16 abs(const V16 &a) {
  V16 r;
  MK_LANES r.v[i] = __builtin_fabsf(a.v[i]);
  return r;
}
static inline V16 copysign(const V16 &a, const V16 &s) {
  V16 r;
  MK_LANES r.v[i] = __builtin_copysignf(a.v[i], s.v[i]);
  return r;
}
static inline V16 scale_by_power(const V16 &p, const V16 &n) {
  V16 r;
  MK_LANES {
    int e = int(n.v[i]), half = e >> 1;
    r.v[i] = p.v[i] * float_of(uint32_t(half + 127) << 23) * float_of(uint32_t(e - half + 127) << 23);
  }
  return r;
}
static inline V16 within(const V16 &a, int lo, int hi, const V16 &other) {
  V16 r;
  MK_LANES r.v[i] = i >= lo && i < hi ? a.v[i] : other.v[i];
  return r;
}
static inline V16 pair_lanes(const V16 &a) { return a; }
static inline V16 unpair_lanes(const V16 &a) { return a; }

static inline V16 load(const Float *p) { return load(reinterpret_cast<const float *>(p)); }
static inline void store(Float *p, const V16 & a) { store(reinterpret_cast<float *>(p), a); }
static inline V16 load(const Half *p) {
  V16 r;
  uint16_t h[16];
  memcpy(h, p, sizeof h);
  MK_LANES r.v[i] = half_to_float(h[i]);
  return r;
}
static inline V16 load(const BFloat *p) {
  V16 r;
  uint16_t h[16];
  memcpy(h, p, sizeof h);
  MK_LANES r.v[i] = float_of(uint32_t(h[i]) << 16);
  return r;
}
static inline V16 canonical_nan(const V16 &a) {
  V16 r;
  MK_LANES r.v[i] = a.v[i] == a.v[i] ? a.v[i] : float_of(0x7fc00000);
  return r;
}
static inline void store(Half *p, const V16 &a) {
  uint16_t h[16];
  MK_LANES h[i] = float_to_half(a.v[i]);
  memcpy(static_cast<void *>(p), h, sizeof h);
}
static inline void store(BFloat *p, const V16 &a) {
  uint16_t h[16];
  MK_LANES h[i] = float_to_bfloat(a.v[i]);
  memcpy(static_cast<void *>(p), h, sizeof h);
}

static inline float sum(const V16 &a) {
  float t[8];
  for (int i = 0; i < 8; i++)
    t[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; i++)
    t[i] += t[i + 4];
  return (t[0] + t[2]) + (t[1] + t[3]);
}
static inline float greatest(const V16 &a) {
  float t[16];
  memcpy(t, a.v, sizeof t);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++)
      t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}

template <int BITS> static inline V16 unpack(const uint8_t *p) {
  V16 r;
  MK_LANES {
    int bit = i * BITS;
    uint32_t word = p[bit / 8];
    if (bit % 8 + BITS > 8)
      word |= uint32_t(p[bit / 8 + 1]) << 8;
    r.v[i] = float((word >> (bit % 8)) & ((1u << BITS) - 1));
  }
  return r;
}
static inline V16 e2m1(const uint8_t *p) {
  static const float table[16] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
  V16 r;
  MK_LANES r.v[i] = table[(p[i / 2] >> (4 * (i % 2))) & 15];
  return r;
}
static inline V16 e4m3(const uint8_t *p) {
  V16 r;
  MK_LANES r.v[i] = float_of(kScaleBits.e4m3[p[i]]);
  return r;
}
#undef MK_LANES

constexpr int kPassRows = 4;                   // x rows for which weights are taken apart in one go
constexpr int64_t kPassesMost = 8;             // x rows beyond which they are taken apart once for all
constexpr int pass_features(int) { return 2; } // output features at once, by the rows of the pass
constexpr int kTileM = 2, kTileN = 2;          // x rows by output features in registers
constexpr int kScoreQ = 2;                     // query rows that share a key vector
constexpr int kValueQ = 2, kValueVecs = 2;     // query rows by vectors of the value
