package main

import (
	"path/filepath"
	"reflect"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

func inspect(t *testing.T, dir string) *sdk.ModelProfile {
	t.Helper()
	return stagetest.Inspect(t, families(), dir)
}

// bare is a checkpoint's config alone, changed.
func bare(t *testing.T, checkpoint string, changes map[string]any) string {
	t.Helper()
	return stagetest.Bare(t, stagetest.ReadConfig(t, filepath.Join(parityRoot, checkpoint), changes))
}

// What a config alone tells is what the headers tell, part by part.
func TestPlanFromConfigAlone(t *testing.T) {
	parity().PlanFromConfig(t, 0.02)
}

// Layers keep a cache of keys and values (32 bytes a head and position in 16 bits), or states of fixed size, or nothing.
func TestKindsAndState(t *testing.T) {
	const f16, f32 = 2, 4
	cases := []struct {
		checkpoint string
		kinds      string
		state      map[string][2]int64 // kind: bytes per position, fixed bytes
	}{
		{"jamba-base-q4", "mamba mamba-moe attention mamba-moe mamba mamba-moe attention mamba-moe", map[string][2]int64{
			"mamba": {0, 3*128*f16 + 16*128*f16}, "mamba-moe": {0, 3*128*f16 + 16*128*f16}, "attention": {2 * 32 * f16, 0},
		}},
		{"nemotron_h-dense-q4", "mamba2 mlp mamba2 attention mlp mamba2 mamba2 attention mlp mamba2", map[string][2]int64{
			"mamba2": {0, 3*256*f16 + 4*32*32*f32}, "attention": {2 * 2 * 32 * f16, 0}, "mlp": {0, 0},
		}},
		{"nemotron_h-moe-q4", "mamba2 moe mamba2 attention moe mamba2 moe mamba2 attention moe", map[string][2]int64{"moe": {0, 0}}},
		{"qwen3_5-base-q4", "gated-delta gated-delta gated-delta gated-attention gated-delta gated-delta gated-delta gated-attention", map[string][2]int64{
			"gated-delta": {0, 3*256*f16 + 4*32*32*f32}, "gated-attention": {2 * 2 * 32 * f16, 0},
		}},
		{"qwen3_next-base-q4", "gated-delta-moe gated-delta-moe gated-delta-moe gated-attention-moe gated-delta-moe gated-delta-moe gated-delta-moe gated-attention-moe", nil},
	}
	for _, c := range cases {
		p := inspect(t, filepath.Join(parityRoot, c.checkpoint))
		for _, l := range p.Layers {
			if want, ok := c.state[l.Kind]; ok && (l.PositionBytes() != want[0] || l.StateBytes(0, 0) != want[1]) {
				t.Errorf("%s: %s keeps %d bytes a position and %d fixed, want %v", c.checkpoint, l.Kind, l.PositionBytes(), l.StateBytes(0, 0), want)
			}
		}
		if got := stagetest.Kinds(p); got != c.kinds {
			t.Errorf("%s: %s, want %s", c.checkpoint, got, c.kinds)
		}
	}
}

// Published configs, and the parameters that their models have by their model cards.
func TestPublishedParameters(t *testing.T) {
	cases := map[string]struct {
		config     map[string]any
		parameters float64 // in billions
	}{
		"Jamba-v0.1": {map[string]any{"model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
			"num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
			"expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_dt_rank": 256, "num_experts": 16,
			"num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "vocab_size": 65536, "tie_word_embeddings": false}, 51.6},
		"Nemotron-H-8B": {map[string]any{"model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
			"num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
			"conv_kernel": 4, "layer_norm_epsilon": 1e-5, "vocab_size": 131072, "mlp_hidden_act": "relu2",
			"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"}, 8.1},
		"Qwen3-Next-80B-A3B": {map[string]any{"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
			"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
			"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
			"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "rms_norm_eps": 1e-6, "vocab_size": 151936}, 79.7},
	}
	for name, c := range cases {
		stagetest.Parameters(t, families(), name, c.config, c.parameters, 0.01)
	}
}

// What a family does not compute is refused with the key's name.
func TestRefuses(t *testing.T) {
	const jamba, nemotron, next, dense, experts = "jamba-base-q4", "nemotron_h-moe-q4", "qwen3_next-base-q4", "qwen3_5-base-q4", "qwen3_5_moe-base-q4"
	type m = map[string]any
	refuses := stagetest.Refusing(t, families(), parityRoot)
	refuses(jamba, m{"hidden_act": "gelu"}, sdk.CodeUnsupported, "hidden_act")
	refuses(jamba, m{"mamba_d_conv": 1}, sdk.CodeUnsupported, "mamba_d_conv: 1")
	refuses(jamba, m{"mamba_expand": 1 << 30}, sdk.CodeInvalid, "mamba_expand: makes a layer")
	refuses(dense, m{"linear_value_head_dim": 1 << 30}, sdk.CodeInvalid, "text_config.linear_value_head_dim: makes a layer")
	refuses(jamba, m{"mamba_dt_rank": "small"}, sdk.CodeInvalid, "mamba_dt_rank")
	refuses(jamba, m{"expert_layer_period": 3}, sdk.CodeUnsupported, "expert_layer_offset: 1 with a period of 3")
	refuses(jamba, m{"num_experts_per_tok": 5}, sdk.CodeInvalid, "num_experts_per_tok: is 5 of 4")
	refuses(jamba, m{"attn_layer_period": nil}, sdk.CodeInvalid, "attn_layer_period: is missing")
	refuses(jamba, m{"layers_block_type": []string{"mamba"}}, sdk.CodeInvalid, "layers_block_type: has 1 entries for 8 layers")
	refuses(jamba, m{"num_hidden_layers": 1, "layers_block_type": []string{"hyena"}}, sdk.CodeUnsupported, `layers_block_type[0]: "hyena"`)
	refuses(nemotron, m{"hybrid_override_pattern": "MXM"}, sdk.CodeUnsupported, "hybrid_override_pattern: letter 1 is 'X'")
	refuses(nemotron, m{"hybrid_override_pattern": ""}, sdk.CodeInvalid, "hybrid_override_pattern: is empty")
	refuses(nemotron, m{"hybrid_override_pattern": 7}, sdk.CodeInvalid, "hybrid_override_pattern")
	refuses(nemotron, m{"hybrid_override_pattern": nil}, sdk.CodeInvalid, "hybrid_override_pattern: is missing")
	refuses(nemotron, m{"hybrid_override_pattern": nil, "layer_types": []string{"mamba", "rwkv"}}, sdk.CodeUnsupported, `layer_types[1]: "rwkv"`)
	refuses(nemotron, m{"mlp_hidden_act": "silu"}, sdk.CodeUnsupported, "mlp_hidden_act")
	refuses(nemotron, m{"sliding_window": 128}, sdk.CodeUnsupported, "sliding_window")
	refuses(nemotron, m{"tie_word_embeddings": true}, sdk.CodeUnsupported, "tie_word_embeddings")
	refuses(nemotron, m{"time_step_limit": []any{0.5}}, sdk.CodeInvalid, "time_step_limit: is no list of two numbers")
	refuses(nemotron, m{"time_step_limit": []any{2, 1}}, sdk.CodeInvalid, "time_step_limit")
	refuses(nemotron, m{"time_step_limit": []any{0, m{"__float__": "NaN"}}}, sdk.CodeInvalid, "time_step_limit")
	refuses(nemotron, m{"n_groups": 3}, sdk.CodeInvalid, "n_groups: is 3")
	refuses(nemotron, m{"n_group": 3}, sdk.CodeInvalid, "n_group: is 3, which does not cut 8 experts")
	refuses(next, m{"attn_output_gate": false}, sdk.CodeUnsupported, "attn_output_gate")
	refuses(next, m{"partial_rotary_factor": 1.5}, sdk.CodeInvalid, "partial_rotary_factor: is 1.5")
	refuses(next, m{"linear_num_key_heads": 3}, sdk.CodeInvalid, "linear_num_key_heads: is 3")
	refuses(next, m{"mlp_only_layers": []any{"first"}}, sdk.CodeInvalid, `mlp_only_layers[0]: is "first"`)
	refuses(next, m{"use_sliding_window": true}, sdk.CodeUnsupported, "use_sliding_window")
	refuses(dense, m{"layer_types": []string{"full_attention"}}, sdk.CodeInvalid, "text_config.layer_types: has 1 entries")
	refuses(dense, m{"full_attention_interval": 2}, sdk.CodeUnsupported, "text_config.layer_types[1]")
	refuses(dense, m{"mamba_ssm_dtype": "bfloat16"}, sdk.CodeUnsupported, "text_config.mamba_ssm_dtype")
	refuses(experts, m{"decoder_sparse_step": 2}, sdk.CodeUnsupported, "text_config.decoder_sparse_step: 2")
	refuses(experts, m{"mlp_only_layers": []int{0}}, sdk.CodeUnsupported, "text_config.mlp_only_layers")
}

// The spellings of one config give one profile.
func TestSpellings(t *testing.T) {
	types := map[rune]string{letterMamba: "linear_attention", letterAttention: "full_attention", letterMLP: "mlp", letterMoE: "moe"}
	var list, names []any
	for _, letter := range "MEM*EMEM*E" {
		list, names = append(list, string(letter)), append(names, types[letter])
	}
	cases := []struct {
		checkpoint string
		changes    map[string]any
	}{
		{"nemotron_h-moe-q4", map[string]any{"hybrid_override_pattern": list, "num_hidden_layers": nil}},
		{"nemotron_h-moe-q4", map[string]any{"hybrid_override_pattern": nil, "layers_block_type": names}},
		{"nemotron_h-moe-q4", map[string]any{"hybrid_override_pattern": nil, "layer_types": names, "time_step_limit": nil}},
		{"jamba-base-q4", map[string]any{"attn_layer_period": nil, "layers_block_type": []string{
			"mamba", "mamba", "attention", "mamba", "mamba", "mamba", "attention", "mamba"}}},
	}
	for _, c := range cases {
		want, got := inspect(t, bare(t, c.checkpoint, nil)), inspect(t, bare(t, c.checkpoint, c.changes))
		if len(got.Layers) != len(want.Layers) {
			t.Fatalf("%v: %d layers, want %d", c.changes, len(got.Layers), len(want.Layers))
		}
		for i := range want.Layers {
			if !reflect.DeepEqual(got.Layers[i], want.Layers[i]) {
				t.Errorf("%v: layer %d is %+v, want %+v", c.changes, i, got.Layers[i], want.Layers[i])
			}
		}
	}
}

func FuzzConfig(f *testing.F) {
	stagetest.FuzzConfigs(f, families(), parityRoot, []string{"jamba-base-q4", "nemotron_h-moe-q4", "qwen3_next-base-q4", "qwen3_5-base-q4", "qwen3_5_moe-base-q4"},
		`{"model_type": "nemotron_h", "time_step_limit": [0.0, Infinity], "hybrid_override_pattern": ["M", "*"]}`)
}
