package main

import (
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

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
	dense               []int64 // layers without experts whatever SparseStep says
}

func (qwen3MoE) Model(c *config.Object) stage.Model {
	a := &qwen3MoEConfig{
		decoder:             readDecoder(c, false),
		IntermediateSize:    c.Size("intermediate_size"),
		MoEIntermediateSize: c.Size("moe_intermediate_size"),
		NumExperts:          c.Size("num_experts"),
		SparseStep:          c.SizeOr("decoder_sparse_step", 1),
		dense:               c.Integers("mlp_only_layers"),
	}
	a.names.Sources = expertsByNumber()
	return a
}

func (a *qwen3MoEConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.QKNorm = a.RMSNormEps
	sparse := (i+1)%a.SparseStep == 0 && !slices.Contains(a.dense, int64(i))
	if sparse {
		a.planExperts(b, path+".mlp", a.NumExperts, a.MoEIntermediateSize)
	} else {
		nn.NewMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, false)
	}
	return a.plan(b, path, attention, sparse)
}
