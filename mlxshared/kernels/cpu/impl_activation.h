// Activations made of tanh.

// GELU by its tanh approximation (Hendrycks and Gimpel 2016).
static inline V16 gelu(V16 x) {
  V16 inner = mul(mul(set1(0.7978845608028654f), x), fma(set1(0.044715f), mul(x, x), set1(1.f))); // sqrt(2/pi)
  return mul(mul(set1(0.5f), x), add(set1(1.f), tanh(inner)));
}

template <class T> static void gelu_mul_as(const SiluMulJob &j, int64_t begin, int64_t end) {
  const T *gate = reinterpret_cast<const T *>(j.gate), *up = reinterpret_cast<const T *>(j.up);
  T *y = reinterpret_cast<T *>(j.y);
  for (int64_t i = begin; i < end; i += 16)
    put(y + i, mul(gelu(get(gate + i, end - i)), get(up + i, end - i)), end - i);
}
static void gelu_mul(const SiluMulJob &j, int64_t begin, int64_t end) {
  with_type(j.dtype, [&](auto t) { gelu_mul_as<TypeOf<decltype(t)>>(j, begin, end); });
}

template <class T> static void softcap_as(const SoftcapJob &j, int64_t begin, int64_t end) {
  const T *x = reinterpret_cast<const T *>(j.x);
  T *y = reinterpret_cast<T *>(j.y);
  const V16 cap = set1(j.cap);
  for (int64_t i = begin; i < end; i += 16)
    put(y + i, mul(cap, tanh(div(get(x + i, end - i), cap))), end - i);
}
static void softcap(const SoftcapJob &j, int64_t begin, int64_t end) {
  with_type(j.dtype, [&](auto t) { softcap_as<TypeOf<decltype(t)>>(j, begin, end); });
}
