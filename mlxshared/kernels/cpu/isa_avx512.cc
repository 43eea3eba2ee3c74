#include "fp.h"
#include "ops.h"
#include "scalar.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#define MK_LOOKUP 1

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif

namespace mk {
namespace {
#include "vec_x86.h"

#include "vec_avx512.h"

#include "impl.h"
} // namespace
} // namespace mk

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace mk {
const Ops *ops_avx512() {
  bool able = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return able ? &kOps : nullptr;
}
} // namespace mk
#else
namespace mk {
const Ops *ops_avx512() { return nullptr; }
} // namespace mk
#endif
