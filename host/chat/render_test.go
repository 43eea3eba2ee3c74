package chat_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/chat"
)

// clock stands at the time that the oracle's scripts use.
func clock() time.Time { return time.Date(2026, 3, 5, 9, 7, 8, 0, time.UTC) }

func newTemplate(t *testing.T, source string) *chat.Template {
	t.Helper()
	template, err := chat.New(source, map[string]string{"bos_token": "<s>"}, chat.WithClock(clock))
	if err != nil {
		t.Fatal(err)
	}
	return template
}

// TestJinja2 renders small templates as Jinja2 does. The script of the oracle
// makes sure that the texts are Python's.
func TestJinja2(t *testing.T) {
	var cases []struct{ Template, Text string }
	readJSON(t, "testdata/jinja2.json", &cases)
	for _, c := range cases {
		template, err := chat.New(c.Template, map[string]string{"bos_token": "<s>"}, chat.WithClock(clock))
		if err != nil {
			t.Errorf("%q: %v", c.Template, err)
			continue
		}
		got, err := template.Render(chat.Options{})
		if err != nil || got != c.Text {
			t.Errorf("%q: got %q, %v; want %q", c.Template, got, err, c.Text)
		}
	}
}

// TestModels renders with model folders what mlx-lm rendered with them.
func TestModels(t *testing.T) {
	dirs, err := filepath.Glob("testdata/models/*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no models: %v", err)
	}
	for _, dir := range dirs {
		var golden struct {
			Messages []chat.Message
			Text     string
		}
		readJSON(t, filepath.Join(dir, "chat.json"), &golden)
		template, err := chat.Open(dir)
		if err != nil {
			t.Errorf("%s: %v", dir, err)
			continue
		}
		got, err := template.Render(chat.Options{Messages: golden.Messages, AddGenerationPrompt: true})
		if err != nil || got != golden.Text {
			t.Errorf("%s: got %q, %v; want %q", dir, got, err, golden.Text)
		}
	}
}

func readJSON(t *testing.T, path string, into any) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

func TestVariables(t *testing.T) {
	const schema = `[{"type":"function","function":{"name":"f","parameters":{"z":{"b":1,"a":2.0},"y":["é<",null]}}}]`
	cases := map[string]struct {
		source  string
		options chat.Options
		want    string
	}{
		"tools keep order": {
			"{{ tools | tojson }}", chat.Options{Tools: json.RawMessage(schema)},
			`[{"type": "function", "function": {"name": "f", "parameters": {"z": {"b": 1, "a": 2.0}, "y": ["é<", null]}}}]`,
		},
		"no tools":         {"{{ tools is none }}{{ documents is none }}", chat.Options{}, "TrueTrue"},
		"empty tools":      {"{{ tools is none }}", chat.Options{Tools: json.RawMessage(" [ ] ")}, "True"},
		"null tools":       {"{{ tools is none }}", chat.Options{Tools: json.RawMessage("null")}, "True"},
		"documents":        {"{{ documents[0].title }}", chat.Options{Documents: json.RawMessage(`[{"title":"T"}]`)}, "T"},
		"extra":            {"{{ enable_thinking is false }}", chat.Options{Extra: map[string]json.RawMessage{"enable_thinking": json.RawMessage("false")}}, "True"},
		"extra is special": {"{{ bos_token }}", chat.Options{Extra: map[string]json.RawMessage{"bos_token": json.RawMessage(`"B"`)}}, "B"},
		"prompt":           {"{{ add_generation_prompt }}", chat.Options{AddGenerationPrompt: true}, "True"},
		"big numbers":      {"{{ tools }}", chat.Options{Tools: json.RawMessage("[9007199254740993, 1e3, -0.5]")}, "[9007199254740993, 1000.0, -0.5]"},
	}
	for name, c := range cases {
		got, err := newTemplate(t, c.source).Render(c.options)
		if err != nil || got != c.want {
			t.Errorf("%s: got %q, %v; want %q", name, got, err, c.want)
		}
	}
}

func TestInputErrors(t *testing.T) {
	extra := func(name, raw string) chat.Options {
		return chat.Options{Extra: map[string]json.RawMessage{name: json.RawMessage(raw)}}
	}
	cases := map[string]struct {
		options chat.Options
		field   string
	}{
		"tools no JSON":      {chat.Options{Tools: json.RawMessage("[")}, "tools"},
		"tools an object":    {chat.Options{Tools: json.RawMessage("{}")}, "tools"},
		"tools and more":     {chat.Options{Tools: json.RawMessage("[] 1")}, "tools"},
		"tools nested":       {chat.Options{Tools: json.RawMessage(strings.Repeat("[", 5000) + strings.Repeat("]", 5000))}, "tools"},
		"documents a string": {chat.Options{Documents: json.RawMessage(`"x"`)}, "documents"},
		"extra no JSON":      {extra("x", "tru"), "x"},
		"extra messages":     {extra("messages", "[]"), "messages"},
		"extra range":        {extra("range", "1"), "range"},
		"extra hidden":       {extra("__macro_enter", "1"), "__macro_enter"},
		"number too large":   {extra("x", "1e999"), "x"},
		"arguments no JSON":  {chat.Options{Messages: []chat.Message{{ToolCalls: []chat.ToolCall{{Function: chat.FunctionCall{Arguments: json.RawMessage("{")}}}}}}, "messages"},
	}
	template := newTemplate(t, "x")
	for name, c := range cases {
		_, err := template.Render(c.options)
		var input *chat.InputError
		if !errors.As(err, &input) || input.Field != c.field {
			t.Errorf("%s: got %v, want an InputError of %s", name, err, c.field)
		}
	}
}

func TestRefused(t *testing.T) {
	for source, want := range map[string]string{
		`{{ raise_exception("Roles must <alternate> & 'so on'") }}`:                                        "Roles must <alternate> & 'so on'",
		`{% macro f() %}{{ raise_exception('in a macro') }}{% endmacro %}{% set x %}{{ f() }}{% endset %}`: "in a macro",
		`{% for i in [1] %}{{ raise_exception(message=i) }}{% endfor %}`:                                   "1",
	} {
		got, err := newTemplate(t, source).Render(chat.Options{})
		var refused *chat.RefusedError
		if !errors.As(err, &refused) || refused.Message != want || got != "" {
			t.Errorf("%s: got %q, %v", source, got, err)
		}
	}
}

func TestRenderErrors(t *testing.T) {
	for name, source := range map[string]string{
		"not callable":      "{{ nothing() }}",
		"filter":            "{{ 1 | nothing }}",
		"empty raise":       "{{ raise_exception() }}",
		"range of a string": "{{ range('a') }}",
		"range step":        "{{ range(1, 2, 0) }}",
		"range arguments":   "{{ range() }}",
		"splat":             "{{ range(*1) }}",
		"rsplit of an int":  "{{ (1).rsplit('a') }}",
		"rsplit empty":      "{{ 'a'.rsplit('') }}",
		"keepends":          "{{ 'a'.splitlines(true) }}",
		"format":            "{{ '%f' | format(1) }}",
		"format too few":    "{{ '%s' | format }}",
		"format too many":   "{{ '%s' | format(1, 2) }}",
		"format integer":    "{{ '%d' | format('a') }}",
		"dict method":       "{% set f = {}.items %}{{ f() }}",
		"namespace":         "{{ namespace(1) }}",
		"strftime":          "{{ strftime_now() }}",
		"engine panic":      "{{ 'a' | indent(4611686018427387904, true) | length }}",
	} {
		got, err := newTemplate(t, source).Render(chat.Options{})
		var render *chat.RenderError
		if !errors.As(err, &render) || got != "" {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
}

func TestLimits(t *testing.T) {
	for name, source := range map[string]string{
		"macro":    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
		"macros":   "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ b() }}",
		"call":     "{% macro a() %}{% call a() %}{% endcall %}{% endmacro %}{{ a() }}",
		"range":    "{{ range(30000000) | length }}",
		"range up": "{{ range(-9223372036854775807, 9223372036854775807) | length }}",
	} {
		_, err := newTemplate(t, source).Render(chat.Options{})
		var limit *chat.LimitError
		if !errors.As(err, &limit) {
			t.Errorf("%s: got %v, want a LimitError", name, err)
		}
	}
	got, err := newTemplate(t, "{% macro a() %}x{% endmacro %}{% for i in range(1000) %}{{ a() }}{% endfor %}").Render(chat.Options{})
	if err != nil || got != strings.Repeat("x", 1000) {
		t.Errorf("macros one after the other: %q, %v", got, err)
	}
	if got, err := newTemplate(t, "{{ range(9223372036854775806, 9223372036854775807, 5) | length }}").Render(chat.Options{}); err != nil || got != "1" {
		t.Errorf("range at the end of int64: %q, %v", got, err)
	}
}

func TestCompileErrors(t *testing.T) {
	for name, source := range map[string]string{
		"expression":     "{{ 'a'",
		"statement":      "{% if true",
		"comment":        "a {# b",
		"string":         "{{ 'a }}",
		"bracket":        "{{ a) }}",
		"raw":            "{% raw %} a",
		"raw tag":        "{% raw",
		"raw end":        "{% raw %} a {% endraw",
		"raw with more":  "{% raw x %}{% endraw %}",
		"unknown":        "{% import 'x' %}",
		"no endif":       "{% if true %}",
		"many brackets":  "{{ " + strings.Repeat("(", 100_000) + strings.Repeat(")", 100_000) + " }}",
		"many bytes":     strings.Repeat("a", 300_000),
		"no expression":  "{{ ( }}",
		"bracket closer": "{{ {'a': 1 }}",
	} {
		_, err := chat.New(source, nil)
		var compile *chat.CompileError
		if !errors.As(err, &compile) || len(err.Error()) > 300 {
			t.Errorf("%s: got %.300v", name, err)
		}
	}
}

func TestConcurrentRender(t *testing.T) {
	template := newTemplate(t, "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s ~ m.content %}{% endfor %}{{ n.s }}")
	var wait sync.WaitGroup
	for _, text := range []string{"a", "b", "c", "d"} {
		wait.Go(func() {
			got, err := template.Render(chat.Options{Messages: []chat.Message{{Content: chat.Text(text)}, {Content: chat.Text(text)}}})
			if err != nil || got != text+text {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
	wait.Wait()
}
