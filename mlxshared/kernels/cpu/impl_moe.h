// Mixtures of experts: the router's choice, the sum over the chosen, gpt-oss's activation.

static inline V16 sigmoid(V16 x) { return div(set1(1.f), add(set1(1.f), exp(sub(zero(), x)))); }

// Whether score a of expert i comes before score b of expert j.
static inline bool goes_before(float a, int i, float b, int j, bool high_ties) {
  if (a > b || (a == a && b != b))
    return true;
  if (a < b || (a != a && b == b))
    return false;
  return high_ties ? i > j : i < j;
}

// The k best of scores, best first, by insertion.
static void best(const float *scores, int n, int k, bool high_ties, int32_t *ids) {
  int held = 0;
  for (int i = 0; i < n; i++) {
    if (held == k && !goes_before(scores[i], i, scores[ids[k - 1]], ids[k - 1], high_ties))
      continue;
    int at = held < k ? held++ : k - 1;
    for (; at > 0 && goes_before(scores[i], i, scores[ids[at - 1]], ids[at - 1], high_ties); at--)
      ids[at] = ids[at - 1];
    ids[at] = i;
  }
}

// Sets the scores of all groups but the best to 0. Among equals the group with the higher number stays.
static void drop_groups(const mk_route_spec &s, float *scores, float *sums) {
  const int size = s.experts / s.groups;
  for (int g = 0; g < s.groups; g++) {
    int32_t top[2];
    best(scores + g * size, size, 2, false, top);
    sums[g] = scores[g * size + top[0]] + scores[g * size + top[1]];
  }
  for (int g = 0; g < s.groups; g++) {
    int better = 0;
    for (int o = 0; o < s.groups; o++)
      better += o != g && goes_before(sums[o], o, sums[g], g, true);
    if (better >= s.top_groups)
      memset(scores + g * size, 0, size_t(size) * sizeof(float));
  }
}

// e^(x - top) of n values to out, and their sum in lanes and pairwise.
static float exponentials(const float *x, int64_t n, float top, float *out) {
  V16 total = zero();
  for (int64_t i = 0; i < n; i += 16) {
    V16 e = within(exp(sub(get(x + i, n - i), set1(top))), 0, int(n - i < 16 ? n - i : 16), zero());
    total = add(total, e);
    store(out + i, e);
  }
  return sum(total);
}

static void route_row(const mk_route_spec &s, const float *logits, float *work, int32_t *ids, float *weights) {
  const int64_t pad = round16(s.experts);
  float *scores = work, *own = work + pad, *chosen = own + pad, *sums = chosen + round16(s.top_k);
  const float *by = logits;
  if (s.scores == MK_ROUTE_SIGMOID) {
    for (int64_t i = 0; i < pad; i += 16)
      store(own + i, sigmoid(load(logits + i)));
    if (s.bias || s.groups > 1) {
      for (int i = 0; i < s.experts; i++)
        scores[i] = s.bias ? own[i] + s.bias[i] : own[i];
      if (s.groups > 1)
        drop_groups(s, scores, sums);
      by = scores;
    }
  }
  best(by, s.experts, s.top_k, s.high_ties != 0, ids);
  for (int j = 0; j < s.top_k; j++)
    chosen[j] = s.scores == MK_ROUTE_SIGMOID ? own[ids[j]] : logits[ids[j]];
  if (s.scores != MK_ROUTE_SIGMOID) {
    float top = chosen[0], total = s.scores == MK_ROUTE_SOFTMAX_ALL ? exponentials(logits, s.experts, top, own) : 0;
    float among = exponentials(chosen, s.top_k, top, chosen);
    if (s.scores == MK_ROUTE_SOFTMAX_CHOSEN)
      total = among;
    for (int j = 0; j < s.top_k; j++)
      chosen[j] /= total;
  }
  float divisor = 1;
  if (s.normalize && s.top_k > 1 && s.scores != MK_ROUTE_SOFTMAX_CHOSEN) {
    float total = 0;
    for (int j = 0; j < s.top_k; j++)
      total += chosen[j];
    divisor = total + s.epsilon;
  }
  for (int j = 0; j < s.top_k; j++)
    weights[j] = chosen[j] / divisor * s.scale;
}

static void route(const RouteJob &j, int64_t begin, int64_t end, Worker &worker) {
  const mk_route_spec &s = *j.spec;
  const int64_t pad = round16(s.experts);
  float *logits = scratch(worker, kScratchState, 3 * pad + round16(s.top_k) + round16(s.groups));
  for (int64_t r = begin; r < end; r++) {
    widen(j.logits + r * s.experts * item_size(j.dtype), j.dtype, s.experts, false, logits);
    route_row(s, logits, logits + pad, j.ids + r * s.top_k, j.weights + r * s.top_k);
  }
}

template <class T> static void weighted_sum_as(const WeightedSumJob &j, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    const T *x = reinterpret_cast<const T *>(j.x) + r * j.k * j.dim;
    T *y = reinterpret_cast<T *>(j.y) + r * j.dim;
    for (int64_t i = 0; i < j.dim; i += 16) {
      V16 total = zero();
      for (int c = 0; c < j.k; c++)
        total = fma(set1(j.weights[r * j.k + c]), get(x + c * j.dim + i, j.dim - i), total);
      put(y + i, total, j.dim - i);
    }
  }
}
static void weighted_sum(const WeightedSumJob &j, int64_t begin, int64_t end) {
  with_type(j.dtype, [&](auto t) { weighted_sum_as<TypeOf<decltype(t)>>(j, begin, end); });
}

template <class T> static void clamped_swiglu_as(const ClampedSwigluJob &j, int64_t begin, int64_t end) {
  const T *gate = reinterpret_cast<const T *>(j.gate), *up = reinterpret_cast<const T *>(j.up);
  T *y = reinterpret_cast<T *>(j.y);
  const V16 limit = set1(j.limit), alpha = set1(j.alpha), one = set1(1.f);
  for (int64_t i = begin; i < end; i += 16) {
    V16 g0 = get(gate + i, end - i), u0 = get(up + i, end - i);
    V16 g = keep_nan(g0, lesser_of(g0, limit));
    V16 u = keep_nan(u0, greater_of(lesser_of(u0, limit), sub(zero(), limit)));
    put(y + i, mul(mul(g, sigmoid(mul(alpha, g))), add(u, one)), end - i);
  }
}
static void clamped_swiglu(const ClampedSwigluJob &j, int64_t begin, int64_t end) {
  with_type(j.dtype, [&](auto t) { clamped_swiglu_as<TypeOf<decltype(t)>>(j, begin, end); });
}

static const MoeOps kMoeOps = {route, weighted_sum, clamped_swiglu};
