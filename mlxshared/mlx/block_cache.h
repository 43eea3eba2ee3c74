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
    int64_t held = mk_kv_len(kv);
    if (len > held) throw std::runtime_error(format("only %lld positions were evaluated", static_cast<long long>(held)));
    mk_kv_truncate(kv, len);
    length = len;
    last.reset();
  }

  void drop_before(int64_t pos) override {
    pos = std::min(pos, mk_kv_len(kv)); // the graph may be ahead
    mk_kv_drop_before(kv, pos);
    first = std::max(first, pos / MK_KV_BLOCK * MK_KV_BLOCK);
  }

  std::shared_ptr<Cache> fork() override {
    if (mk_kv_len(kv) != length)
      throw std::runtime_error(format("%lld positions were not evaluated yet", static_cast<long long>(length - mk_kv_len(kv))));
    auto copy = std::make_shared<BlockCache>(kv_heads, k_dim, v_dim, dtype, latent, mk_kv_fork(kv));
    copy->first = first;
    return copy;
  }

  void evaluated() override {
    if (last && last->status() != array::Status::unscheduled) last.reset();
  }
  void abandon() override { last.reset(); }

  mk_kv* const kv;
  // The last attention built on this cache and not evaluated yet. The next one takes it as an input, since MLX
  // would else be free to run them in any order.
  std::optional<array> last;
};

// A segment over a BlockCache.
struct BlockSegment {
  std::shared_ptr<BlockCache> cache;
  int64_t row0, rows, pos;
};

inline std::vector<BlockSegment> block_segments(const std::vector<Segment>& segments) {
  std::vector<BlockSegment> parts;
  parts.reserve(segments.size());
  for (auto& g : segments) {
    parts.push_back({std::static_pointer_cast<BlockCache>(g.cache), g.row0, g.rows, g.pos});
    if (g.cache->dtype != segments[0].cache->dtype) throw std::invalid_argument("the segments' caches differ in dtype");
  }
  return parts;
}

// Appends each segment's rows of k and v, unless k is null, and views the segments as the kernels'. v is null for latent
// caches.
inline std::vector<mk_segment> appended(const std::vector<BlockSegment>& segments, const char* k, size_t k_row,
                                        const char* v, size_t v_row) {
  std::vector<mk_segment> parts;
  parts.reserve(segments.size());
  for (auto& g : segments) {
    if (k && mk_kv_append(g.cache->kv, g.pos, k + g.row0 * k_row, v ? v + g.row0 * v_row : nullptr, g.rows) != 0)
      throw std::runtime_error(format("attention: no memory for %lld positions, or the cache holds %lld, want %lld",
                                      static_cast<long long>(g.rows), static_cast<long long>(mk_kv_len(g.cache->kv)),
                                      static_cast<long long>(g.pos)));
    if (mk_kv_len(g.cache->kv) < g.pos + g.rows) throw std::runtime_error("attention: the cache lost positions");
    parts.push_back({g.cache->kv, g.row0, g.rows, g.pos});
  }
  return parts;
}

} // namespace mlxcel
#endif
