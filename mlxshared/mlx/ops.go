package mlx

// #include "shim.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_full
// #cgo nocallback mx_full
// #cgo noescape mx_shaped
// #cgo nocallback mx_shaped
// #cgo noescape mx_slice
// #cgo nocallback mx_slice
// #cgo noescape mx_concat
// #cgo nocallback mx_concat
// #cgo noescape mx_select_rows
// #cgo nocallback mx_select_rows
// #cgo noescape mx_quantize
// #cgo nocallback mx_quantize
// #cgo noescape mx_dequantize
// #cgo nocallback mx_dequantize
import "C"

import "unsafe"

// Element-wise operations broadcast as in NumPy and promote dtypes as in MLX.

func (s *Scope) binary(op C.int, a, b Array) Array { return s.own(C.mx_binary(s.p, op, a.p, b.p)) }

// Add is a + b.
func (s *Scope) Add(a, b Array) Array { return s.binary(C.MX_ADD, a, b) }

// Sub is a - b.
func (s *Scope) Sub(a, b Array) Array { return s.binary(C.MX_SUB, a, b) }

// Mul is a · b.
func (s *Scope) Mul(a, b Array) Array { return s.binary(C.MX_MUL, a, b) }

// Div is a / b.
func (s *Scope) Div(a, b Array) Array { return s.binary(C.MX_DIV, a, b) }

// Maximum is the greater of a and b.
func (s *Scope) Maximum(a, b Array) Array { return s.binary(C.MX_MAXIMUM, a, b) }

// Minimum is the lesser of a and b.
func (s *Scope) Minimum(a, b Array) Array { return s.binary(C.MX_MINIMUM, a, b) }

// Power is a to the power b.
func (s *Scope) Power(a, b Array) Array { return s.binary(C.MX_POWER, a, b) }

// LogAddExp is log(exp(a) + exp(b)).
func (s *Scope) LogAddExp(a, b Array) Array { return s.binary(C.MX_LOGADDEXP, a, b) }

// Equal is a == b, of Bool.
func (s *Scope) Equal(a, b Array) Array { return s.binary(C.MX_EQUAL, a, b) }

// Less is a < b, of Bool.
func (s *Scope) Less(a, b Array) Array { return s.binary(C.MX_LESS, a, b) }

// LessEqual is a <= b, of Bool.
func (s *Scope) LessEqual(a, b Array) Array { return s.binary(C.MX_LESS_EQUAL, a, b) }

// Greater is a > b, of Bool.
func (s *Scope) Greater(a, b Array) Array { return s.binary(C.MX_GREATER, a, b) }

// GreaterEqual is a >= b, of Bool.
func (s *Scope) GreaterEqual(a, b Array) Array { return s.binary(C.MX_GREATER_EQUAL, a, b) }

// LogicalAnd is a && b, of Bool.
func (s *Scope) LogicalAnd(a, b Array) Array { return s.binary(C.MX_AND, a, b) }

// LogicalOr is a || b, of Bool.
func (s *Scope) LogicalOr(a, b Array) Array { return s.binary(C.MX_OR, a, b) }

// MatMul is the matrix product of the last two dimensions.
func (s *Scope) MatMul(a, b Array) Array { return s.binary(C.MX_MATMUL, a, b) }

func (s *Scope) unary(op C.int, a Array) Array { return s.own(C.mx_unary(s.p, op, a.p)) }

// Neg is -a.
func (s *Scope) Neg(a Array) Array { return s.unary(C.MX_NEG, a) }

// Abs is |a|.
func (s *Scope) Abs(a Array) Array { return s.unary(C.MX_ABS, a) }

// Exp is e to the power a.
func (s *Scope) Exp(a Array) Array { return s.unary(C.MX_EXP, a) }

// Log is the natural logarithm.
func (s *Scope) Log(a Array) Array { return s.unary(C.MX_LOG, a) }

// Log1p is log(1 + a).
func (s *Scope) Log1p(a Array) Array { return s.unary(C.MX_LOG1P, a) }

// Sqrt is the square root.
func (s *Scope) Sqrt(a Array) Array { return s.unary(C.MX_SQRT, a) }

// Rsqrt is 1 / sqrt(a).
func (s *Scope) Rsqrt(a Array) Array { return s.unary(C.MX_RSQRT, a) }

// Square is a².
func (s *Scope) Square(a Array) Array { return s.unary(C.MX_SQUARE, a) }

// Sigmoid is 1 / (1 + exp(-a)).
func (s *Scope) Sigmoid(a Array) Array { return s.unary(C.MX_SIGMOID, a) }

// Tanh is the hyperbolic tangent.
func (s *Scope) Tanh(a Array) Array { return s.unary(C.MX_TANH, a) }

// Erf is the error function.
func (s *Scope) Erf(a Array) Array { return s.unary(C.MX_ERF, a) }

// Sin is the sine.
func (s *Scope) Sin(a Array) Array { return s.unary(C.MX_SIN, a) }

// Cos is the cosine.
func (s *Scope) Cos(a Array) Array { return s.unary(C.MX_COS, a) }

// Floor rounds down.
func (s *Scope) Floor(a Array) Array { return s.unary(C.MX_FLOOR, a) }

// LogicalNot is !a, of Bool.
func (s *Scope) LogicalNot(a Array) Array { return s.unary(C.MX_NOT, a) }

// Contiguous is a with its elements row-major in memory.
func (s *Scope) Contiguous(a Array) Array { return s.unary(C.MX_CONTIGUOUS, a) }

// Where is a where cond holds, else b.
func (s *Scope) Where(cond, a, b Array) Array { return s.own(C.mx_where(s.p, cond.p, a.p, b.p)) }

// AsType converts to dtype, rounding to nearest even.
func (s *Scope) AsType(a Array, dtype Dtype) Array {
	return s.own(C.mx_astype(s.p, a.p, C.int(dtype)))
}

// View reinterprets the bytes of the last dimension as dtype.
func (s *Scope) View(a Array, dtype Dtype) Array { return s.own(C.mx_view(s.p, a.p, C.int(dtype))) }

// Scalar is v as a zero-dimensional array.
func (s *Scope) Scalar(v float64, dtype Dtype) Array {
	return s.own(C.mx_scalar(s.p, C.double(v), C.int(dtype)))
}

// Full is an array of the given shape filled with v.
func (s *Scope) Full(v float64, dtype Dtype, shape ...int) Array {
	dims, ok := s.ints("full", shape)
	if !ok {
		return Array{}
	}
	return s.own(C.mx_full(s.p, C.double(v), C.int(dtype), &dims.v[0], dims.n))
}

// Arange is start, start+step, … up to but not including stop.
func (s *Scope) Arange(start, stop, step float64, dtype Dtype) Array {
	return s.own(C.mx_arange(s.p, C.double(start), C.double(stop), C.double(step), C.int(dtype)))
}

// Reshape changes the shape; one dimension may be -1.
func (s *Scope) Reshape(a Array, shape ...int) Array {
	return s.shaped(C.MX_RESHAPE, "reshape", a, shape)
}

// BroadcastTo repeats dimensions of size 1.
func (s *Scope) BroadcastTo(a Array, shape ...int) Array {
	return s.shaped(C.MX_BROADCAST_TO, "broadcast_to", a, shape)
}

// Transpose permutes the dimensions; without axes it reverses them.
func (s *Scope) Transpose(a Array, axes ...int) Array {
	return s.shaped(C.MX_TRANSPOSE, "transpose", a, axes)
}

// Squeeze drops the given dimensions of size 1.
func (s *Scope) Squeeze(a Array, axes ...int) Array {
	return s.shaped(C.MX_SQUEEZE, "squeeze", a, axes)
}

// ExpandDims inserts dimensions of size 1.
func (s *Scope) ExpandDims(a Array, axes ...int) Array {
	return s.shaped(C.MX_EXPAND_DIMS, "expand_dims", a, axes)
}

func (s *Scope) shaped(op C.int, name string, a Array, values []int) Array {
	l, ok := s.ints(name, values)
	if !ok {
		return Array{}
	}
	return s.own(C.mx_shaped(s.p, op, a.p, &l.v[0], l.n))
}

// Slice is a[start[0]:stop[0], start[1]:stop[1], …]. Bounds must lie within the shape.
func (s *Scope) Slice(a Array, start, stop []int) Array {
	from, ok := s.ints("slice", start)
	if !ok {
		return Array{}
	}
	to, ok := s.ints("slice", stop)
	if !ok {
		return Array{}
	}
	return s.own(C.mx_slice(s.p, a.p, &from.v[0], from.n, &to.v[0], to.n))
}

// SliceRows is the rows [from, to) of the first dimension.
func (s *Scope) SliceRows(a Array, from, to int) Array { return s.SliceAxis(a, 0, from, to) }

// SliceAxis is the elements [from, to) of one dimension.
func (s *Scope) SliceAxis(a Array, axis, from, to int) Array {
	return s.own(C.mx_slice_axis(s.p, a.p, C.int(axis), C.int(from), C.int(to)))
}

// SplitAxis cuts one dimension into n equal parts.
func (s *Scope) SplitAxis(a Array, axis, n int) []Array {
	parts := make([]Array, n)
	size := a.Dim(axis)
	if n < 1 || size%n != 0 {
		s.fail("split", "", "dimension %d of %v does not divide by %d", axis, a.Shape(), n)
		return parts
	}
	for i := range parts {
		parts[i] = s.SliceAxis(a, axis, i*size/n, (i+1)*size/n)
	}
	return parts
}

// Concat joins arrays along a dimension.
func (s *Scope) Concat(axis int, arrays ...Array) Array {
	list, n := handles(arrays)
	return s.own(C.mx_concat(s.p, list, n, C.int(axis)))
}

// Take picks indices (of an integer type, any shape) along a dimension. Indices must be in range: MLX does not check.
func (s *Scope) Take(a, indices Array, axis int) Array {
	return s.own(C.mx_take(s.p, a.p, indices.p, C.int(axis)))
}

// TakeAlong picks along a dimension by indices of a's rank: NumPy's take_along_axis.
func (s *Scope) TakeAlong(a, indices Array, axis int) Array {
	return s.own(C.mx_take_along(s.p, a.p, indices.p, C.int(axis)))
}

// SelectRows is the given rows of x [rows, ...], in that order, as for the head's last tokens.
func (s *Scope) SelectRows(x Array, rows []int32) Array {
	return s.own(C.mx_select_rows(s.p, x.p, (*C.int32_t)(unsafe.Pointer(unsafe.SliceData(rows))), C.int(len(rows))))
}

func (s *Scope) reduce(op C.int, a Array, axis int, keep bool) Array {
	return s.own(C.mx_reduce(s.p, op, a.p, C.int(axis), C.bool(keep)))
}

// Sum adds along a dimension, which stays with size 1 if keep.
func (s *Scope) Sum(a Array, axis int, keep bool) Array { return s.reduce(C.MX_SUM, a, axis, keep) }

// Mean averages along a dimension.
func (s *Scope) Mean(a Array, axis int, keep bool) Array { return s.reduce(C.MX_MEAN, a, axis, keep) }

// Max is the greatest along a dimension.
func (s *Scope) Max(a Array, axis int, keep bool) Array { return s.reduce(C.MX_MAX, a, axis, keep) }

// Min is the least along a dimension.
func (s *Scope) Min(a Array, axis int, keep bool) Array { return s.reduce(C.MX_MIN, a, axis, keep) }

// LogSumExp is log(sum(exp(a))) along a dimension.
func (s *Scope) LogSumExp(a Array, axis int, keep bool) Array {
	return s.reduce(C.MX_LOGSUMEXP, a, axis, keep)
}

// ArgMax is the uint32 index of the greatest, the first among equals.
func (s *Scope) ArgMax(a Array, axis int, keep bool) Array {
	return s.reduce(C.MX_ARGMAX, a, axis, keep)
}

// ArgMin is the uint32 index of the least, the first among equals.
func (s *Scope) ArgMin(a Array, axis int, keep bool) Array {
	return s.reduce(C.MX_ARGMIN, a, axis, keep)
}

// All is whether every element is true along a dimension.
func (s *Scope) All(a Array, axis int, keep bool) Array { return s.reduce(C.MX_ALL, a, axis, keep) }

// Any is whether some element is true along a dimension.
func (s *Scope) Any(a Array, axis int, keep bool) Array { return s.reduce(C.MX_ANY, a, axis, keep) }

// Softmax is exp(a) / sum(exp(a)) along a dimension, in float32 inside if precise.
func (s *Scope) Softmax(a Array, axis int, precise bool) Array {
	return s.own(C.mx_softmax(s.p, a.p, C.int(axis), C.bool(precise)))
}

// CumSum is the running sum along a dimension, this element included.
func (s *Scope) CumSum(a Array, axis int) Array { return s.along(C.MX_CUMSUM, a, axis, 0) }

// Sort is ascending along a dimension.
func (s *Scope) Sort(a Array, axis int) Array { return s.along(C.MX_SORT, a, axis, 0) }

// ArgSort is the uint32 indices that Sort would pick.
func (s *Scope) ArgSort(a Array, axis int) Array { return s.along(C.MX_ARGSORT, a, axis, 0) }

// ArgPartition is uint32 indices such that the kth is in its sorted place, lesser ones before it, greater ones after.
func (s *Scope) ArgPartition(a Array, kth, axis int) Array {
	return s.along(C.MX_ARGPARTITION, a, axis, kth)
}

// Repeat repeats each element n times along a dimension.
func (s *Scope) Repeat(a Array, n, axis int) Array { return s.along(C.MX_REPEAT, a, axis, n) }

func (s *Scope) along(op C.int, a Array, axis, n int) Array {
	return s.own(C.mx_along(s.p, op, a.p, C.int(axis), C.int(n)))
}

// Quantize packs w [rows, cols], floating, as format; bits and group count for Affine only. The arrays belong to the
// scope.
func (s *Scope) Quantize(w Array, format Format, bits, group int) Matrix {
	var scales, biases *C.mx_array
	packed := s.own(C.mx_quantize(s.p, w.p, C.int(format), C.int(bits), C.int(group), &scales, &biases))
	return Matrix{Format: format, Bits: bits, Group: group, W: packed, Scales: Array{scales}, Biases: Array{biases}}
}

// Dequantize is the weights of m as [rows, cols] in dtype.
func (s *Scope) Dequantize(m *Matrix, dtype Dtype) Array {
	c := m.c()
	return s.own(C.mx_dequantize(s.p, &c, C.int(dtype)))
}
