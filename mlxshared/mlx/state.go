package mlx

// #include "state.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_state_new
// #cgo nocallback mx_state_new
// #cgo noescape mx_state_fork
// #cgo nocallback mx_state_fork
import "C"

import "fmt"

// State is a matrix of fixed size that one sequence keeps in one layer, zero at first: a convolution's last inputs or a
// recurrence's state. Its length counts the rows of every operation that was built on it, evaluated or not. It can't go
// back: after a failed step, free it.
type State struct{ p *C.mx_state }

// NewState makes a state of rows by cols elements of dtype (Float32, Float16 or BFloat16). Free releases it.
func (s *Stream) NewState(rows, cols int, dtype Dtype) (*State, error) {
	var msg *C.char
	p := C.mx_state_new(s.p, C.int(rows), C.int(cols), C.int(dtype), &msg)
	if p == nil {
		return nil, fmt.Errorf("mlx: new state of %d by %d %s: %w", rows, cols, dtype, takeError(msg))
	}
	return &State{p}, nil
}

// Len is the number of positions that went into the state or will by operations already built.
func (s *State) Len() int { return int(C.mx_state_len(s.p)) }

// Bytes is the memory that the state holds.
func (s *State) Bytes() uint64 { return uint64(C.mx_state_bytes(s.p)) }

// Fork makes an independent copy.
func (s *State) Fork() (*State, error) {
	var msg *C.char
	p := C.mx_state_fork(s.p, &msg)
	if p == nil {
		return nil, fmt.Errorf("mlx: fork state: %w", takeError(msg))
	}
	return &State{p}, nil
}

// Free releases the state once the work already handed to the stream is done with it. Twice is harmless.
func (s *State) Free() {
	if s.p != nil {
		C.mx_state_free(s.p)
		s.p = nil
	}
}
