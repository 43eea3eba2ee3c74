package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// glm4 is the dense GLM-4-0414 (reference: mlx_lm/models/glm4.py): norms also behind each half of a block, inside the
// residual, and rotary positions over a leading part of each head. Original and converted checkpoints use the same names.
type glm4 struct{}

func (glm4) Info() sdk.Family { return stage.Info("glm4", "glm4") }

type glm4Config struct {
	decoder
	IntermediateSize int
	AttentionBias    bool // of the query, key and value projections
	RotaryDim        int
}

func (glm4) Model(c *config.Object) stage.Model {
	a := &glm4Config{
		decoder:          readDecoder(c, false),
		IntermediateSize: c.Size("intermediate_size"),
		AttentionBias:    c.BoolOr("attention_bias", false),
	}
	a.plainRope(c)
	a.Rope.Traditional = c.BoolOr("rope_traditional", true)
	a.RotaryDim = nn.RotaryDim(c, a.HeadDim, c.Positive("partial_rotary_factor"))
	a.names.Sources = fusedGateUp()
	return a
}

// fusedGateUp finds gate_proj and up_proj in the halves of one matrix, the gate first.
func fusedGateUp() []weights.Source {
	return []weights.Source{
		{Of: "mlp.gate_proj.", From: "mlp.gate_up_proj.", Parts: 2, Part: 0},
		{Of: "mlp.up_proj.", From: "mlp.gate_up_proj.", Parts: 2, Part: 1},
	}
}

type glm4Block struct {
	inputNorm             *nn.RMSNorm
	attention             *nn.Attention
	attentionNorm         *nn.RMSNorm // behind the attention
	feedForwardInputNorm  *nn.RMSNorm
	feedForward           *nn.MLP
	feedForwardOutputNorm *nn.RMSNorm
}

func (a *glm4Config) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.Bias, attention.RotaryDim = a.AttentionBias, a.RotaryDim
	return &glm4Block{
		inputNorm:             a.norm(b, path+".input_layernorm"),
		attention:             nn.NewAttention(b, path+".self_attn", attention),
		attentionNorm:         a.norm(b, path+".post_self_attn_layernorm"),
		feedForwardInputNorm:  a.norm(b, path+".post_attention_layernorm"),
		feedForward:           nn.NewMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, false),
		feedForwardOutputNorm: a.norm(b, path+".post_mlp_layernorm"),
	}
}

func (l *glm4Block) Kind() string { return l.attention.Kind() }

func (l *glm4Block) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	r := l.attentionNorm.Forward(p, l.attention.Forward(p, l.inputNorm.Forward(p, x)))
	h, normed := l.feedForwardInputNorm.AddForward(p, x, r)
	return p.Add(l.feedForwardOutputNorm.Forward(p, l.feedForward.Forward(p, normed)), h)
}
