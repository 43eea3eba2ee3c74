#include "activation.h"

#include "calls.h"

using namespace mk;

extern "C" {

void mk_gelu_mul(mk_pool *p, const void *gate, const void *up, mk_dtype t, int64_t n, void *y) {
  Call<SiluMulJob> call = {p->ops, {bytes(gate), bytes(up), t, bytes(y)}};
  run(
      p->team, n, grain(p, n, 8, 16),
      [](void *c, int64_t begin, int64_t end, Worker &) {
        auto *call = static_cast<const Call<SiluMulJob> *>(c);
        call->ops->gelu_mul(call->job, begin, end);
      },
      &call);
}

void mk_softcap(mk_pool *p, const void *x, mk_dtype t, float cap, int64_t n, void *y) {
  Call<SoftcapJob> call = {p->ops, {bytes(x), t, cap, bytes(y)}};
  run(
      p->team, n, grain(p, n, 8, 16),
      [](void *c, int64_t begin, int64_t end, Worker &) {
        auto *call = static_cast<const Call<SoftcapJob> *>(c);
        call->ops->softcap(call->job, begin, end);
      },
      &call);
}

} // extern "C"
