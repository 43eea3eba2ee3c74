package main

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// deltaConfig is what Qwen3-Next and Qwen 3.5 share.
type deltaConfig struct {
	hybrid
	FullAttentionInterval int // every so many'th layer is attention
	AttentionBias         bool
	Rope                  nn.RoPEConfig
	RotaryDim             int
	Delta                 nn.GatedDeltaConfig
	IntermediateSize      int // of dense layers

	NumExperts                   int // 0 for none
	NumExpertsPerTok             int
	MoEIntermediateSize          int
	SharedExpertIntermediateSize int
	NormTopKProb                 bool
	sparse                       func(layer int) bool // whether the layer has experts

	// original reports whether the checkpoint is the maker's, whose norms are stored minus 1 (but those within the delta nets).
	original func(b *nn.Builder) bool
}

// readDelta reads the shared keys; partial is the share of each head that rotates.
func readDelta(c *config.Object, partial float64) deltaConfig {
	a := deltaConfig{
		hybrid:                readHybrid(c, "rms_norm_eps", false),
		FullAttentionInterval: c.SizeOr("full_attention_interval", 4),
		AttentionBias:         c.BoolOr("attention_bias", false),
		Rope:                  nn.ReadRoPE(c),
	}
	a.NumHiddenLayers = c.Size("num_hidden_layers")
	a.RotaryDim = nn.RotaryDim(c, a.HeadDim, partial)
	a.Delta = nn.GatedDeltaConfig{
		Width: a.HiddenSize, KeyHeads: c.Size("linear_num_key_heads"), ValueHeads: c.Size("linear_num_value_heads"),
		KeyDim: c.Size("linear_key_head_dim"), ValueDim: c.Size("linear_value_head_dim"), Conv: c.Size("linear_conv_kernel_dim"), NormEps: a.Eps,
	}
	a.names.DropContains = []string{"mtp."} // layers for multi-token prediction
	a.check(c)
	return a
}

func (a *deltaConfig) check(c *config.Object) {
	c.OneOf("hidden_act", "silu", "silu", "swish")
	c.OneOf("mamba_ssm_dtype", "float32", "float32")
	if !c.BoolOr("attn_output_gate", true) {
		c.Unsupported("attn_output_gate", "false is not built")
	}
	if c.BoolOr("use_sliding_window", false) {
		c.Unsupported("use_sliding_window", "true is not built")
	}
	c.Divides("linear_num_key_heads", a.Delta.KeyHeads, "linear_num_value_heads", a.Delta.ValueHeads)
	checkConv(c, "linear_conv_kernel_dim", a.Delta.Conv)
	checkWidth(c, "linear_key_head_dim", a.Delta.KeyHeads*a.Delta.KeyDim)
	checkWidth(c, "linear_value_head_dim", a.Delta.ValueHeads*a.Delta.ValueDim)
	a.checkLayerTypes(c)
}

// checkLayerTypes refuses layer_types that say otherwise than full_attention_interval, which the reference goes by.
func (a *deltaConfig) checkLayerTypes(c *config.Object) {
	types := c.Strings("layer_types")
	if types == nil {
		return
	}
	if len(types) != a.NumHiddenLayers {
		c.Fail("layer_types", "has %d entries for %d layers", len(types), a.NumHiddenLayers)
		return
	}
	for i, kind := range types {
		want := "linear_attention"
		if a.isAttention(i) {
			want = "full_attention"
		}
		if kind != want {
			c.Unsupported(fmt.Sprintf("layer_types[%d]", i), "%q is not built: full_attention_interval %d makes it %s", kind, a.FullAttentionInterval, want)
			return
		}
	}
}

func (a *deltaConfig) isAttention(layer int) bool { return (layer+1)%a.FullAttentionInterval == 0 }

func (a *deltaConfig) readExperts(c *config.Object) {
	a.NumExpertsPerTok = c.Size("num_experts_per_tok")
	a.MoEIntermediateSize = c.Size("moe_intermediate_size")
	a.SharedExpertIntermediateSize = c.Size("shared_expert_intermediate_size")
	nn.CheckTopK(c, "num_experts_per_tok", a.NumExpertsPerTok, a.NumExperts)
}

// normOffset is what the checkpoint's norm weights lack.
func (a *deltaConfig) normOffset(b *nn.Builder) float64 {
	if a.original(b) {
		return 1
	}
	return 0
}

func (a *deltaConfig) Head(b *nn.Builder) nn.Head { return a.head(b, a.normOffset(b)) }

func (a *deltaConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path, offset := a.layerPath(i), a.normOffset(b)
	l := &nn.Block{
		InputNorm:       nn.NewOffsetRMSNorm(b, path+".input_layernorm", a.HiddenSize, a.Eps, offset),
		FeedForwardNorm: nn.NewOffsetRMSNorm(b, path+".post_attention_layernorm", a.HiddenSize, a.Eps, offset),
	}
	if a.isAttention(i) {
		l.Mixer = nn.NewGatedAttention(b, path+".self_attn", nn.GatedAttentionConfig{
			Width: a.HiddenSize, Heads: a.NumAttentionHeads, KVHeads: a.NumKeyValueHeads, HeadDim: a.HeadDim, RotDim: a.RotaryDim,
			Bias: a.AttentionBias, Rope: a.Rope, NormEps: a.Eps, NormOffset: offset,
		})
	} else {
		l.Mixer = nn.NewGatedDeltaNet(b, path+".linear_attn", a.Delta)
	}
	path += ".mlp"
	if !a.sparse(i) {
		l.FeedForward = nn.NewMLP(b, path, a.HiddenSize, a.IntermediateSize, false)
		return l
	}
	l.FeedForward = &nn.MoE{
		Router: nn.NewRouter(b, path+".gate", a.NumExperts, a.HiddenSize, false, mlx.RouteSpec{
			TopK: a.NumExpertsPerTok, Scores: mlx.RouteSoftmaxAll, Normalize: a.NormTopKProb, HighTies: true,
		}),
		Experts: nn.NewSwitchGLU(b, path+".switch_mlp", a.NumExperts, a.HiddenSize, a.MoEIntermediateSize, false, nn.SwiGLU),
		Shared:  nn.NewGatedExpert(b, path+".shared_expert", a.HiddenSize, a.SharedExpertIntermediateSize),
	}
	return l
}
