#include "activation.h"

#include "calls.h"

using namespace mk;

extern "C" {

void mk_gelu_mul(mk_pool *p, const void *gate, const void *up, mk_dtype t, int64_t n, void *y) {
  run_job(p, p->ops->gelu_mul, {bytes(gate), bytes(up), t, bytes(y)}, n, grain(p, n, 8, 16));
}

void mk_softcap(mk_pool *p, const void *x, mk_dtype t, float cap, int64_t n, void *y) {
  run_job(p, p->ops->softcap, {bytes(x), t, cap, bytes(y)}, n, grain(p, n, 8, 16));
}

} // extern "C"
