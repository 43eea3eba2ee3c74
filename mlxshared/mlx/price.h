// What the back ends' caches cost; price.go describes it.
#ifndef MLXCEL_MLX_PRICE_H
#define MLXCEL_MLX_PRICE_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

int mx_cache_block(bool kernels);

#ifdef __cplusplus
}
#endif
#endif
