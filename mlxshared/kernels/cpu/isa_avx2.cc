#include "fp.h"
#include "ops.h"
#include "scalar.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#define MK_LOOKUP 0

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace mk {
namespace {
#include "vec_x86.h"

#include "vec_avx2.h"

#include "impl.h"
} // namespace
} // namespace mk

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace mk {
// Older compilers' __builtin_cpu_supports does not know f16c.
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
const Ops *ops_avx2() {
  bool able = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  return able ? &kOps : nullptr;
}
} // namespace mk
#else
namespace mk {
const Ops *ops_avx2() { return nullptr; }
} // namespace mk
#endif
