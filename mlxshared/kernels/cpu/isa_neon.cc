#include "fp.h"
#include "ops.h"
#include "scalar.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#define MK_LOOKUP 0

namespace mk {
namespace {
#include "vec_neon.h"

#include "impl.h"
} // namespace
const Ops *ops_neon() { return &kOps; }
} // namespace mk
#else
namespace mk {
const Ops *ops_neon() { return nullptr; }
} // namespace mk
#endif
