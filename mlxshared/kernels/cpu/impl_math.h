// Elementary functions over sixteen lanes, made of steps that round alike on every instruction set.

// e^x to about 1 ulp; exact at 0, correctly rounded into the subnormals, infinite above 88.72, NaN for NaN. Cephes'
// expf: x = n ln 2 + r, a polynomial in r.
static inline V16 exp(V16 x) {
  const V16 magic = set1(0x1.8p23f); // adding it rounds to an integer
  V16 t = greater_of(lesser_of(x, set1(89.f)), set1(-105.f));
  V16 n = sub(fma(t, set1(0x1.715476p0f), magic), magic);
  V16 r = fma(n, set1(-0.693359375f), t);
  r = fma(n, set1(2.12194440e-4f), r);
  V16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.f));
  return keep_nan(x, scale_by_power(p, n));
}

// tanh x: an odd polynomial near 0 (Cephes' tanhf), 1 - 2/(e^2|x| + 1) elsewhere.
static inline V16 tanh(V16 x) {
  V16 a = abs(x), z = mul(x, x);
  V16 p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  V16 near = fma(mul(p, z), x, x);
  V16 far = sub(set1(1.f), div(set1(2.f), add(exp(add(a, a)), set1(1.f))));
  return if_less(a, set1(0.625f), near, copysign(far, x));
}

static inline V16 silu(V16 x) { return div(x, add(set1(1.f), exp(sub(zero(), x)))); }

// ln(1 + e^x) to about 2 ulp: the greater of x and 0 plus ln(1 + u), u = e^-|x| in (0, 1], by the series of
// 2 artanh(u / (2 + u)), whose argument is at most a third.
static inline V16 softplus(V16 x) {
  V16 u = exp(sub(zero(), abs(x)));
  V16 s = div(u, add(u, set1(2.f))), z = mul(s, s);
  V16 p = set1(1.f / 15);
  p = fma(p, z, set1(1.f / 13));
  p = fma(p, z, set1(1.f / 11));
  p = fma(p, z, set1(1.f / 9));
  p = fma(p, z, set1(1.f / 7));
  p = fma(p, z, set1(1.f / 5));
  p = fma(p, z, set1(1.f / 3));
  V16 log = mul(set1(2.f), fma(mul(p, z), s, s));
  return keep_nan(x, add(greater_of(x, zero()), log));
}
