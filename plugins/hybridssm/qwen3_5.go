package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// qwen35 is the text tower of Qwen 3.5 (Qwen team 2026; reference: mlx_lm/models/qwen3_5.py), dense or with experts: the
// blocks of Qwen3-Next with a projection each for what that fuses. Checkpoints with a vision tower load without it; the wire
// names with _vlm are the same model.
type qwen35 struct {
	name      string
	modelType string
}

func (f qwen35) Info() sdk.Family { return stage.Info(f.name, f.modelType) }

func (f qwen35) Model(c *config.Object) stage.Model {
	text := c.Object("text_config")
	if text == nil { // a text model's own config
		text = c
	}
	const defaultTheta = 100000
	theta, partial := float64(defaultTheta), 0.25
	if params := text.Object("rope_parameters"); params != nil {
		theta = params.PositiveOr("rope_theta", defaultTheta)
		partial = params.PositiveOr("partial_rotary_factor", partial)
	}
	a := readDelta(text, partial)
	a.Rope.Base = theta
	a.TieWordEmbeddings = text.BoolOr("tie_word_embeddings", c.BoolOr("tie_word_embeddings", false))
	a.NormTopKProb = text.BoolOr("norm_topk_prob", true)
	a.NumExperts = text.CountOr("num_experts", 0)
	if a.NumExperts > 0 {
		a.readExperts(text)
		if step := text.SizeOr("decoder_sparse_step", 1); step != 1 {
			text.Unsupported("decoder_sparse_step", "%d is not built for %s; built is 1", step, f.name)
		}
		if len(text.Integers("mlp_only_layers")) > 0 {
			text.Unsupported("mlp_only_layers", "is not built for %s; built is an empty list", f.name)
		}
	} else {
		a.IntermediateSize = text.Size("intermediate_size")
	}
	a.sparse = func(int) bool { return a.NumExperts > 0 }

	const tower = "language_model."
	a.embedPath, a.layersPath = tower+"model.embed_tokens", tower+"model.layers"
	a.normPath, a.headPath = tower+"model.norm", tower+"lm_head"
	a.names.DropContains = append(a.names.DropContains, "vision_tower.", "model.visual.")
	a.names.Sources = []weights.Source{
		{Of: "mlp.switch_mlp.gate_proj.weight", From: "mlp.experts.gate_up_proj", Parts: 2, Part: 0, Axis: 1},
		{Of: "mlp.switch_mlp.up_proj.weight", From: "mlp.experts.gate_up_proj", Parts: 2, Part: 1, Axis: 1},
		{Of: "mlp.switch_mlp.down_proj.weight", From: "mlp.experts.down_proj"},
		{Of: tower + "model.", From: "model.language_model."},
		{Of: tower, From: ""},
	}
	// The original has its convolutions in PyTorch's layout.
	a.original = func(b *nn.Builder) bool {
		for i := range a.NumHiddenLayers {
			if !a.isAttention(i) {
				return nn.OriginalConv(b, a.layerPath(i)+".linear_attn.conv1d")
			}
		}
		return false
	}
	return &a
}
