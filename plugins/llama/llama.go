package main

import (
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// llama is Llama and what is built like it: Llama 1 to 3, SmolLM, TinyLlama and others (Touvron et al. 2023; reference:
// mlx_lm/models/llama.py). Original and converted checkpoints use the same names.
type llama struct{}

func (llama) Info() sdk.Family {
	f := stage.Info("llama", "llama")
	f.Imports = []string{"gguf:llama"}
	return f
}

func (llama) Model(c *config.Object) stage.Model { return readLlama(c) }

func (llama) Import(req *sdk.ImportRequest) (*sdk.ImportPlan, error) { return importLlama(req) }

// llamaConfig is config.json with the defaults of mlx-lm's ModelArgs.
type llamaConfig struct {
	decoder
	IntermediateSize int
	AttentionBias    bool
	MLPBias          bool
	LayerTypes       []string // default: all full_attention
	SlidingWindow    int      // of the layers with sliding_attention; without layer_types it has no effect, as in mlx-lm
}

func readLlama(c *config.Object) *llamaConfig {
	a := &llamaConfig{
		decoder:          readDecoder(c, true),
		IntermediateSize: c.Size("intermediate_size"),
		AttentionBias:    c.BoolOr("attention_bias", false),
		MLPBias:          c.BoolOr("mlp_bias", false),
	}
	a.names.DropContains = []string{"self_attn.rotary_emb.inv_freq"} // precomputed in old checkpoints
	a.check(c)
	return a
}

// check refuses what this family does not compute: a key that changes the model is never ignored.
func (a *llamaConfig) check(c *config.Object) {
	if f := c.FloatOr("partial_rotary_factor", 1); f != 1 {
		c.Unsupported("partial_rotary_factor", "%v is not built for llama; built is 1", f)
	}
	a.LayerTypes = nn.ReadLayerTypes(c, a.NumHiddenLayers)
	if slices.Contains(a.LayerTypes, nn.SlidingAttention) {
		a.SlidingWindow = c.Size("sliding_window")
	}
}

func (a *llamaConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.Bias, attention.OutputBias = a.AttentionBias, a.AttentionBias
	if a.LayerTypes != nil && a.LayerTypes[i] == nn.SlidingAttention {
		attention.Window = a.SlidingWindow
	}
	l := a.block(b, path)
	l.Mixer = nn.NewAttention(b, path+".self_attn", attention)
	l.FeedForward = nn.NewMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, a.MLPBias)
	return l
}
