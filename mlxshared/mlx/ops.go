package mlx

// #include "shim.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_shaped
// #cgo nocallback mx_shaped
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

// Maximum is the greater of a and b.
func (s *Scope) Maximum(a, b Array) Array { return s.binary(C.MX_MAXIMUM, a, b) }

// Minimum is the lesser of a and b.
func (s *Scope) Minimum(a, b Array) Array { return s.binary(C.MX_MINIMUM, a, b) }

func (s *Scope) unary(op C.int, a Array) Array { return s.own(C.mx_unary(s.p, op, a.p)) }

// Neg is -a.
func (s *Scope) Neg(a Array) Array { return s.unary(C.MX_NEG, a) }

// Exp is e to the power a.
func (s *Scope) Exp(a Array) Array { return s.unary(C.MX_EXP, a) }

// Square is a².
func (s *Scope) Square(a Array) Array { return s.unary(C.MX_SQUARE, a) }

// Contiguous is a with its elements row-major in memory.
func (s *Scope) Contiguous(a Array) Array { return s.unary(C.MX_CONTIGUOUS, a) }

// AsType converts to dtype, rounding to nearest even.
func (s *Scope) AsType(a Array, dtype Dtype) Array {
	return s.own(C.mx_astype(s.p, a.p, C.int(dtype)))
}

// Scalar is v as a zero-dimensional array.
func (s *Scope) Scalar(v float64, dtype Dtype) Array {
	return s.own(C.mx_scalar(s.p, C.double(v), C.int(dtype)))
}

// Reshape changes the shape; one dimension may be -1.
func (s *Scope) Reshape(a Array, shape ...int) Array {
	return s.shaped(C.MX_RESHAPE, "reshape", a, shape)
}

// Transpose permutes the dimensions; without axes it reverses them.
func (s *Scope) Transpose(a Array, axes ...int) Array {
	return s.shaped(C.MX_TRANSPOSE, "transpose", a, axes)
}

// Squeeze drops the given dimensions of size 1.
func (s *Scope) Squeeze(a Array, axes ...int) Array {
	return s.shaped(C.MX_SQUEEZE, "squeeze", a, axes)
}

func (s *Scope) shaped(op C.int, name string, a Array, values []int) Array {
	l, ok := s.ints(name, values)
	if !ok {
		return Array{}
	}
	return s.own(C.mx_shaped(s.p, op, a.p, &l.v[0], l.n))
}

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

// SelectRows is the given rows of x [rows, ...], in that order, as for the head's last tokens.
func (s *Scope) SelectRows(x Array, rows []int32) Array {
	return s.own(C.mx_select_rows(s.p, x.p, (*C.int32_t)(unsafe.Pointer(unsafe.SliceData(rows))), C.int(len(rows))))
}

// Softmax is exp(a) / sum(exp(a)) along a dimension, in float32 inside if precise.
func (s *Scope) Softmax(a Array, axis int, precise bool) Array {
	return s.own(C.mx_softmax(s.p, a.p, C.int(axis), C.bool(precise)))
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
