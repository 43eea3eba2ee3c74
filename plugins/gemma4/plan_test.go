package main

import (
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
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
	parity().PlanFromConfig(t, 0)
}

func TestLayerKinds(t *testing.T) {
	for name, want := range map[string]string{
		"gemma3-text-q4": "sliding-attention sliding-attention attention sliding-attention sliding-attention attention",
		"gemma4-e2b-q4":  "sliding-attention sliding-attention sliding-attention attention shared-sliding-attention shared-sliding-attention shared-sliding-attention shared-attention",
		"gemma4-moe-q4":  "sliding-attention-moe sliding-attention-moe sliding-attention-moe attention-moe sliding-attention-moe sliding-attention-moe sliding-attention-moe attention-moe",
	} {
		p := inspect(t, filepath.Join(parityRoot, name))
		for i, l := range p.Layers {
			if shared := strings.HasPrefix(l.Kind, "shared"); shared != (l.PositionBytes() == 0) {
				t.Errorf("%s, layer %d: %+v", name, i, l)
			}
		}
		if got := stagetest.Kinds(p); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// What layers carry beside the residual stream crosses the boundary with it.
func TestBoundary(t *testing.T) {
	for name, want := range map[string]int{"gemma3-text-q4": 128, "gemma4-e2b-q4": 64 + 8*64, "gemma4-moe-q4": 64} {
		if p := inspect(t, filepath.Join(parityRoot, name)); p.Boundary.Width != want || !p.Tied {
			t.Errorf("%s: %d elements, tied %v; want %d", name, p.Boundary.Width, p.Tied, want)
		}
	}
}

// e2b is Gemma 4 E2B's published shape.
func e2b() map[string]any {
	types := make([]string, 35)
	for i := range types {
		types[i] = nn.SlidingAttention
		if i%5 == 4 {
			types[i] = nn.FullAttention
		}
	}
	return map[string]any{"model_type": "gemma4", "vocab_size": 262144, "text_config": map[string]any{"layer_types": types, "num_hidden_layers": 35,
		"num_kv_shared_layers": 20, "hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 1}}
}

func TestAdjacencyOfE2B(t *testing.T) {
	p := inspect(t, stagetest.Bare(t, e2b()))
	if len(p.Adjacency) != 20 || p.Adjacency[0].Source != 13 || p.Adjacency[4].Source != 14 || p.Adjacency[19].Consumer != 34 {
		t.Fatalf("%+v", p.Adjacency)
	}
	var legal []int
	for b := 1; b < len(p.Layers); b++ {
		if !slices.ContainsFunc(p.Adjacency, func(g sdk.AdjacencyGroup) bool { return g.Source < b && b <= g.Consumer }) {
			legal = append(legal, b)
		}
	}
	if len(legal) != 13 || legal[12] != 13 {
		t.Errorf("legal boundaries are %v, want 1 to 13", legal)
	}
	// The last layers' feed-forward part is twice as wide: 3 matrices of 6144 by 1536 more, in 2 bytes, less what reads a cache.
	if wide := p.Layers[15].Weights - p.Layers[10].Weights; wide != 2*(3*6144*1536-2*256*1536-256) {
		t.Errorf("a layer that shares weighs %d bytes more", wide)
	}
	// By its model card E2B has 5.1 billion parameters: these and the towers' 0.45.
	total := p.Embedding
	for _, l := range p.Layers {
		total += l.Weights
	}
	if n := float64(total) / 2 / 1e9; math.Abs(n-4.65) > 0.1 {
		t.Errorf("%.3f billion parameters", n)
	}
}

// A stage whose bounds part a reader from its source is refused with both.
func TestCutIsRefused(t *testing.T) {
	dir := filepath.Join(parityRoot, "gemma4-e2b-q4")
	for _, r := range []sdk.LayerRange{{Start: 0, End: 4}, {Start: 4, End: 8}, {Start: 3, End: 8}, {Start: 2, End: 7}} {
		req := sdk.LoadRequest{Dir: dir, Family: "gemma4", Layers: r, HasEmbedding: r.Start == 0, HasHead: r.End == 8, Threads: 1}
		_, err := stagetest.New(t, families()).Load(t.Context(), req, nil)
		if err == nil || sdk.CodeOf(err) != sdk.CodeInvalid || !strings.Contains(err.Error(), "reads the keys and values of layer") {
			t.Errorf("%v: %v", r, err)
		}
	}
}

// What is not computed is refused with the key's name.
func TestConfigFaults(t *testing.T) {
	refuses := stagetest.Refusing(t, families(), parityRoot)
	refuses("gemma3-text-q4", map[string]any{"hidden_activation": "gelu"}, sdk.CodeUnsupported, "hidden_activation")
	refuses("gemma3-text-q4", map[string]any{"attn_logit_softcapping": 50}, sdk.CodeUnsupported, "attn_logit_softcapping: 50")
	refuses("gemma3-text-q4", map[string]any{"final_logit_softcapping": 30}, sdk.CodeUnsupported, "final_logit_softcapping: 30")
	refuses("gemma3-text-q4", map[string]any{"use_bidirectional_attention": true}, sdk.CodeUnsupported, "use_bidirectional_attention: true")
	refuses("gemma3-mm-q4", map[string]any{"num_key_value_heads": 3}, sdk.CodeInvalid, "text_config.num_key_value_heads: is 3")
	refuses("gemma3-mm-q4", map[string]any{"head_dim": 31}, sdk.CodeInvalid, "text_config.head_dim: is 31")
	refuses("gemma3-mm-q4", map[string]any{"rope_scaling": map[string]any{"rope_type": "dynamic"}}, sdk.CodeUnsupported, "rope_scaling.rope_type")
	refuses("gemma4-e2b-q4", map[string]any{"layer_types": []string{nn.FullAttention}}, sdk.CodeInvalid, "layer_types: has 1 entries for 8 layers")
	refuses("gemma4-e2b-q4", map[string]any{"num_kv_shared_layers": 8}, sdk.CodeInvalid, "num_kv_shared_layers: is 8 of 8 layers")
	refuses("gemma4-e2b-q4", map[string]any{"num_kv_shared_layers": 5}, sdk.CodeInvalid, "leaves layer 3 no full_attention layer")
	refuses("gemma4-e2b-q4", map[string]any{"vocab_size_per_layer_input": 300}, sdk.CodeUnsupported, "vocab_size_per_layer_input: 300")
	refuses("gemma4-e2b-q4", map[string]any{"rope_traditional": true}, sdk.CodeUnsupported, "rope_traditional")
	refuses("gemma4-e2b-q4", map[string]any{"rope_parameters": map[string]any{nn.SlidingAttention: map[string]any{"partial_rotary_factor": 0.5}}}, sdk.CodeUnsupported, "partial_rotary_factor: 0.5")
	refuses("gemma4-e2b-q4", map[string]any{"rope_parameters": map[string]any{nn.FullAttention: map[string]any{"rope_type": "yarn"}}}, sdk.CodeUnsupported, `"yarn"`)
	refuses("gemma4-moe-q4", map[string]any{"top_k_experts": 9}, sdk.CodeInvalid, "top_k_experts: is 9 of 8 experts")
	refuses("gemma4-moe-q4", map[string]any{"num_global_key_value_heads": 3}, sdk.CodeInvalid, "num_global_key_value_heads: is 3")
	bare := stagetest.Bare(t, map[string]any{"model_type": "gemma4"})
	if _, err := stagetest.New(t, families()).Inspect(t.Context(), sdk.InspectRequest{Dir: bare}); !stagetest.Is(err, sdk.CodeInvalid, "text_config: is missing") {
		t.Errorf("gemma4 without text_config: %v", err)
	}
}

// The defaults are those of mlx-lm's ModelArgs.
func TestDefaults(t *testing.T) {
	p := inspect(t, stagetest.Bare(t, map[string]any{"model_type": "gemma3", "text_config": map[string]any{}}))
	if p.VocabSize != 262208 || len(p.Layers) != 26 || p.Layers[5].Kind != "attention" || p.Layers[4].Kind != "sliding-attention" || p.Layers[0].PositionBytes() != 2*2*4*256 {
		t.Errorf("gemma3: %d tokens, %+v", p.VocabSize, p.Layers)
	}
	p = inspect(t, stagetest.Bare(t, map[string]any{"model_type": "gemma4_text"}))
	if p.VocabSize != 262144 || len(p.Layers) != 35 || p.Layers[4].PositionBytes() != 2*2*512 || p.Layers[3].PositionBytes() != 2*2*256 || p.Boundary.Width != 1536+35*256 {
		t.Errorf("gemma4: %d tokens, %+v", p.VocabSize, p.Layers)
	}
}

// Newer configs keep both rotations of Gemma 3 by kind of layer.
func TestGemma3Ropes(t *testing.T) {
	read := func(text string) *gemma3Config {
		o, err := config.Parse([]byte(text), config.FileName)
		if err != nil {
			t.Fatal(err)
		}
		m := gemma3{}.Model(o)
		if o.Err() != nil {
			t.Fatal(o.Err())
		}
		return m.(*gemma3Config)
	}
	older := read(`{"model_type": "gemma3_text", "rope_local_base_freq": 5000, "rope_scaling": {"rope_type": "linear", "factor": 8}}`)
	newer := read(`{"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
		"sliding_attention": {"rope_type": "default", "rope_theta": 5000}}}`)
	for _, a := range []*gemma3Config{older, newer} {
		if f := a.global.InverseFrequencies(4); f[0] != 1.0/8 || math.Abs(f[1]-1e-3/8) > 1e-12 {
			t.Errorf("global frequencies are %v", f)
		}
		if f := a.local.InverseFrequencies(4); f[0] != 1 || math.Abs(f[1]-1/math.Sqrt(5000)) > 1e-12 {
			t.Errorf("local frequencies are %v", f)
		}
	}
}

// The proportional rotation's frequencies are those of the whole head, of which the leading share rotates.
func TestProportionalRope(t *testing.T) {
	o, err := config.Parse([]byte(`{"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 256, "factor": 2}`), config.FileName)
	if err != nil {
		t.Fatal(err)
	}
	r := readRope(o, 1e4, 8)
	if got, want := r.InverseFrequencies(8), []float64{1. / 2, 1. / 4 / 2, 0, 0}; o.Err() != nil || !slices.Equal(got, want) {
		t.Errorf("%v, want %v (%v)", got, want, o.Err())
	}
}

// Every family takes any config: it records faults, or describes a model whose layers can be priced.
func FuzzFamilyConfigs(f *testing.F) {
	stagetest.FuzzConfigs(f, families(), parityRoot, []string{"gemma3-text-q4", "gemma3-mm-q4", "gemma4-text-q4", "gemma4-moe-q4", "gemma4_vlm-e2b-q4"})
}
