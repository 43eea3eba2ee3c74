// Blocks of keys and values. A block holds MK_KV_BLOCK positions of every kv head of one layer.
//
// Keys are stored transposed, [kv_head][k_pad][MK_KV_BLOCK], so that a vector holds one element of sixteen neighbouring
// positions and a score needs no horizontal sum. Values are [kv_head][MK_KV_BLOCK][v_pad]. k_pad and v_pad are the
// dimensions rounded up to sixteen; the padding is zero. A latent cache has one head and keeps keys only, as
// [MK_KV_BLOCK][k_pad]: its values lie within them.
#ifndef MLXCEL_KERNELS_CPU_KV_H
#define MLXCEL_KERNELS_CPU_KV_H

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

namespace mk {

// Shared between caches that begin alike until one of them writes.
struct Block {
  int owners; // atomic
  unsigned char *data;
};

// What the kernels see of an mk_kv.
struct KvView {
  int kv_heads;
  int k_dim, v_dim;
  int k_pad, v_pad;
  mk_dtype dtype;
  size_t key_bytes, value_bytes; // of one head in one block; a latent cache has no value_bytes
  int64_t first;                 // positions before it were dropped
  Block *const *blocks;          // by position / MK_KV_BLOCK; null where dropped
  bool latent;
};

const KvView &view_of(const mk_kv *);

} // namespace mk

#endif
