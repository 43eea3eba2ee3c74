// The caches of the back end on our CPU kernels.
#ifndef MLXCEL_MLX_BLOCK_CACHE_H
#define MLXCEL_MLX_BLOCK_CACHE_H

#include "kernel_backend.h"

namespace mlxcel {

using KernelCache = std::unique_ptr<mk_kv, decltype(&mk_kv_free)>;

class BlockCache final : public Cache {
 public:
  // Blocks of own count in held.
  BlockCache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype, bool latent, KernelCache own, std::shared_ptr<int64_t> held)
      : Cache(kv_heads, k_dim, v_dim, dtype, latent), kv(own.get()), held_(std::move(held)), own_(std::move(own)) {
    if (kv == nullptr) throw std::bad_alloc();
    length = mk_kv_len(kv);
    first = mk_kv_first(kv);
  }

  uint64_t bytes() const override { return mk_kv_bytes(kv); }
  uint64_t owed() const override { return mk_kv_owed(kv); }

  void truncate(int64_t len) override {
    mk_kv_truncate(kv, len);
    length = len;
    first = mk_kv_first(kv);
  }

  void drop_before(int64_t pos) override {
    mk_kv_drop_before(kv, pos);
    first = mk_kv_first(kv);
  }

  std::shared_ptr<Cache> share(int64_t keep) override {
    return std::make_shared<BlockCache>(kv_heads, k_dim, v_dim, dtype, latent, KernelCache(mk_kv_share(kv, keep), mk_kv_free), held_);
  }

  void begin(int64_t at) override {
    checked(mk_kv_begin(kv, at));
    length = first = at;
  }

  void read(int64_t pos, int64_t n, char* k, char* v) override { checked(mk_kv_read(kv, pos, n, k, v)); }

  void append_rows(int64_t n, const char* k, const char* v) override {
    checked(mk_kv_append(kv, length, k, v, n));
    length += n;
  }

  mk_kv* const kv;

 private:
  std::shared_ptr<int64_t> held_; // outlives own_
  KernelCache own_;
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
      checked(mk_kv_append(kv, g.pos, row(k, g.row0), row(v, g.row0), g.rows));
      g.cache->length += g.rows;
    }
    parts.push_back({kv, g.row0, g.rows, g.pos});
  }
  return parts;
}

} // namespace mlxcel
#endif
