package mlx

// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"
)

// Kind is what kind of error an operation met.
type Kind uint8

// The kinds.
const (
	KindInvalid  Kind = C.MX_INVALID   // a wrong argument or use
	KindNoMemory Kind = C.MX_NO_MEMORY // memory that could not be had; what the operation was to change may be half changed
	KindDevice   Kind = C.MX_DEVICE    // anything else
)

func (k Kind) String() string {
	switch k {
	case KindInvalid:
		return "invalid"
	case KindNoMemory:
		return "no memory"
	}
	return "device"
}

// OpError is an operation that failed.
type OpError struct {
	Op     string // "linear"
	Inputs string // dtypes and shapes: "float32[4,8], none"
	Reason string
	Kind   Kind
}

func (e *OpError) Error() string { return fmt.Sprintf("mlx: %s(%s): %s", e.Op, e.Inputs, e.Reason) }

// callError is a call that failed beside a scope's operations.
type callError struct {
	reason string
	kind   Kind
}

func (e *callError) Error() string { return e.reason }

// IsNoMemory reports whether err came of memory that could not be had.
func IsNoMemory(err error) bool {
	var op *OpError
	var call *callError
	return errors.As(err, &op) && op.Kind == KindNoMemory || errors.As(err, &call) && call.kind == KindNoMemory
}

// WantedBytes returns how many bytes an error of KindNoMemory could not have; 0 where that is not known.
func WantedBytes(err error) int64 {
	reason := ""
	if op, ok := errors.AsType[*OpError](err); ok {
		reason = op.Reason
	} else if call, ok := errors.AsType[*callError](err); ok {
		reason = call.reason
	}
	_, rest, _ := strings.Cut(reason, "no memory for ") // class NoMemory's words
	var bytes int64
	if _, err := fmt.Sscanf(rest, "%d bytes", &bytes); err != nil {
		return 0
	}
	return bytes
}

// failed turns what the C side says of a failed call into an error.
func failed(f *C.mx_failure) error {
	kind := Kind(f.kind)
	if f.text == nil {
		if kind == KindInvalid { // untouched: the object is no more
			return ErrClosed
		}
		return &callError{kind.String(), kind}
	}
	defer C.free(unsafe.Pointer(f.text))
	return &callError{C.GoString(f.text), kind}
}
