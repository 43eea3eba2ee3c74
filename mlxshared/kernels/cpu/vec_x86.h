// Integer steps that AVX2 and AVX-512 share.

// E4M3 in sign-extended 16-bit lanes to the half that is 1/256 of it; NaN (all ones but the sign) to NaN.
static inline __m256i e4m3_as_half(__m256i b) {
  __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
  __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
  __m256i sign = _mm256_and_si256(b, _mm256_set1_epi16(int16_t(0x8000)));
  return _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
}
