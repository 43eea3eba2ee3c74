package api

import (
	"encoding/json"
	"encoding/json/jsontext"
	"errors"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/host/api/jsonbody"
	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/mlxcel/mlxcel/host/tokenize"
)

// Roles of messages.
const (
	roleSystem    = "system"
	roleDeveloper = "developer"
	roleUser      = "user"
	roleAssistant = "assistant"
	roleTool      = "tool"
)

// conversation is what a chat template is given.
type conversation struct {
	messages []chat.Message
	extra    map[string]json.RawMessage
}

// conversation reads messages and the template's variables.
func (r *reader) conversation() conversation {
	c := conversation{extra: map[string]json.RawMessage{}}
	if v, ok := r.Need("messages"); ok {
		list := v.Array()
		if v.IsArray() && len(list) == 0 {
			v.Fail("is empty; a conversation needs at least one message")
		}
		for _, m := range list {
			c.messages = append(c.messages, readMessage(m.Object()))
		}
	}
	if v, ok := r.Get("chat_template_kwargs"); ok {
		o := v.Object()
		for _, name := range o.Names() {
			if v, ok := o.Get(name); ok {
				c.extra[name] = json.RawMessage(v.Raw())
			}
		}
	}
	if v, ok := r.Get(reasoningEffort); ok {
		v.Text()
		c.extra[reasoningEffort] = json.RawMessage(v.Raw())
	}
	return c
}

// reasoningEffort is a field that templates of reasoning models know under the same name.
const reasoningEffort = "reasoning_effort"

// readMessage checks a message. Members without a meaning here stay in it, since its template may print them.
func readMessage(o *jsonbody.Object) chat.Message {
	role := ""
	if v, ok := o.Need("role"); ok {
		role = v.Text()
		if !slices.Contains([]string{roleSystem, roleDeveloper, roleUser, roleAssistant, roleTool}, role) {
			v.Fail("is %q, wanted system, developer, user, assistant or tool", role)
		}
	}
	calls := toolCalls(o, role)
	text, has := messageText(o, role, calls)
	for _, name := range []string{"name", "reasoning_content"} {
		if v, ok := o.Get(name); ok {
			v.Text()
		}
	}
	if role == roleTool {
		if v, ok := o.Need("tool_call_id"); ok {
			v.Text()
		}
	}
	for _, name := range []string{"audio", "function_call"} {
		if v, ok := o.Get(name); ok {
			v.Fail("is not supported by this server")
		}
	}
	m, err := message(o)
	if err != nil {
		o.Fail("%v", err)
	}
	m.Content = chat.NullContent()
	if has {
		m.Content = chat.Text(text)
	}
	return m
}

// message decodes what was checked, without the members that are null: those are absent.
func message(o *jsonbody.Object) (m chat.Message, err error) {
	raw := []byte{'{'}
	for _, name := range o.Names() {
		v, ok := o.Get(name)
		if !ok || name == "content" {
			continue
		}
		if len(raw) > 1 {
			raw = append(raw, ',')
		}
		if raw, err = jsontext.AppendQuote(raw, name); err != nil {
			return m, err
		}
		raw = append(append(raw, ':'), v.Raw()...)
	}
	if o.Err() != nil { // then the members may be of any type
		return m, nil
	}
	return m, json.Unmarshal(append(raw, '}'), &m)
}

// messageText reads the content, a string or parts of text, as one text. Only a message that calls tools may do without.
func messageText(o *jsonbody.Object, role string, calls bool) (text string, has bool) {
	if _, ok := o.Get("content"); !ok && role == roleAssistant && calls {
		return "", false
	}
	v, ok := o.Need("content")
	switch {
	case !ok:
		return "", false
	case v.IsString():
		return v.Text(), true
	case !v.IsArray():
		v.Want("a string or an array of parts")
		return "", false
	}
	var b strings.Builder
	for _, part := range v.Array() {
		b.WriteString(partText(part.Object(), role))
	}
	return b.String(), true
}

func partText(o *jsonbody.Object, role string) string {
	v, ok := o.Need("type")
	if !ok {
		return ""
	}
	switch kind := v.Text(); {
	case kind == "text", kind == "refusal" && role == roleAssistant:
		if v, ok := o.Need(kind); ok {
			return v.Text()
		}
	case kind == "image_url", kind == "input_audio", kind == "file", kind == "video_url":
		v.Fail("is %q; this server takes text only", kind)
	default:
		v.Fail("is %q, wanted text", kind)
	}
	return ""
}

// toolCalls checks the calls that the assistant made, and tells whether there are any.
func toolCalls(o *jsonbody.Object, role string) bool {
	v, ok := o.Get("tool_calls")
	if !ok {
		return false
	}
	if role != roleAssistant {
		v.Fail("is only for messages of the assistant")
	}
	calls := v.Array()
	for _, call := range calls {
		readToolCall(call.Object())
	}
	return len(calls) > 0
}

func readToolCall(o *jsonbody.Object) {
	if v, ok := o.Need("id"); ok {
		v.Text()
	}
	if v, ok := o.Get("type"); ok && v.Text() != "function" {
		v.Fail("is %s, wanted \"function\"", v.Raw())
	}
	v, ok := o.Need("function")
	if !ok {
		return
	}
	f := v.Object()
	if v, ok := f.Need("name"); ok {
		v.Text()
	}
	if v, ok := f.Need("arguments"); ok && !v.IsObject() {
		v.Text()
	}
}

// prompt renders a conversation and turns it into token ids.
func (m *Model) prompt(c conversation) (string, []int32, *Error) {
	text, err := m.render(c)
	if err != nil {
		return "", nil, err
	}
	ids, err := m.encode("messages", text, false) // the template writes the special tokens
	return text, ids, err
}

func (m *Model) render(c conversation) (string, *Error) {
	if m.Template == nil {
		return "", unsupported("messages", "the model has no chat template; use /v1/completions, or start the server with --chat-template-file")
	}
	if _, asked := c.extra[reasoningEffort]; asked && !m.templateMentions(reasoningEffort) {
		return "", unsupported(reasoningEffort, "is not supported by this model's chat template")
	}
	messages := chat.WithObjectArguments(c.messages)
	if !m.templateMentions(roleDeveloper) { // older templates know the role under its former name
		for i := range messages {
			if messages[i].Role == roleDeveloper {
				messages[i].Role = roleSystem
			}
		}
	}
	text, err := m.Template.Render(chat.Options{Messages: messages, AddGenerationPrompt: true, Extra: c.extra})
	if err != nil {
		return "", templateError(err)
	}
	return text, nil
}

func (m *Model) templateMentions(word string) bool {
	return slices.ContainsFunc(m.Template.Names(), func(name string) bool {
		source, _ := m.Template.Source(name)
		return strings.Contains(source, word)
	})
}

// templateError blames the conversation for what a template does not like: the template itself was tried when it was loaded.
func templateError(err error) *Error {
	e := invalid("", "%v", err)
	e.Param, e.Code = "messages", CodeTemplateRefused
	if in, ok := errors.AsType[*chat.InputError](err); ok {
		e.Code = CodeInvalidValue
		if in.Field != "messages" {
			e.Param = "chat_template_kwargs." + in.Field
		}
	}
	return e
}

// encode turns text into token ids; param is the field that it came from.
func (m *Model) encode(param, text string, addSpecial bool) ([]int32, *Error) {
	ids, err := m.Tokenizer.Encode(text, addSpecial)
	switch {
	case errors.Is(err, tokenize.ErrTooSlow):
		return nil, invalid(param, "%v", err)
	case err != nil:
		return nil, errorOf(err, param)
	}
	return ids, nil
}
