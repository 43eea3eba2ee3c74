// Package chat owns chat templates: it finds a model's Jinja template and
// renders conversations with it as Hugging Face transformers does.
//
// A template is a program. One may come from the model's folder or from a file
// that the operator names, never from a request.
package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ardanlabs/jinja"
)

// Renderer turns a conversation into the text of a prompt. The text already
// holds the special tokens that the model wants: encode it without adding more.
// A Renderer is safe for concurrent use.
type Renderer interface {
	Render(Options) (string, error)
}

// Options is what a conversation gives to a template.
type Options struct {
	Messages []Message
	// Tools is a JSON array of tool definitions, empty for none. The order of
	// keys is kept.
	Tools json.RawMessage
	// Documents is a JSON array of documents to answer from, empty for none.
	Documents json.RawMessage
	// AddGenerationPrompt ends the text with the opening of an assistant's turn.
	AddGenerationPrompt bool
	// Extra holds a template's further variables as JSON, such as
	// enable_thinking.
	Extra map[string]json.RawMessage
}

// Names of the templates that have a meaning in a list of several, from
// transformers' get_chat_template.
const (
	nameDefault = "default"
	nameToolUse = "tool_use"
)

// Template is a model's chat template, or its several ones with their names.
type Template struct {
	programs map[string]*program
	sources  map[string]string
	specials map[string]string
	chosen   string // a name asked for; empty to choose by the conversation
	now      func() time.Time
}

var _ Renderer = (*Template)(nil)

// Option changes how a template is made.
type Option func(*settings)

type settings struct {
	file string
	name string
	now  func() time.Time
}

// WithFile takes the template from a file in place of the model's own.
func WithFile(path string) Option { return func(s *settings) { s.file = path } }

// WithName takes the template of this name where a model has several. Without
// it a conversation with tools takes "tool_use" if there is one, and any other
// takes "default".
func WithName(name string) Option { return func(s *settings) { s.name = name } }

// WithClock is where strftime_now gets the time. Without it, it is time.Now.
func WithClock(now func() time.Time) Option { return func(s *settings) { s.now = now } }

// New compiles one template. The specials are variables such as bos_token. Of the
// options only WithClock has a meaning here.
// The error is a *CompileError.
func New(source string, specials map[string]string, options ...Option) (*Template, error) {
	return newTemplate(map[string]string{nameDefault: source}, specials, gather(options))
}

func gather(options []Option) settings {
	s := settings{now: time.Now}
	for _, o := range options {
		o(&s)
	}
	return s
}

func newTemplate(sources, specials map[string]string, s settings) (*Template, error) {
	t := &Template{
		programs: make(map[string]*program, len(sources)),
		sources:  sources,
		specials: specials,
		chosen:   s.name,
		now:      s.now,
	}
	if t.chosen != "" && sources[t.chosen] == "" {
		return nil, fmt.Errorf("%w: none is named %q; the model has %s", ErrNoTemplate, t.chosen, strings.Join(t.Names(), ", "))
	}
	for _, name := range t.Names() {
		p, err := compile(name, sources[name])
		if err != nil {
			return nil, err
		}
		t.programs[name] = p
	}
	return t, nil
}

// Names are the names of the model's templates, sorted. A lone one is "default".
func (t *Template) Names() []string { return slices.Sorted(maps.Keys(t.sources)) }

// Source is the text of the template of that name.
func (t *Template) Source(name string) (string, bool) {
	s, ok := t.sources[name]
	return s, ok
}

// Render renders the conversation. The error is a *RefusedError when the
// template itself turns the conversation down, an *InputError when something in
// the options is not what a template can be given, a *RenderError when the
// template fails, and wraps ErrNoTemplate when a model has only templates with
// names and none was chosen.
func (t *Template) Render(o Options) (string, error) {
	variables, err := t.variables(o)
	if err != nil {
		return "", err
	}
	p, err := t.choose(!variables["tools"].IsNone())
	if err != nil {
		return "", err
	}
	return p.render(variables, t.now)
}

func (t *Template) choose(tools bool) (*program, error) {
	if t.chosen != "" {
		return t.programs[t.chosen], nil
	}
	if p := t.programs[nameToolUse]; tools && p != nil {
		return p, nil
	}
	if p := t.programs[nameDefault]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%w for use without a name: choose one of %s", ErrNoTemplate, strings.Join(t.Names(), ", "))
}

// variables are those that transformers' render_jinja_template passes.
func (t *Template) variables(o Options) (map[string]jinja.Value, error) {
	v := make(map[string]jinja.Value, len(t.specials)+len(o.Extra)+8)
	for name, s := range t.specials {
		v[name] = jinja.NewString(s)
	}
	for name, extra := range o.Extra {
		value, err := extraVariable(name, extra)
		if err != nil {
			return nil, &InputError{Field: name, Err: err}
		}
		v[name] = value
	}
	messages, err := list(o.Messages, Message.value)
	if err != nil {
		return nil, &InputError{Field: "messages", Err: err}
	}
	v["messages"] = messages
	v["add_generation_prompt"] = jinja.NewBool(o.AddGenerationPrompt)
	for name, raw := range map[string]json.RawMessage{"tools": o.Tools, "documents": o.Documents} {
		value, err := optionalList(raw)
		if err != nil {
			return nil, &InputError{Field: name, Err: err}
		}
		v[name] = value
	}
	return v, nil
}

// extraVariable decodes a further variable, which must not take the place of
// one that the package sets itself: extras may come from a request.
func extraVariable(name string, raw json.RawMessage) (jinja.Value, error) {
	switch name {
	case "messages", "tools", "documents", "add_generation_prompt", "range", "raise_exception", "strftime_now":
		return jinja.Value{}, errors.New("the name is taken")
	}
	if strings.HasPrefix(name, "__") {
		return jinja.Value{}, errors.New("a name must not begin with two underscores")
	}
	return decodeValue(raw)
}

// optionalList is None for no JSON, null and an empty list, as transformers has
// it for tools and documents that are not there.
func optionalList(raw json.RawMessage) (jinja.Value, error) {
	if len(raw) == 0 {
		return jinja.None(), nil
	}
	v, err := decodeValue(raw)
	if err != nil || v.IsNone() {
		return jinja.None(), err
	}
	if !v.IsList() {
		return jinja.Value{}, errors.New("wanted a JSON array")
	}
	if v.AsList().Len() == 0 {
		return jinja.None(), nil
	}
	return v, nil
}
