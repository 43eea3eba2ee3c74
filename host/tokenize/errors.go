package tokenize

import (
	"errors"
	"fmt"
)

// ErrTooSlow is returned by Encode when the pre-tokenizer's or normalizer's regular expression used up the time or the
// backtracking depth that one text is allowed.
var ErrTooSlow = errors.New("the tokenizer's pattern takes too long on this text")

// UnsupportedError says that tokenizer.json asks for something this package does not implement.
type UnsupportedError struct {
	Component string // where in the file, such as "pre_tokenizer.Split.behavior"
	Value     string // what stands there
	Want      string // what would be read, such as `"BPE"`; may be empty
}

func (e *UnsupportedError) Error() string {
	msg := fmt.Sprintf("tokenizer.json: %s %q is not supported", e.Component, e.Value)
	if e.Want != "" {
		msg += ", want " + e.Want
	}
	return msg
}

// FormatError says that tokenizer.json is malformed or contradicts itself.
type FormatError struct {
	Component string // where in the file, such as "model.merges"; empty for the file as a whole
	Err       error
}

func (e *FormatError) Error() string {
	if e.Component == "" {
		return fmt.Sprintf("tokenizer.json is malformed: %v", e.Err)
	}
	return fmt.Sprintf("tokenizer.json is malformed: %s: %v", e.Component, e.Err)
}

func (e *FormatError) Unwrap() error { return e.Err }

func malformed(component, format string, args ...any) error {
	return &FormatError{Component: component, Err: fmt.Errorf(format, args...)}
}

// InvalidUTF8Error says that a text is no UTF-8.
type InvalidUTF8Error struct {
	Offset int // of the first byte that belongs to no character, in bytes
}

func (e *InvalidUTF8Error) Error() string {
	return fmt.Sprintf("text is not valid UTF-8: bad byte at offset %d", e.Offset)
}
