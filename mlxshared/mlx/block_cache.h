// The caches of the back end on our CPU kernels.
#ifndef MLXCEL_MLX_BLOCK_CACHE_H
#define MLXCEL_MLX_BLOCK_CACHE_H

#include <algorithm>

#include "internal.h"
#include "kernels.h"

namespace mlxcel {

class BlockCache final : public Cache {
 public:
  BlockCache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype, bool latent, mk_kv* kv)
      : Cache(kv_heads, k_dim, v_dim, dtype, latent), kv(kv) {
    if (kv == nullptr) throw std::runtime_error("no memory for a cache");
    length = mk_kv_len(kv);
  }
  ~BlockCache() override { mk_kv_free(kv); }

  uint64_t bytes() const override { return mk_kv_bytes(kv); }

  void truncate(int64_t len) override {
    mk_kv_truncate(kv, len);
    length = len;
  }

  void drop_before(int64_t pos) override {
    mk_kv_drop_before(kv, pos);
    first = std::max(first, pos / MK_KV_BLOCK * MK_KV_BLOCK);
  }

  std::shared_ptr<Cache> fork() override {
    auto copy = std::make_shared<BlockCache>(kv_heads, k_dim, v_dim, dtype, latent, mk_kv_fork(kv));
    copy->first = first;
    return copy;
  }

  mk_kv* const kv;
};

// The dtype of all the segments' caches.
inline mc::Dtype cache_dtype(const std::vector<Segment>& segments) {
  for (auto& g : segments)
    if (g.cache->dtype != segments[0].cache->dtype) throw std::invalid_argument("the segments' caches differ in dtype");
  return segments[0].cache->dtype;
}

// Appends each segment's rows of k and v, if there are any, and views the segments as the kernels'. Latent caches take no v.
inline std::vector<mk_segment> appended(const std::vector<Segment>& segments, const array* k, const array* v) {
  auto row = [](const array* a, int64_t i) { return a ? a->data<char>() + i * (a->nbytes() / a->shape(0)) : nullptr; };
  std::vector<mk_segment> parts;
  parts.reserve(segments.size());
  for (auto& g : segments) {
    mk_kv* kv = static_cast<BlockCache&>(*g.cache).kv;
    if (k) {
      if (mk_kv_append(kv, g.pos, row(k, g.row0), row(v, g.row0), g.rows) != 0)
        throw std::runtime_error(format("no memory for %lld positions, or the cache holds %lld, want %lld",
                                        static_cast<long long>(g.rows), static_cast<long long>(mk_kv_len(kv)),
                                        static_cast<long long>(g.pos)));
      g.cache->length += g.rows;
    }
    parts.push_back({kv, g.row0, g.rows, g.pos});
  }
  return parts;
}

} // namespace mlxcel
#endif
