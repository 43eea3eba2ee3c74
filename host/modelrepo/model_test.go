package modelrepo

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOpen(t *testing.T) {
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  Model // of which ModelType, ContextLength and EOS are compared
		err   string
	}{
		{"plain", map[string]string{"config.json": `{"model_type":"llama","eos_token_id":2,"max_position_embeddings":8192}`},
			Model{ModelType: "llama", ContextLength: 8192, EOS: []int32{2}}, ""},
		{"several ids", map[string]string{"config.json": `{"model_type":"llama","eos_token_id":[3,4,3]}`},
			Model{ModelType: "llama", EOS: []int32{3, 4}}, ""},
		{"generation config wins", map[string]string{"config.json": `{"model_type":"llama","eos_token_id":2}`, "generation_config.json": `{"eos_token_id":[5]}`},
			Model{ModelType: "llama", EOS: []int32{5}}, ""},
		{"generation config without ids", map[string]string{"config.json": `{"model_type":"llama","eos_token_id":2}`, "generation_config.json": `{"eos_token_id":null}`},
			Model{ModelType: "llama", EOS: []int32{2}}, ""},
		{"text tower", map[string]string{"config.json": `{"model_type":"vlm","text_config":{"max_position_embeddings":64,"eos_token_id":1}}`},
			Model{ModelType: "vlm", ContextLength: 64, EOS: []int32{1}}, ""},
		{"python's Infinity", map[string]string{"config.json": `{"model_type":"h","limits":[0.0, Infinity]}`}, Model{ModelType: "h"}, ""},
		{"no config", nil, Model{}, "no config.json"},
		{"config is no JSON", map[string]string{"config.json": `{`}, Model{}, "config.json is not a JSON object"},
		{"no model_type", map[string]string{"config.json": `{}`}, Model{}, "no model_type"},
		{"eos of the wrong kind", map[string]string{"config.json": `{"model_type":"llama","eos_token_id":"x"}`}, Model{}, "want token ids"},
		{"eos below zero", map[string]string{"config.json": `{"model_type":"llama","eos_token_id":[-1]}`}, Model{}, "want token ids"},
		{"generation config is no JSON", map[string]string{"config.json": `{"model_type":"llama"}`, "generation_config.json": `[`}, Model{}, "generation_config.json"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, tc.files)
			m, err := Open(dir)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("error %v, want one with %q", err, tc.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if m.ModelType != tc.want.ModelType || m.ContextLength != tc.want.ContextLength || !slices.Equal(m.EOS, tc.want.EOS) {
				t.Errorf("%+v, want %+v", m, tc.want)
			}
			if err := m.RequireWeights(); !errors.Is(err, safetensors.ErrNoWeights) {
				t.Errorf("without weights: %v", err)
			}
		})
	}
}

func TestOpenNamesWhatToDo(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "m.gguf")
	write(t, dir, map[string]string{"m.gguf": "GGUF"})
	for path, want := range map[string]string{
		filepath.Join(dir, "absent"): "no such model folder",
		file:                         "mlxcel import " + file,
	} {
		_, err := Open(path)
		if _, ok := errors.AsType[*NotFoundError](err); !ok || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}

func TestWeights(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"config.json": `{"model_type":"llama"}`})
	path := filepath.Join(dir, "model.safetensors")
	entry := safetensors.Entry{Name: "w", Dtype: "U8", Shape: []int64{4}, Write: func(w io.Writer) error {
		_, err := w.Write(make([]byte, 4))
		return err
	}}
	if err := safetensors.WriteFile(path, nil, []safetensors.Entry{entry}); err != nil {
		t.Fatal(err)
	}
	m, err := Open(dir)
	if err != nil || m.RequireWeights() != nil || m.Weights.Bytes() != 4 {
		t.Fatalf("%+v, %v, %v", m, err, m.RequireWeights())
	}
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, st.Size()-1); err != nil {
		t.Fatal(err)
	}
	if m, err = Open(dir); err != nil {
		t.Fatal(err)
	}
	if err := m.RequireWeights(); err == nil || !strings.Contains(err.Error(), "truncated") {
		t.Fatalf("truncated file: %v", err)
	}
}
