package chat

import (
	"errors"
	"fmt"
)

// ErrNoTemplate says that a model folder holds no chat template in any of the
// places where one may be. Test for it with errors.Is.
var ErrNoTemplate = errors.New("no chat template")

// CompileError says that a template is not one that can be rendered.
type CompileError struct {
	Name string // the template's name, "default" for a lone one
	Err  error
}

func (e *CompileError) Error() string {
	return fmt.Sprintf("chat template %q does not compile: %v", e.Name, e.Err)
}

func (e *CompileError) Unwrap() error { return e.Err }

// InputError says which part of Options cannot be given to a template.
type InputError struct {
	Field string // "messages", "tools", "documents" or the name of an extra variable
	Err   error
}

func (e *InputError) Error() string {
	return fmt.Sprintf("chat template input %s: %v", e.Field, e.Err)
}

func (e *InputError) Unwrap() error { return e.Err }

// RefusedError carries the words with which a template itself refused the
// conversation, through its raise_exception. The conversation is at fault, not
// the template.
type RefusedError struct{ Message string }

func (e *RefusedError) Error() string {
	return "the model's chat template refuses the conversation: " + e.Message
}

// RenderError says that a template failed while it was rendered.
type RenderError struct {
	Name string // the template's name, "default" for a lone one
	Err  error
}

func (e *RenderError) Error() string {
	return fmt.Sprintf("chat template %q cannot be rendered: %v", e.Name, e.Err)
}

func (e *RenderError) Unwrap() error { return e.Err }

// LimitError says that a template went past a bound that keeps it from taking
// the process with it. It is found inside a CompileError or a RenderError.
type LimitError struct {
	What  string // what is bounded, with its unit
	Limit int
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("%s: more than %d", e.What, e.Limit)
}

// UnsafeTemplateError says how a template failed its trial in a process of its
// own. Such a template must not be rendered by this process.
type UnsafeTemplateError struct {
	Reason string
	Err    error // what lies under it, nil if there is only the reason
}

func (e *UnsafeTemplateError) Error() string {
	return "unsafe chat template: " + e.Reason + " (use another with a template file of your own)"
}

func (e *UnsafeTemplateError) Unwrap() error { return e.Err }
