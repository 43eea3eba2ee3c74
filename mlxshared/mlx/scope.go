package mlx

// #include "shim.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_eval
// #cgo nocallback mx_eval
// #cgo noescape mx_from_bytes
// #cgo nocallback mx_from_bytes
// #cgo noescape mx_elements
// #cgo nocallback mx_elements
// #cgo noescape mx_copy_to
// #cgo nocallback mx_copy_to
import "C"

import (
	"fmt"
	"slices"
	"unsafe"
)

// Scope owns the arrays that its operations make and the first error among them.
type Scope struct {
	p    *C.mx_scope
	err  error
	segs []C.mx_segment // Attention's argument buffer
}

// NewScope makes an empty scope. Close frees it with all its arrays.
func (s *Stream) NewScope() *Scope {
	scope := &Scope{p: C.mx_scope_new(s.p)}
	if scope.p == nil && s.p != nil {
		scope.err = &OpError{Op: "new scope", Reason: KindNoMemory.String(), Kind: KindNoMemory}
	}
	return scope
}

// Close frees every array that the scope still owns. Twice is harmless.
func (s *Scope) Close() {
	if s.p != nil {
		C.mx_scope_free(s.p)
		s.p = nil
	}
}

// Keep moves a to the caller, who frees it with Array.Free.
func (s *Scope) Keep(a Array) Array {
	if s.p != nil && a.p != nil {
		C.mx_scope_release(s.p, a.p)
	}
	return a
}

// Adopt moves an array that the caller owns into the scope. Where that fails the array is freed.
func (s *Scope) Adopt(a Array) Array {
	if a.p == nil {
		return a
	}
	if s.p == nil || !bool(C.mx_scope_adopt(s.p, a.p)) {
		a.Free()
		s.check(false)
		return Array{}
	}
	return a
}

// Err is the first error of the scope's operations.
func (s *Scope) Err() error { return s.err }

// Eval computes the arrays and what they depend on, and waits for them.
func (s *Scope) Eval(arrays ...Array) error {
	if s.err != nil {
		return s.err
	}
	list, n := handles(arrays)
	s.check(bool(C.mx_eval(s.p, list, n)))
	return s.err
}

// own hands out what an operation made, or notes its failure.
func (s *Scope) own(p *C.mx_array) Array {
	if p == nil {
		s.check(false)
	}
	return Array{p}
}

// check notes the failure that the C side holds.
func (s *Scope) check(ok bool) {
	if ok || s.err != nil {
		return
	}
	if s.p == nil {
		s.err = ErrClosed
		return
	}
	s.err = &OpError{
		Op:     C.GoString(C.mx_scope_error(s.p, 0)),
		Inputs: C.GoString(C.mx_scope_error(s.p, 1)),
		Reason: C.GoString(C.mx_scope_error(s.p, 2)),
		Kind:   Kind(C.mx_scope_error_kind(s.p)),
	}
}

// fail notes an error that Go found.
func (s *Scope) fail(op, inputs, format string, args ...any) Array {
	if s.err == nil {
		s.err = &OpError{Op: op, Inputs: inputs, Reason: fmt.Sprintf(format, args...)}
	}
	return Array{}
}

// FromBytes makes an array of the given dtype and shape from a copy of data, which is row-major and little-endian.
func (s *Scope) FromBytes(data []byte, dtype Dtype, shape ...int) Array {
	return s.fromMemory(unsafe.Pointer(unsafe.SliceData(data)), len(data), dtype, shape)
}

// FromFloat32s makes a float32 array from a copy of data.
func (s *Scope) FromFloat32s(data []float32, shape ...int) Array {
	return s.fromMemory(unsafe.Pointer(unsafe.SliceData(data)), len(data)*4, Float32, shape)
}

// FromInt32s makes an int32 array from a copy of data.
func (s *Scope) FromInt32s(data []int32, shape ...int) Array {
	return s.fromMemory(unsafe.Pointer(unsafe.SliceData(data)), len(data)*4, Int32, shape)
}

// Uninitialized makes an array and the memory behind it, row-major and little-endian, for the caller to fill before any
// operation reads it. The memory is valid as long as the array.
func (s *Scope) Uninitialized(dtype Dtype, shape ...int) (Array, []byte) {
	dims, ok := s.ints("from bytes", shape)
	if !ok {
		return Array{}, nil
	}
	var data unsafe.Pointer
	size := ^C.size_t(0)
	a := s.own(C.mx_uninitialized(s.p, C.int(dtype), &dims.v[0], dims.n, &data, &size))
	if data == nil {
		return a, nil
	}
	return a, unsafe.Slice((*byte)(data), int(size))
}

func (s *Scope) fromMemory(data unsafe.Pointer, n int, dtype Dtype, shape []int) Array {
	dims, ok := s.ints("from bytes", shape)
	if !ok {
		return Array{}
	}
	return s.own(C.mx_from_bytes(s.p, data, C.size_t(n), C.int(dtype), &dims.v[0], dims.n))
}

// CopyTo evaluates a and writes its elements, row-major and little-endian, to dst, whose length must be a.NBytes().
func (s *Scope) CopyTo(a Array, dst []byte) error {
	if s.err != nil {
		return s.err
	}
	s.check(bool(C.mx_copy_to(s.p, a.p, unsafe.Pointer(unsafe.SliceData(dst)), C.size_t(len(dst)))))
	return s.err
}

// Elements evaluates a, of Float32, and views its elements, row-major. They are valid as long as the array, and not to be changed.
func (s *Scope) Elements(a Array) ([]float32, error) {
	if s.err == nil && a.Dtype() != Float32 {
		s.fail("elements", a.Dtype().String(), "want float32")
	}
	if s.err != nil {
		return nil, s.err
	}
	var p unsafe.Pointer
	if s.check(bool(C.mx_elements(s.p, a.p, &p))); s.err != nil {
		return nil, s.err
	}
	return unsafe.Slice((*float32)(p), a.Size()), nil
}

// Bytes evaluates a and returns its elements, row-major and little-endian.
func (s *Scope) Bytes(a Array) ([]byte, error) {
	dst := make([]byte, a.NBytes())
	return dst, s.CopyTo(a, dst)
}

// Float32s evaluates a and returns its elements as float32, converting other dtypes.
func (s *Scope) Float32s(a Array) ([]float32, error) {
	if a.Dtype() != Float32 {
		a = s.AsType(a, Float32)
	}
	dst := make([]float32, a.Size())
	return dst, s.CopyTo(a, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), 4*len(dst)))
}

// Int32s evaluates a and returns its elements as int32, converting other dtypes.
func (s *Scope) Int32s(a Array) ([]int32, error) {
	if a.Dtype() != Int32 {
		a = s.AsType(a, Int32)
	}
	dst := make([]int32, a.Size())
	return dst, s.CopyTo(a, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), 4*len(dst)))
}

// maxDims is the most dimensions, axes or bounds that an operation takes.
const maxDims = 8

type intList struct {
	v [maxDims]C.int
	n C.int
}

// ints converts dimensions or axes for the C side without allocating: the clones keep values on the caller's stack.
func (s *Scope) ints(op string, values []int) (intList, bool) {
	var l intList
	if len(values) > maxDims {
		s.fail(op, fmt.Sprint(slices.Clone(values)), "%d dimensions, at most %d are supported", len(values), maxDims)
		return l, false
	}
	for i, v := range values {
		if int(C.int(v)) != v {
			s.fail(op, fmt.Sprint(slices.Clone(values)), "%d is beyond 32 bits", v)
			return l, false
		}
		l.v[i] = C.int(v)
	}
	l.n = C.int(len(values))
	return l, true
}
