package main

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

func newExecutor(t *testing.T) *stage.Executor {
	t.Helper()
	e := stage.New(stage.Options{Name: "test", Version: "test", Families: families(), Device: mlx.DeviceCPU})
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func inspect(t *testing.T, dir string) *sdk.ModelProfile {
	t.Helper()
	p, err := newExecutor(t).Inspect(t.Context(), sdk.InspectRequest{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// configOnly makes a folder with the config of dir alone, changed by edit.
func configOnly(t *testing.T, dir string, edit func(c map[string]any)) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, config.FileName))
	if err != nil {
		t.Fatal(err)
	}
	var c map[string]any
	if err := json.Unmarshal(raw, &c); err != nil {
		t.Fatal(err)
	}
	if edit != nil {
		edit(c)
	}
	if raw, err = json.Marshal(c); err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	if err := os.WriteFile(filepath.Join(out, config.FileName), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}

// What a config alone tells is what the headers tell, part by part.
func TestPlanFromConfigAlone(t *testing.T) {
	t.Run("kimi_k3-tiny-q4", func(t *testing.T) { planFromConfig(t, kimiTiny) })
	eachCheckpoint(t, planFromConfig)
}

func planFromConfig(t *testing.T, dir string) {
	t.Helper()
	exact, estimate := inspect(t, dir), inspect(t, configOnly(t, dir, nil))
	if !exact.Exact || estimate.Exact {
		t.Errorf("exact is %v with weights, %v without", exact.Exact, estimate.Exact)
	}
	same := func(what string, got, want int64) {
		if math.Abs(float64(got-want)) > 0.02*float64(want) {
			t.Errorf("%s: %d bytes from the config, %d from the headers", what, got, want)
		}
	}
	same("embedding", estimate.Embedding, exact.Embedding)
	same("head", estimate.Head, exact.Head)
	for i, l := range exact.Layers {
		same(l.Kind, estimate.Layers[i].Weights, l.Weights)
		if e := estimate.Layers[i]; e.Kind != l.Kind || e.KVBytesPerToken != l.KVBytesPerToken || e.StateBytes != l.StateBytes {
			t.Errorf("layer %d: %+v from the config, %+v from the headers", i, e, l)
		}
	}
}

func TestKindsAndState(t *testing.T) {
	for _, c := range []struct {
		name, first, last string
		perToken          int64 // latent, rotated key and indexer's key of a position, in 2 bytes each
	}{
		{"deepseek_v3-base-q4", "latent-attention", "latent-attention-moe", 2 * (64 + 32)},
		{"glm_moe_dsa-base-q4", "sparse-latent-attention", "sparse-latent-attention-moe", 2 * (64 + 32 + 64)},
	} {
		p := inspect(t, filepath.Join(parityRoot, c.name))
		last := p.Layers[len(p.Layers)-1]
		if p.Layers[0].Kind != c.first || last.Kind != c.last || last.KVBytesPerToken != c.perToken || last.KVWindow != 0 {
			t.Errorf("%s: first layer %+v, last %+v; want %s, %s with %d bytes a position", c.name, p.Layers[0], last, c.first, c.last, c.perToken)
		}
	}
}

// deepSeekV3Config is the published config of DeepSeek-V3.
const deepSeekV3Config = `{
	"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
	"num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
	"n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
	"qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
	"norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "max_position_embeddings": 163840,
	"rms_norm_eps": 1e-06, "rope_theta": 10000, "torch_dtype": "bfloat16",
	"rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
}`

// The published total is 671 billion parameters without the layer for multi-token prediction.
func TestDeepSeekV3Parameters(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, config.FileName), []byte(deepSeekV3Config), 0o600); err != nil {
		t.Fatal(err)
	}
	p := inspect(t, dir)
	if len(p.Layers) != 61 {
		t.Fatalf("%d layers, want the 61 without the trailer", len(p.Layers))
	}
	if billions := float64(totalWeights(p)) / 2 / 1e9; math.Abs(billions-671) > 0.5 {
		t.Errorf("%.1f billion parameters, want 671", billions)
	}
	if got := p.Layers[0].KVBytesPerToken; got != 2*576 {
		t.Errorf("%d bytes of state per position and layer, want 1152", got)
	}
}

func totalWeights(p *sdk.ModelProfile) int64 {
	n := p.Embedding + p.Head
	for _, l := range p.Layers {
		n += l.Weights
	}
	return n
}

func TestRefusals(t *testing.T) {
	base := filepath.Join(parityRoot, "deepseek_v3-base-q4")
	for key, c := range map[string]struct {
		value any
		code  sdk.Code
		want  string
	}{
		"topk_method":         {"greedy", sdk.CodeUnsupported, `topk_method: "greedy" is not built`},
		"scoring_func":        {"softmax", sdk.CodeUnsupported, `scoring_func: "softmax" is not built`},
		"hidden_act":          {"gelu", sdk.CodeUnsupported, `hidden_act: "gelu" is not built`},
		"tie_word_embeddings": {true, sdk.CodeUnsupported, "tie_word_embeddings"},
		"rope_interleave":     {false, sdk.CodeUnsupported, "rope_interleave"},
		"n_group":             {3, sdk.CodeInvalid, "n_group: is 3"},
		"topk_group":          {5, sdk.CodeInvalid, "topk_group: is 5 of 4 groups"},
		"num_experts_per_tok": {9, sdk.CodeInvalid, "num_experts_per_tok: is 9 of 8 experts"},
		"qk_rope_head_dim":    {31, sdk.CodeInvalid, "qk_rope_head_dim: is 31"},
		"kv_lora_rank":        {nil, sdk.CodeInvalid, "kv_lora_rank: is missing"},
		"rope_scaling":        {map[string]any{"type": "longrope"}, sdk.CodeUnsupported, `rope_scaling.type: "longrope" is not built`},
		"quantization_config": {map[string]any{"quant_method": "fp8", "weight_block_size": []int{64, 64}}, sdk.CodeUnsupported, "weight_block_size"},
	} {
		t.Run(key, func(t *testing.T) {
			dir := configOnly(t, base, func(m map[string]any) {
				delete(m, "quantization")
				m[key] = c.value
			})
			_, err := newExecutor(t).Inspect(t.Context(), sdk.InspectRequest{Dir: dir})
			if err == nil || sdk.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %v with %q", err, c.code, c.want)
			}
		})
	}
	for key, want := range map[string]string{"q_lora_rank": "q_lora_rank: is missing", "index_head_dim": "index_head_dim: is 16"} {
		t.Run(key, func(t *testing.T) {
			dir := configOnly(t, filepath.Join(parityRoot, "glm_moe_dsa-base-q4"), func(m map[string]any) {
				m[key] = map[string]any{"q_lora_rank": nil, "index_head_dim": 16}[key]
			})
			if _, err := newExecutor(t).Inspect(t.Context(), sdk.InspectRequest{Dir: dir}); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
		})
	}
}

// The numbers are those of the dimensions published for Kimi K3: billions of parameters.
func TestKimiK3IsPriced(t *testing.T) {
	dir := filepath.Join(parityRoot, "kimi_k3-full-q4")
	p := inspect(t, dir)
	if len(p.Layers) != 93 || p.Exact {
		t.Fatalf("%d layers, exact %v", len(p.Layers), p.Exact)
	}
	kinds := map[string]int{}
	for _, l := range p.Layers {
		kinds[l.Kind]++
	}
	if kinds["delta-attention"] != 1 || kinds["delta-attention-moe"] != 68 || kinds["latent-attention-moe"] != 24 {
		t.Errorf("kinds of layers: %v", kinds)
	}
	const experts, delta, latent, dense, ends = 29.6, 0.44, 0.23, 0.73, 2.35
	billions := func(what string, bytes int64, want float64) {
		t.Helper()
		if got := float64(bytes) / 2 / 1e9; math.Abs(got-want) > 0.01*want {
			t.Errorf("%s: %.3f billion parameters, want %.3f", what, got, want)
		}
	}
	billions("a dense layer", p.Layers[0].Weights, delta+dense)
	billions("a delta layer with experts", p.Layers[1].Weights, delta+experts)
	billions("a latent layer with experts", p.Layers[3].Weights, latent+experts)
	billions("embedding and head", p.Embedding+p.Head, ends)
	billions("all", totalWeights(p), 2780)
	if p.Layers[3].KVBytesPerToken != 2*576 || p.Layers[3].StateBytes != 0 || p.Layers[1].KVBytesPerToken != 0 {
		t.Errorf("state of a latent layer %+v, of a delta layer %+v", p.Layers[3], p.Layers[1])
	}
	// 96 heads of 128 by 128 in float32, and three inputs of the convolution in 2 bytes.
	if want := int64(96*128*128*4 + 3*3*96*128*2); p.Layers[1].StateBytes != want {
		t.Errorf("a delta layer's state is %d bytes, want %d", p.Layers[1].StateBytes, want)
	}
	packed := inspect(t, configOnly(t, dir, func(c map[string]any) { c["quantization"] = map[string]any{"mode": "mxfp4"} }))
	if terabytes := float64(totalWeights(packed)) / 1e12; math.Abs(terabytes-1.48) > 0.01 {
		t.Errorf("%.3f TB as mxfp4, want 1.48", terabytes)
	}
}

// The layers of one process see all of a row's residual blocks; a boundary would have to carry them.
func TestKimiK3DoesNotPipeline(t *testing.T) {
	for _, f := range families() {
		if info := f.Info(); info.Pipeline == (info.Name == "kimi_k3") {
			t.Errorf("%s advertises pipeline: %v", info.Name, info.Pipeline)
		}
	}
	e := newExecutor(t)
	req := sdk.LoadRequest{
		Dir: filepath.Join(parityRoot, "kimi_k3-tiny-q4"), Family: "kimi_k3", Layers: sdk.LayerRange{Start: 0, End: 4}, HasEmbedding: true, Threads: 1,
	}
	if _, err := e.Load(t.Context(), req, nil); sdk.CodeOf(err) != sdk.CodeUnsupported || !strings.Contains(err.Error(), "kimi_k3 runs in one process only") {
		t.Errorf("layers 0 to 3: %v", err)
	}
}
