// The transformer operations: every argument is checked here, the back ends trust them.
#include <algorithm>

#include "checks.h"

using namespace mlxcel;

namespace {

std::optional<array> checked_norm_weight(const array& x, mx_array* weight) {
  want_float(x, "the input");
  want(x.ndim() > 0 && x.size() > 0, "the input is empty");
  if (weight == nullptr) return std::nullopt;
  want_float(weight->value, "the weight");
  want_vector(weight->value, "the weight", x.shape(-1));
  return weight->value;
}

} // namespace

std::vector<Segment> mlxcel::checked_segments(const mx_segment* segments, int n, int rows, bool append, const Attention& a,
                                      mx_stream* stream) {
  want(n > 0, "no segments");
  std::vector<Segment> out;
  out.reserve(n);
  int64_t row = 0;
  for (int i = 0; i < n; i++) {
    const mx_segment& g = segments[i];
    want(g.kv != nullptr, format("segment %d has no cache", i));
    want(g.kv->stream == stream, format("segment %d's cache belongs to another stream", i));
    const Cache& c = *g.kv->cache;
    want(c.kv_heads == a.kv_heads && c.k_dim == a.head_dim && c.v_dim == a.value_dim,
         format("segment %d's cache has %d heads of key %d, value %d, want %d of %d, %d", i, c.kv_heads, c.k_dim, c.v_dim,
                a.kv_heads, a.head_dim, a.value_dim));
    want(c.latent == segments[0].kv->cache->latent, format("segment %d's cache is latent, or the first's is, want all or none", i));
    want(g.row0 == row && g.rows > 0 && g.rows <= rows - row,
         format("segment %d has rows [%lld, %lld), want it to start at %lld within %d", i, (long long)g.row0,
                (long long)(g.row0 + g.rows), (long long)row, rows));
    int64_t pos = append ? c.length : c.length - g.rows;
    want(g.pos == pos, format("segment %d is at position %lld, its cache at %lld", i, (long long)g.pos, (long long)pos));
    int64_t seen = a.window > 0 ? std::max<int64_t>(0, g.pos + 1 - a.window) : 0;
    want(seen >= c.first, format("segment %d sees position %lld, its cache dropped those before %lld", i, (long long)seen,
                                 (long long)c.first));
    for (int j = 0; j < i; j++) want(segments[j].kv != g.kv, format("segments %d and %d share a cache", j, i));
    row += g.rows;
    out.push_back({g.kv->cache, g.row0, g.rows, g.pos});
  }
  want(row == rows, format("segments end at row %lld of %d", (long long)row, rows));
  return out;
}

void mlxcel::want_heads(const array& a, const char* name, int rows, int width) {
  want_float(a, name);
  want(a.ndim() >= 2 && a.shape(0) == rows && a.size() == size_t(rows) * width,
       format("%s is %s, want [%d,%d]", name, describe(a).c_str(), rows, width));
}

Attention mlxcel::checked_attention(const mx_attention_spec& spec) {
  Attention a{spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim, spec.scale, spec.window, spec.softcap,
              maybe(spec.sinks), spec.chunk};
  want(a.kv_heads > 0 && a.heads > 0 && a.heads % a.kv_heads == 0,
       format("%d heads over %d key heads: want a multiple", a.heads, a.kv_heads));
  want(a.head_dim > 0 && a.value_dim > 0, format("head dim %d, value dim %d", a.head_dim, a.value_dim));
  want(a.window >= 0 && a.softcap >= 0,
       format("window %lld, softcap %g: want neither negative", (long long)a.window, a.softcap));
  want(a.chunk >= 0 && (a.chunk == 0 || (a.window == 0 && a.softcap == 0 && !a.sinks)),
       format("chunk %lld: want it not negative, and without window, softcap and sinks", (long long)a.chunk));
  if (a.sinks) {
    want(a.sinks->dtype() == mc::float32, format("sinks are %s, want float32", describe(*a.sinks).c_str()));
    want_vector(*a.sinks, "sinks", a.heads);
  }
  return a;
}

// The number of columns that the packed row of a quantized matrix holds.
static int unpacked_cols(int words, int bits) {
  int64_t cols = int64_t(words) * 32 / bits;
  want(cols * bits == int64_t(words) * 32 && cols <= INT32_MAX,
       format("%d words a row do not hold a whole number of %d-bit values", words, bits));
  return static_cast<int>(cols);
}

Matrix mlxcel::checked_matrix(const mx_matrix& m, int leading) {
  const array& w = need(m.w, "the weight");
  want(static_cast<int>(w.ndim()) == 2 + leading && w.size() > 0,
       format("the weight is %s, want %s]", describe(w).c_str(), leading ? "[experts, rows, cols" : "[rows, cols"));
  want(m.format >= 0 && m.format <= static_cast<int>(Format::nvfp4), format("%d is no weight format", m.format));
  Matrix r{static_cast<Format>(m.format), m.bits, m.group, w.shape(-2), w.shape(-1), w, maybe(m.scales), maybe(m.biases)};
  if (r.format == Format::dense) {
    want_float(w, "the weight");
    want(!r.scales && !r.biases, "a dense weight takes no scales and biases");
    return r;
  }
  const char* name = r.format == Format::affine ? "affine" : r.format == Format::nvfp4 ? "nvfp4"
                     : r.format == Format::mxfp8 ? "mxfp8" : "mxfp4";
  if (r.format == Format::affine) {
    want((r.bits >= 2 && r.bits <= 6) || r.bits == 8, format("affine bits is %d, want 2, 3, 4, 5, 6 or 8", r.bits));
  } else {
    r.bits = r.format == Format::mxfp8 ? 8 : 4;
    r.group = r.format == Format::nvfp4 ? 16 : 32;
  }
  want(w.dtype() == mc::uint32, format("the %s weight is %s, want uint32", name, describe(w).c_str()));
  r.cols = unpacked_cols(w.shape(-1), r.bits);
  want(r.group > 0 && r.cols % r.group == 0,
       format("%s group is %d, want a divisor of the %d columns", name, r.group, r.cols));
  auto want_groups = [&](const std::optional<array>& a, const char* what) {
    want(a.has_value(), format("the %s weight has no %s", name, what));
    mc::Shape shape = w.shape();
    shape.back() = r.cols / r.group;
    want(a->shape() == shape, format("%s are %s, want rows of %d for the weight %s", what, describe(*a).c_str(),
                                     r.cols / r.group, describe(w).c_str()));
  };
  want_groups(r.scales, "scales");
  if (r.format == Format::affine) {
    want_groups(r.biases, "biases");
    want_float(*r.scales, "scales");
    want(r.biases->dtype() == r.scales->dtype(),
         format("biases are %s and scales %s, want one dtype", describe(*r.biases).c_str(), describe(*r.scales).c_str()));
  } else {
    want(r.scales->dtype() == mc::uint8, format("%s scales are %s, want uint8", name, describe(*r.scales).c_str()));
    want(!r.biases, format("an %s weight takes no biases", name));
  }
  return r;
}

std::string Matrix::mode() const {
  switch (format) {
    case Format::dense: return "dense";
    case Format::affine: return "affine";
    case Format::mxfp4: return "mxfp4";
    case Format::mxfp8: return "mxfp8";
    case Format::nvfp4: return "nvfp4";
  }
  return "";
}

mx_array* mx_quantize(mx_scope* s, mx_array* w, int fmt, int bits, int group, mx_array** scales, mx_array** biases) {
  return guarded(s, "quantize", {w}, [&]() -> mx_array* {
    Matrix m{static_cast<Format>(fmt), bits, group, 0, 0, need(w, "the weight"), {}, {}};
    want(m.format >= Format::affine && m.format <= Format::nvfp4, format("%d is no quantized format", fmt));
    std::optional<int> b, g; // the fp formats fix them
    if (m.format == Format::affine) b = bits, g = group;
    auto parts = mc::quantize(m.w, g, b, m.mode(), std::nullopt, s->stream->stream);
    *scales = s->own(parts[1]);
    if (parts.size() > 2) *biases = s->own(parts[2]);
    return s->own(parts[0]);
  });
}

mx_array* mx_dequantize(mx_scope* s, const mx_matrix* w, int dtype) {
  return guarded(s, "dequantize", {w->w, w->scales, w->biases}, [&] {
    Matrix m = checked_matrix(*w);
    auto t = dtype_of(dtype);
    auto stream = s->stream->stream;
    if (m.format == Format::dense) return s->own(mc::astype(m.w, t, stream));
    return s->own(mc::astype(
        mc::dequantize(m.w, *m.scales, m.biases, m.group, m.bits, m.mode(), std::nullopt, std::nullopt, stream), t, stream));
  });
}

mx_array* mx_linear(mx_scope* s, mx_array* x, const mx_matrix* w, mx_array* bias) {
  return guarded(s, "linear", {x, w->w, w->scales, w->biases, bias}, [&] {
    const array& in = need(x, "the input");
    Matrix m = checked_matrix(*w);
    want_float(in, "the input");
    want(in.ndim() > 0 && in.size() > 0 && in.shape(-1) == m.cols,
         format("the input is %s, want rows of %d", describe(in).c_str(), m.cols));
    if (bias) {
      want_float(bias->value, "the bias");
      want_vector(bias->value, "the bias", m.rows);
    }
    return s->own(s->stream->backend->linear(in, m, maybe(bias)));
  });
}

mx_array* mx_embedding(mx_scope* s, mx_array* ids, const mx_matrix* w, int dtype) {
  return guarded(s, "embedding", {ids, w->w, w->scales, w->biases}, [&] {
    const array& in = need(ids, "ids");
    Matrix m = checked_matrix(*w);
    auto t = dtype_of(dtype);
    want(in.dtype() == mc::int32, format("ids are %s, want int32", describe(in).c_str()));
    want(in.size() > 0, "no ids");
    want(is_float(t), "the output's dtype is none of float32, float16 and bfloat16");
    return s->own(s->stream->backend->embedding(in, m, t));
  });
}

mx_array* mx_rms_norm(mx_scope* s, mx_array* x, mx_array* weight, float eps, float offset) {
  return guarded(s, "rms_norm", {x, weight}, [&] {
    const array& in = need(x, "the input");
    return s->own(s->stream->backend->rms_norm(in, checked_norm_weight(in, weight), eps, offset));
  });
}

mx_array* mx_add_rms_norm(mx_scope* s, mx_array* x, mx_array* y, mx_array* weight, float eps, float offset,
                          mx_array** norm) {
  return guarded(s, "add_rms_norm", {x, y, weight}, [&] {
    const array& a = need(x, "the left side");
    const array& b = need(y, "the right side");
    want(a.shape() == b.shape() && a.dtype() == b.dtype(), "the sides differ in shape or dtype");
    auto both = s->stream->backend->add_rms_norm(a, b, checked_norm_weight(a, weight), eps, offset);
    *norm = s->own(both[1]);
    return s->own(both[0]);
  });
}

mx_array* mx_rope(mx_scope* s, mx_array* x, mx_array* pos, mx_array* inv_freq, int head_dim, int rot_dim, float scale,
                  bool traditional) {
  return guarded(s, "rope", {x, pos, inv_freq}, [&] {
    const array& in = need(x, "the input");
    const array& p = need(pos, "positions");
    const array& f = need(inv_freq, "the inverse frequencies");
    want(head_dim > 0 && rot_dim > 0 && rot_dim <= head_dim && rot_dim % 2 == 0,
         format("head dim %d, rotated %d: want an even number up to the head's", head_dim, rot_dim));
    want(in.ndim() >= 2, format("the input is %s, want [rows, heads*%d]", describe(in).c_str(), head_dim));
    int rows = in.shape(0);
    int width = rows > 0 ? static_cast<int>(in.size() / rows) : 0;
    want_heads(in, "the input", rows, width);
    want(width > 0 && width % head_dim == 0,
         format("rows of %d elements are no multiple of head dim %d", width, head_dim));
    want(p.dtype() == mc::int32, format("positions are %s, want int32", describe(p).c_str()));
    want_vector(p, "positions", rows);
    want(f.dtype() == mc::float32, format("the inverse frequencies are %s, want float32", describe(f).c_str()));
    want_vector(f, "the inverse frequencies", rot_dim / 2);
    return s->own(s->stream->backend->rope(in, p, f, Rope{width / head_dim, head_dim, rot_dim, scale, traditional}));
  });
}

mx_array* mx_silu_mul(mx_scope* s, mx_array* gate, mx_array* up) {
  return guarded(s, "silu_mul", {gate, up}, [&] {
    const array& g = need(gate, "the gate");
    const array& u = need(up, "the up side");
    want_float(g, "the gate");
    want(g.shape() == u.shape() && g.dtype() == u.dtype(), "gate and up differ in shape or dtype");
    return s->own(s->stream->backend->silu_mul(g, u));
  });
}

mx_array* mx_attention(mx_scope* s, mx_array* q, mx_array* k, mx_array* v, const mx_attention_spec* spec,
                       const mx_segment* segments, int n) {
  return guarded(s, "attention", {q, k, v}, [&] {
    Attention a = checked_attention(*spec);
    const array& query = need(q, "q");
    want(query.ndim() >= 2 && query.shape(0) > 0, format("q is %s, want [rows, heads*dim]", describe(query).c_str()));
    int rows = query.shape(0);
    want_heads(query, "q", rows, a.heads * a.head_dim);
    auto checked = checked_segments(segments, n, rows, k != nullptr, a, s->stream);
    bool latent = checked[0].cache->latent;
    want((v != nullptr) == (k != nullptr && !latent), latent ? "latent caches take no v" : "only one of k and v is given");
    if (k) want_heads(k->value, "k", rows, a.kv_heads * a.head_dim);
    if (v) want_heads(v->value, "v", rows, a.kv_heads * a.value_dim);
    return s->own(s->stream->backend->attention(query, maybe(k), maybe(v), a, checked));
  });
}
