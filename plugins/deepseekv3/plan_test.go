package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

func inspect(t *testing.T, dir string) *sdk.ModelProfile {
	t.Helper()
	return stagetest.Inspect(t, families(), dir)
}

// What a config alone tells is what the headers tell, part by part.
func TestPlanFromConfigAlone(t *testing.T) {
	t.Run("kimi_k3-tiny-q4", func(t *testing.T) { planFromConfig(t, kimiTiny) })
	parity().Each(t, planFromConfig)
}

func planFromConfig(t *testing.T, dir string) { stagetest.PlanFromConfig(t, families(), dir, 0.02) }

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
		if p.Layers[0].Kind != c.first || last.Kind != c.last || last.PositionBytes() != c.perToken || last.States[0].Window != 0 {
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
	if billions := float64(stagetest.Weights(p)) / 2 / 1e9; math.Abs(billions-671) > 0.5 {
		t.Errorf("%.1f billion parameters, want 671", billions)
	}
	if got := p.Layers[0].PositionBytes(); got != 2*576 {
		t.Errorf("%d bytes of state per position and layer, want 1152", got)
	}
}

func TestRefusals(t *testing.T) {
	const base, sparse = "deepseek_v3-base-q4", "glm_moe_dsa-base-q4"
	type m = map[string]any
	refuses := stagetest.Refusing(t, families(), parityRoot)
	refuses(base, m{"topk_method": "greedy"}, sdk.CodeUnsupported, `topk_method: "greedy" is not built`)
	refuses(base, m{"scoring_func": "softmax"}, sdk.CodeUnsupported, `scoring_func: "softmax" is not built`)
	refuses(base, m{"hidden_act": "gelu"}, sdk.CodeUnsupported, `hidden_act: "gelu" is not built`)
	refuses(base, m{"tie_word_embeddings": true}, sdk.CodeUnsupported, "tie_word_embeddings")
	refuses(base, m{"rope_interleave": false}, sdk.CodeUnsupported, "rope_interleave")
	refuses(base, m{"n_group": 3}, sdk.CodeInvalid, "n_group: is 3")
	refuses(base, m{"topk_group": 5}, sdk.CodeInvalid, "topk_group: is 5 of 4 groups")
	refuses(base, m{"num_experts_per_tok": 9}, sdk.CodeInvalid, "num_experts_per_tok: is 9 of 8 experts")
	refuses(base, m{"qk_rope_head_dim": 31}, sdk.CodeInvalid, "qk_rope_head_dim: is 31")
	refuses(base, m{"kv_lora_rank": nil}, sdk.CodeInvalid, "kv_lora_rank: is missing")
	refuses(base, m{"rope_scaling": m{"type": "longrope"}}, sdk.CodeUnsupported, `rope_scaling.type: "longrope" is not built`)
	refuses(base, m{"quantization": nil, "quantization_config": m{"quant_method": "fp8", "weight_block_size": []int{64, 64}}}, sdk.CodeUnsupported, "weight_block_size")
	refuses(sparse, m{"q_lora_rank": nil}, sdk.CodeInvalid, "q_lora_rank: is missing")
	refuses(sparse, m{"index_head_dim": 16}, sdk.CodeInvalid, "index_head_dim: is 16")
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
	billions("all", stagetest.Weights(p), 2780)
	if p.Layers[3].PositionBytes() != 2*576 || p.Layers[3].StateBytes(0, 0) != 0 || p.Layers[1].PositionBytes() != 0 {
		t.Errorf("state of a latent layer %+v, of a delta layer %+v", p.Layers[3], p.Layers[1])
	}
	// 96 heads of 128 by 128 in float32, and three inputs of the convolution in 2 bytes.
	if want := int64(96*128*128*4 + 3*3*96*128*2); p.Layers[1].StateBytes(0, 0) != want {
		t.Errorf("a delta layer's state is %d bytes, want %d", p.Layers[1].StateBytes(0, 0), want)
	}
	values := stagetest.ReadConfig(t, dir, nil)
	values["quantization"] = map[string]any{"mode": "mxfp4"}
	packed := inspect(t, stagetest.Bare(t, values))
	if terabytes := float64(stagetest.Weights(packed)) / 1e12; math.Abs(terabytes-1.48) > 0.01 {
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
	e := stagetest.New(t, families())
	req := sdk.LoadRequest{
		Dir: filepath.Join(parityRoot, "kimi_k3-tiny-q4"), Family: "kimi_k3", Layers: sdk.LayerRange{Start: 0, End: 4}, HasEmbedding: true, Threads: 1,
	}
	if _, err := e.Load(t.Context(), req, nil); sdk.CodeOf(err) != sdk.CodeUnsupported || !strings.Contains(err.Error(), "kimi_k3 runs in one process only") {
		t.Errorf("layers 0 to 3: %v", err)
	}
}
