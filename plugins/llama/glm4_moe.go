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

func (glm4MoE) Info() sdk.Family {
	return sdk.Family{Name: "glm4_moe", ModelTypes: []string{"glm4_moe"}, Pipeline: true, Quantizations: quantizations()}
}

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
		FirstKDenseReplace:  readCount(c, "first_k_dense_replace"),
		MoEIntermediateSize: c.Size("moe_intermediate_size"),
		NRoutedExperts:      c.Size("n_routed_experts"),
		NSharedExperts:      readCount(c, "n_shared_experts"),
	}
	a.plainRope(c)
	a.RotaryDim = readRotaryDim(c, a.HeadDim)
	a.Route = readCorrectedRoute(c, a.NRoutedExperts)
	a.names.Sources = expertsByNumber()
	for i := range min(max(1, readCount(c, "num_nextn_predict_layers")), maxPredictLayers) {
		a.names.DropContains = append(a.names.DropContains, fmt.Sprintf("model.layers.%d.", a.NumHiddenLayers+i))
	}
	return a
}

// maxPredictLayers bounds the layers that are left aside; published models have one.
const maxPredictLayers = 8

// readCount reads a number that may be 0 or absent, which counts as 0.
func readCount(c *config.Object, key string) int {
	if c.FloatOr(key, 0) == 0 {
		return 0
	}
	return c.Size(key)
}

// readCorrectedRoute reads the keys of DeepSeek V3's router.
func readCorrectedRoute(c *config.Object, experts int) mlx.RouteSpec {
	r := mlx.RouteSpec{
		TopK: c.Size("num_experts_per_tok"), Scores: mlx.RouteSigmoid, Normalize: c.BoolOr("norm_topk_prob", true),
		Scale: float32(c.PositiveOr("routed_scaling_factor", 1)), Groups: c.SizeOr("n_group", 1), TopGroups: c.SizeOr("topk_group", 1),
	}
	c.OneOf("scoring_func", "sigmoid", "sigmoid")
	c.OneOf("topk_method", "noaux_tc", "noaux_tc")
	checkTopK(c, r.TopK, experts)
	if experts%r.Groups != 0 || (r.Groups > 1 && experts/r.Groups < 2) {
		c.Fail("n_group", "is %d, which does not cut %d experts into equal groups of two or more", r.Groups, experts)
	}
	if r.TopGroups > r.Groups {
		c.Fail("topk_group", "is %d of %d groups", r.TopGroups, r.Groups)
	}
	return r
}

func (a *glm4MoEConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.Bias, attention.RotaryDim = a.AttentionBias, a.RotaryDim
	if a.UseQKNorm {
		attention.QKNorm = a.RMSNormEps
	}
	l := a.block(b, path)
	l.attention = nn.NewAttention(b, path+".self_attn", attention)
	l.feedForward = a.feedForward(b, path+".mlp", i)
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
