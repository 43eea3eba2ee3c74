package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/ardanlabs/jinja"
)

// Message is one turn of a conversation in the shape of OpenAI's chat API, as
// Hugging Face templates expect it. One that is decoded from JSON keeps all of
// its members, also those without a field here, and their order: a template can
// print a message as a whole.
type Message struct {
	Role             string
	Content          Content
	ReasoningContent string
	ToolCalls        []ToolCall
	Name             string
	ToolCallID       string

	rest members
}

// ToolCall is one call of a tool that the assistant asked for.
type ToolCall struct {
	ID       string
	Type     string // "function"
	Function FunctionCall

	rest members
}

// FunctionCall names a function and gives its arguments: a JSON object, or a
// JSON string that holds one as text, as OpenAI's API sends it. Templates
// differ in which of the two they can print; most want the object.
type FunctionCall struct {
	Name      string
	Arguments json.RawMessage

	rest members
}

// Content is what a message says: nothing at all (the zero value), null, a
// text, or a list of parts.
type Content struct {
	raw json.RawMessage
}

// Text is the content that is one string.
func Text(s string) Content {
	raw, err := json.Marshal(s)
	if err != nil {
		panic(err) // a string always has a JSON form
	}
	return Content{raw: raw}
}

// NullContent is the content null, which an assistant's message with tool calls
// carries.
func NullContent() Content { return Content{raw: json.RawMessage("null")} }

// Parts is the content that is a list of typed parts, each a JSON object such
// as {"type":"text","text":"…"}.
func Parts(parts ...json.RawMessage) (Content, error) {
	raw, err := json.Marshal(parts)
	if err != nil {
		return Content{}, fmt.Errorf("content parts: %w", err)
	}
	return Content{raw: raw}, nil
}

// JSON is the content's JSON, empty when the message has none.
func (c Content) JSON() json.RawMessage { return c.raw }

// AsText is the content's string, and whether it is one.
func (c Content) AsText() (string, bool) {
	if len(c.raw) == 0 || c.raw[0] != '"' {
		return "", false
	}
	var s string
	err := json.Unmarshal(c.raw, &s)
	return s, err == nil
}

// UnmarshalJSON reads a message. An unknown member is kept for the template.
func (m *Message) UnmarshalJSON(raw []byte) error {
	*m = Message{}
	return m.rest.decode(raw, map[string]any{
		"role":              &m.Role,
		"content":           &m.Content.raw,
		"reasoning_content": &m.ReasoningContent,
		"tool_calls":        &m.ToolCalls,
		"name":              &m.Name,
		"tool_call_id":      &m.ToolCallID,
	})
}

// UnmarshalJSON reads a tool call. An unknown member is kept for the template.
func (c *ToolCall) UnmarshalJSON(raw []byte) error {
	*c = ToolCall{}
	return c.rest.decode(raw, map[string]any{"id": &c.ID, "type": &c.Type, "function": &c.Function})
}

// UnmarshalJSON reads a function call. An unknown member is kept for the
// template.
func (f *FunctionCall) UnmarshalJSON(raw []byte) error {
	*f = FunctionCall{}
	return f.rest.decode(raw, map[string]any{"name": &f.Name, "arguments": &f.Arguments})
}

// WithObjectArguments gives the conversation back with each tool call's
// arguments as an object where they came as the text of one. The messages given
// stay as they are.
func WithObjectArguments(messages []Message) []Message {
	out := slices.Clone(messages)
	for i := range out {
		out[i].ToolCalls = slices.Clone(out[i].ToolCalls)
		for j := range out[i].ToolCalls {
			f := &out[i].ToolCalls[j].Function
			var text string
			var object map[string]json.RawMessage
			if json.Unmarshal(f.Arguments, &text) == nil && json.Unmarshal([]byte(text), &object) == nil && object != nil {
				f.Arguments = json.RawMessage(text)
			}
		}
	}
	return out
}

func (m Message) value() (jinja.Value, error) {
	fields := []field{
		text("role", m.Role),
		raw("content", m.Content.raw),
		text("reasoning_content", m.ReasoningContent),
		{key: "tool_calls"},
		text("name", m.Name),
		text("tool_call_id", m.ToolCallID),
	}
	if len(m.ToolCalls) > 0 {
		fields[3].value = func() (jinja.Value, error) { return list(m.ToolCalls, ToolCall.value) }
	}
	return m.rest.object(fields)
}

func (c ToolCall) value() (jinja.Value, error) {
	fields := []field{text("id", c.ID), text("type", c.Type), {key: "function"}}
	if !c.Function.empty() {
		fields[2].value = c.Function.value
	}
	return c.rest.object(fields)
}

func (f FunctionCall) value() (jinja.Value, error) {
	return f.rest.object([]field{text("name", f.Name), raw("arguments", f.Arguments)})
}

func (f FunctionCall) empty() bool { return f.Name == "" && len(f.Arguments) == 0 }

// list turns each element into a template's value.
func list[T any](elements []T, value func(T) (jinja.Value, error)) (jinja.Value, error) {
	items := make([]jinja.Value, len(elements))
	for i, e := range elements {
		v, err := value(e)
		if err != nil {
			return jinja.Value{}, fmt.Errorf("[%d]: %w", i, err)
		}
		items[i] = v
	}
	return jinja.NewList(items), nil
}

// field is one member of an object: a key and its value, nil if it is absent.
type field struct {
	key   string
	value func() (jinja.Value, error)
}

func text(key, s string) field {
	if s == "" {
		return field{key: key}
	}
	return field{key, func() (jinja.Value, error) { return jinja.NewString(s), nil }}
}

func raw(key string, r json.RawMessage) field {
	if len(r) == 0 {
		return field{key: key}
	}
	return field{key, func() (jinja.Value, error) { return decodeValue(r) }}
}

// members is what a decoded object holds besides its typed fields: the order of
// all its members, and the JSON of each that has no field or leaves its field
// empty ("", [], null), which the field cannot tell from an absent member.
type members struct {
	order []string
	kept  map[string]json.RawMessage
}

// decode reads an object into the fields given and into m.
func (m *members) decode(object []byte, fields map[string]any) error {
	if err := json.Unmarshal(object, &m.kept); err != nil {
		return err
	}
	if m.kept == nil {
		return errors.New("wanted an object, got null")
	}
	v, err := decodeValue(object)
	if err != nil {
		return err
	}
	m.order = v.AsDict().Keys
	for key, field := range fields {
		value, ok := m.kept[key]
		if !ok {
			continue
		}
		if err := json.Unmarshal(value, field); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		if !empty(field) {
			delete(m.kept, key)
		}
	}
	return nil
}

func empty(field any) bool {
	switch f := field.(type) {
	case *string:
		return *f == ""
	case *json.RawMessage:
		return len(*f) == 0
	case *[]ToolCall:
		return len(*f) == 0
	case *FunctionCall:
		return f.empty()
	}
	return false
}

// object puts the members together: in the order in which they were read, then
// the fields that were set since.
func (m members) object(fields []field) (jinja.Value, error) {
	set := make(map[string]func() (jinja.Value, error), len(m.kept)+len(fields))
	for key, value := range m.kept {
		set[key] = raw(key, value).value
	}
	order := slices.Clone(m.order)
	for _, f := range fields {
		if f.value != nil {
			set[f.key] = f.value
			order = append(order, f.key)
		}
	}
	object := jinja.NewDict()
	for _, key := range order {
		if set[key] == nil || object.AsDict().Has(key) {
			continue
		}
		v, err := set[key]()
		if err != nil {
			return jinja.Value{}, fmt.Errorf("%s: %w", key, err)
		}
		object.AsDict().Set(key, v)
	}
	return object, nil
}
