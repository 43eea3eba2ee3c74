// The kernels, over the V16 that the including file has defined, in that file's own namespace.
#include "impl_math.h"
#include "impl_rows.h"

#include "impl_linear.h"

#include "impl_attention.h"

#include "impl_moe.h"

#include "impl_recurrent.h"

#include "impl_sparse.h"

#include "impl_activation.h"

static const Ops kOps = {paired,   widen, linear,   embed,             dequantize,     rms_norm,
                         rope,     silu_mul, attention_partial, attention_unit, attention_span, attention_merge,
                         &kMoeOps, &kRecurrentOps, index_scores, gelu_mul, softcap,
                         binary,   convert};
