package mlx

// #include "shim.h"
import "C"

import (
	"fmt"
	"unsafe"
)

// Dtype is the element type of an array.
type Dtype uint8

// The element types, numbered as in MLX.
const (
	Bool Dtype = iota
	Uint8
	Uint16
	Uint32
	Uint64
	Int8
	Int16
	Int32
	Int64
	Float16
	Float32
	Float64
	BFloat16
	Complex64
)

var dtypes = [...]struct {
	name string
	size int
}{
	Bool: {"bool", 1}, Uint8: {"uint8", 1}, Uint16: {"uint16", 2}, Uint32: {"uint32", 4}, Uint64: {"uint64", 8},
	Int8: {"int8", 1}, Int16: {"int16", 2}, Int32: {"int32", 4}, Int64: {"int64", 8},
	Float16: {"float16", 2}, Float32: {"float32", 4}, Float64: {"float64", 8}, BFloat16: {"bfloat16", 2},
	Complex64: {"complex64", 8},
}

func (d Dtype) valid() bool { return int(d) < len(dtypes) }

// Size is the bytes of one element; 0 for a value that is no dtype.
func (d Dtype) Size() int {
	if !d.valid() {
		return 0
	}
	return dtypes[d].size
}

func (d Dtype) String() string {
	if !d.valid() {
		return fmt.Sprintf("dtype(%d)", uint8(d))
	}
	return dtypes[d].name
}

// IsFloat reports a real floating type.
func (d Dtype) IsFloat() bool { return d >= Float16 && d <= BFloat16 }

// ParseDtype reads a name as MLX and config files spell it ("bfloat16", "uint8").
func ParseDtype(name string) (Dtype, error) {
	for d := range dtypes {
		if dtypes[d].name == name {
			return Dtype(d), nil
		}
	}
	return 0, fmt.Errorf("mlx: unknown dtype %q", name)
}

// Array refers to an array that a Scope or, after Scope.Keep, the caller owns. It is a pointer: copies refer to the
// same array, and using one after its owner freed it is a bug that nothing catches. The zero Array is "none":
// optional inputs take it, and a failed Scope returns it.
type Array struct{ p *C.mx_array }

// IsZero reports whether a is the zero Array.
func (a Array) IsZero() bool { return a.p == nil }

// Shape is the sizes of the dimensions, outermost first; nil for the zero Array.
func (a Array) Shape() []int {
	if a.p == nil {
		return nil
	}
	shape := make([]int, C.mx_array_ndim(a.p))
	for i := range shape {
		shape[i] = int(C.mx_array_dim(a.p, C.int(i)))
	}
	return shape
}

// NDim is the number of dimensions.
func (a Array) NDim() int {
	if a.p == nil {
		return 0
	}
	return int(C.mx_array_ndim(a.p))
}

// Dim is the size of dimension i; negative i counts from the end. 0 if there is no such dimension.
func (a Array) Dim(i int) int {
	if a.p == nil {
		return 0
	}
	return int(C.mx_array_dim(a.p, C.int(i)))
}

// Size is the number of elements.
func (a Array) Size() int {
	if a.p == nil {
		return 0
	}
	return int(C.mx_array_size(a.p))
}

// NBytes is Size times the element's bytes.
func (a Array) NBytes() int { return a.Size() * a.Dtype().Size() }

// Dtype is the element type; Bool for the zero Array.
func (a Array) Dtype() Dtype {
	if a.p == nil {
		return Bool
	}
	return Dtype(C.mx_array_dtype(a.p))
}

// Free releases an array that Scope.Keep gave to the caller. Freeing the zero Array does nothing.
func (a Array) Free() {
	if a.p != nil {
		C.mx_array_free(a.p)
	}
}

// LiveArrays is the number of arrays in this process that are not freed yet: for tests that look for leaks.
func LiveArrays() int { return int(C.mx_live_arrays()) }

// handles views arrays as the C side's array of pointers.
func handles(arrays []Array) (**C.mx_array, C.int) {
	if len(arrays) == 0 {
		return nil, 0
	}
	return (**C.mx_array)(unsafe.Pointer(unsafe.SliceData(arrays))), C.int(len(arrays))
}
