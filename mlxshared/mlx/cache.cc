// Handles of caches.
#include <algorithm>
#include <limits>

#include "internal.h"
#include "latent.h"

using namespace mlxcel;

namespace {

void want_float_cache(mc::Dtype t) {
  if (t != mc::float32 && t != mc::float16 && t != mc::bfloat16)
    throw std::invalid_argument("the dtype must be float32, float16 or bfloat16");
}

mx_kv* handle(mx_stream* s, std::shared_ptr<Cache> cache) {
  may_fail();
  auto kv = std::make_unique<mx_kv>(mx_kv{std::move(cache), s});
  s->caches.push_back(kv.get());
  return kv.release();
}

void forget(std::vector<mx_kv*>& list, mx_kv* kv) { list.erase(std::remove(list.begin(), list.end(), kv), list.end()); }

// Rows of the bytes that a caller brings.
void want_rows(const Cache& c, int64_t n, size_t k_bytes, size_t v_bytes) {
  if (n < 0 || n > std::numeric_limits<int>::max() || k_bytes != size_t(n) * c.key_bytes() || v_bytes != size_t(n) * c.value_bytes())
    throw std::invalid_argument(format("%lld rows in %zu bytes of keys and %zu of values, want %zu and %zu a row", (long long)n,
                                       k_bytes, v_bytes, c.key_bytes(), c.value_bytes()));
}

void want_kept(const Cache& c, int64_t pos) {
  if (pos < 0 || pos > c.length) throw std::invalid_argument(format("want 0 to its length %lld", (long long)c.length));
  if (pos > 0 && pos < c.first)
    throw std::invalid_argument(format("positions before %lld were dropped", (long long)c.first));
}

} // namespace

mx_kv* mx_kv_new(mx_stream* s, int kv_heads, int k_dim, int v_dim, int dtype, mx_failure* failure) {
  if (s == nullptr) return nullptr;
  return reported(failure, [&] {
    auto t = dtype_of(dtype);
    if (kv_heads < 1 || k_dim < 1 || v_dim < 1) throw std::invalid_argument("heads and dimensions must be positive");
    want_float_cache(t);
    return handle(s, s->backend->new_cache(kv_heads, k_dim, v_dim, t));
  });
}

mx_kv* mx_kv_new_latent(mx_stream* s, int k_dim, int v_dim, int dtype, mx_failure* failure) {
  if (s == nullptr) return nullptr;
  return reported(failure, [&] {
    auto t = dtype_of(dtype);
    if (k_dim < 1 || v_dim < 1 || v_dim > k_dim) throw std::invalid_argument("want 1 <= value <= key");
    want_float_cache(t);
    return handle(s, s->backend->latent().new_cache(k_dim, v_dim, t));
  });
}

void mx_kv_free(mx_kv* kv) {
  kv->cache->abandon();
  forget(kv->stream->caches, kv);
  delete kv;
}

int64_t mx_kv_len(const mx_kv* kv) { return kv ? kv->cache->length : 0; }

int64_t mx_kv_first(const mx_kv* kv) { return kv ? kv->cache->first : 0; }

uint64_t mx_kv_bytes(const mx_kv* kv) { return kv ? kv->cache->bytes() : 0; }

uint64_t mx_kv_owed(const mx_kv* kv) { return kv ? kv->cache->owed() : 0; }

bool mx_kv_truncate(mx_kv* kv, int64_t len, mx_failure* failure) {
  if (kv == nullptr) return false;
  return reported(failure, [&] {
    want_kept(*kv->cache, len);
    kv->cache->truncate(len);
    return true;
  });
}

bool mx_kv_drop_before(mx_kv* kv, int64_t pos, mx_failure* failure) {
  if (kv == nullptr) return false;
  return reported(failure, [&] {
    if (pos < 0 || pos > kv->cache->length)
      throw std::invalid_argument(format("want 0 to its length %lld", (long long)kv->cache->length));
    kv->cache->drop_before(pos);
    return true;
  });
}

mx_kv* mx_kv_share(mx_kv* kv, int64_t keep, mx_failure* failure) {
  if (kv == nullptr) return nullptr;
  return reported(failure, [&] {
    want_kept(*kv->cache, keep);
    return handle(kv->stream, kv->cache->share(keep));
  });
}

bool mx_kv_begin(mx_kv* kv, int64_t first, mx_failure* failure) {
  if (kv == nullptr) return false;
  return reported(failure, [&] {
    if (kv->cache->length != 0 || first < 0)
      throw std::invalid_argument(format("its length is %lld, want 0", (long long)kv->cache->length));
    kv->cache->begin(first);
    return true;
  });
}

bool mx_kv_read(mx_kv* kv, int64_t pos, int64_t n, void* k, size_t k_bytes, void* v, size_t v_bytes, mx_failure* failure) {
  if (kv == nullptr) return false;
  return reported(failure, [&] {
    const Cache& c = *kv->cache;
    want_rows(c, n, k_bytes ? k_bytes : size_t(n) * c.key_bytes(), v_bytes ? v_bytes : size_t(n) * c.value_bytes());
    if (pos < c.first || pos > c.length - n)
      throw std::invalid_argument(format("positions [%lld, %lld) of a cache of [%lld, %lld)", (long long)pos, (long long)(pos + n),
                                         (long long)c.first, (long long)c.length));
    if (n > 0) kv->cache->read(pos, n, k_bytes ? static_cast<char*>(k) : nullptr, v_bytes ? static_cast<char*>(v) : nullptr);
    return true;
  });
}

bool mx_kv_append(mx_kv* kv, int64_t n, const void* k, size_t k_bytes, const void* v, size_t v_bytes, mx_failure* failure) {
  if (kv == nullptr) return false;
  return reported(failure, [&] {
    want_rows(*kv->cache, n, k_bytes, v_bytes);
    if (n > 0) kv->cache->append_rows(n, static_cast<const char*>(k), static_cast<const char*>(v));
    return true;
  });
}
