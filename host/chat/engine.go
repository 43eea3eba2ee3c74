package chat

import (
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/ardanlabs/jinja"
)

// Bounds on a rendering. Python's sandbox has the same bound on ranges; its
// recursion limit stops macros somewhat later.
const (
	maxRange      = 100_000
	maxMacroDepth = 200
)

// program is a compiled template.
type program struct {
	name     string
	template *jinja.Template
}

func compile(name, source string) (p *program, err error) {
	defer func() {
		if r := recover(); r != nil {
			p, err = nil, &CompileError{Name: name, Err: fmt.Errorf("the engine panicked: %v", r)}
		}
	}()
	plain, err := resolveWhitespace(source, adapt)
	if err != nil {
		return nil, &CompileError{Name: name, Err: err}
	}
	t, err := jinja.Compile(plain)
	if err != nil {
		return nil, &CompileError{Name: name, Err: err}
	}
	return &program{name: name, template: t}, nil
}

// render runs the template with the variables, to which it adds the functions
// that transformers gives a template.
func (p *program) render(variables map[string]jinja.Value, now func() time.Time) (text string, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = &RenderError{Name: p.name, Err: fmt.Errorf("the engine panicked: %v\n%s", r, debug.Stack())}
		}
	}()
	for name, f := range functions(now) {
		variables[name] = jinja.NewCallable(name, f)
	}
	text, err = p.template.RenderValues(variables)
	var refused *RefusedError
	if err != nil && !errors.As(err, &refused) {
		return "", &RenderError{Name: p.name, Err: err}
	}
	if err != nil {
		return "", refused
	}
	return text, nil
}
