package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// mixtral is Mixtral 8x7B and 8x22B (Jiang et al. 2024; reference: mlx_lm/models/mixtral.py): every layer's feed-forward is
// a mixture of experts. A sliding_window has no effect, as in mlx-lm.
type mixtral struct{}

func (mixtral) Info() sdk.Family { return stage.Info("mixtral", "mixtral") }

type mixtralConfig struct {
	decoder
	IntermediateSize int // of each expert
	NumLocalExperts  int
	NumExpertsPerTok int
}

func (mixtral) Model(c *config.Object) stage.Model {
	a := &mixtralConfig{
		decoder:          readDecoder(c, false),
		IntermediateSize: c.Size("intermediate_size"),
		NumLocalExperts:  c.SizeOr("num_local_experts", 8),
		NumExpertsPerTok: c.SizeOr("num_experts_per_tok", 2),
	}
	if !c.Has("rope_theta") && !c.Has("rope_parameters") {
		a.Rope.Base = 1e6
	}
	a.plainRope(c)
	nn.CheckTopK(c, "num_experts_per_tok", a.NumExpertsPerTok, a.NumLocalExperts)
	a.names.Sources = mixtralExperts()
	return a
}

func (a *mixtralConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	moe := path + ".block_sparse_moe"
	l := a.block(b, path)
	l.Mixer = nn.NewAttention(b, path+".self_attn", a.attention())
	l.FeedForward = &nn.MoE{
		Router:  nn.NewRouter(b, moe+".gate", a.NumLocalExperts, a.HiddenSize, false, mlx.RouteSpec{TopK: a.NumExpertsPerTok}),
		Experts: nn.NewSwitchGLU(b, moe+".switch_mlp", a.NumLocalExperts, a.HiddenSize, a.IntermediateSize, false, nn.SwiGLU),
	}
	return l
}
