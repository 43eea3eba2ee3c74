// The caches of the back end on MLX's own kernels.
#ifndef MLXCEL_MLX_ARRAY_CACHE_H
#define MLXCEL_MLX_ARRAY_CACHE_H

#include <algorithm>

#include "internal.h"

namespace mlxcel {

inline constexpr int cache_step = 256; // positions by which a cache grows

// Keys and values [1, heads, capacity, dim] of the positions from first on; a latent cache has no values of its own.
class ArrayCache final : public Cache {
 public:
  ArrayCache(int kv_heads, int k_dim, int v_dim, mc::Dtype dtype, bool latent, mc::Stream s)
      : Cache(kv_heads, k_dim, v_dim, dtype, latent), stream_(s) {}

  uint64_t bytes() const override { return (k_ ? k_->nbytes() : 0) + (v_ ? v_->nbytes() : 0); }
  uint64_t owed() const override { return k_ && k_->is_available() && !k_->is_donatable() ? bytes() : 0; }
  std::vector<const array*> arrays() const override {
    std::vector<const array*> list;
    if (k_) list.push_back(&*k_);
    if (v_) list.push_back(&*v_);
    return list;
  }

  void truncate(int64_t len) override {
    length = len;
    if (len <= first) k_.reset(), v_.reset(), first = len;
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

  std::shared_ptr<Cache> share(int64_t keep) override {
    auto copy = std::make_shared<ArrayCache>(kv_heads, k_dim, v_dim, dtype, latent, stream_);
    copy->k_ = k_; // MLX copies a shared buffer when one side writes
    copy->v_ = v_;
    copy->first = first;
    copy->length = length;
    copy->truncate(keep);
    return copy;
  }

  void begin(int64_t at) override { first = length = at; }

  void read(int64_t pos, int64_t n, char* k, char* v) override {
    if (k) take(*k_, pos, n, k);
    if (v && v_) take(*v_, pos, n, v);
  }

  void append_rows(int64_t n, const char* k, const char* v) override {
    std::optional<array> values;
    if (!latent) values = by_head(v, n, v_dim);
    append(by_head(k, n, k_dim), values);
    compute(stream_, values ? std::vector<array>{*k_, *v_} : std::vector<array>{*k_});
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
  // Positions [pos, pos+n) of a as rows [n, heads, dim].
  void take(const array& a, int64_t pos, int64_t n, char* to) const {
    array r = row_major(stream_, mc::transpose(rows(a, pos - first, pos - first + n), {0, 2, 1, 3}, stream_));
    std::copy_n(r.data<char>(), r.nbytes(), to);
  }

  // Rows [n, heads, dim] in memory as [1, heads, n, dim].
  array by_head(const char* from, int64_t n, int dim) const {
    auto memory = allocated(size_t(n) * kv_heads * dim * dtype.size());
    std::copy_n(from, size_t(n) * kv_heads * dim * dtype.size(), static_cast<char*>(memory_of(memory)));
    array r(std::move(memory), {1, static_cast<int>(n), kv_heads, dim}, dtype);
    return mc::transpose(r, {0, 2, 1, 3}, stream_);
  }

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
