// Scalars of the formats, bit for bit what the vector instructions do, save that every NaN comes out as the quiet one.
#ifndef MLXCEL_KERNELS_CPU_SCALAR_H
#define MLXCEL_KERNELS_CPU_SCALAR_H

#include <stdint.h>
#include <string.h>

namespace {

// Elements in memory, without alignment.
struct Float {
  uint8_t bytes[4];
};
struct Half {
  uint8_t bytes[2];
};
struct BFloat {
  uint8_t bytes[2];
};

inline uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}
inline float float_of(uint32_t b) {
  float x;
  memcpy(&x, &b, 4);
  return x;
}
inline uint16_t load_u16(const void *p) {
  uint16_t x;
  memcpy(&x, p, 2);
  return x;
}
inline uint32_t load_u32(const void *p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}
inline uint64_t load_u64(const void *p) {
  uint64_t x;
  memcpy(&x, p, 8);
  return x;
}

inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  if (exponent == 31)
    return float_of(sign | 0x7f800000 | (fraction ? 0x400000 | fraction << 13 : 0));
  if (exponent)
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  float magnitude = float(fraction) * 0x1p-24f;
  return float_of(sign | bits_of(magnitude));
}

inline uint16_t float_to_half(float x) {
  uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000, magnitude = b & 0x7fffffff;
  if (magnitude > 0x7f800000)
    return 0x7e00;
  if (magnitude >= 0x477ff000) // 65520 and above round to infinity
    return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) { // below the least normal half: the sum aligns and rounds the fraction
    float aligned = float_of(magnitude) + 0.5f;
    return uint16_t(sign | (bits_of(aligned) - 0x3f000000));
  }
  uint32_t odd = (magnitude >> 13) & 1;
  return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

inline uint16_t float_to_bfloat(float x) {
  if (x != x)
    return 0x7fc0;
  uint32_t b = bits_of(x);
  return uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// The 8-bit floats as float32 bits. E4M3 has no infinity: all ones but the sign is NaN.
constexpr uint32_t e4m3_bits(uint8_t b) {
  uint32_t sign = uint32_t(b & 0x80) << 24, exponent = (b >> 3) & 15, fraction = b & 7;
  if ((b & 0x7f) == 0x7f)
    return 0x7fc00000;
  if (exponent)
    return sign | (exponent + 120) << 23 | fraction << 20;
  if (fraction == 0)
    return sign;
  uint32_t top = fraction >= 4 ? 2 : fraction >= 2 ? 1 : 0; // subnormal: fraction * 2^-9, normalized
  return sign | (top + 118) << 23 | (fraction << (23 - top) & 0x7fffff);
}

// A power of two from 2^-127 up; 255 is NaN.
constexpr uint32_t e8m0_bits(uint8_t b) { return b == 255 ? 0x7fc00000u : b == 0 ? 0x400000u : uint32_t(b) << 23; }

struct ScaleBits {
  uint32_t e4m3[256], e8m0[256];
  constexpr ScaleBits() : e4m3{}, e8m0{} {
    for (int i = 0; i < 256; i++) {
      e4m3[i] = e4m3_bits(uint8_t(i));
      e8m0[i] = e8m0_bits(uint8_t(i));
    }
  }
};
constexpr ScaleBits kScaleBits;

} // namespace

#endif
