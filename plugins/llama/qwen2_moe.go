package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

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
