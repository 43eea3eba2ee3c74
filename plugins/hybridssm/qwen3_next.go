package main

import (
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// qwen3Next is Qwen3-Next (Qwen team 2025; reference: mlx_lm/models/qwen3_next.py): gated delta nets, every few of them a
// gated attention layer, with experts and a gated shared one.
type qwen3Next struct{}

func (qwen3Next) Info() sdk.Family { return stage.Info("qwen3_next", "qwen3_next") }

func (qwen3Next) Model(c *config.Object) stage.Model {
	a := readDelta(c, c.PositiveOr("partial_rotary_factor", 0.25))
	a.Delta.Fused = true
	a.IntermediateSize = c.Size("intermediate_size")
	a.NormTopKProb = c.BoolOr("norm_topk_prob", false)
	a.NumExperts = c.Count("num_experts")
	if a.NumExperts > 0 {
		a.readExperts(c)
	}
	step, dense := c.SizeOr("decoder_sparse_step", 1), c.Integers("mlp_only_layers")
	a.sparse = func(layer int) bool {
		return a.NumExperts > 0 && (layer+1)%step == 0 && !slices.Contains(dense, int64(layer))
	}
	a.names.Sources = []weights.Source{{Of: "mlp.switch_mlp.", From: "mlp.experts.{}."}}
	// The original, and only that, has a tensor for each expert.
	a.original = func(b *nn.Builder) bool {
		for i := range a.NumHiddenLayers {
			if a.sparse(i) {
				return b.Shape(a.layerPath(i)+".mlp.experts.0.up_proj.weight") != nil
			}
		}
		return false
	}
	return &a
}
