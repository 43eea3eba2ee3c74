package main

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// Families that are priced for planning and not run: their modules are declared, so that Inspect tells their bytes from
// headers or from a config alone, and the stage refuses to load them.

// plannedFamily describes a family that is only priced.
func plannedFamily(name string) sdk.Family {
	return sdk.Family{Name: name, ModelTypes: []string{name}, PlanOnly: true, Quantizations: quantizations()}
}

// planned stands for a layer or a head whose modules were declared.
type planned string

func (l planned) Kind() string { return string(l) }

// Forward returns no array, which every operation refuses.
func (planned) Forward(*nn.Pass, mlx.Array) mlx.Array { return mlx.Array{} }

// plan declares the norms and the attention of a layer; the caller declares what follows.
func (d *decoder) plan(b *nn.Builder, path string, a nn.AttentionConfig, sparse bool) planned {
	d.norm(b, path+".input_layernorm")
	d.norm(b, path+".post_attention_layernorm")
	kind := nn.NewAttention(b, path+".self_attn", a).Kind()
	if sparse {
		kind += "-moe"
	}
	return planned(kind)
}

// planExperts declares a router and experts.
func (d *decoder) planExperts(b *nn.Builder, path string, experts, hidden int) {
	nn.NewRouter(b, path+".gate", experts, d.HiddenSize, false, mlx.RouteSpec{})
	nn.NewSwitchGLU(b, path+".switch_mlp", experts, d.HiddenSize, hidden, false, nn.SwiGLU)
}

// expertsByNumber finds stacked experts in checkpoints with tensors for each.
func expertsByNumber() []weights.Source {
	return []weights.Source{{Of: "mlp.switch_mlp.", From: "mlp.experts.{}."}}
}

// qwen2MoE is Qwen 1.5 and 2 MoE (reference: mlx_lm/models/qwen2_moe.py): every layer has experts and a gated shared one.
type qwen2MoE struct{}

func (qwen2MoE) Info() sdk.Family { return plannedFamily("qwen2_moe") }

type qwen2MoEConfig struct {
	decoder
	MoEIntermediateSize          int
	SharedExpertIntermediateSize int
	NumExperts                   int
}

func (qwen2MoE) Model(c *config.Object) stage.Model {
	a := &qwen2MoEConfig{
		decoder:                      readDecoder(c, false),
		MoEIntermediateSize:          c.Size("moe_intermediate_size"),
		SharedExpertIntermediateSize: c.Size("shared_expert_intermediate_size"),
		NumExperts:                   c.Size("num_experts"),
	}
	a.names.Sources = expertsByNumber()
	return a
}

func (a *qwen2MoEConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.Bias = true
	a.planExperts(b, path+".mlp", a.NumExperts, a.MoEIntermediateSize)
	nn.NewMLP(b, path+".mlp.shared_expert", a.HiddenSize, a.SharedExpertIntermediateSize, false)
	nn.NewLinear(b, path+".mlp.shared_expert_gate", a.HiddenSize, 1, false)
	return a.plan(b, path, attention, true)
}

// qwen3MoE is Qwen 3 MoE (reference: mlx_lm/models/qwen3_moe.py): experts on every decoder_sparse_step'th layer but those in
// mlp_only_layers.
type qwen3MoE struct{}

func (qwen3MoE) Info() sdk.Family { return plannedFamily("qwen3_moe") }

type qwen3MoEConfig struct {
	decoder
	IntermediateSize    int // of dense layers
	MoEIntermediateSize int
	NumExperts          int
	SparseStep          int
	dense               map[int64]bool // layers without experts whatever SparseStep says
}

func (qwen3MoE) Model(c *config.Object) stage.Model {
	a := &qwen3MoEConfig{
		decoder:             readDecoder(c, false),
		IntermediateSize:    c.Size("intermediate_size"),
		MoEIntermediateSize: c.Size("moe_intermediate_size"),
		NumExperts:          c.Size("num_experts"),
		SparseStep:          c.SizeOr("decoder_sparse_step", 1),
		dense:               map[int64]bool{},
	}
	for i, v := range list(c, "mlp_only_layers") {
		n, ok := config.Integer(v)
		if !ok {
			c.Fail(fmt.Sprintf("mlp_only_layers[%d]", i), "is no whole number")
		}
		a.dense[n] = true
	}
	a.names.Sources = expertsByNumber()
	return a
}

// list returns the list under key, nil if it is absent; anything else is a fault.
func list(c *config.Object, key string) []any {
	if !c.Has(key) {
		return nil
	}
	l, ok := c.Value(key).([]any)
	if !ok {
		c.Fail(key, "is no list")
	}
	return l
}

func (a *qwen3MoEConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.QKNorm = a.RMSNormEps
	sparse := (i+1)%a.SparseStep == 0 && !a.dense[int64(i)]
	if sparse {
		a.planExperts(b, path+".mlp", a.NumExperts, a.MoEIntermediateSize)
	} else {
		nn.NewMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, false)
	}
	return a.plan(b, path, attention, sparse)
}

// phiMoE is Phi-3.5-MoE (reference: mlx_lm/models/phimoe.py): biases in attention and head, and norms with mean and bias.
type phiMoE struct{}

func (phiMoE) Info() sdk.Family { return plannedFamily("phimoe") }

type phiMoEConfig struct {
	decoder
	IntermediateSize int // of each expert
	NumLocalExperts  int
}

func (phiMoE) Model(c *config.Object) stage.Model {
	a := &phiMoEConfig{
		decoder:          readSizes(c, false), // rotary positions, of type longrope, change no price
		IntermediateSize: c.Size("intermediate_size"),
		NumLocalExperts:  c.SizeOr("num_local_experts", 16),
	}
	a.names.Sources = mixtralExperts()
	return a
}

func (a *phiMoEConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.Bias, attention.OutputBias = true, true
	for _, norm := range []string{".input_layernorm", ".post_attention_layernorm"} {
		b.Vector(path+norm+".bias", a.HiddenSize)
	}
	a.planExperts(b, path+".block_sparse_moe", a.NumLocalExperts, a.IntermediateSize)
	return a.plan(b, path, attention, true)
}

func (a *phiMoEConfig) Head(b *nn.Builder) nn.Head {
	a.norm(b, "model.norm")
	b.Vector("model.norm.bias", a.HiddenSize)
	nn.NewLinear(b, headPath, a.HiddenSize, a.VocabSize, true)
	return planned("head")
}

// exaoneMoE is K-EXAONE (reference: mlx_lm/models/exaone_moe.py): DeepSeek V3's router behind attention with windows.
type exaoneMoE struct{}

func (exaoneMoE) Info() sdk.Family { return plannedFamily("exaone_moe") }

type exaoneMoEConfig struct {
	decoder
	IntermediateSize    int // of dense layers
	MoEIntermediateSize int
	NumExperts          int
	NumSharedExperts    int // 0 for none
	SlidingWindow       int
	LayerTypes          []string
	sparse              []bool
}

func (exaoneMoE) Model(c *config.Object) stage.Model {
	a := &exaoneMoEConfig{
		decoder:             readDecoder(c, false),
		IntermediateSize:    c.Size("intermediate_size"),
		MoEIntermediateSize: c.Size("moe_intermediate_size"),
		NumExperts:          c.Size("num_experts"),
		NumSharedExperts:    readCount(c, "num_shared_experts"),
		SlidingWindow:       c.Size("sliding_window"),
		LayerTypes:          readLayerTypes(c, c.Size("num_hidden_layers")),
	}
	if a.LayerTypes == nil {
		c.Fail("layer_types", "is missing")
	}
	for i, v := range list(c, "is_moe_layer") {
		sparse, ok := v.(bool)
		if !ok {
			c.Fail(fmt.Sprintf("is_moe_layer[%d]", i), "is neither true nor false")
		}
		a.sparse = append(a.sparse, sparse)
	}
	if len(a.sparse) != a.NumHiddenLayers {
		c.Fail("is_moe_layer", "has %d entries for %d layers", len(a.sparse), a.NumHiddenLayers)
	}
	a.names.Sources = append(expertsByNumber(), weights.Source{Of: "mlp.gate.e_score", From: "mlp.e_score"})
	a.names.DropContains = []string{"mtp."} // multi-token prediction
	return a
}

func (a *exaoneMoEConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.QKNorm = a.RMSNormEps
	if a.LayerTypes[i] == slidingAttention {
		attention.Window = a.SlidingWindow
	}
	if !a.sparse[i] {
		nn.NewMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, false)
		return a.plan(b, path, attention, false)
	}
	nn.NewCorrectedRouter(b, path+".mlp.gate", a.NumExperts, a.HiddenSize, mlx.RouteSpec{})
	nn.NewSwitchGLU(b, path+".mlp.switch_mlp", a.NumExperts, a.HiddenSize, a.MoEIntermediateSize, false, nn.SwiGLU)
	if a.NumSharedExperts > 0 {
		nn.NewMLP(b, path+".mlp.shared_experts", a.HiddenSize, a.MoEIntermediateSize*a.NumSharedExperts, false)
	}
	return a.plan(b, path, attention, true)
}
