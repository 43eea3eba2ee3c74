package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Files of a model folder, as transformers writes them.
const (
	fileTemplate        = "chat_template.jinja"
	dirMoreTemplates    = "additional_chat_templates" // NAME.jinja each
	fileTokenizerConfig = "tokenizer_config.json"
	fileTemplateJSON    = "chat_template.json" // of a multimodal processor
	fileSpecialTokens   = "special_tokens_map.json"
)

// Open reads the chat template of the model in dir and its special tokens. The
// template is the file of WithFile, else chat_template.jinja (with
// additional_chat_templates), else the chat_template of tokenizer_config.json,
// else that of chat_template.json. The error wraps ErrNoTemplate when there is
// none, is a *CompileError when it cannot be used, and names the file when one
// cannot be read.
func Open(dir string, options ...Option) (*Template, error) {
	s := gather(options)
	config, err := readObject(filepath.Join(dir, fileTokenizerConfig))
	if err != nil {
		return nil, err
	}
	specials, err := specialTokens(dir, config)
	if err != nil {
		return nil, err
	}
	sources, err := findSources(dir, s.file, config)
	if err != nil {
		return nil, err
	}
	if len(sources) == 0 {
		return nil, fmt.Errorf("%w in %s: neither %s nor a chat_template in %s or %s; give a template file",
			ErrNoTemplate, dir, fileTemplate, fileTokenizerConfig, fileTemplateJSON)
	}
	return newTemplate(sources, specials, s)
}

func findSources(dir, file string, config map[string]json.RawMessage) (map[string]string, error) {
	if file != "" {
		source, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("chat template file: %w", err)
		}
		return map[string]string{nameDefault: string(source)}, nil
	}
	sources, err := templateFiles(dir)
	if err != nil || len(sources) > 0 {
		return sources, err
	}
	sources, err = inConfig(config["chat_template"])
	if err != nil {
		return nil, fmt.Errorf("chat_template in %s: %w", filepath.Join(dir, fileTokenizerConfig), err)
	}
	if len(sources) > 0 {
		return sources, nil
	}
	processor, err := readObject(filepath.Join(dir, fileTemplateJSON))
	if err != nil {
		return nil, err
	}
	sources, err = inConfig(processor["chat_template"])
	if err != nil {
		return nil, fmt.Errorf("chat_template in %s: %w", filepath.Join(dir, fileTemplateJSON), err)
	}
	return sources, nil
}

// templateFiles reads the templates that are files of their own.
func templateFiles(dir string) (map[string]string, error) {
	paths := map[string]string{nameDefault: filepath.Join(dir, fileTemplate)}
	more, err := os.ReadDir(filepath.Join(dir, dirMoreTemplates))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("chat templates: %w", err)
	}
	for _, entry := range more {
		if name, ok := strings.CutSuffix(entry.Name(), ".jinja"); ok {
			paths[name] = filepath.Join(dir, dirMoreTemplates, entry.Name())
		}
	}
	sources := map[string]string{}
	for name, path := range paths {
		source, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("chat template: %w", err)
		}
		sources[name] = string(source)
	}
	return sources, nil
}

// inConfig reads a chat_template key: a string, or a list of {name, template}.
func inConfig(raw json.RawMessage) (map[string]string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return map[string]string{nameDefault: one}, nil
	}
	var several []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if err := json.Unmarshal(raw, &several); err != nil {
		return nil, fmt.Errorf("wanted a string or a list of objects with name and template: %w", err)
	}
	sources := map[string]string{}
	for _, t := range several {
		if t.Name == "" {
			return nil, errors.New("a template in the list has no name")
		}
		sources[t.Name] = t.Template
	}
	return sources, nil
}

// specialTokens reads every NAME_token that has a text, from
// tokenizer_config.json and, where that has none, from special_tokens_map.json.
func specialTokens(dir string, config map[string]json.RawMessage) (map[string]string, error) {
	other, err := readObject(filepath.Join(dir, fileSpecialTokens))
	if err != nil {
		return nil, err
	}
	specials := map[string]string{}
	for _, from := range []map[string]json.RawMessage{other, config} {
		for key, raw := range from {
			if token, ok := tokenText(raw); ok && strings.HasSuffix(key, "_token") {
				specials[key] = token
			}
		}
	}
	return specials, nil
}

// tokenText reads a token: a string, or an object with its content.
func tokenText(raw json.RawMessage) (string, bool) {
	var text *string
	if json.Unmarshal(raw, &text) == nil {
		if text == nil {
			return "", false
		}
		return *text, true
	}
	var object struct {
		Content *string `json:"content"`
	}
	if json.Unmarshal(raw, &object) != nil || object.Content == nil {
		return "", false
	}
	return *object.Content, true
}

// readObject reads a JSON object from a file; one that is not there is empty.
func readObject(path string) (map[string]json.RawMessage, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("chat template: %w", err)
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(raw, &object); err != nil {
		return nil, fmt.Errorf("chat template: %s is no JSON object: %w", path, err)
	}
	return object, nil
}
