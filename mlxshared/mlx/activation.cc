// Activations made of tanh: every argument is checked here, the back ends trust them.
#include "activation.h"

#include "checks.h"

using namespace mlxcel;

mx_array* mx_gelu_mul(mx_scope* s, mx_array* gate, mx_array* up) {
  return guarded(s, "gelu_mul", {gate, up}, [&] {
    const array& g = need(gate, "the gate");
    const array& u = need(up, "the up side");
    want_float(g, "the gate");
    want(g.shape() == u.shape() && g.dtype() == u.dtype(), "gate and up differ in shape or dtype");
    return s->own(s->stream->backend->activation().gelu_mul(g, u));
  });
}

mx_array* mx_softcap(mx_scope* s, mx_array* x, float cap) {
  return guarded(s, "softcap", {x}, [&] {
    const array& in = need(x, "the input");
    want_float(in, "the input");
    want(cap > 0, format("the limit is %g, want it positive", cap));
    return s->own(s->stream->backend->activation().softcap(in, cap));
  });
}
