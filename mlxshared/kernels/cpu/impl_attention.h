// Causal attention over blocks of keys and values.
//
// Order of the sums, for one query row and head: a score is the canonical sixteen-lane dot product. Positions are
// cut at multiples of kSpan. Within a span, blocks of MK_KV_BLOCK positions follow one another in ascending order with a
// running maximum; the denominator has sixteen lanes, lane p%16 for position p; each output element is one chain over
// the visible positions, ascending. Spans merge in ascending order. All of it hangs on absolute positions alone.

constexpr float kMinusInfinity = -__builtin_inff();

// Where a unit's arrays lie. A partial result of one span is [maximum][denominator: 16 lanes][output: v_pad] for each
// query, stride kStride floats.
struct AttentionPlan {
  const KvView *kv;
  int heads;       // of the unit
  int64_t queries; // rows * heads; query i is row i / heads, head i % heads
  int64_t k_pad, v_pad;
  int64_t v_stride; // elements from one position's values to the next's
  int64_t stride;
};

static AttentionPlan plan_of(const AttentionUnit &u) {
  AttentionPlan p;
  p.kv = u.kv;
  p.heads = u.heads;
  p.queries = u.rows * u.heads;
  p.k_pad = p.kv->k_pad;
  p.v_pad = p.kv->v_pad;
  p.v_stride = p.kv->latent ? p.k_pad : p.v_pad;
  p.stride = 32 + p.v_pad;
  return p;
}

struct Partial {
  float *at;
  float &maximum() const { return at[0]; }
  float *denominator() const { return at + 16; }
  float *output() const { return at + 32; }
};

static int64_t attention_partial(const AttentionJob &, const AttentionUnit &u) {
  AttentionPlan p = plan_of(u);
  return p.queries * p.stride;
}

// The visible positions [low, high) of a query row.
struct Visible {
  int64_t low, high;
};
static inline Visible visible(const AttentionJob &j, const AttentionUnit &u, int64_t row) {
  int64_t position = u.segment->pos + u.row + row;
  int64_t low = j.first_seen(position);
  return {low < u.kv->first ? u.kv->first : low, position + 1};
}

// Scores of Q queries for sixteen positions. keys points at their column in [k_pad][MK_KV_BLOCK].
template <class T, int Q>
static inline void score(const T *keys, int64_t k_pad, const float *const *q, V16 *out) {
  V16 quarter[4][Q];
  for (int i = 0; i < 4; i++) {
    // Lanes i, i+8, i+4, i+12 of the canonical dot product.
    const int lanes[4] = {i, i + 8, i + 4, i + 12};
    V16 acc[4][Q];
    for (int l = 0; l < 4; l++)
      for (int n = 0; n < Q; n++)
        acc[l][n] = zero();
    for (int64_t d = 0; d < k_pad; d += 16) {
      for (int l = 0; l < 4; l++) {
        V16 k = load(keys + (d + lanes[l]) * MK_KV_BLOCK);
        for (int n = 0; n < Q; n++)
          acc[l][n] = fma(k, set1(q[n][d + lanes[l]]), acc[l][n]);
      }
    }
    for (int n = 0; n < Q; n++)
      quarter[i][n] = add(add(acc[0][n], acc[1][n]), add(acc[2][n], acc[3][n]));
  }
  for (int n = 0; n < Q; n++)
    out[n] = add(add(quarter[0][n], quarter[2][n]), add(quarter[1][n], quarter[3][n]));
}

// The same for a latent cache, whose rows are positions: keys points at the first of the sixteen. Lanes are elements, so
// the sum is the canonical one by itself.
template <class T, int Q>
static inline void score_latent(const T *keys, int64_t k_pad, const float *const *q, V16 *out) {
  float scores[Q][16];
  for (int i = 0; i < 16; i += kTileN) {
    V16 acc[Q][kTileN];
    for (int n = 0; n < Q; n++)
      for (int r = 0; r < kTileN; r++)
        acc[n][r] = zero();
    for (int64_t d = 0; d < k_pad; d += 16) {
      V16 k[kTileN];
      for (int r = 0; r < kTileN; r++)
        k[r] = load(keys + (i + r) * k_pad + d);
      for (int n = 0; n < Q; n++) {
        V16 x = load(q[n] + d);
        for (int r = 0; r < kTileN; r++)
          acc[n][r] = fma(k[r], x, acc[n][r]);
      }
    }
    for (int n = 0; n < Q; n++)
      sums<false, kTileN>(acc[n], scores[n] + i);
  }
  for (int n = 0; n < Q; n++)
    out[n] = load(scores[n]);
}

// Adds p[n][i] * values[i] to Q outputs for positions [begin, end), ascending.
template <class T, int Q, int VECS>
static inline void add_values(const T *values, int64_t stride, const float *const *p, float *const *out, int begin, int end) {
  V16 acc[Q][VECS];
  for (int n = 0; n < Q; n++)
    for (int c = 0; c < VECS; c++)
      acc[n][c] = load(out[n] + 16 * c);
  for (int i = begin; i < end; i++) {
    V16 v[VECS];
    for (int c = 0; c < VECS; c++)
      v[c] = load(values + i * stride + 16 * c);
    for (int n = 0; n < Q; n++) {
      V16 weight = set1(p[n][i]);
      for (int c = 0; c < VECS; c++)
        acc[n][c] = fma(weight, v[c], acc[n][c]);
    }
  }
  for (int n = 0; n < Q; n++)
    for (int c = 0; c < VECS; c++)
      store(out[n] + 16 * c, acc[n][c]);
}

template <class T, int Q>
static inline void add_all_values(const T *values, const AttentionPlan &plan, const float *const *p, float *const *out,
                                  int begin, int end) {
  if (begin >= end)
    return;
  int64_t d = 0;
  float *at[Q];
  for (; d + 16 * kValueVecs <= plan.v_pad; d += 16 * kValueVecs) {
    for (int n = 0; n < Q; n++)
      at[n] = out[n] + d;
    add_values<T, Q, kValueVecs>(values + d, plan.v_stride, p, at, begin, end);
  }
  for (; d < plan.v_pad; d += 16) {
    for (int n = 0; n < Q; n++)
      at[n] = out[n] + d;
    add_values<T, Q, 1>(values + d, plan.v_stride, p, at, begin, end);
  }
}

// One query's share of a block: its scores on the way in, its weights on the way out.
struct QueryBlock {
  Partial partial;
  float *p;      // MK_KV_BLOCK
  const float *q;
  int low, high; // visible positions within the block; empty if it has none
};

// Scores to weights relative to the running maximum; brings the partial result to that maximum.
static inline void soften(const AttentionJob &j, const QueryBlock &b, int64_t v_pad) {
  constexpr int kVecs = MK_KV_BLOCK / 16;
  const V16 none = set1(kMinusInfinity);
  V16 s[kVecs], top = none;
  const int first = b.low / 16, last = (b.high - 1) / 16;
  for (int v = first; v <= last; v++) {
    V16 x = mul(load(b.p + 16 * v), set1(j.scale));
    if (j.softcap > 0)
      x = mul(set1(j.softcap), tanh(div(x, set1(j.softcap))));
    s[v] = within(x, b.low - 16 * v, b.high - 16 * v, none);
    top = greater_of(s[v], top);
  }
  float before = b.partial.maximum(), now = greatest(top);
  float *denominator = b.partial.denominator();
  V16 d = load(denominator);
  if (now > before) {
    V16 factor = exp(set1(before - now));
    d = mul(d, factor);
    float *out = b.partial.output();
    for (int64_t i = 0; i < v_pad; i += 16)
      store(out + i, mul(load(out + i), factor));
    b.partial.maximum() = now;
  } else {
    now = before;
  }
  // With every score so far minus infinity the weights are e^-inf = 0, not e^(inf-inf).
  const V16 shift = set1(now == kMinusInfinity ? 0.f : now);
  for (int v = first; v <= last; v++) {
    V16 w = within(exp(sub(s[v], shift)), b.low - 16 * v, b.high - 16 * v, zero());
    store(b.p + 16 * v, w);
    d = add(d, w);
  }
  store(denominator, d);
}

template <class T, int Q>
static void score_queries(const T *keys, const AttentionPlan &plan, const QueryBlock *b) {
  const float *q[Q];
  int first = MK_KV_BLOCK, last = 0;
  for (int n = 0; n < Q; n++) {
    q[n] = b[n].q;
    first = b[n].low / 16 < first ? b[n].low / 16 : first;
    last = (b[n].high + 15) / 16 > last ? (b[n].high + 15) / 16 : last;
  }
  for (int v = first; v < last; v++) {
    V16 s[Q];
    if (plan.kv->latent)
      score_latent<T, Q>(keys + 16 * v * plan.k_pad, plan.k_pad, q, s);
    else
      score<T, Q>(keys + 16 * v, plan.k_pad, q, s);
    for (int n = 0; n < Q; n++)
      store(b[n].p + 16 * v, s[n]);
  }
}

// The positions that all Q queries see go together, the rest one query at a time: what a query does not see must not
// touch it, not even as zero times infinity.
template <class T, int Q>
static void value_queries(const T *values, const AttentionPlan &plan, const QueryBlock *b) {
  const float *p[Q];
  float *out[Q];
  int low = 0, high = MK_KV_BLOCK;
  for (int n = 0; n < Q; n++) {
    p[n] = b[n].p;
    out[n] = b[n].partial.output();
    low = b[n].low > low ? b[n].low : low;
    high = b[n].high < high ? b[n].high : high;
  }
  if (low >= high)
    low = high = MK_KV_BLOCK; // nothing in common: every query alone
  for (int n = 0; n < Q; n++)
    add_all_values<T, 1>(values, plan, p + n, out + n, b[n].low, b[n].high < low ? b[n].high : low);
  add_all_values<T, Q>(values, plan, p, out, low, high);
  for (int n = 0; n < Q; n++)
    add_all_values<T, 1>(values, plan, p + n, out + n, high > b[n].low ? high : b[n].low, b[n].high);
}

template <class T, int Q> static void score_rest(const T *keys, const AttentionPlan &plan, const QueryBlock *b, int64_t n) {
  if constexpr (Q > 0) {
    if (n == Q)
      score_queries<T, Q>(keys, plan, b);
    else
      score_rest<T, Q - 1>(keys, plan, b, n);
  }
}
template <class T, int Q> static void value_rest(const T *values, const AttentionPlan &plan, const QueryBlock *b, int64_t n) {
  if constexpr (Q > 0) {
    if (n == Q)
      value_queries<T, Q>(values, plan, b);
    else
      value_rest<T, Q - 1>(values, plan, b, n);
  }
}

template <class T>
static void attend_block(const AttentionJob &j, const T *keys, const T *values, const AttentionPlan &p, const QueryBlock *b,
                         int64_t n) {
  int64_t i = 0;
  for (; i + kScoreQ <= n; i += kScoreQ)
    score_queries<T, kScoreQ>(keys, p, b + i);
  score_rest<T, kScoreQ - 1>(keys, p, b + i, n - i);
  for (i = 0; i < n; i++)
    soften(j, b[i], p.v_pad);
  for (i = 0; i + kValueQ <= n; i += kValueQ)
    value_queries<T, kValueQ>(values, p, b + i);
  value_rest<T, kValueQ - 1>(values, p, b + i, n - i);
}

// A unit's working memory besides its partial results.
struct Bench {
  float *q;          // [queries, k_pad]
  float *p;          // [queries, MK_KV_BLOCK]
  QueryBlock *block; // [queries]
  float *keys, *values; // one block in float32, when enough queries share it
};

template <class T>
static void load_queries(const AttentionJob &j, const AttentionUnit &u, const AttentionPlan &p, float *q) {
  const int k_dim = p.kv->k_dim;
  for (int64_t i = 0; i < p.queries; i++) {
    int64_t row = u.segment->row0 + u.row + i / p.heads, head = u.first_head + i % p.heads;
    widen_as(reinterpret_cast<const T *>(j.q) + (row * j.heads + head) * k_dim, k_dim, false, q + i * p.k_pad);
  }
}

static Bench bench_of(const AttentionJob &j, const AttentionUnit &u, const AttentionPlan &p, Worker &worker) {
  Bench b;
  b.q = scratch(worker, kScratchInput, p.queries * (p.k_pad + MK_KV_BLOCK));
  b.p = b.q + p.queries * p.k_pad;
  b.block = static_cast<QueryBlock *>(scratch_bytes(worker, kScratchState, size_t(p.queries) * sizeof(QueryBlock)));
  b.keys = b.values = nullptr;
  if (p.kv->dtype != MK_F32 && p.queries > kScoreQ) {
    b.keys = scratch(worker, kScratchKeys, p.k_pad * MK_KV_BLOCK);
    b.values = p.kv->latent ? b.keys : scratch(worker, kScratchValues, p.v_pad * MK_KV_BLOCK);
  }
  with_type(j.dtype, [&](auto t) { load_queries<TypeOf<decltype(t)>>(j, u, p, b.q); });
  return b;
}

// Reduces one span of every query of the unit into partials.
static void reduce_span(const AttentionJob &j, const AttentionUnit &u, const AttentionPlan &p, const Bench &bench,
                        int64_t span, float *partials) {
  for (int64_t i = 0; i < p.queries; i++) {
    Partial partial = {partials + i * p.stride};
    memset(partial.at, 0, size_t(p.stride) * sizeof(float));
    partial.maximum() = kMinusInfinity;
  }
  int64_t from = visible(j, u, 0).low, to = visible(j, u, u.rows - 1).high;
  if (from < span * kSpan)
    from = span * kSpan;
  if (to > (span + 1) * kSpan)
    to = (span + 1) * kSpan;
  for (int64_t at = from / MK_KV_BLOCK; at * MK_KV_BLOCK < to; at++) {
    const int64_t base = at * MK_KV_BLOCK;
    int64_t n = 0;
    for (int64_t i = 0; i < p.queries; i++) {
      Visible v = visible(j, u, i / p.heads);
      int low = int(v.low > base ? (v.low - base < MK_KV_BLOCK ? v.low - base : MK_KV_BLOCK) : 0);
      int high = int(v.high < base ? 0 : v.high - base < MK_KV_BLOCK ? v.high - base : MK_KV_BLOCK);
      if (low < high)
        bench.block[n++] = {{partials + i * p.stride}, bench.p + i * MK_KV_BLOCK, bench.q + i * p.k_pad, low, high};
    }
    if (n == 0)
      continue;
    const uint8_t *keys = p.kv->blocks[at]->data + size_t(u.kv_head) * p.kv->key_bytes;
    const uint8_t *values =
        p.kv->latent ? keys
                     : p.kv->blocks[at]->data + size_t(p.kv->kv_heads) * p.kv->key_bytes + size_t(u.kv_head) * p.kv->value_bytes;
    if (bench.keys) {
      widen(keys, p.kv->dtype, p.k_pad * MK_KV_BLOCK, false, bench.keys);
      if (!p.kv->latent)
        widen(values, p.kv->dtype, p.v_pad * MK_KV_BLOCK, false, bench.values);
      attend_block(j, bench.keys, bench.values, p, bench.block, n);
    } else {
      with_type(p.kv->dtype, [&](auto t) {
        using T = TypeOf<decltype(t)>;
        attend_block(j, reinterpret_cast<const T *>(keys), reinterpret_cast<const T *>(values), p, bench.block, n);
      });
    }
  }
}

// total takes in the span's part, which comes after what it holds. A query that sees nothing of the span is left alone,
// and its first part is taken as it is, so that rows that share the unit do not matter.
static void merge(const AttentionJob &j, const AttentionUnit &u, const AttentionPlan &p, int64_t span, float *totals,
                  const float *parts) {
  for (int64_t i = 0; i < p.queries; i++) {
    Visible v = visible(j, u, i / p.heads);
    if (v.low >= (span + 1) * kSpan || v.high <= span * kSpan)
      continue;
    Partial total = {totals + i * p.stride}, part = {const_cast<float *>(parts) + i * p.stride};
    if (v.low >= span * kSpan) {
      memcpy(total.at, part.at, size_t(p.stride) * sizeof(float));
      continue;
    }
    float a = total.maximum(), b = part.maximum(), top = b > a ? b : a;
    const float shift = top == kMinusInfinity ? 0.f : top;
    V16 scale_a = exp(set1(a - shift)), scale_b = exp(set1(b - shift));
    total.maximum() = top;
    for (int64_t d = 0; d < 16 + p.v_pad; d += 16) {
      float *t = total.denominator() + d;
      store(t, fma(load(part.denominator() + d), scale_b, mul(load(t), scale_a)));
    }
  }
}

template <class T>
static void put_outputs(const AttentionJob &j, const AttentionUnit &u, const AttentionPlan &p, const float *totals) {
  const int v_dim = p.kv->v_dim;
  for (int64_t i = 0; i < p.queries; i++) {
    Partial total = {const_cast<float *>(totals) + i * p.stride};
    int64_t row = u.segment->row0 + u.row + i / p.heads, head = u.first_head + i % p.heads;
    float denominator = sum(load(total.denominator()));
    V16 factor = set1(1.f);
    if (j.sinks) {
      float sink = j.sinks[head], most = total.maximum(), top = sink > most ? sink : most;
      const float shift = top == kMinusInfinity ? 0.f : top;
      factor = exp(set1(most - shift));
      float both[16];
      store(both, fma(set1(denominator), factor, exp(set1(sink - shift))));
      denominator = both[0];
    }
    T *y = reinterpret_cast<T *>(j.y) + (row * j.heads + head) * v_dim;
    for (int64_t d = 0; d < v_dim; d += 16)
      put(y + d, div(mul(load(total.output() + d), factor), set1(denominator)), v_dim - d);
  }
}
static void put_all(const AttentionJob &j, const AttentionUnit &u, const AttentionPlan &p, const float *totals) {
  with_type(j.dtype, [&](auto t) { put_outputs<TypeOf<decltype(t)>>(j, u, p, totals); });
}

static void attention_unit(const AttentionJob &j, const AttentionUnit &u, Worker &worker) {
  AttentionPlan p = plan_of(u);
  Bench bench = bench_of(j, u, p, worker);
  float *total = scratch(worker, kScratchOutput, 2 * p.queries * p.stride), *part = total + p.queries * p.stride;
  reduce_span(j, u, p, bench, u.first_span, total);
  for (int64_t span = u.first_span + 1; span <= u.last_span; span++) {
    reduce_span(j, u, p, bench, span, part);
    merge(j, u, p, span, total, part);
  }
  put_all(j, u, p, total);
}

static void attention_span(const AttentionJob &j, const AttentionUnit &u, int64_t span, Worker &worker) {
  AttentionPlan p = plan_of(u);
  Bench bench = bench_of(j, u, p, worker);
  reduce_span(j, u, p, bench, span, u.partials + (span - u.first_span) * p.queries * p.stride);
}

static void attention_merge(const AttentionJob &j, const AttentionUnit &u, Worker &) {
  AttentionPlan p = plan_of(u);
  for (int64_t span = u.first_span + 1; span <= u.last_span; span++)
    merge(j, u, p, span, u.partials, u.partials + (span - u.first_span) * p.queries * p.stride);
  put_all(j, u, p, u.partials);
}
