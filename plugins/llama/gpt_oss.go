package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// gptOSS is gpt-oss 20b and 120b (OpenAI 2025; reference: mlx_lm/models/gpt_oss.py): experts in MXFP4, windows on every other
// layer, attention sinks, and a clamped activation. As in mlx-lm, YaRN's "truncate": false has no effect.
type gptOSS struct{}

func (gptOSS) Info() sdk.Family { return stage.Info("gpt_oss", "gpt_oss") }

type gptOSSConfig struct {
	decoder
	IntermediateSize int // of each expert
	NumLocalExperts  int
	NumExpertsPerTok int
	AttentionBias    bool
	LayerTypes       []string // default: sliding and full attention in turns
	SlidingWindow    int
	SwiGLULimit      float64
}

// swigluAlpha is the slope within the activation's sigmoid.
const swigluAlpha = 1.702

func (gptOSS) Model(c *config.Object) stage.Model {
	a := &gptOSSConfig{
		decoder:          readDecoder(c, false),
		IntermediateSize: c.Size("intermediate_size"),
		NumLocalExperts:  c.Size("num_local_experts"),
		NumExpertsPerTok: c.Size("num_experts_per_tok"),
		AttentionBias:    c.BoolOr("attention_bias", true),
		SlidingWindow:    c.SizeOr("sliding_window", 128),
		SwiGLULimit:      c.PositiveOr("swiglu_limit", 7),
	}
	nn.CheckTopK(c, "num_experts_per_tok", a.NumExpertsPerTok, a.NumLocalExperts)
	a.LayerTypes = nn.ReadLayerTypes(c, a.NumHiddenLayers)
	a.names.Sources = gptOSSOriginal()
	// The original packs its experts alone; conversions name every other packed layer one by one.
	a.names.Packed = []string{".mlp.experts."}
	return a
}

// gptOSSOriginal finds the experts in the original checkpoint: gate and up rows take turns, and 32 weights are the 16 bytes
// of a block.
func gptOSSOriginal() []weights.Source {
	var sources []weights.Source
	for _, leaf := range []struct {
		of, from string
		bytes    bool
	}{{".weight", "_blocks", true}, {".scales", "_scales", false}, {".bias", "_bias", false}} {
		for part, name := range []string{"gate_proj", "up_proj"} {
			sources = append(sources, weights.Source{
				Of: "experts." + name + leaf.of, From: "experts.gate_up_proj" + leaf.from, Bytes: leaf.bytes,
				Parts: 2, Part: part, Axis: 1, Interleaved: true,
			})
		}
		sources = append(sources, weights.Source{Of: "experts.down_proj" + leaf.of, From: "experts.down_proj" + leaf.from, Bytes: leaf.bytes})
	}
	return sources
}

func (a *gptOSSConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.Bias, attention.OutputBias, attention.Sinks = a.AttentionBias, a.AttentionBias, true
	if a.slides(i) {
		attention.Window = a.SlidingWindow
	}
	l := a.block(b, path)
	l.Mixer = nn.NewAttention(b, path+".self_attn", attention)
	l.FeedForward = &nn.MoE{
		Router: nn.NewRouter(b, path+".mlp.router", a.NumLocalExperts, a.HiddenSize, true,
			mlx.RouteSpec{TopK: a.NumExpertsPerTok, HighTies: true}),
		Experts: nn.NewSwitchGLU(b, path+".mlp.experts", a.NumLocalExperts, a.HiddenSize, a.IntermediateSize, true, a.swiglu),
	}
	return l
}

func (a *gptOSSConfig) slides(i int) bool {
	if a.LayerTypes == nil {
		return i%2 == 0
	}
	return a.LayerTypes[i] == nn.SlidingAttention
}

func (a *gptOSSConfig) swiglu(p *nn.Pass, gate, up mlx.Array) mlx.Array {
	return p.ClampedSwiGLU(gate, up, swigluAlpha, float32(a.SwiGLULimit))
}
