package chat_test

import (
	"encoding/json"
	"testing"

	"github.com/mlxcel/mlxcel/host/chat"
)

// render prints a message as a template sees it.
func render(t *testing.T, m chat.Message) string {
	t.Helper()
	got, err := newTemplate(t, "{{ messages[0] | tojson }}").Render(chat.Options{Messages: []chat.Message{m}})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestMessageAsRead(t *testing.T) {
	for _, raw := range []string{
		`{"content": null, "role": "assistant", "tool_calls": [{"function": {"arguments": {"b": 1, "a": [2.0]}, "name": "f"}, "index": 0, "id": "1", "type": "function"}]}`,
		`{"role": "assistant", "name": null, "tool_calls": [], "reasoning_content": "", "content": "", "x": {"z": 1, "y": 2}}`,
		`{"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "<é>"}], "name": "f"}`,
		`{"role": null, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}, {"function": {}}, {"id": null}]}`,
		`{}`,
	} {
		var m chat.Message
		if err := json.Unmarshal([]byte(raw), &m); err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		if got := render(t, m); got != raw {
			t.Errorf("got %s\nwant %s", got, raw)
		}
	}
}

func TestMessageAsMade(t *testing.T) {
	parts, err := chat.Parts(json.RawMessage(`{"type":"text","text":"a"}`), json.RawMessage(`{"type":"image"}`))
	if err != nil {
		t.Fatal(err)
	}
	for want, m := range map[string]chat.Message{
		`{"role": "user", "content": "a\nb"}`: {Role: "user", Content: chat.Text("a\nb")},
		`{"role": "user"}`:                    {Role: "user"},
		`{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}`: {Role: "user", Content: parts},
		`{"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}`: {
			Role: "assistant", Content: chat.NullContent(), ReasoningContent: "r",
			ToolCalls: []chat.ToolCall{{ID: "1", Type: "function", Function: chat.FunctionCall{Name: "f", Arguments: json.RawMessage(`{"a":1}`)}}},
		},
		`{"role": "tool", "content": "", "name": "f", "tool_call_id": "1"}`: {Role: "tool", Content: chat.Text(""), Name: "f", ToolCallID: "1"},
	} {
		if got := render(t, m); got != want {
			t.Errorf("got %s\nwant %s", got, want)
		}
	}
	if _, err := chat.Parts(json.RawMessage("{")); err == nil {
		t.Error("parts that are no JSON were taken")
	}
}

func TestMessageChanged(t *testing.T) {
	var m chat.Message
	if err := json.Unmarshal([]byte(`{"x":1,"role":"developer","name":null,"content":"a","tool_call_id":"1"}`), &m); err != nil {
		t.Fatal(err)
	}
	m.Role, m.Name, m.Content, m.ToolCallID, m.ReasoningContent = "system", "n", chat.Content{}, "", "r"
	want := `{"x": 1, "role": "system", "name": "n", "reasoning_content": "r"}`
	if got := render(t, m); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

func TestMessageErrors(t *testing.T) {
	for _, raw := range []string{
		`[]`, `null`, `"a"`, `{"role":1}`, `{"tool_calls":{}}`, `{"tool_calls":[null]}`, `{"tool_calls":[{"function":[]}]}`, `{"x":1e999}`,
	} {
		var m chat.Message
		if err := m.UnmarshalJSON([]byte(raw)); err == nil {
			t.Errorf("%s was taken", raw)
		}
	}
}

func TestContentAsText(t *testing.T) {
	for _, c := range []struct {
		content chat.Content
		text    string
		ok      bool
	}{
		{chat.Text("é\""), "é\"", true}, {chat.Text(""), "", true}, {chat.NullContent(), "", false}, {chat.Content{}, "", false},
	} {
		if text, ok := c.content.AsText(); text != c.text || ok != c.ok {
			t.Errorf("%s: got %q, %v", c.content.JSON(), text, ok)
		}
	}
}

func TestWithObjectArguments(t *testing.T) {
	call := func(arguments string) chat.Message {
		return chat.Message{ToolCalls: []chat.ToolCall{{Function: chat.FunctionCall{Arguments: json.RawMessage(arguments)}}}}
	}
	for given, want := range map[string]string{
		`"{\"b\": 1, \"a\": 2}"`: `{"b": 1, "a": 2}`,
		`"not JSON"`:             `"not JSON"`,
		`"null"`:                 `"null"`,
		`"[1]"`:                  `"[1]"`,
		`{"a":1}`:                `{"a":1}`,
		``:                       ``,
	} {
		before := []chat.Message{call(given)}
		after := chat.WithObjectArguments(before)
		if got := string(after[0].ToolCalls[0].Function.Arguments); got != want {
			t.Errorf("%s: got %s, want %s", given, got, want)
		}
		if got := string(before[0].ToolCalls[0].Function.Arguments); got != given {
			t.Errorf("%s: the message given became %s", given, got)
		}
	}
}
