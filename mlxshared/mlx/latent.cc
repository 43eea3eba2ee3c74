// The operations of multi-head latent attention: every argument is checked here, the back ends trust them.
#include "latent.h"

#include "checks.h"

using namespace mlxcel;

namespace {

Index checked_index(const mx_index& x, int rows) {
  want(x.heads > 0 && x.dim > 0 && x.top_k > 0,
       format("an indexer of %d heads of %d that takes %lld positions", x.heads, x.dim, (long long)x.top_k));
  const array &q = need(x.q, "the indexer's q"), &k = need(x.k, "the indexer's k"), &w = need(x.weights, "the indexer's weights");
  want_heads(q, "the indexer's q", rows, x.heads * x.dim);
  want_heads(k, "the indexer's k", rows, x.dim);
  want(w.dtype() == mc::float32 && w.ndim() == 2 && w.shape(0) == rows && w.shape(1) == x.heads,
       format("the indexer's weights are %s, want float32[%d,%d]", describe(w).c_str(), rows, x.heads));
  return {x.heads, x.dim, x.top_k, q, k, w};
}

} // namespace

mx_array* mx_multi_linear(mx_scope* s, mx_array* x, const mx_matrix* w) {
  return guarded(s, "multi_linear", {x, w->w, w->scales, w->biases}, [&] {
    const array& in = need(x, "the input");
    Matrix m = checked_matrix(*w, 1);
    want_float(in, "the input");
    want(in.ndim() == 2 && in.size() > 0 && in.shape(1) == m.w.shape(0) * m.cols,
         format("the input is %s, want rows of %d heads of %d", describe(in).c_str(), m.w.shape(0), m.cols));
    return s->own(s->stream->backend->latent().multi_linear(in, m));
  });
}

mx_array* mx_sparse_attention(mx_scope* s, mx_array* q, mx_array* k, const mx_attention_spec* spec, const mx_index* x,
                              const mx_segment* segments, mx_kv* const* index_kv, int n) {
  return guarded(s, "sparse_attention", {q, k, x->q, x->k, x->weights}, [&] {
    Attention a = checked_attention(*spec);
    want(a.kv_heads == 1 && a.window == 0 && a.chunk == 0 && a.softcap == 0 && !a.sinks,
         "sparse attention has one key head and no window, chunk, cap or sinks");
    const array &query = need(q, "q"), &key = need(k, "k");
    want(query.ndim() >= 2 && query.shape(0) > 0, format("q is %s, want [rows, heads*dim]", describe(query).c_str()));
    int rows = query.shape(0);
    want_heads(query, "q", rows, a.heads * a.head_dim);
    want_heads(key, "k", rows, a.head_dim);
    Index index = checked_index(*x, rows);
    want(index.q.dtype() == query.dtype(), "the indexer's q and q differ in dtype");
    auto own = checked_segments(segments, n, rows, true, a, s->stream);
    std::vector<mx_segment> others(segments, segments + n);
    for (int i = 0; i < n; i++) others[i].kv = index_kv[i];
    Attention keys = a;
    keys.heads = x->heads;
    keys.head_dim = keys.value_dim = x->dim;
    auto indexed = checked_segments(others.data(), n, rows, true, keys, s->stream);
    want(own[0].cache->latent && indexed[0].cache->latent, "sparse attention wants latent caches");
    for (auto& g : own) want(g.cache->first == 0, "sparse attention wants whole caches");
    for (auto& g : indexed) want(g.cache->first == 0, "sparse attention wants whole caches");
    return s->own(s->stream->backend->latent().sparse_attention(query, key, a, own, index, indexed));
  });
}
