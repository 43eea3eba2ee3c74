#include "fp.h"

#include "calls.h"

using namespace mk;

namespace {

// Runs blocks units of each segment. row_steps is what one row of a unit costs.
template <class J>
void run_units(mk_pool *p, Call<J> &call, int64_t nsegs, int64_t blocks, int64_t row_steps, Task task) {
  int64_t rows = 0;
  for (int64_t i = 0; i < nsegs; i++)
    rows += call.job.segments[i].n;
  if (rows == 0)
    return;
  const int64_t steps = 1 + rows * row_steps / nsegs;
  run(p->team, nsegs * blocks, (kPieceSteps + steps - 1) / steps, task, &call);
}

} // namespace

extern "C" {

size_t mk_state_bytes(int64_t rows, int64_t cols, mk_dtype t) { return size_t(rows) * size_t(round16(cols)) * size_t(item_size(t)); }

void mk_causal_conv(mk_pool *p, const mk_conv *s, const float *weight, const float *bias, const void *x, mk_dtype t,
                    const mk_recurrent_segment *segs, int64_t nsegs, void *y) {
  Call<ConvJob> call = {p->ops, {*s, weight, bias, bytes(x), t, segs, bytes(y)}};
  run_units(p, call, nsegs, (s->channels + 15) / 16, 4 * (s->width + 2), [](void *c, int64_t begin, int64_t end, Worker &) {
    auto *call = static_cast<const Call<ConvJob> *>(c);
    call->ops->recurrent->conv(call->job, begin, end);
  });
}

mk_result mk_selective_scan(mk_pool *p, const mk_scan *s, const float *a, const float *skip, const void *x, const void *dt,
                            const void *b, const void *c, mk_dtype t, const mk_recurrent_segment *segs, int64_t nsegs, void *y) {
  Call<ScanJob> call = {p->ops, {*s, a, skip, bytes(x), bytes(dt), bytes(b), bytes(c), t, segs, bytes(y)}};
  return reported([&] {
    run_units(p, call, nsegs, (s->channels + 15) / 16, 24 * s->states, [](void *c, int64_t begin, int64_t end, Worker &w) {
      auto *call = static_cast<const Call<ScanJob> *>(c);
      call->ops->recurrent->scan(call->job, begin, end, w);
    });
  });
}

mk_result mk_ssm_step(mk_pool *p, const mk_ssm *s, const float *a, const float *skip, const float *dt_bias, const void *xbc,
                      const void *dt, mk_dtype t, const mk_recurrent_segment *segs, int64_t nsegs, void *y) {
  Call<SsmJob> call = {p->ops, {*s, a, skip, dt_bias, bytes(xbc), bytes(dt), t, segs, bytes(y)}};
  return reported([&] {
    run_units(p, call, nsegs, s->heads, s->states * (round16(s->head_dim) / 4),
              [](void *c, int64_t begin, int64_t end, Worker &w) {
                auto *call = static_cast<const Call<SsmJob> *>(c);
                call->ops->recurrent->ssm(call->job, begin, end, w);
              });
  });
}

mk_result mk_gated_delta(mk_pool *p, const mk_delta *s, const float *a, const float *gate_bias, const void *qkv, const void *gate,
                         const void *beta, mk_dtype t, const mk_recurrent_segment *segs, int64_t nsegs, void *y) {
  Call<DeltaJob> call = {p->ops, {*s, a, gate_bias, bytes(qkv), bytes(gate), bytes(beta), t, segs, bytes(y)}};
  const int64_t parts = (s->value_dim + kDeltaValues - 1) / kDeltaValues;
  return reported([&] {
    run_units(p, call, nsegs, s->value_heads * parts, int64_t(s->key_dim) * kDeltaValues / 2,
              [](void *c, int64_t begin, int64_t end, Worker &w) {
                auto *call = static_cast<const Call<DeltaJob> *>(c);
                call->ops->recurrent->delta(call->job, begin, end, w);
              });
  });
}

void mk_sigmoid_mul(mk_pool *p, const void *x, const void *gate, mk_dtype t, int64_t rows, int64_t dim, int64_t gate_dim,
                    void *y) {
  run_job(p, p->ops->recurrent->sigmoid_mul, {bytes(x), bytes(gate), t, dim, gate_dim, bytes(y)},
          rows, (kPieceSteps + 4 * dim - 1) / (4 * dim));
}

} // extern "C"
