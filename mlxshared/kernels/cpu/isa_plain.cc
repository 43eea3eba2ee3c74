#include "fp.h"

#if defined(__GNUC__) && !defined(__clang__)
// Full unrolling of sixteen scalar lanes makes this file slow to compile and no faster to run.
#pragma GCC optimize("O2")
#endif

#include "ops.h"
#include "scalar.h"

#include <string.h>

#define MK_LOOKUP 0

namespace mk {
namespace {
#include "vec_plain.h"

#include "impl.h"
} // namespace
const Ops *ops_plain() { return &kOps; }
} // namespace mk
