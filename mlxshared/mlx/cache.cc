// Handles of caches.
#include <algorithm>

#include "internal.h"
#include "latent.h"

using namespace mlxcel;

namespace {

void want_float_cache(mc::Dtype t) {
  if (t != mc::float32 && t != mc::float16 && t != mc::bfloat16)
    throw std::invalid_argument("the dtype must be float32, float16 or bfloat16");
}

mx_kv* handle(mx_stream* s, std::shared_ptr<Cache> cache) {
  auto* kv = new mx_kv{std::move(cache), s};
  s->caches.push_back(kv);
  return kv;
}

void forget(std::vector<mx_kv*>& list, mx_kv* kv) { list.erase(std::remove(list.begin(), list.end(), kv), list.end()); }

// Runs f and turns what it throws into a message.
template <class F>
auto reported(char** error, F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& e) {
    *error = copy_message(e.what());
  }
  return {};
}

} // namespace

mx_kv* mx_kv_new(mx_stream* s, int kv_heads, int k_dim, int v_dim, int dtype, char** error) {
  if (s == nullptr) return nullptr;
  return reported(error, [&] {
    auto t = dtype_of(dtype);
    if (kv_heads < 1 || k_dim < 1 || v_dim < 1) throw std::invalid_argument("heads and dimensions must be positive");
    want_float_cache(t);
    return handle(s, s->backend->new_cache(kv_heads, k_dim, v_dim, t));
  });
}

mx_kv* mx_kv_new_latent(mx_stream* s, int k_dim, int v_dim, int dtype, char** error) {
  if (s == nullptr) return nullptr;
  return reported(error, [&] {
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

uint64_t mx_kv_bytes(mx_kv* kv) { return kv ? kv->cache->bytes() : 0; }

bool mx_kv_truncate(mx_kv* kv, int64_t len, char** error) {
  if (kv == nullptr) return false;
  return reported(error, [&] {
    if (len < 0 || len > kv->cache->length)
      throw std::invalid_argument(format("want 0 to its length %lld", (long long)kv->cache->length));
    if (len < kv->cache->first)
      throw std::invalid_argument(format("positions before %lld were dropped", (long long)kv->cache->first));
    kv->cache->truncate(len);
    return true;
  });
}

bool mx_kv_drop_before(mx_kv* kv, int64_t pos, char** error) {
  if (kv == nullptr) return false;
  return reported(error, [&] {
    if (pos < 0 || pos > kv->cache->length)
      throw std::invalid_argument(format("want 0 to its length %lld", (long long)kv->cache->length));
    kv->cache->drop_before(pos);
    return true;
  });
}

mx_kv* mx_kv_fork(mx_kv* kv, char** error) {
  if (kv == nullptr) return nullptr;
  return reported(error, [&] { return handle(kv->stream, kv->cache->fork()); });
}
