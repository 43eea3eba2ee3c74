#include "kv.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "memory.h"

struct mk_kv {
  mk::KvView view;
  size_t item;   // bytes of one element
  int64_t *held; // counts the blocks that live, or null
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
  auto data = mk::allocate(kv.block_bytes());
  Block *b = new Block{1, static_cast<unsigned char *>(data.get())};
  memset(data.release(), 0, kv.block_bytes());
  if (kv.held)
    __atomic_fetch_add(kv.held, int64_t(kv.block_bytes()), __ATOMIC_RELAXED);
  return b;
}

void release(const mk_kv &kv, Block *b) {
  if (!b || __atomic_fetch_sub(&b->owners, 1, __ATOMIC_ACQ_REL) != 1)
    return;
  if (kv.held)
    __atomic_fetch_sub(kv.held, int64_t(kv.block_bytes()), __ATOMIC_RELAXED);
  free(b->data);
  delete b;
}

bool shared(const Block *b) { return __atomic_load_n(&b->owners, __ATOMIC_ACQUIRE) > 1; }

size_t blocks_of(int64_t positions) { return size_t((positions + MK_KV_BLOCK - 1) / MK_KV_BLOCK); }

template <class E> void write_keys(E *block, const unsigned char *rows, int k_dim, int slot) {
  for (int d = 0; d < k_dim; d++)
    memcpy(block + size_t(d) * MK_KV_BLOCK + slot, rows + size_t(d) * sizeof(E), sizeof(E));
}

template <class E> void read_keys(const E *block, unsigned char *rows, int k_dim, int slot) {
  for (int d = 0; d < k_dim; d++)
    memcpy(rows + size_t(d) * sizeof(E), block + size_t(d) * MK_KV_BLOCK + slot, sizeof(E));
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

// Takes the keys of one position out of its block.
void read_key(const mk_kv &kv, const Block *b, int slot, unsigned char *k) {
  const mk::KvView &view = kv.view;
  if (view.latent) {
    memcpy(k, b->data + size_t(slot) * size_t(view.k_pad) * kv.item, size_t(view.k_dim) * kv.item);
    return;
  }
  for (int h = 0; h < view.kv_heads; h++) {
    const unsigned char *keys = b->data + size_t(h) * view.key_bytes;
    unsigned char *row = k + size_t(h) * size_t(view.k_dim) * kv.item;
    if (kv.item == 2)
      read_keys(reinterpret_cast<const uint16_t *>(keys), row, view.k_dim, slot);
    else
      read_keys(reinterpret_cast<const uint32_t *>(keys), row, view.k_dim, slot);
  }
}

// The same with its values, which a latent cache does not have.
void read_value(const mk_kv &kv, const Block *b, int slot, unsigned char *v) {
  const mk::KvView &view = kv.view;
  const size_t row = size_t(view.v_dim) * kv.item;
  for (int h = 0; h < view.kv_heads; h++)
    memcpy(v + size_t(h) * row,
           b->data + size_t(view.kv_heads) * view.key_bytes + size_t(h) * view.value_bytes + size_t(slot) * size_t(view.v_pad) * kv.item,
           row);
}

// The blocks that an append takes into [begin, end), none of which the cache owns yet.
struct Fresh {
  const mk_kv &kv;
  std::vector<Block *> blocks; // null where the cache's own block will do

  ~Fresh() {
    for (Block *b : blocks)
      release(kv, b);
  }
};

// Gets a block of its own wherever append may not write to what the cache has at begin + i: it has none, or a shared one.
void obtain(Fresh &fresh, size_t begin, size_t end) {
  fresh.blocks.resize(end - begin, nullptr);
  for (size_t i = begin; i < end; i++) {
    const Block *old = i < fresh.kv.blocks.size() ? fresh.kv.blocks[i] : nullptr;
    if (old && !shared(old))
      continue;
    Block *b = new_block(fresh.kv);
    if (old)
      memcpy(b->data, old->data, fresh.kv.block_bytes());
    fresh.blocks[i - begin] = b;
  }
}

void drop_from(mk_kv &kv, size_t keep) {
  while (kv.blocks.size() > keep) {
    release(kv, kv.blocks.back());
    kv.blocks.pop_back();
  }
}

} // namespace

extern "C" {

mk_kv *mk_kv_new(int kv_heads, int k_dim, int v_dim, mk_dtype t, int64_t *held) {
  if (kv_heads < 1 || k_dim < 1 || v_dim < 1 || mk::fails())
    return nullptr;
  mk_kv *kv = new (std::nothrow) mk_kv;
  if (!kv)
    return nullptr;
  kv->item = t == MK_F32 ? 4 : 2;
  kv->held = held;
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

mk_kv *mk_kv_new_latent(int k_dim, int v_dim, mk_dtype t, int64_t *held) {
  if (v_dim > k_dim)
    return nullptr;
  mk_kv *kv = mk_kv_new(1, k_dim, v_dim, t, held);
  if (kv) {
    kv->view.value_bytes = 0;
    kv->view.latent = true;
  }
  return kv;
}

void mk_kv_free(mk_kv *kv) {
  if (!kv)
    return;
  drop_from(*kv, 0);
  delete kv;
}

int64_t mk_kv_len(const mk_kv *kv) { return kv->length; }

int64_t mk_kv_first(const mk_kv *kv) { return kv->view.first; }

size_t mk_kv_bytes(const mk_kv *kv) {
  size_t n = 0;
  for (const Block *b : kv->blocks)
    n += b ? kv->block_bytes() : 0;
  return n;
}

size_t mk_kv_owed(const mk_kv *kv) {
  if (kv->length % MK_KV_BLOCK == 0)
    return 0;
  const Block *last = kv->blocks[size_t(kv->length / MK_KV_BLOCK)];
  return last && shared(last) ? kv->block_bytes() : 0;
}

void mk_kv_truncate(mk_kv *kv, int64_t len) {
  if (len < 0)
    len = 0;
  if (len >= kv->length)
    return;
  kv->length = len;
  if (kv->view.first > len)
    kv->view.first = len;
  drop_from(*kv, blocks_of(len));
}

void mk_kv_drop_before(mk_kv *kv, int64_t pos) {
  if (pos > kv->length)
    pos = kv->length;
  int64_t whole = pos / MK_KV_BLOCK;
  for (int64_t i = kv->view.first / MK_KV_BLOCK; i < whole; i++) {
    release(*kv, kv->blocks[size_t(i)]);
    kv->blocks[size_t(i)] = nullptr;
  }
  if (whole * MK_KV_BLOCK > kv->view.first)
    kv->view.first = whole * MK_KV_BLOCK;
}

mk_kv *mk_kv_share(const mk_kv *kv, int64_t keep) {
  if (keep < 0 || keep > kv->length || mk::fails())
    return nullptr;
  mk_kv *copy = new (std::nothrow) mk_kv{kv->view, kv->item, kv->held, keep, {}};
  if (!copy)
    return nullptr;
  try {
    copy->blocks.assign(kv->blocks.begin(), kv->blocks.begin() + int64_t(blocks_of(keep)));
  } catch (const std::bad_alloc &) {
    delete copy;
    return nullptr;
  }
  if (copy->view.first > keep)
    copy->view.first = keep;
  copy->view.blocks = copy->blocks.data();
  for (Block *b : copy->blocks)
    if (b)
      __atomic_fetch_add(&b->owners, 1, __ATOMIC_RELAXED);
  return copy;
}

mk_result mk_kv_begin(mk_kv *kv, int64_t first) {
  if (kv->length != 0 || first < 0)
    return MK_POSITION;
  return mk::reported([&] {
    kv->blocks.assign(blocks_of(first), nullptr);
    kv->view.blocks = kv->blocks.data();
    kv->view.first = kv->length = first;
  });
}

mk_result mk_kv_read(const mk_kv *kv, int64_t pos, int64_t n, void *k, void *v) {
  if (n < 0 || pos < kv->view.first || pos > kv->length - n)
    return MK_POSITION;
  const size_t k_row = size_t(kv->view.kv_heads) * size_t(kv->view.k_dim) * kv->item;
  const size_t v_row = size_t(kv->view.kv_heads) * size_t(kv->view.v_dim) * kv->item;
  for (int64_t i = 0; i < n; i++) {
    const Block *b = kv->blocks[size_t((pos + i) / MK_KV_BLOCK)];
    const int slot = int((pos + i) % MK_KV_BLOCK);
    if (k)
      read_key(*kv, b, slot, static_cast<unsigned char *>(k) + size_t(i) * k_row);
    if (v && !kv->view.latent)
      read_value(*kv, b, slot, static_cast<unsigned char *>(v) + size_t(i) * v_row);
  }
  return 0;
}

mk_result mk_kv_append(mk_kv *kv, int64_t pos, const void *k, const void *v, int64_t n) {
  if (pos != kv->length || n < 0)
    return MK_POSITION;
  if (n == 0)
    return 0;
  const size_t begin = size_t(pos / MK_KV_BLOCK), end = blocks_of(pos + n);
  // First get every block, then write: a failure changes nothing.
  const mk_result missing = mk::reported([&] {
    Fresh fresh{*kv, {}};
    obtain(fresh, begin, end);
    if (end > kv->blocks.capacity())
      kv->blocks.reserve(end > 2 * kv->blocks.capacity() ? end : 2 * kv->blocks.capacity());
    if (kv->blocks.size() < end)
      kv->blocks.resize(end, nullptr);
    kv->view.blocks = kv->blocks.data();
    for (size_t i = begin; i < end; i++)
      if (fresh.blocks[i - begin])
        std::swap(kv->blocks[i], fresh.blocks[i - begin]); // a shared block goes with fresh
  });
  if (missing)
    return missing;
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
