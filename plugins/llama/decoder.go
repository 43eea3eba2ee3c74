package main

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// decoder is what the configs of this group share: the sizes around and within a stack of attention blocks.
type decoder struct {
	HiddenSize            int
	NumHiddenLayers       int
	NumAttentionHeads     int
	NumKeyValueHeads      int // default: num_attention_heads
	HeadDim               int // default: hidden_size / num_attention_heads
	VocabSize             int
	MaxPositionEmbeddings int // 0: unbounded
	RMSNormEps            float64
	TieWordEmbeddings     bool
	Rope                  nn.RoPEConfig

	prefix string        // of every tensor's name
	names  weights.Names // beyond those that a tied head brings
}

// readDecoder reads the shared keys. tied is tie_word_embeddings' default.
func readDecoder(c *config.Object, tied bool) decoder {
	d := readSizes(c, tied)
	d.Rope = nn.ReadRoPE(c)
	return d
}

// readSizes is readDecoder without rotary positions.
func readSizes(c *config.Object, tied bool) decoder {
	d := decoder{
		HiddenSize:        c.Size("hidden_size"),
		NumHiddenLayers:   c.Size("num_hidden_layers"),
		NumAttentionHeads: c.Size("num_attention_heads"),
		VocabSize:         c.Size("vocab_size"),
		RMSNormEps:        c.Positive("rms_norm_eps"),
		TieWordEmbeddings: c.BoolOr("tie_word_embeddings", tied),
	}
	d.NumKeyValueHeads = c.SizeOr("num_key_value_heads", d.NumAttentionHeads)
	d.HeadDim = c.SizeOr("head_dim", max(1, d.HiddenSize/d.NumAttentionHeads))
	d.MaxPositionEmbeddings = c.SizeOr("max_position_embeddings", 0)
	c.OneOf("hidden_act", "silu", "silu", "swish")
	c.Divides("num_key_value_heads", d.NumKeyValueHeads, "num_attention_heads", d.NumAttentionHeads)
	c.Even("head_dim", d.HeadDim)
	return d
}

const (
	embedPath = "model.embed_tokens"
	headPath  = "lm_head"
)

func (d *decoder) Shape() stage.Shape {
	s := stage.Shape{
		Layers: d.NumHiddenLayers, Width: d.HiddenSize, Vocab: d.VocabSize, Context: d.MaxPositionEmbeddings,
		EmbeddingPath: d.prefix + embedPath, Names: d.names,
	}
	if d.TieWordEmbeddings {
		s.Names.Drop = append(s.Names.Drop, d.prefix+headPath+".weight")
	}
	return s
}

func (d *decoder) Embedding(b *nn.Builder) nn.Embedder {
	return nn.NewEmbedding(b, d.prefix+embedPath, d.VocabSize, d.HiddenSize)
}

func (d *decoder) Head(b *nn.Builder) nn.Head {
	path := d.prefix + headPath
	if d.TieWordEmbeddings {
		path = d.prefix + embedPath
	}
	return nn.NewLMHead(b, nn.NewRMSNorm(b, d.prefix+"model.norm", d.HiddenSize, d.RMSNormEps), path, d.VocabSize, d.HiddenSize)
}

func (d *decoder) layerPath(i int) string { return fmt.Sprintf("%smodel.layers.%d", d.prefix, i) }

// norm is a norm over the residual stream.
func (d *decoder) norm(b *nn.Builder, path string) *nn.RMSNorm {
	return nn.NewRMSNorm(b, path, d.HiddenSize, d.RMSNormEps)
}

// attention sizes an attention layer; callers add what is special.
func (d *decoder) attention() nn.AttentionConfig {
	return nn.AttentionConfig{
		Width: d.HiddenSize, Heads: d.NumAttentionHeads, KVHeads: d.NumKeyValueHeads, HeadDim: d.HeadDim, Rope: d.Rope,
	}
}

// block makes the norms of a transformer block; callers add its two halves.
func (d *decoder) block(b *nn.Builder, path string) *nn.Block {
	return &nn.Block{InputNorm: d.norm(b, path+".input_layernorm"), FeedForwardNorm: d.norm(b, path+".post_attention_layernorm")}
}

// plainRope refuses stretched rotary positions for families whose reference does not compute them.
func (d *decoder) plainRope(c *config.Object) {
	if d.Rope.Type != "default" {
		c.Unsupported("rope_scaling", "type %q is not built for this family; built is default", d.Rope.Type)
	}
}

// expertsByNumber finds stacked experts in checkpoints with tensors for each.
func expertsByNumber() []weights.Source {
	return []weights.Source{{Of: "mlp.switch_mlp.", From: "mlp.experts.{}."}}
}

// mixtralExperts finds stacked experts in the original and in old conversions, which name the matrices of each expert apart.
func mixtralExperts() []weights.Source {
	return []weights.Source{
		{Of: "block_sparse_moe.switch_mlp.gate_proj.", From: "block_sparse_moe.experts.{}.w1."},
		{Of: "block_sparse_moe.switch_mlp.down_proj.", From: "block_sparse_moe.experts.{}.w2."},
		{Of: "block_sparse_moe.switch_mlp.up_proj.", From: "block_sparse_moe.experts.{}.w3."},
	}
}
