package main

import (
	"encoding/json"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// minimal is a config with nothing but the keys that have no default.
const minimal = `{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 100`

func read(t testing.TB, text string) (*llamaConfig, error) {
	t.Helper()
	o, err := config.Parse([]byte(text), config.FileName)
	if err != nil {
		t.Fatal(err)
	}
	a := readLlama(o)
	return a, o.Err()
}

// The defaults are those of mlx_lm/models/llama.py's ModelArgs.
func TestDefaults(t *testing.T) {
	a, err := read(t, minimal+"}")
	if err != nil {
		t.Fatal(err)
	}
	if a.NumKeyValueHeads != 4 || a.HeadDim != 16 || !a.TieWordEmbeddings || a.AttentionBias || a.MLPBias || a.MaxPositionEmbeddings != 0 ||
		a.Rope.Base != 10000 || a.Rope.Traditional || a.Rope.Type != "default" || a.LayerTypes != nil {
		t.Errorf("%+v", a)
	}
	a, err = read(t, minimal+`, "head_dim": null, "num_key_value_heads": 2, "sliding_window": 16, "rope_scaling": null, "max_position_embeddings": 2048}`)
	if err != nil {
		t.Fatal(err)
	}
	if a.HeadDim != 16 || a.NumKeyValueHeads != 2 || a.SlidingWindow != 0 || a.MaxPositionEmbeddings != 2048 {
		t.Errorf("%+v", a)
	}
}

func TestConfigFaults(t *testing.T) {
	cases := []struct {
		more string
		code sdk.Code
		want string
	}{
		{`, "hidden_act": "gelu"`, sdk.CodeUnsupported, `hidden_act: "gelu" is not built`},
		{`, "num_key_value_heads": 3`, sdk.CodeInvalid, "num_key_value_heads: is 3, which does not divide num_attention_heads 4"},
		{`, "head_dim": 15`, sdk.CodeInvalid, "head_dim: is 15"},
		{`, "partial_rotary_factor": 0.5`, sdk.CodeUnsupported, "partial_rotary_factor: 0.5"},
		{`, "layer_types": ["full_attention"]`, sdk.CodeInvalid, "layer_types: has 1 entries for 3 layers"},
		{`, "layer_types": ["full_attention", "linear_attention", "full_attention"]`, sdk.CodeUnsupported, `layer_types[1]: "linear_attention" is not built`},
		{`, "layer_types": ["full_attention", "sliding_attention", "full_attention"]`, sdk.CodeInvalid, "sliding_window: is missing"},
		{`, "rope_scaling": {"rope_type": "dynamic", "factor": 2}`, sdk.CodeUnsupported, "rope_scaling.rope_type"},
		{`, "num_hidden_layers": 0`, sdk.CodeInvalid, "num_hidden_layers: is 0"},
		{`, "rms_norm_eps": NaN`, sdk.CodeInvalid, "rms_norm_eps: is NaN"},
		{`, "tie_word_embeddings": "yes"`, sdk.CodeInvalid, `tie_word_embeddings: is "yes"`},
	}
	for _, c := range cases {
		_, err := read(t, minimal+c.more+"}")
		if err == nil || sdk.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %v with %q", c.more, err, c.code, c.want)
		}
	}
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(minimal + "}"))
	f.Add([]byte(minimal + `, "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 8, "rope_scaling": {"type": "yarn", "factor": 4}}`))
	f.Add([]byte(minimal + `, "rope_scaling": {"rope_type": "llama3", "factor": 8}, "tie_word_embeddings": false, "head_dim": 1e9}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		o, err := config.Parse(raw, config.FileName)
		if err != nil {
			return
		}
		a := readLlama(o)
		if o.Err() != nil {
			return
		}
		s := a.Shape()
		if s.Layers < 1 || s.Width < 1 || s.Vocab < 1 || a.NumAttentionHeads%a.NumKeyValueHeads != 0 || a.HeadDim%2 != 0 {
			t.Fatalf("%+v passed", a)
		}
		if a.LayerTypes != nil && len(a.LayerTypes) != a.NumHiddenLayers {
			t.Fatalf("%d layer types for %d layers", len(a.LayerTypes), a.NumHiddenLayers)
		}
		for _, f := range a.Rope.InverseFrequencies(min(a.HeadDim, 256)) {
			if f < 0 || f != f {
				t.Fatalf("frequency %v of %+v", f, a.Rope)
			}
		}
	})
}

// rewrite copies a checkpoint without its index, with its config and its tensors changed.
func rewrite(t *testing.T, name string, changes map[string]any, tensors func(map[string]safetensors.Entry)) string {
	t.Helper()
	src, dst := filepath.Join(parityRoot, name), t.TempDir()
	raw, err := os.ReadFile(filepath.Join(src, config.FileName))
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := json.Unmarshal(raw, &values); err != nil {
		t.Fatal(err)
	}
	maps.Copy(values, changes)
	if raw, err = json.Marshal(values); err != nil {
		t.Fatal(err)
	}
	copyFile(t, filepath.Join(src, "golden_f32.json"), filepath.Join(dst, "golden_f32.json"))
	if err := os.WriteFile(filepath.Join(dst, config.FileName), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := safetensors.Open(src)
	if err != nil {
		t.Fatal(err)
	}
	entries := map[string]safetensors.Entry{}
	for _, name := range c.Names() {
		tensor, _ := c.Lookup(name)
		entries[name] = safetensors.Entry{Name: name, Dtype: tensor.Dtype, Shape: tensor.Shape, Write: writeData(t, tensor)}
	}
	if tensors != nil {
		tensors(entries)
	}
	var list []safetensors.Entry
	for _, e := range entries {
		list = append(list, e)
	}
	if err := safetensors.WriteFile(filepath.Join(dst, "model.safetensors"), nil, list); err != nil {
		t.Fatal(err)
	}
	return dst
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	raw, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, raw, 0o600); err != nil {
		t.Fatal(err)
	}
}

func writeData(t *testing.T, tensor safetensors.Tensor) func(io.Writer) error {
	raw := data(t, tensor)
	return func(w io.Writer) error {
		_, err := w.Write(raw)
		return err
	}
}

func data(t *testing.T, tensor safetensors.Tensor) []byte {
	t.Helper()
	f, err := os.Open(tensor.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	raw := make([]byte, tensor.Size)
	if _, err := f.ReadAt(raw, tensor.Offset); err != nil {
		t.Fatal(err)
	}
	return raw
}

// widen turns bfloat16 data into float32: the upper half of each value.
func widen(raw []byte) []byte {
	out := make([]byte, 0, 2*len(raw))
	for i := 0; i < len(raw); i += 2 {
		out = append(out, 0, 0, raw[i], raw[i+1])
	}
	return out
}

func bytesEntry(name, dtype string, raw []byte, shape ...int64) safetensors.Entry {
	return safetensors.Entry{Name: name, Dtype: dtype, Shape: shape, Write: func(w io.Writer) error {
		_, err := w.Write(raw)
		return err
	}}
}

// A float32 checkpoint as it came from Hugging Face in the days of Llama 2: one file, no index, precomputed frequencies.
// Its values are those of the bfloat16 checkpoint, so its golden is too.
func TestOriginalFloat32Checkpoint(t *testing.T) {
	dir := rewrite(t, "llama-untied-bf16", map[string]any{"torch_dtype": "float32"}, func(entries map[string]safetensors.Entry) {
		c, err := safetensors.Open(filepath.Join(parityRoot, "llama-untied-bf16"))
		if err != nil {
			t.Fatal(err)
		}
		for name := range entries {
			tensor, _ := c.Lookup(name)
			entries[name] = bytesEntry(name, "F32", widen(data(t, tensor)), tensor.Shape...)
		}
		name := "model.layers.0.self_attn.rotary_emb.inv_freq"
		entries[name] = bytesEntry(name, "F32", make([]byte, 64), 16)
	})
	stagetest.Tokens(t, families(), dir)
}

// mlx-lm drops lm_head.weight from a tied model, and so does this family: the projection is the embedding.
func TestTiedModelDropsItsHead(t *testing.T) {
	dir := rewrite(t, "llama-tied-q4", nil, func(entries map[string]safetensors.Entry) {
		entries["lm_head.weight"] = bytesEntry("lm_head.weight", "BF16", make([]byte, 320*128*2), 320, 128)
	})
	stagetest.Tokens(t, families(), dir)
}

func TestLoadFaults(t *testing.T) {
	cases := []struct {
		name    string
		from    string
		changes map[string]any
		tensors func(map[string]safetensors.Entry)
		code    sdk.Code
		tensor  string
	}{
		{"no head though untied", "llama-tied-q4", map[string]any{"tie_word_embeddings": false}, nil, sdk.CodeNotFound, "lm_head.weight"},
		{"a layer too many in the config", "llama-tied-q4", map[string]any{"num_hidden_layers": 7}, nil, sdk.CodeNotFound, "model.layers.6.input_layernorm.weight"},
		{"a layer too few in the config", "llama-tied-q4", map[string]any{"num_hidden_layers": 5}, nil, sdk.CodeUnsupported, "model.layers.5.input_layernorm.weight"},
		{"other width", "llama-tied-q4", map[string]any{"hidden_size": 64}, nil, sdk.CodeCorrupt, "model.layers.0.input_layernorm.weight"},
		{"other vocabulary", "llama-tied-q4", map[string]any{"vocab_size": 321}, nil, sdk.CodeCorrupt, "model.embed_tokens.weight"},
		{"other heads", "llama-untied-bf16", map[string]any{"num_key_value_heads": 2}, nil, sdk.CodeCorrupt, "model.layers.0.self_attn.k_proj.weight"},
		{"biases that the config denies", "llama-bias-q4", map[string]any{"attention_bias": false}, nil, sdk.CodeUnsupported, "model.layers.0.self_attn.k_proj.bias"},
		{"biases that the file lacks", "llama-tied-q4", map[string]any{"mlp_bias": true}, nil, sdk.CodeNotFound, "model.layers.0.mlp.gate_proj.bias"},
		{"a tensor of another family", "llama-tied-q4", nil, func(entries map[string]safetensors.Entry) {
			name := "model.layers.0.self_attn.q_norm.weight"
			entries[name] = bytesEntry(name, "F32", make([]byte, 128), 32)
		}, sdk.CodeUnsupported, "model.layers.0.self_attn.q_norm.weight"},
		{"no zero points", "llama-tied-q4", nil, func(entries map[string]safetensors.Entry) { delete(entries, "model.layers.3.mlp.up_proj.biases") }, sdk.CodeNotFound, "model.layers.3.mlp.up_proj.biases"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			dir := rewrite(t, c.from, c.changes, c.tensors)
			e := stagetest.New(t, families())
			if _, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: dir}); !isFault(err, c.code, c.tensor) {
				t.Errorf("inspect: %v, want %v of %s", err, c.code, c.tensor)
			}
			_, err := e.Load(t.Context(), sdk.LoadRequest{Dir: dir, Family: "llama", Layers: sdk.LayerRange{Start: 0, End: 1}, HasEmbedding: true, Threads: 1}, nil)
			if !isFault(err, c.code, c.tensor) {
				t.Errorf("load: %v, want %v of %s", err, c.code, c.tensor)
			}
		})
	}
}
