package main

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// glm4MoE is GLM-4.5 and its successors with plain attention (Zeng et al. 2025; reference: mlx_lm/models/glm4_moe.py):
// DeepSeek V3's router over experts behind grouped-query attention. The layers for multi-token prediction behind the last
// one are left aside.
type glm4MoE struct{}

func (glm4MoE) Info() sdk.Family { return stage.Info("glm4_moe", "glm4_moe") }

type glm4MoEConfig struct {
	decoder
	IntermediateSize int  // of the dense layers
	AttentionBias    bool // of the query, key and value projections
	UseQKNorm        bool
	RotaryDim        int

	FirstKDenseReplace  int // the first layers, which are dense
	MoEIntermediateSize int // of each expert
	NRoutedExperts      int
	NSharedExperts      int // 0 for none
	Route               mlx.RouteSpec
}

func (glm4MoE) Model(c *config.Object) stage.Model {
	a := &glm4MoEConfig{
		decoder:             readDecoder(c, false),
		IntermediateSize:    c.Size("intermediate_size"),
		AttentionBias:       c.BoolOr("attention_bias", false),
		UseQKNorm:           c.BoolOr("use_qk_norm", false),
		FirstKDenseReplace:  c.CountOr("first_k_dense_replace", 0),
		MoEIntermediateSize: c.Size("moe_intermediate_size"),
		NRoutedExperts:      c.Size("n_routed_experts"),
		NSharedExperts:      c.CountOr("n_shared_experts", 0),
	}
	a.plainRope(c)
	a.RotaryDim = nn.RotaryDim(c, a.HeadDim, c.Positive("partial_rotary_factor"))
	a.Route = nn.ReadCorrectedRoute(c, a.NRoutedExperts)
	a.names.Sources = expertsByNumber()
	for i := range min(max(1, c.CountOr("num_nextn_predict_layers", 0)), maxPredictLayers) {
		a.names.DropContains = append(a.names.DropContains, fmt.Sprintf("model.layers.%d.", a.NumHiddenLayers+i))
	}
	return a
}

// maxPredictLayers bounds the layers that are left aside; published models have one.
const maxPredictLayers = 8

func (a *glm4MoEConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.Bias, attention.RotaryDim = a.AttentionBias, a.RotaryDim
	if a.UseQKNorm {
		attention.QKNorm = a.RMSNormEps
	}
	l := a.block(b, path)
	l.Mixer = nn.NewAttention(b, path+".self_attn", attention)
	l.FeedForward = a.feedForward(b, path+".mlp", i)
	return l
}

func (a *glm4MoEConfig) feedForward(b *nn.Builder, path string, i int) nn.FeedForward {
	if i < a.FirstKDenseReplace {
		return nn.NewMLP(b, path, a.HiddenSize, a.IntermediateSize, false)
	}
	m := &nn.MoE{
		Router:  nn.NewCorrectedRouter(b, path+".gate", a.NRoutedExperts, a.HiddenSize, a.Route),
		Experts: nn.NewSwitchGLU(b, path+".switch_mlp", a.NRoutedExperts, a.HiddenSize, a.MoEIntermediateSize, false, nn.SwiGLU),
	}
	if a.NSharedExperts > 0 {
		m.Shared = nn.NewMLP(b, path+".shared_experts", a.HiddenSize, a.MoEIntermediateSize*a.NSharedExperts, false)
	}
	return m
}
