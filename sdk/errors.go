package sdk

import (
	"errors"
	"fmt"
)

// Code classifies an executor's error. It crosses the process boundary; texts may change, codes don't.
type Code int

const (
	CodeInternal        Code = iota // a fault of the executor
	CodeInvalid                     // the request or the config makes no sense
	CodeNotFound                    // a folder, file or tensor is missing
	CodeCorrupt                     // a file is truncated, or disagrees with its header or the config
	CodeUnsupported                 // well formed, but not built
	CodeOutOfMemory                 // would exceed the budget or the machine
	CodeUnknownSequence             // no such sequence on this stage
	CodeNotLoaded                   // a step before a load
	CodeCanceled                    // given up at the host's wish
)

var codeNames = [...]string{"internal", "invalid", "not_found", "corrupt", "unsupported", "out_of_memory", "unknown_sequence", "not_loaded", "canceled"}

func (c Code) String() string {
	if c < 0 || int(c) >= len(codeNames) {
		return fmt.Sprintf("code(%d)", int(c))
	}
	return codeNames[c]
}

// Error is an executor's typed error. Message is complete by itself, lower case, and says what to change.
type Error struct {
	Code    Code
	Message string
	File    string // the file at fault, if one is
	Tensor  string // the tensor at fault, if one is
	Wanted  int64  // with CodeOutOfMemory: bytes that could not be had; 0 where that is not known
	Held    int64  // with CodeOutOfMemory: bytes held already; 0 where that is not known
}

func (e *Error) Error() string { return e.Message }

// Errorf makes an *Error; the text is fmt.Sprintf's.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// CodeOf returns the code of the first *Error in err's chain, CodeInternal if there is none.
func CodeOf(err error) Code {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return CodeInternal
}
