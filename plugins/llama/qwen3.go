package main

import (
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// qwen3 is the dense Qwen 3 (Yang et al. 2025; reference: mlx_lm/models/qwen3.py): Llama's block with a norm over each query
// and key head. Original and converted checkpoints use the same names.
type qwen3 struct{}

func (qwen3) Info() sdk.Family { return stage.Info("qwen3", "qwen3") }

type qwen3Config struct {
	decoder
	IntermediateSize int
	AttentionBias    bool
}

func (qwen3) Model(c *config.Object) stage.Model {
	a := &qwen3Config{
		decoder:          readDecoder(c, false),
		IntermediateSize: c.Size("intermediate_size"),
		AttentionBias:    c.BoolOr("attention_bias", false),
	}
	if c.BoolOr("use_sliding_window", false) || slices.Contains(nn.ReadLayerTypes(c, a.NumHiddenLayers), nn.SlidingAttention) {
		c.Unsupported("use_sliding_window", "sliding windows are not built for qwen3")
	}
	return a
}

func (a *qwen3Config) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.Bias, attention.OutputBias = a.AttentionBias, a.AttentionBias
	attention.QKNorm = a.RMSNormEps
	l := a.block(b, path)
	l.Mixer = nn.NewAttention(b, path+".self_attn", attention)
	l.FeedForward = nn.NewMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, false)
	return l
}
