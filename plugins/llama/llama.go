package main

import (
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// llama is Llama and what is built like it: Llama 1 to 3, SmolLM, TinyLlama and others (Touvron et al. 2023; reference:
// mlx_lm/models/llama.py). Original and converted checkpoints use the same names.
type llama struct{}

func (llama) Info() sdk.Family {
	return sdk.Family{
		Name: "llama", ModelTypes: []string{"llama"}, Pipeline: true, Quantizations: quantizations(), Imports: []string{"gguf:llama"},
	}
}

func (llama) Model(c *config.Object) stage.Model { return readLlama(c) }

func (llama) Import(req *sdk.ImportRequest) (*sdk.ImportPlan, error) { return importLlama(req) }

// quantizations are those that the families of this executor run.
func quantizations() []string {
	return []string{"none", "affine-2", "affine-3", "affine-4", "affine-5", "affine-6", "affine-8", "mxfp4", "mxfp8", "nvfp4"}
}

// The values of layer_types.
const (
	fullAttention    = "full_attention"
	slidingAttention = "sliding_attention"
)

// llamaConfig is config.json with the defaults of mlx-lm's ModelArgs.
type llamaConfig struct {
	HiddenSize            int
	IntermediateSize      int
	NumHiddenLayers       int
	NumAttentionHeads     int
	NumKeyValueHeads      int // default: num_attention_heads
	HeadDim               int // default: hidden_size / num_attention_heads
	VocabSize             int
	MaxPositionEmbeddings int // 0: unbounded
	RMSNormEps            float64
	AttentionBias         bool
	MLPBias               bool
	TieWordEmbeddings     bool     // default: true
	LayerTypes            []string // default: all full_attention
	SlidingWindow         int      // of the layers with sliding_attention; without layer_types it has no effect, as in mlx-lm
	Rope                  nn.RoPEConfig
}

func readLlama(c *config.Object) *llamaConfig {
	a := &llamaConfig{
		HiddenSize:        c.Size("hidden_size"),
		IntermediateSize:  c.Size("intermediate_size"),
		NumHiddenLayers:   c.Size("num_hidden_layers"),
		NumAttentionHeads: c.Size("num_attention_heads"),
		VocabSize:         c.Size("vocab_size"),
		RMSNormEps:        c.Positive("rms_norm_eps"),
		AttentionBias:     c.BoolOr("attention_bias", false),
		MLPBias:           c.BoolOr("mlp_bias", false),
		TieWordEmbeddings: c.BoolOr("tie_word_embeddings", true),
		LayerTypes:        c.Strings("layer_types"),
		Rope:              nn.ReadRoPE(c),
	}
	a.NumKeyValueHeads = c.SizeOr("num_key_value_heads", a.NumAttentionHeads)
	a.HeadDim = c.SizeOr("head_dim", max(1, a.HiddenSize/a.NumAttentionHeads))
	if c.Has("max_position_embeddings") {
		a.MaxPositionEmbeddings = c.Size("max_position_embeddings")
	}
	a.check(c)
	return a
}

// check refuses what this family does not compute: a key that changes the model is never ignored.
func (a *llamaConfig) check(c *config.Object) {
	c.OneOf("hidden_act", "silu", "silu", "swish")
	if f := c.FloatOr("partial_rotary_factor", 1); f != 1 {
		c.Unsupported("partial_rotary_factor", "%v is not built for llama; built is 1", f)
	}
	if a.NumAttentionHeads%a.NumKeyValueHeads != 0 {
		c.Fail("num_key_value_heads", "is %d, which does not divide num_attention_heads %d", a.NumKeyValueHeads, a.NumAttentionHeads)
	}
	if a.HeadDim%2 != 0 {
		c.Fail("head_dim", "is %d, want an even number", a.HeadDim)
	}
	if a.LayerTypes == nil {
		return
	}
	if len(a.LayerTypes) != a.NumHiddenLayers {
		c.Fail("layer_types", "has %d entries for %d layers", len(a.LayerTypes), a.NumHiddenLayers)
	}
	for i, kind := range a.LayerTypes {
		if kind != fullAttention && kind != slidingAttention {
			c.Unsupported(fmt.Sprintf("layer_types[%d]", i), "%q is not built; built are %s, %s", kind, fullAttention, slidingAttention)
		}
	}
	if slices.Contains(a.LayerTypes, slidingAttention) {
		a.SlidingWindow = c.Size("sliding_window")
	}
}

func (a *llamaConfig) Shape() stage.Shape {
	s := stage.Shape{
		Layers: a.NumHiddenLayers, Width: a.HiddenSize, Vocab: a.VocabSize, Context: a.MaxPositionEmbeddings,
		Tied: a.TieWordEmbeddings, EmbeddingPath: embedPath,
		Names: weights.Names{DropContains: []string{"self_attn.rotary_emb.inv_freq"}}, // precomputed in old checkpoints
	}
	if a.TieWordEmbeddings {
		s.Names.Drop = []string{headPath + ".weight"}
	}
	return s
}

const (
	embedPath = "model.embed_tokens"
	headPath  = "lm_head"
)

func (a *llamaConfig) Embedding(b *nn.Builder) nn.Embedder {
	return nn.NewEmbedding(b, embedPath, a.VocabSize, a.HiddenSize)
}

func (a *llamaConfig) Head(b *nn.Builder) nn.Head {
	path := headPath
	if a.TieWordEmbeddings {
		path = embedPath
	}
	return nn.NewLMHead(b, nn.NewRMSNorm(b, "model.norm", a.HiddenSize, a.RMSNormEps), path, a.VocabSize, a.HiddenSize)
}

// llamaBlock is a pre-norm transformer block.
type llamaBlock struct {
	inputNorm     *nn.RMSNorm
	attention     *nn.Attention
	attentionNorm *nn.RMSNorm
	mlp           *nn.MLP
}

func (a *llamaConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := fmt.Sprintf("model.layers.%d", i)
	window := 0
	if a.LayerTypes != nil && a.LayerTypes[i] == slidingAttention {
		window = a.SlidingWindow
	}
	return &llamaBlock{
		inputNorm: nn.NewRMSNorm(b, path+".input_layernorm", a.HiddenSize, a.RMSNormEps),
		attention: nn.NewAttention(b, path+".self_attn", nn.AttentionConfig{
			Width: a.HiddenSize, Heads: a.NumAttentionHeads, KVHeads: a.NumKeyValueHeads, HeadDim: a.HeadDim,
			Bias: a.AttentionBias, Window: window, Rope: a.Rope,
		}),
		attentionNorm: nn.NewRMSNorm(b, path+".post_attention_layernorm", a.HiddenSize, a.RMSNormEps),
		mlp:           nn.NewMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, a.MLPBias),
	}
}

func (l *llamaBlock) Kind() string { return l.attention.Kind() }

func (l *llamaBlock) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	r := l.attention.Forward(p, l.inputNorm.Forward(p, x))
	h, normed := l.attentionNorm.AddForward(p, x, r)
	return p.Add(h, l.mlp.Forward(p, normed))
}
