// The general operations: thin calls of MLX's.
#include "internal.h"
#include "mlx/backend/common/utils.h"

using namespace mlxcel;

namespace {

const char* const binary_names[] = {"add", "sub", "mul", "maximum", "minimum"};

array binary(int op, const array& a, const array& b, mx_stream* stream) {
  mc::Stream s = stream->stream;
  switch (op) {
    case MX_ADD: return stream->backend->add(a, b);
    case MX_SUB: return mc::subtract(a, b, s);
    case MX_MUL: return stream->backend->multiply(a, b);
    case MX_MAXIMUM: return mc::maximum(a, b, s);
    case MX_MINIMUM: return mc::minimum(a, b, s);
  }
  throw std::logic_error("unknown operation");
}

const char* const unary_names[] = {"neg", "exp", "square", "contiguous"};

array unary(int op, const array& a, mc::Stream s) {
  switch (op) {
    case MX_NEG: return mc::negative(a, s);
    case MX_EXP: return mc::exp(a, s);
    case MX_SQUARE: return mc::square(a, s);
    case MX_CONTIGUOUS: return mc::contiguous(a, false, s);
  }
  throw std::logic_error("unknown operation");
}

// Elements of a computed array, which need no graph: they lie in its memory, from offset on.
array view_of(const array& a, const mc::Shape& shape, const mc::Strides& strides, int64_t offset) {
  array out(shape, a.dtype(), nullptr, {});
  auto [span, row_contiguous, col_contiguous] = mc::check_contiguity(out.shape(), strides);
  size_t reach = out.size() > 0 ? 1 : 0; // elements from the first to the last
  for (size_t i = 0; reach > 0 && i < out.ndim(); i++) reach += (out.shape(i) - 1) * strides[i];
  array::Flags flags = a.flags();
  flags.contiguous = span == reach;
  flags.row_contiguous = row_contiguous;
  flags.col_contiguous = col_contiguous;
  out.copy_shared_buffer(a, strides, flags, reach, offset);
  out.set_status(array::Status::available);
  return out;
}

array reshape(const array& a, mc::Shape shape, mc::Stream s) {
  array view = mc::reshape(a, std::move(shape), s);
  if (!a.is_available() || !a.flags().row_contiguous) return view;
  mc::Strides strides(view.ndim(), 1);
  for (int i = static_cast<int>(view.ndim()) - 2; i >= 0; i--) strides[i] = strides[i + 1] * view.shape(i + 1);
  return view_of(a, view.shape(), strides, 0);
}

const char* const shaped_names[] = {"reshape", "transpose", "squeeze"};

array shaped(int op, const array& a, const int* values, int n, mc::Stream s) {
  switch (op) {
    case MX_RESHAPE: return reshape(a, mc::Shape(values, values + n), s);
    case MX_TRANSPOSE: return n ? mc::transpose(a, std::vector<int>(values, values + n), s) : mc::transpose(a, s);
    case MX_SQUEEZE: return mc::squeeze(a, std::vector<int>(values, values + n), s);
  }
  throw std::logic_error("unknown operation");
}

// [start, stop) of every dimension, within the shape: MLX would clamp silently.
array slice_checked(const array& a, const mc::Shape& start, const mc::Shape& stop, mc::Stream s) {
  for (size_t i = 0; i < a.ndim(); i++)
    if (start[i] < 0 || start[i] > stop[i] || stop[i] > a.shape(i))
      throw std::invalid_argument(format("[%d, %d) of dimension %zu, which has %d", start[i], stop[i], i, a.shape(i)));
  array view = mc::slice(a, start, stop, s);
  if (!a.is_available()) return view;
  int64_t offset = 0;
  for (size_t i = 0; i < start.size(); i++) offset += start[i] * a.strides()[i];
  return view_of(a, view.shape(), a.strides(), offset);
}

int checked_axis(const array& a, int axis) {
  int n = static_cast<int>(a.ndim());
  int i = axis < 0 ? axis + n : axis;
  if (i < 0 || i >= n) throw std::invalid_argument(format("axis %d of %d dimensions", axis, n));
  return i;
}

} // namespace

mx_array* mx_binary(mx_scope* s, int op, mx_array* a, mx_array* b) {
  return guarded(s, binary_names[op], {a, b}, [&] {
    return s->own(binary(op, need(a, "the left side"), need(b, "the right side"), s->stream));
  });
}

mx_array* mx_unary(mx_scope* s, int op, mx_array* a) {
  return guarded(s, unary_names[op], {a}, [&] { return s->own(unary(op, need(a, "the argument"), s->stream->stream)); });
}

mx_array* mx_astype(mx_scope* s, mx_array* a, int dtype) {
  return guarded(s, "astype", {a}, [&] { return s->own(s->stream->backend->convert(need(a, "the argument"), dtype_of(dtype))); });
}

mx_array* mx_scalar(mx_scope* s, double v, int dtype) {
  return guarded(s, "scalar", {}, [&] { return s->own(array(v, dtype_of(dtype))); });
}

mx_array* mx_shaped(mx_scope* s, int op, mx_array* a, const int* values, int n) {
  return guarded(s, shaped_names[op], {a}, [&] {
    return s->own(shaped(op, need(a, "the argument"), values, n, s->stream->stream));
  });
}

mx_array* mx_slice_axis(mx_scope* s, mx_array* a, int axis, int from, int to) {
  return guarded(s, "slice", {a}, [&] {
    const array& x = need(a, "the argument");
    axis = checked_axis(x, axis);
    mc::Shape start(x.ndim(), 0), stop = x.shape();
    start[axis] = from;
    stop[axis] = to;
    return s->own(slice_checked(x, start, stop, s->stream->stream));
  });
}

mx_array* mx_concat(mx_scope* s, mx_array* const* list, int n, int axis) {
  if (s == nullptr || s->failed) return nullptr;
  try {
    std::vector<array> arrays;
    arrays.reserve(n);
    for (int i = 0; i < n; i++) arrays.push_back(need(list[i], "an argument"));
    return s->own(s->stream->backend->concatenate(std::move(arrays), axis));
  } catch (...) {
    s->fail("concat", list, n);
    return nullptr;
  }
}

mx_array* mx_take(mx_scope* s, mx_array* a, mx_array* indices, int axis) {
  return guarded(s, "take", {a, indices}, [&] {
    return s->own(mc::take(need(a, "the argument"), need(indices, "indices"), axis, s->stream->stream));
  });
}

mx_array* mx_select_rows(mx_scope* s, mx_array* a, const int32_t* rows, int n) {
  return guarded(s, "select_rows", {a}, [&] {
    const array& x = need(a, "the argument");
    if (x.ndim() < 1 || n < 1) throw std::invalid_argument(format("%d rows", n));
    for (int i = 0; i < n; i++)
      if (rows[i] < 0 || rows[i] >= x.shape(0))
        throw std::invalid_argument(format("row %d of %d does not exist", rows[i], x.shape(0)));
    return s->own(s->stream->backend->select_rows(x, rows, n));
  });
}

mx_array* mx_softmax(mx_scope* s, mx_array* a, int axis, bool precise) {
  return guarded(s, "softmax", {a}, [&] {
    const array& x = need(a, "the argument");
    return s->own(mc::softmax(x, checked_axis(x, axis), precise, s->stream->stream));
  });
}
