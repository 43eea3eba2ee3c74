// The operations of mixtures of experts: every argument is checked here, the back ends trust them.
#include "moe.h"

#include "checks.h"

using namespace mlxcel;

namespace {

void want_ids(const array& ids, int rows) {
  want(ids.dtype() == mc::int32 && ids.ndim() == 2 && ids.shape(0) == rows && ids.shape(1) > 0,
       format("ids are %s, want int32[%d,k]", describe(ids).c_str(), rows));
}

Route checked_route(const array& logits, const mx_route_spec& r) {
  want_float(logits, "logits");
  want(logits.ndim() == 2 && logits.size() > 0, format("logits are %s, want [rows, experts]", describe(logits).c_str()));
  int experts = logits.shape(1);
  want(r.top_k > 0 && r.top_k <= experts, format("top %d of %d experts", r.top_k, experts));
  want(r.scores >= MX_ROUTE_SOFTMAX_CHOSEN && r.scores <= MX_ROUTE_SIGMOID, format("%d is no way to score", r.scores));
  want(r.groups >= 1 && experts % r.groups == 0 && (r.groups == 1 || experts / r.groups >= 2),
       format("%d groups of %d experts: want equal groups of at least 2", r.groups, experts));
  want(r.top_groups >= 1 && r.top_groups <= r.groups, format("top %d of %d groups", r.top_groups, r.groups));
  bool sigmoid = r.scores == MX_ROUTE_SIGMOID;
  want(sigmoid || (r.groups == 1 && r.bias == nullptr), "groups and a bias belong to the sigmoid router");
  if (r.bias) {
    want(r.bias->value.dtype() == mc::float32, format("the bias is %s, want float32", describe(r.bias->value).c_str()));
    want_vector(r.bias->value, "the bias", experts);
  }
  return {experts, r.top_k, r.scores, r.normalize, r.epsilon, r.scale, r.groups, r.top_groups, r.high_ties, maybe(r.bias)};
}

} // namespace

mx_array* mx_linear_gather(mx_scope* s, mx_array* x, const mx_matrix* w, mx_array* bias, mx_array* ids) {
  return guarded(s, "linear_gather", {x, w->w, w->scales, w->biases, bias, ids}, [&] {
    const array &in = need(x, "the input"), &choice = need(ids, "ids");
    Matrix m = checked_matrix(*w, 1);
    want_float(in, "the input");
    want((in.ndim() == 2 || in.ndim() == 3) && in.size() > 0 && in.shape(-1) == m.cols,
         format("the input is %s, want rows of %d", describe(in).c_str(), m.cols));
    want_ids(choice, in.shape(0));
    want(in.ndim() == 2 || in.shape(1) == choice.shape(1),
         format("the input %s and ids %s differ", describe(in).c_str(), describe(choice).c_str()));
    if (bias) {
      want_float(bias->value, "the bias");
      want(bias->value.ndim() == 2 && bias->value.shape(0) == m.w.shape(0) && bias->value.shape(1) == m.rows,
           format("the bias is %s, want [%d,%d]", describe(bias->value).c_str(), m.w.shape(0), m.rows));
    }
    return s->own(s->stream->backend->moe().linear_gather(in, m, maybe(bias), choice));
  });
}

mx_array* mx_route(mx_scope* s, mx_array* logits, const mx_route_spec* spec, mx_array** weights) {
  return guarded(s, "route", {logits, spec->bias}, [&] {
    const array& in = need(logits, "logits");
    auto both = s->stream->backend->moe().route(in, checked_route(in, *spec));
    *weights = s->own(both[1]);
    return s->own(both[0]);
  });
}

mx_array* mx_weighted_sum(mx_scope* s, mx_array* x, mx_array* weights) {
  return guarded(s, "weighted_sum", {x, weights}, [&] {
    const array &in = need(x, "the input"), &w = need(weights, "the weights");
    want_float(in, "the input");
    want(in.ndim() == 3 && in.size() > 0, format("the input is %s, want [rows, k, width]", describe(in).c_str()));
    want(w.dtype() == mc::float32 && w.ndim() == 2 && w.shape(0) == in.shape(0) && w.shape(1) == in.shape(1),
         format("the weights are %s, want float32[%d,%d]", describe(w).c_str(), in.shape(0), in.shape(1)));
    return s->own(s->stream->backend->moe().weighted_sum(in, w));
  });
}

mx_array* mx_clamped_swiglu(mx_scope* s, mx_array* gate, mx_array* up, float alpha, float limit) {
  return guarded(s, "clamped_swiglu", {gate, up}, [&] {
    const array &g = need(gate, "the gate"), &u = need(up, "the up side");
    want_float(g, "the gate");
    want(g.shape() == u.shape() && g.dtype() == u.dtype(), "gate and up differ in shape or dtype");
    want(limit > 0, format("the limit is %g, want it positive", limit));
    return s->own(s->stream->backend->moe().clamped_swiglu(g, u, alpha, limit));
  });
}
