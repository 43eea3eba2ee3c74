// What the back ends' caches cost.
#include "price.h"

#include "array_cache.h"
#include "kernels.h"

int mx_cache_block(bool kernels) { return kernels ? MK_KV_BLOCK : mlxcel::cache_step; }
