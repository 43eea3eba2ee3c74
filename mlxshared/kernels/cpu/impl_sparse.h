// The scores by which an indexer picks positions.

// Adds Q heads' scores of a block's positions to sums, in the order of the heads.
template <class T, int Q>
static inline void index_heads(const T *keys, int64_t k_pad, const float *q, const float *weights, V16 *sums) {
  const float *at[Q];
  for (int n = 0; n < Q; n++)
    at[n] = q + n * k_pad;
  for (int v = 0; v < MK_KV_BLOCK / 16; v++) {
    V16 s[Q];
    score_latent<T, Q>(keys + 16 * v * k_pad, k_pad, at, s);
    for (int n = 0; n < Q; n++)
      sums[v] = fma(keep_nan(s[n], greater_of(s[n], zero())), set1(weights[n]), sums[v]);
  }
}

template <class T> static void index_block(const T *keys, int64_t k_pad, const float *q, const float *weights, int heads, float *out) {
  constexpr int kVecs = MK_KV_BLOCK / 16;
  V16 sums[kVecs];
  for (int v = 0; v < kVecs; v++)
    sums[v] = zero();
  int h = 0;
  for (; h + kScoreQ <= heads; h += kScoreQ)
    index_heads<T, kScoreQ>(keys, k_pad, q + h * k_pad, weights + h, sums);
  for (; h < heads; h++)
    index_heads<T, 1>(keys, k_pad, q + h * k_pad, weights + h, sums);
  for (int v = 0; v < kVecs; v++)
    store(out + 16 * v, sums[v]);
}

static void index_scores(const IndexJob &j, int64_t row, const KvView &kv, int64_t block, float *out, Worker &worker) {
  float *q = scratch(worker, kScratchInput, int64_t(j.heads) * kv.k_pad);
  for (int h = 0; h < j.heads; h++)
    widen(j.q + (row * j.heads + h) * j.dim * item_size(j.dtype), j.dtype, j.dim, false, q + h * kv.k_pad);
  with_type(kv.dtype, [&](auto t) {
    index_block(reinterpret_cast<const TypeOf<decltype(t)> *>(kv.blocks[block]->data), kv.k_pad, q,
                j.weights + row * j.heads, j.heads, out);
  });
}
