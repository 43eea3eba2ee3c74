package tokenize

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// fileJSON is tokenizer.json.
type fileJSON struct {
	Version       string         `json:"version"`
	Truncation    jsontext.Value `json:"truncation"`
	Padding       jsontext.Value `json:"padding"`
	AddedTokens   []addedToken   `json:"added_tokens"`
	Normalizer    jsontext.Value `json:"normalizer"`
	PreTokenizer  jsontext.Value `json:"pre_tokenizer"`
	PostProcessor jsontext.Value `json:"post_processor"`
	Decoder       jsontext.Value `json:"decoder"`
	Model         modelJSON      `json:"model"`
}

// Open reads dir/tokenizer.json. The error wraps fs.ErrNotExist if there is none, *UnsupportedError or *FormatError if
// the file cannot be used.
func Open(dir string) (*Tokenizer, error) {
	path := filepath.Join(dir, "tokenizer.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the model's tokenizer: %w", err)
	}
	t, err := New(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// New reads the contents of a tokenizer.json. The error is an *UnsupportedError or a *FormatError.
func New(data []byte) (*Tokenizer, error) { return newTokenizer(data, defaultLimits()) }

func newTokenizer(data []byte, l limits) (*Tokenizer, error) {
	var f fileJSON
	if err := decodeStrict("", data, &f); err != nil {
		return nil, preferModelType(data, err)
	}
	if f.Version != "1.0" {
		return nil, &UnsupportedError{Component: "version", Value: f.Version, Want: `"1.0"`}
	}
	if err := checkLengthOptions(&f); err != nil {
		return nil, err
	}
	t := &Tokenizer{limits: l}
	var err error
	if t.model, err = f.Model.build(); err != nil {
		return nil, err
	}
	if t.normalizer, err = buildNormalizer(f.Normalizer, l); err != nil {
		return nil, err
	}
	if t.preTokenizer, err = buildPreTokenizer(f.PreTokenizer, l); err != nil {
		return nil, err
	}
	if t.template, err = buildTemplate(f.PostProcessor); err != nil {
		return nil, err
	}
	if t.decoder, err = buildDecoder(f.Decoder); err != nil {
		return nil, err
	}
	if err = t.addVocabulary(f.AddedTokens); err != nil {
		return nil, err
	}
	return t, t.checkTemplate()
}

// preferModelType looks for another model kind behind an error: its fields are unknown too, and say less.
func preferModelType(data []byte, err error) error {
	var f struct {
		Model struct {
			Type string `json:"type"`
		} `json:"model"`
	}
	if json.Unmarshal(data, &f) == nil && f.Model.Type != "" && f.Model.Type != "BPE" {
		return unsupportedModel(f.Model.Type)
	}
	return err
}

func unsupportedModel(kind string) error {
	return &UnsupportedError{Component: "model.type", Value: kind, Want: `"BPE"`}
}

// checkLengthOptions refuses truncation and padding: both change the ids of a single text. Padding to the longest of a
// batch does not, since there is one text in it.
func checkLengthOptions(f *fileJSON) error {
	if !isNull(f.Truncation) {
		return &UnsupportedError{Component: "truncation", Value: string(f.Truncation), Want: "null"}
	}
	if isNull(f.Padding) {
		return nil
	}
	var padding struct {
		Strategy jsontext.Value `json:"strategy"`
		Multiple *int           `json:"pad_to_multiple_of"`
	}
	err := json.Unmarshal(f.Padding, &padding)
	if err != nil || string(padding.Strategy) != `"BatchLongest"` || padding.Multiple != nil {
		return &UnsupportedError{Component: "padding", Value: string(f.Padding), Want: "null"}
	}
	return nil
}

func isNull(v jsontext.Value) bool { return len(v) == 0 || v.Kind() == 'n' }

// decodeStrict reads JSON into a struct and refuses members that the struct lacks, since they might change results.
func decodeStrict(component string, data []byte, into any) error {
	err := json.Unmarshal(data, into, json.RejectUnknownMembers(true))
	var semantic *json.SemanticError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, json.ErrUnknownName) && errors.As(err, &semantic):
		path := strings.ReplaceAll(strings.TrimPrefix(string(semantic.JSONPointer), "/"), "/", ".")
		return &UnsupportedError{Component: join(component, "option"), Value: path}
	}
	return &FormatError{Component: component, Err: err}
}

func join(parts ...string) string {
	if parts[0] == "" {
		parts = parts[1:]
	}
	return strings.Join(parts, ".")
}

// componentType returns the "type" of a normalizer, pre-tokenizer, post-processor or decoder.
func componentType(component string, data jsontext.Value) (string, error) {
	var c struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return "", &FormatError{Component: component, Err: err}
	}
	return c.Type, nil
}

// sequenceMembers reads the list in a component of type Sequence, which key names.
func sequenceMembers(component, key string, data jsontext.Value) ([]jsontext.Value, error) {
	var members map[string]jsontext.Value
	if err := json.Unmarshal(data, &members); err != nil {
		return nil, &FormatError{Component: component, Err: err}
	}
	for name := range members {
		if name != "type" && name != key {
			return nil, &UnsupportedError{Component: component + ".Sequence.option", Value: name}
		}
	}
	var list []jsontext.Value
	if err := json.Unmarshal(members[key], &list); err != nil {
		return nil, malformed(component+"."+key, "%w", err)
	}
	return list, nil
}

// flatten returns the components in data in order, with the members of (nested) Sequences in their place.
func flatten(component, key string, data jsontext.Value) ([]typedComponent, error) {
	if isNull(data) {
		return nil, nil
	}
	return appendFlat(nil, component, key, data, 0)
}

type typedComponent struct {
	kind string
	name string // for errors: component and kind
	data jsontext.Value
}

const maxNesting = 16

func appendFlat(out []typedComponent, component, key string, data jsontext.Value, depth int) ([]typedComponent, error) {
	if depth > maxNesting {
		return nil, malformed(component, "sequences nested deeper than %d", maxNesting)
	}
	kind, err := componentType(component, data)
	if err != nil {
		return nil, err
	}
	if kind != "Sequence" {
		return append(out, typedComponent{kind, component + "." + kind, data}), nil
	}
	members, err := sequenceMembers(component, key, data)
	if err != nil {
		return nil, err
	}
	for _, member := range members {
		if out, err = appendFlat(out, component, key, member, depth+1); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func unsupportedKind(component string, c typedComponent, want string) error {
	return &UnsupportedError{Component: component + ".type", Value: c.kind, Want: want}
}
