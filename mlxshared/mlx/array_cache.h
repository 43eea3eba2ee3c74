// The caches of the back end on MLX's own kernels.
#ifndef MLXCEL_MLX_ARRAY_CACHE_H
#define MLXCEL_MLX_ARRAY_CACHE_H

#include "internal.h"

namespace mlxcel {

inline constexpr int cache_step = 256; // positions by which a cache grows

// Keys and values [1, heads, capacity, dim] of the positions from first on; a latent cache has no values of its own.
class ArrayCache final : public Cache {
 public:
  ArrayCache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype, bool latent, mc::Stream s)
      : Cache(kv_heads, k_dim, v_dim, dtype, latent), stream_(s) {}

  uint64_t bytes() const override { return (k_ ? k_->nbytes() : 0) + (v_ ? v_->nbytes() : 0); }
  bool counted_by_mlx() const override { return true; }

  void truncate(int64_t len) override {
    length = len;
    if (len == first) k_.reset(), v_.reset();
  }

  void drop_before(int64_t pos) override {
    int64_t base = pos / cache_step * cache_step;
    if (!k_ || base <= first) return;
    int from = static_cast<int>(base - first);
    if (from >= k_->shape(2)) {
      k_.reset(), v_.reset();
    } else {
      // A copy: a slice would keep the whole buffer alive.
      k_ = mc::contiguous(rows(*k_, from, k_->shape(2)), false, stream_);
      mc::eval(*k_);
      if (v_) {
        v_ = mc::contiguous(rows(*v_, from, v_->shape(2)), false, stream_);
        mc::eval(*v_);
      }
    }
    first = base;
  }

  std::shared_ptr<Cache> fork() override {
    auto copy = std::make_shared<ArrayCache>(kv_heads, k_dim, v_dim, dtype, latent, stream_);
    copy->k_ = k_; // MLX copies a shared buffer when one side writes
    copy->v_ = v_;
    copy->first = first;
    copy->length = length;
    return copy;
  }

  void abandon() override { k_.reset(), v_.reset(); }

  // Appends k and v [1, heads, n, dim]; a latent cache takes no v.
  void append(const array& k, const std::optional<array>& v) {
    int n = k.shape(2), at = static_cast<int>(length - first);
    k_ = written(k_, k, at, k_dim);
    if (v) v_ = written(v_, *v, at, v_dim);
    length += n;
  }

  array keys(int64_t from) const { return rows(*k_, from - first, length - first); }
  array values(int64_t from) const {
    if (!latent) return rows(*v_, from - first, length - first);
    array k = keys(from);
    return mc::slice(k, {0, 0, 0, 0}, {1, kv_heads, k.shape(2), v_dim}, stream_);
  }

 private:
  array rows(const array& a, int64_t from, int64_t to) const {
    return mc::slice(a, {0, 0, static_cast<int>(from), 0}, {1, a.shape(1), static_cast<int>(to), a.shape(3)}, stream_);
  }

  array written(const std::optional<array>& old, const array& news, int at, int dim) const {
    int need = at + news.shape(2);
    std::optional<array> room = old;
    if (!old || need > old->shape(2)) {
      int held = old ? old->shape(2) : 0;
      int grown = (need + cache_step - 1) / cache_step * cache_step;
      array more = mc::zeros({1, kv_heads, grown - held, dim}, dtype, stream_);
      room = old ? mc::concatenate({*old, more}, 2, stream_) : more;
    }
    return mc::slice_update(*room, mc::astype(news, dtype, stream_), mc::Shape{0, 0, at, 0},
                            mc::Shape{1, kv_heads, need, dim}, stream_);
  }

  mc::Stream stream_;
  std::optional<array> k_, v_;
};

} // namespace mlxcel
#endif
