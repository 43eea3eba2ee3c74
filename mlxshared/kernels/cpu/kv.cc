#include "kv.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

struct mk_kv {
  mk::KvView view;
  size_t item; // bytes of one element
  int64_t length = 0;
  std::vector<mk::Block *> blocks;

  size_t block_bytes() const { return size_t(view.kv_heads) * (view.key_bytes + view.value_bytes); }
};

namespace mk {
const KvView &view_of(const mk_kv *kv) { return kv->view; }
} // namespace mk

namespace {

using mk::Block;

int round16(int n) { return (n + 15) & ~15; }

Block *new_block(const mk_kv &kv) {
  Block *b = new (std::nothrow) Block;
  if (!b)
    return nullptr;
  b->owners = 1;
  b->data = static_cast<unsigned char *>(aligned_alloc(64, (kv.block_bytes() + 63) & ~size_t(63)));
  if (!b->data) {
    delete b;
    return nullptr;
  }
  memset(b->data, 0, kv.block_bytes());
  return b;
}

void release(Block *b) {
  if (!b || __atomic_fetch_sub(&b->owners, 1, __ATOMIC_ACQ_REL) != 1)
    return;
  free(b->data);
  delete b;
}

template <class E> void write_keys(E *block, const unsigned char *rows, int k_dim, int slot) {
  for (int d = 0; d < k_dim; d++)
    memcpy(block + size_t(d) * MK_KV_BLOCK + slot, rows + size_t(d) * sizeof(E), sizeof(E));
}

// Stores one position of k and v in its block.
void write(const mk_kv &kv, Block *b, int slot, const unsigned char *k, const unsigned char *v) {
  const mk::KvView &view = kv.view;
  if (view.latent) {
    memcpy(b->data + size_t(slot) * size_t(view.k_pad) * kv.item, k, size_t(view.k_dim) * kv.item);
    return;
  }
  for (int h = 0; h < view.kv_heads; h++) {
    unsigned char *keys = b->data + size_t(h) * view.key_bytes;
    const unsigned char *row = k + size_t(h) * size_t(view.k_dim) * kv.item;
    if (kv.item == 2)
      write_keys(reinterpret_cast<uint16_t *>(keys), row, view.k_dim, slot);
    else
      write_keys(reinterpret_cast<uint32_t *>(keys), row, view.k_dim, slot);
    unsigned char *values = b->data + size_t(view.kv_heads) * view.key_bytes + size_t(h) * view.value_bytes;
    memcpy(values + size_t(slot) * size_t(view.v_pad) * kv.item, v + size_t(h) * size_t(view.v_dim) * kv.item,
           size_t(view.v_dim) * kv.item);
  }
}

// The block that append may write at index i: new, own, or an own copy of a shared one. Null when memory ran out.
Block *writable(const mk_kv &kv, size_t i) {
  Block *old = i < kv.blocks.size() ? kv.blocks[i] : nullptr;
  if (old && __atomic_load_n(&old->owners, __ATOMIC_ACQUIRE) == 1)
    return old;
  Block *b = new_block(kv);
  if (b && old)
    memcpy(b->data, old->data, kv.block_bytes());
  return b;
}

} // namespace

extern "C" {

mk_kv *mk_kv_new(int kv_heads, int k_dim, int v_dim, mk_dtype t) {
  if (kv_heads < 1 || k_dim < 1 || v_dim < 1)
    return nullptr;
  mk_kv *kv = new (std::nothrow) mk_kv;
  if (!kv)
    return nullptr;
  kv->item = t == MK_F32 ? 4 : 2;
  int k_pad = round16(k_dim), v_pad = round16(v_dim);
  kv->view = {kv_heads,
              k_dim,
              v_dim,
              k_pad,
              v_pad,
              t,
              size_t(k_pad) * MK_KV_BLOCK * kv->item,
              size_t(v_pad) * MK_KV_BLOCK * kv->item,
              0,
              nullptr,
              false};
  return kv;
}

mk_kv *mk_kv_new_latent(int k_dim, int v_dim, mk_dtype t) {
  if (v_dim > k_dim)
    return nullptr;
  mk_kv *kv = mk_kv_new(1, k_dim, v_dim, t);
  if (kv) {
    kv->view.value_bytes = 0;
    kv->view.latent = true;
  }
  return kv;
}

void mk_kv_free(mk_kv *kv) {
  if (!kv)
    return;
  for (Block *b : kv->blocks)
    release(b);
  delete kv;
}

int64_t mk_kv_len(const mk_kv *kv) { return kv->length; }

size_t mk_kv_bytes(const mk_kv *kv) {
  size_t n = 0;
  for (const Block *b : kv->blocks)
    n += b ? kv->block_bytes() : 0;
  return n;
}

void mk_kv_truncate(mk_kv *kv, int64_t len) {
  if (len < 0)
    len = 0;
  if (len >= kv->length)
    return;
  kv->length = len;
  if (kv->view.first > len)
    kv->view.first = len;
  size_t keep = size_t((len + MK_KV_BLOCK - 1) / MK_KV_BLOCK);
  while (kv->blocks.size() > keep) {
    release(kv->blocks.back());
    kv->blocks.pop_back();
  }
}

void mk_kv_drop_before(mk_kv *kv, int64_t pos) {
  if (pos > kv->length)
    pos = kv->length;
  int64_t whole = pos / MK_KV_BLOCK;
  for (int64_t i = kv->view.first / MK_KV_BLOCK; i < whole; i++) {
    release(kv->blocks[size_t(i)]);
    kv->blocks[size_t(i)] = nullptr;
  }
  if (whole * MK_KV_BLOCK > kv->view.first)
    kv->view.first = whole * MK_KV_BLOCK;
}

mk_kv *mk_kv_fork(const mk_kv *kv) {
  mk_kv *copy = nullptr;
  try {
    copy = new mk_kv(*kv);
  } catch (...) {
    return nullptr;
  }
  copy->view.blocks = copy->blocks.data();
  for (Block *b : copy->blocks)
    if (b)
      __atomic_fetch_add(&b->owners, 1, __ATOMIC_RELAXED);
  return copy;
}

int mk_kv_append(mk_kv *kv, int64_t pos, const void *k, const void *v, int64_t n) {
  if (pos != kv->length || n < 0)
    return -1;
  if (n == 0)
    return 0;
  size_t begin = size_t(pos / MK_KV_BLOCK);
  size_t end = size_t((pos + n + MK_KV_BLOCK - 1) / MK_KV_BLOCK);
  // First get every block, then write: a failure changes nothing.
  std::vector<Block *> fresh;
  try {
    fresh.resize(end - begin, nullptr);
    if (end > kv->blocks.capacity())
      kv->blocks.reserve(end > 2 * kv->blocks.capacity() ? end : 2 * kv->blocks.capacity());
  } catch (...) {
    return -1;
  }
  for (size_t i = begin; i < end; i++) {
    fresh[i - begin] = writable(*kv, i);
    if (fresh[i - begin])
      continue;
    for (size_t j = begin; j < i; j++)
      if (j >= kv->blocks.size() || fresh[j - begin] != kv->blocks[j])
        release(fresh[j - begin]);
    return -1;
  }
  if (kv->blocks.size() < end)
    kv->blocks.resize(end, nullptr);
  kv->view.blocks = kv->blocks.data();
  for (size_t i = begin; i < end; i++) {
    if (kv->blocks[i] != fresh[i - begin])
      release(kv->blocks[i]);
    kv->blocks[i] = fresh[i - begin];
  }
  size_t k_row = size_t(kv->view.kv_heads) * size_t(kv->view.k_dim) * kv->item;
  size_t v_row = size_t(kv->view.kv_heads) * size_t(kv->view.v_dim) * kv->item;
  for (int64_t i = 0; i < n; i++) {
    int64_t p = pos + i;
    write(*kv, kv->blocks[size_t(p / MK_KV_BLOCK)], int(p % MK_KV_BLOCK),
          static_cast<const unsigned char *>(k) + size_t(i) * k_row,
          kv->view.latent ? nullptr : static_cast<const unsigned char *>(v) + size_t(i) * v_row);
  }
  kv->length = pos + n;
  return 0;
}

} // extern "C"
