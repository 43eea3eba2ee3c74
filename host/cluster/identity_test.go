package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// model writes a model folder of two weight files and opens it.
func model(t *testing.T, config string, sizes ...int) *modelrepo.Model {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	for i, size := range sizes {
		e := safetensors.Entry{Name: fmt.Sprint("w", i), Dtype: "U8", Shape: []int64{int64(size)}, Write: func(w io.Writer) error {
			_, err := w.Write(make([]byte, size))
			return err
		}}
		path := filepath.Join(dir, fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(sizes)))
		if err := safetensors.WriteFile(path, nil, []safetensors.Entry{e}); err != nil {
			t.Fatal(err)
		}
	}
	m, err := modelrepo.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func identify(t *testing.T, m *modelrepo.Model, layers int, version string) Identity {
	t.Helper()
	id, err := Identify(m, layers, version)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

const llamaConfig = `{"model_type":"llama"}`

func TestIdentityTellsWhatDiffers(t *testing.T) {
	want := identify(t, model(t, llamaConfig, 100, 200), 30, "1.0")
	if len(want.Weights) != 2 || want.Weights[0].Name != "model-00001-of-00002.safetensors" || want.Weights[0].Size <= 100 || len(want.ConfigHash) != 64 {
		t.Fatalf("%+v", want)
	}
	for _, tc := range []struct {
		name string
		got  Identity
		want []string
	}{
		{"a copy", identify(t, model(t, llamaConfig, 100, 200), 30, "1.0"), nil},
		{"another version", identify(t, model(t, llamaConfig, 100, 200), 30, "1.1"), []string{`program version: want "1.0", got "1.1"`}},
		{"another config", identify(t, model(t, llamaConfig+"\n", 100, 200), 30, "1.0"), []string{"SHA-256 of config.json: want "}},
		{"another layer count", identify(t, model(t, llamaConfig, 100, 200), 31, "1.0"), []string{"layers: want 30, got 31"}},
		{"another size", identify(t, model(t, llamaConfig, 100, 208), 30, "1.0"), []string{"weight file model-00002-of-00002.safetensors: want "}},
		{"another cut into files", identify(t, model(t, llamaConfig, 300), 30, "1.0"),
			[]string{"model-00001-of-00002.safetensors: want ", "model-00002-of-00002.safetensors: want ", "model-00001-of-00001.safetensors: want no such file, got "}},
		{"everything", Identity{}, []string{"program version", "config.json", "layers", "model-00001-of-00002", "model-00002-of-00002"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := want.Diff(tc.got)
			if len(got) != len(tc.want) {
				t.Fatalf("%q, want %d differences", got, len(tc.want))
			}
			for i, d := range got {
				if !strings.Contains(d.String(), tc.want[i]) {
					t.Errorf("difference %d is %q, want %q", i, d, tc.want[i])
				}
			}
		})
	}
}

// Hashes that begin alike are told apart all the same.
func TestAlikeHashes(t *testing.T) {
	a := Identity{ConfigHash: strings.Repeat("0", 64)}
	b := Identity{ConfigHash: strings.Repeat("0", 63) + "1"}
	if d := a.Diff(b); len(d) != 1 || d[0].Want == d[0].Got {
		t.Errorf("%v", d)
	}
}

func TestVerifyComparesContents(t *testing.T) {
	a, b := model(t, llamaConfig, 100, 200), model(t, llamaConfig, 100, 200)
	path := filepath.Join(b.Dir, "model-00002-of-00002.safetensors")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)-1] ^= 1
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	plainA, plainB := identify(t, a, 30, "1"), identify(t, b, 30, "1")
	if d := plainA.Diff(plainB); len(d) != 0 {
		t.Fatalf("sizes and names alone: %v", d)
	}
	fullA, err := plainA.WithHashes(t.Context(), a.Dir)
	if err != nil {
		t.Fatal(err)
	}
	fullB, err := plainB.WithHashes(t.Context(), b.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if d := fullA.Diff(fullB); len(d) != 1 || d[0].What != "SHA-256 of model-00002-of-00002.safetensors" {
		t.Errorf("%v", d)
	}
	if d := fullA.Diff(plainB); len(d) != 0 {
		t.Errorf("one side without hashes: %v", d)
	}
	if plainA.Weights[0].Hash != "" {
		t.Error("the identity that hashes were asked of has changed")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := plainA.WithHashes(ctx, a.Dir); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := plainA.WithHashes(t.Context(), t.TempDir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("files gone: %v", err)
	}
}

func TestIdentityNeedsWholeWeights(t *testing.T) {
	if _, err := Identify(model(t, llamaConfig), 30, "1"); !errors.Is(err, safetensors.ErrNoWeights) {
		t.Errorf("config alone: %v", err)
	}
}
