package main

import (
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

// What a family does not compute is refused with the key's name.
func TestFamiliesRefuse(t *testing.T) {
	refuses := stagetest.Refusing(t, families(), parityRoot)
	refuses("qwen3-tied-q4", map[string]any{"use_sliding_window": true}, sdk.CodeUnsupported, "use_sliding_window")
	refuses("qwen3-tied-q4", map[string]any{"hidden_act": "gelu"}, sdk.CodeUnsupported, "hidden_act")
	refuses("mixtral-base-q4", map[string]any{"num_experts_per_tok": 9}, sdk.CodeInvalid, "num_experts_per_tok: is 9 of 8 experts")
	refuses("mixtral-base-q4", map[string]any{"rope_scaling": map[string]any{"type": "linear", "factor": 2}}, sdk.CodeUnsupported, `rope_scaling: type "linear"`)
	refuses("glm4-base-q4", map[string]any{"partial_rotary_factor": 1.5}, sdk.CodeInvalid, "partial_rotary_factor: is 1.5")
	refuses("glm4-base-q4", map[string]any{"partial_rotary_factor": 0.05}, sdk.CodeInvalid, "partial_rotary_factor: is 0.05")
	refuses("glm4_moe-base-q4", map[string]any{"scoring_func": "softmax"}, sdk.CodeUnsupported, "scoring_func")
	refuses("glm4_moe-base-q4", map[string]any{"topk_method": "greedy"}, sdk.CodeUnsupported, "topk_method")
	refuses("glm4_moe-base-q4", map[string]any{"n_group": 3}, sdk.CodeInvalid, "n_group: is 3")
	refuses("glm4_moe-base-q4", map[string]any{"n_group": 8}, sdk.CodeInvalid, "n_group: is 8")
	refuses("glm4_moe-base-q4", map[string]any{"n_group": 4, "topk_group": 5}, sdk.CodeInvalid, "topk_group: is 5 of 4")
	refuses("gpt_oss-base-q4", map[string]any{"layer_types": []string{"linear_attention"}}, sdk.CodeInvalid, "layer_types: has 1 entries for 6 layers")
	refuses("gpt_oss-base-q4", map[string]any{"swiglu_limit": 0}, sdk.CodeInvalid, "swiglu_limit")
	refuses("llama4-scout-q4", map[string]any{"num_experts_per_tok": 2}, sdk.CodeUnsupported, "text_config.num_experts_per_tok: 2 is not built")
	refuses("llama4-scout-q4", map[string]any{"no_rope_layers": []int{1, 1, 0, 1}}, sdk.CodeUnsupported, "text_config.no_rope_layers: entry 2")
	refuses("llama4-scout-q4", map[string]any{"attention_chunk_size": nil}, sdk.CodeInvalid, "text_config.attention_chunk_size: is missing")
	e := stagetest.New(t, families())
	if _, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: stagetest.Bare(t, map[string]any{"model_type": "llama4"})}); !stagetest.Is(err, sdk.CodeInvalid, "text_config: is missing") {
		t.Errorf("llama4 without text_config: %v", err)
	}
}

// The kinds of layers that configs describe.
func TestLayerKinds(t *testing.T) {
	cases := []struct {
		checkpoint string
		changes    map[string]any
		want       string
	}{
		{"mixtral-base-q4", nil, "attention-moe attention-moe attention-moe attention-moe attention-moe"},
		{"glm4_moe-base-q4", map[string]any{"first_k_dense_replace": 2}, "attention attention attention-moe attention-moe attention-moe"},
		{"glm4_moe-base-q4", map[string]any{"first_k_dense_replace": 0}, "attention-moe attention-moe attention-moe attention-moe attention-moe"},
		{"gpt_oss-base-q4", map[string]any{"layer_types": nil, "num_hidden_layers": 3}, "sliding-attention-moe attention-moe sliding-attention-moe"},
		{"llama4-maverick-q4", nil, "chunked-attention chunked-attention-moe chunked-attention attention-moe chunked-attention chunked-attention-moe chunked-attention attention-moe"},
	}
	e := stagetest.New(t, families())
	for _, c := range cases {
		p, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: stagetest.Bare(t, stagetest.ReadConfig(t, filepath.Join(parityRoot, c.checkpoint), c.changes))})
		if err != nil {
			t.Errorf("%s with %v: %v", c.checkpoint, c.changes, err)
			continue
		}
		if got := stagetest.Kinds(p); got != c.want {
			t.Errorf("%s with %v: %s, want %s", c.checkpoint, c.changes, got, c.want)
		}
	}
}

// Published configs of families that are only priced, and the parameters that their models have by their model cards.
func TestPlannedFamilies(t *testing.T) {
	cases := map[string]struct {
		config     map[string]any
		parameters float64 // in billions
	}{
		"Qwen1.5-MoE-A2.7B": {map[string]any{"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
			"num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
			"num_experts": 60, "num_experts_per_tok": 4, "rms_norm_eps": 1e-6, "vocab_size": 151936}, 14.3},
		"Qwen3-30B-A3B": {map[string]any{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
			"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
			"num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []int{}, "rms_norm_eps": 1e-6, "vocab_size": 151936}, 30.5},
		"Phi-3.5-MoE": {map[string]any{"model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
			"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
			"vocab_size": 32064, "rope_scaling": map[string]any{"type": "longrope"}}, 41.9},
	}
	for name, c := range cases {
		stagetest.Parameters(t, families(), name, c.config, c.parameters, 0.02)
	}
}

// tinyExaone is K-EXAONE in small.
func tinyExaone() map[string]any {
	return map[string]any{"model_type": "exaone_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1,
		"rms_norm_eps": 1e-5, "sliding_window": 8, "layer_types": []string{"sliding_attention", "full_attention", "full_attention"},
		"is_moe_layer": []bool{false, true, true}, "vocab_size": 100}
}

func TestPlannedExaone(t *testing.T) {
	p, err := stagetest.New(t, families()).Inspect(t.Context(), sdk.InspectRequest{Dir: stagetest.Bare(t, tinyExaone())})
	if err != nil {
		t.Fatal(err)
	}
	attention := 64*64 + 2*32*64 + 64*64 + 2*64 + 2*16
	dense, sparse := attention+3*64*128, attention+9*3*64*32+8*64
	for i, want := range []int64{int64(2 * dense), int64(2*sparse + 4*8), int64(2*sparse + 4*8)} {
		if p.Layers[i].Weights != want {
			t.Errorf("layer %d weighs %d bytes, want %d", i, p.Layers[i].Weights, want)
		}
	}
	if p.Layers[0].States[0].Window == 0 || p.Layers[0].Kind != "sliding-attention" || p.Layers[1].Kind != "attention-moe" {
		t.Errorf("%+v", p.Layers)
	}
}

// A family that is only priced says so wherever it would have to run.
func TestPlannedFamiliesDoNotRun(t *testing.T) {
	e := stagetest.New(t, families())
	d, err := e.Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	planned := map[string]bool{"qwen2_moe": true, "qwen3_moe": true, "phimoe": true, "exaone_moe": true}
	for _, f := range d.Families {
		if f.PlanOnly != planned[f.Name] || f.Pipeline == f.PlanOnly {
			t.Errorf("%+v", f)
		}
	}
	_, err = e.Load(t.Context(), sdk.LoadRequest{Dir: stagetest.Bare(t, tinyExaone()), Family: "exaone_moe", Layers: sdk.LayerRange{End: 3}, Threads: 1}, nil)
	if !stagetest.Is(err, sdk.CodeUnsupported, "family exaone_moe can be planned but not run") {
		t.Errorf("loading: %v", err)
	}
}

// Every family takes any config: it records faults, or describes a model whose layers can be priced.
func FuzzFamilyConfigs(f *testing.F) {
	raw, err := json.Marshal(tinyExaone())
	if err != nil {
		f.Fatal(err)
	}
	stagetest.FuzzConfigs(f, families(), parityRoot,
		[]string{"qwen3-tied-q4", "mixtral-base-q4", "glm4-base-q4", "glm4_moe-base-q4", "gpt_oss-base-mxfp4", "llama4-scout-q4"}, string(raw))
}
