package chat_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/chat"
)

// folder writes files into a new folder.
func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestOpenFinds(t *testing.T) {
	const several = `{"chat_template":[{"name":"default","template":"D"},{"name":"tool_use","template":"T"},{"name":"rag","template":"R"}]}`
	tools := chat.Options{Tools: json.RawMessage("[{}]")}
	for name, c := range map[string]struct {
		files   map[string]string
		options []chat.Option
		input   chat.Options
		want    string
	}{
		"file before config":   {map[string]string{"chat_template.jinja": "F", "tokenizer_config.json": `{"chat_template":"C"}`}, nil, chat.Options{}, "F"},
		"config":               {map[string]string{"tokenizer_config.json": `{"chat_template":"C"}`, "chat_template.json": `{"chat_template":"P"}`}, nil, chat.Options{}, "C"},
		"processor":            {map[string]string{"tokenizer_config.json": `{"chat_template":null}`, "chat_template.json": `{"chat_template":"P"}`}, nil, chat.Options{}, "P"},
		"several":              {map[string]string{"tokenizer_config.json": several}, nil, chat.Options{}, "D"},
		"several, tools":       {map[string]string{"tokenizer_config.json": several}, nil, tools, "T"},
		"several, name":        {map[string]string{"tokenizer_config.json": several}, []chat.Option{chat.WithName("rag")}, tools, "R"},
		"more files":           {map[string]string{"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "A", "additional_chat_templates/x.txt": "X"}, nil, tools, "A"},
		"tools, one template":  {map[string]string{"chat_template.jinja": "F"}, nil, tools, "F"},
		"special token text":   {map[string]string{"tokenizer_config.json": `{"bos_token":"<s>","eos_token":null,"chat_template":"{{ bos_token }}{{ eos_token }}"}`}, nil, chat.Options{}, "<s>"},
		"special token object": {map[string]string{"tokenizer_config.json": `{"eos_token":{"content":"</s>","lstrip":false},"chat_template":"{{ eos_token }}"}`}, nil, chat.Options{}, "</s>"},
		"special tokens map":   {map[string]string{"chat_template.jinja": "{{ bos_token }}{{ unk_token }}", "special_tokens_map.json": `{"unk_token":{"content":"<unk>"},"bos_token":"no"}`, "tokenizer_config.json": `{"bos_token":"<s>"}`}, nil, chat.Options{}, "<s><unk>"},
		"no special token":     {map[string]string{"tokenizer_config.json": `{"add_bos_token":true,"pad_token":{"x":1},"chat_template":"{{ add_bos_token }}{{ pad_token }}"}`}, nil, chat.Options{}, ""},
	} {
		template, err := chat.Open(folder(t, c.files), c.options...)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, err := template.Render(c.input); err != nil || got != c.want {
			t.Errorf("%s: got %q, %v; want %q", name, got, err, c.want)
		}
	}
}

func TestOpenWithFile(t *testing.T) {
	dir := folder(t, map[string]string{"chat_template.jinja": "F", "tokenizer_config.json": `{"bos_token":"<s>"}`, "mine.txt": "M{{ bos_token }}"})
	template, err := chat.Open(dir, chat.WithFile(filepath.Join(dir, "mine.txt")))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := template.Render(chat.Options{}); err != nil || got != "M<s>" {
		t.Errorf("got %q, %v", got, err)
	}
	missing := filepath.Join(dir, "missing")
	if _, err := chat.Open(dir, chat.WithFile(missing)); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), missing) {
		t.Errorf("got %v", err)
	}
}

func TestOpenErrors(t *testing.T) {
	for name, c := range map[string]struct {
		files   map[string]string
		options []chat.Option
		none    bool
		says    string
	}{
		"empty folder":         {nil, nil, true, "chat_template.jinja"},
		"no key":               {map[string]string{"tokenizer_config.json": "{}", "chat_template.json": "{}"}, nil, true, "chat_template.jinja"},
		"empty list":           {map[string]string{"tokenizer_config.json": `{"chat_template":[]}`}, nil, true, "chat_template.jinja"},
		"name":                 {map[string]string{"chat_template.jinja": "F"}, []chat.Option{chat.WithName("rag")}, true, `"rag"; the model has default`},
		"config no JSON":       {map[string]string{"tokenizer_config.json": `{"chat`}, nil, false, "tokenizer_config.json"},
		"map no JSON":          {map[string]string{"special_tokens_map.json": `[]`}, nil, false, "special_tokens_map.json"},
		"key a number":         {map[string]string{"tokenizer_config.json": `{"chat_template":1}`}, nil, false, "tokenizer_config.json"},
		"nameless":             {map[string]string{"tokenizer_config.json": `{"chat_template":[{"template":"T"}]}`}, nil, false, "no name"},
		"processor no JSON":    {map[string]string{"chat_template.json": `x`}, nil, false, "chat_template.json"},
		"processor a number":   {map[string]string{"chat_template.json": `{"chat_template":1}`}, nil, false, "chat_template.json"},
		"template is a folder": {map[string]string{"chat_template.jinja/x": "F"}, nil, false, "chat_template.jinja"},
		"more is a file":       {map[string]string{"additional_chat_templates": "F"}, nil, false, "additional_chat_templates"},
		"does not compile":     {map[string]string{"additional_chat_templates/x.jinja": "{{", "chat_template.jinja": "F"}, nil, false, `"x"`},
	} {
		_, err := chat.Open(folder(t, c.files), c.options...)
		if err == nil || errors.Is(err, chat.ErrNoTemplate) != c.none || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestOnlyNamedTemplates(t *testing.T) {
	dir := folder(t, map[string]string{"tokenizer_config.json": `{"chat_template":[{"name":"b","template":"B"},{"name":"a","template":"A"}]}`})
	template, err := chat.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := template.Render(chat.Options{}); !errors.Is(err, chat.ErrNoTemplate) || !strings.Contains(err.Error(), "a, b") {
		t.Errorf("got %v", err)
	}
	if names := template.Names(); !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("names %v", names)
	}
	if source, ok := template.Source("b"); source != "B" || !ok {
		t.Errorf("source %q, %v", source, ok)
	}
	if _, ok := template.Source("c"); ok {
		t.Error("a source that is not there")
	}
}
