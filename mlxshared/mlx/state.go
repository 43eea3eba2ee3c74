package mlx

// #include "state.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_state_new
// #cgo nocallback mx_state_new
// #cgo noescape mx_state_copy
// #cgo nocallback mx_state_copy
// #cgo noescape mx_state_read
// #cgo nocallback mx_state_read
// #cgo noescape mx_state_write
// #cgo nocallback mx_state_write
import "C"

import (
	"fmt"
	"unsafe"
)

// State is a matrix of fixed size that one sequence keeps in one layer, zero at first: a convolution's last inputs or a
// recurrence's state. Its length counts the rows of every operation that was built on it, evaluated or not. It can't go
// back: after a failed step, free it.
type State struct{ p *C.mx_state }

// NewState makes a state of rows by cols elements of dtype (Float32, Float16 or BFloat16). Free releases it.
func (s *Stream) NewState(rows, cols int, dtype Dtype) (*State, error) {
	var failure C.mx_failure
	p := C.mx_state_new(s.p, C.int(rows), C.int(cols), C.int(dtype), &failure)
	if p == nil {
		return nil, fmt.Errorf("mlx: new state of %d by %d %s: %w", rows, cols, dtype, failed(&failure))
	}
	return &State{p}, nil
}

// Len is the number of positions that went into the state or will by operations already built.
func (s *State) Len() int { return int(C.mx_state_len(s.p)) }

// Bytes is the memory that the state holds.
func (s *State) Bytes() uint64 { return uint64(C.mx_state_bytes(s.p)) }

// Copy makes an independent copy.
func (s *State) Copy() (*State, error) {
	var failure C.mx_failure
	p := C.mx_state_copy(s.p, &failure)
	if p == nil {
		return nil, fmt.Errorf("mlx: copy state: %w", failed(&failure))
	}
	return &State{p}, nil
}

// Read copies the matrix to data: row-major, little-endian, without padding.
func (s *State) Read(data []byte) error {
	var failure C.mx_failure
	if !C.mx_state_read(s.p, unsafe.Pointer(unsafe.SliceData(data)), C.size_t(len(data)), &failure) {
		return fmt.Errorf("mlx: read state: %w", failed(&failure))
	}
	return nil
}

// Write sets the matrix, as Read gives it, and the number of positions that went into it.
func (s *State) Write(data []byte, length int) error {
	var failure C.mx_failure
	if !C.mx_state_write(s.p, unsafe.Pointer(unsafe.SliceData(data)), C.size_t(len(data)), C.int64_t(length), &failure) {
		return fmt.Errorf("mlx: write state: %w", failed(&failure))
	}
	return nil
}

// Free releases the state once the work already handed to the stream is done with it. Twice is harmless.
func (s *State) Free() {
	if s.p != nil {
		C.mx_state_free(s.p)
		s.p = nil
	}
}
