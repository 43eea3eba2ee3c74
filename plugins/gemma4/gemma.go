package main

import (
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// Parts of the names of what a text model leaves aside: the towers for images and sound, and their ways into the stream.
func towers() []string {
	return []string{"vision_tower.", "vision_embedder.", "multi_modal_projector.", "audio_tower.", "embed_vision.", "embed_audio."}
}

// text is what the configs of all Gemmas share.
type text struct {
	HiddenSize            int
	NumHiddenLayers       int
	IntermediateSize      int
	NumAttentionHeads     int
	NumKeyValueHeads      int
	HeadDim               int
	VocabSize             int
	MaxPositionEmbeddings int
	RMSNormEps            float64
	SlidingWindow         int
	TieWordEmbeddings     bool

	prefix string // of every tensor's name
}

// read overrides the defaults in t by those keys that the config has, and returns the object that holds them: the config
// itself, or with wrapped its text_config. Then vocab_size is the outer one, as in mlx-lm.
func (t *text) read(c *config.Object, wrapped bool) *config.Object {
	outer := c
	if wrapped {
		t.prefix = "language_model."
		if c = outer.Object("text_config"); c == nil {
			outer.Fail("text_config", "is missing")
			return nil
		}
	}
	t.HiddenSize = c.SizeOr("hidden_size", t.HiddenSize)
	t.NumHiddenLayers = c.SizeOr("num_hidden_layers", t.NumHiddenLayers)
	t.IntermediateSize = c.SizeOr("intermediate_size", t.IntermediateSize)
	t.NumAttentionHeads = c.SizeOr("num_attention_heads", t.NumAttentionHeads)
	t.NumKeyValueHeads = c.SizeOr("num_key_value_heads", t.NumKeyValueHeads)
	t.HeadDim = c.SizeOr("head_dim", t.HeadDim)
	t.VocabSize = outer.SizeOr("vocab_size", t.VocabSize)
	t.MaxPositionEmbeddings = c.SizeOr("max_position_embeddings", t.MaxPositionEmbeddings)
	t.RMSNormEps = c.PositiveOr("rms_norm_eps", 1e-6)
	t.SlidingWindow = c.SizeOr("sliding_window", t.SlidingWindow)
	t.TieWordEmbeddings = c.BoolOr("tie_word_embeddings", true)
	c.OneOf("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
	c.Divides("num_key_value_heads", t.NumKeyValueHeads, "num_attention_heads", t.NumAttentionHeads)
	c.Even("head_dim", t.HeadDim)
	if c.Has("attn_logit_softcapping") {
		c.Unsupported("attn_logit_softcapping", "%v is not built for this family; built is null", c.Value("attn_logit_softcapping"))
	}
	// "vision" makes image tokens see each other both ways; text stays causal.
	if v := c.Value("use_bidirectional_attention"); v != nil && v != false && v != "vision" {
		c.Unsupported("use_bidirectional_attention", "%v is not built; built are false and \"vision\"", v)
	}
	return c
}

// null reports whether a key is there with the value null, which for keys with a default says none.
func null(c *config.Object, key string) bool {
	return !c.Has(key) && slices.Contains(c.Keys(), key)
}

// readRope reads the rotation of one kind of layer from its entry in rope_parameters, nil for none: heads of headDim elements.
func readRope(c *config.Object, base float64, headDim int) nn.RoPEConfig {
	r := nn.RoPEConfig{Base: base, Type: "default"}
	if c == nil {
		return r
	}
	r.Base = c.PositiveOr("rope_theta", base)
	if r.Base <= 1 {
		c.Fail("rope_theta", "is %v, want above 1", r.Base)
	}
	r.Type = c.OneOf("rope_type", "default", "default", "linear", "proportional")
	r.Factor = c.PositiveOr("factor", 1)
	share := c.PositiveOr("partial_rotary_factor", 1)
	switch {
	case share > 1:
		c.Fail("partial_rotary_factor", "is %v, want at most 1", share)
	case r.Type == "proportional":
		r.RotatedPairs = (int(float64(headDim)*share) + 1) / 2
	case share != 1:
		c.Unsupported("partial_rotary_factor", "%v is not built for rope_type %q; built is 1", share, r.Type)
	}
	return r
}

func (t *text) embedPath() string { return t.prefix + "model.embed_tokens" }
func (t *text) headPath() string  { return t.prefix + "lm_head" }

func (t *text) layerPath(i int) string { return fmt.Sprintf("%smodel.layers.%d", t.prefix, i) }

// shape is what the stage must know; families add to it.
func (t *text) shape() stage.Shape {
	return stage.Shape{
		Layers: t.NumHiddenLayers, Width: t.HiddenSize, Vocab: t.VocabSize, Context: t.MaxPositionEmbeddings,
		EmbeddingPath: t.embedPath(),
		Names: weights.Names{
			DropContains: append(towers(), "self_attn.rotary_emb."),
			// The original repositories' names.
			Sources: []weights.Source{
				{Of: "language_model.model.", From: "model.language_model."},
				{Of: "language_model.lm_head.", From: "lm_head."},
			},
		},
	}
}
