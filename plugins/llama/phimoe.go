package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

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
