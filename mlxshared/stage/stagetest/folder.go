package stagetest

import (
	"encoding/json"
	"io"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// ReadConfig reads the config of the folder dir and makes changes to its text model; a nil value takes a key away.
func ReadConfig(t testing.TB, dir string, changes map[string]any) map[string]any {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, config.FileName))
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := json.Unmarshal(raw, &values); err != nil {
		t.Fatal(err)
	}
	target := values
	if text, ok := values["text_config"].(map[string]any); ok {
		target = text
	}
	maps.Copy(target, changes)
	maps.DeleteFunc(target, func(_ string, v any) bool { return v == nil })
	return values
}

// WriteConfig writes a config into the folder dir.
func WriteConfig(t testing.TB, dir string, values map[string]any) {
	t.Helper()
	raw, err := json.Marshal(values)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, config.FileName), raw, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Bare makes a folder with a config and no weights.
func Bare(t testing.TB, values map[string]any) string {
	t.Helper()
	dir := t.TempDir()
	WriteConfig(t, dir, values)
	return dir
}

// Tensor is a tensor of a checkpoint in memory.
type Tensor struct {
	Dtype string // as safetensors names it
	Shape []int64
	Data  []byte
}

// ReadTensors reads all tensors of the folder dir.
func ReadTensors(t testing.TB, dir string) map[string]Tensor {
	t.Helper()
	c, err := safetensors.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]Tensor{}
	for _, name := range c.Names() {
		h, _ := c.Lookup(name)
		all[name] = Tensor{h.Dtype, h.Shape, readAt(t, h)}
	}
	return all
}

func readAt(t testing.TB, h safetensors.Tensor) []byte {
	t.Helper()
	f, err := os.Open(h.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	raw := make([]byte, h.Size)
	if _, err := f.ReadAt(raw, h.Offset); err != nil {
		t.Fatal(err)
	}
	return raw
}

// WriteTensors writes tensors into the folder dir.
func WriteTensors(t testing.TB, dir string, tensors map[string]Tensor) {
	t.Helper()
	var entries []safetensors.Entry
	for name, x := range tensors {
		entries = append(entries, safetensors.Entry{Name: name, Dtype: x.Dtype, Shape: x.Shape, Write: func(w io.Writer) error {
			_, err := w.Write(x.Data)
			return err
		}})
	}
	if err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), nil, entries); err != nil {
		t.Fatal(err)
	}
}
