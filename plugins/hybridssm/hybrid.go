package main

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// hybrid is what the configs of this group share: the sizes around a stack of unlike blocks, and the names of what stands
// before and after them.
type hybrid struct {
	HiddenSize            int
	NumHiddenLayers       int
	NumAttentionHeads     int
	NumKeyValueHeads      int
	HeadDim               int // default: hidden_size / num_attention_heads
	VocabSize             int
	MaxPositionEmbeddings int // 0: unbounded
	Eps                   float64
	TieWordEmbeddings     bool

	embedPath, layersPath, normPath, headPath string
	names                                     weights.Names // beyond those that a tied head brings
}

// readHybrid reads the shared keys. epsKey names the norms' epsilon, tied is tie_word_embeddings' default.
func readHybrid(c *config.Object, epsKey string, tied bool) hybrid {
	h := hybrid{
		HiddenSize:        c.Size("hidden_size"),
		NumAttentionHeads: c.Size("num_attention_heads"),
		VocabSize:         c.Size("vocab_size"),
		Eps:               c.Positive(epsKey),
		TieWordEmbeddings: c.BoolOr("tie_word_embeddings", tied),
		embedPath:         "model.embed_tokens", layersPath: "model.layers", normPath: "model.norm", headPath: "lm_head",
	}
	h.NumKeyValueHeads = c.SizeOr("num_key_value_heads", h.NumAttentionHeads)
	h.HeadDim = c.SizeOr("head_dim", max(1, h.HiddenSize/h.NumAttentionHeads))
	if c.Has("max_position_embeddings") {
		h.MaxPositionEmbeddings = c.Size("max_position_embeddings")
	}
	if h.NumAttentionHeads%h.NumKeyValueHeads != 0 {
		c.Fail("num_key_value_heads", "is %d, which does not divide num_attention_heads %d", h.NumKeyValueHeads, h.NumAttentionHeads)
	}
	checkWidth(c, "head_dim", h.NumAttentionHeads*h.HeadDim)
	return h
}

// checkWidth refuses a product of two sizes beyond what any model has, before sums of it overflow.
func checkWidth(c *config.Object, key string, width int) {
	const most = 1 << 24
	if width > most {
		c.Fail(key, "makes a layer %d wide; at most %d is believed", width, most)
	}
}

func (h *hybrid) Shape() stage.Shape {
	s := stage.Shape{
		Layers: h.NumHiddenLayers, Width: h.HiddenSize, Vocab: h.VocabSize, Context: h.MaxPositionEmbeddings,
		EmbeddingPath: h.embedPath, Names: h.names,
	}
	if h.TieWordEmbeddings {
		s.Names.DropContains = append(s.Names.DropContains, "lm_head.weight")
	}
	return s
}

func (h *hybrid) Embedding(b *nn.Builder) nn.Embedder {
	return nn.NewEmbedding(b, h.embedPath, h.VocabSize, h.HiddenSize)
}

// head is the final norm, whose weights are stored minus offset, and the projection.
func (h *hybrid) head(b *nn.Builder, offset float64) nn.Head {
	path := h.headPath
	if h.TieWordEmbeddings {
		path = h.embedPath
	}
	return nn.NewLMHead(b, nn.NewOffsetRMSNorm(b, h.normPath, h.HiddenSize, h.Eps, offset), path, h.VocabSize, h.HiddenSize)
}

func (h *hybrid) layerPath(i int) string { return fmt.Sprintf("%s.%d", h.layersPath, i) }

// attention sizes an attention layer without positions: the recurrent layers tell them.
func (h *hybrid) attention() nn.AttentionConfig {
	return nn.AttentionConfig{
		Width: h.HiddenSize, Heads: h.NumAttentionHeads, KVHeads: h.NumKeyValueHeads, HeadDim: h.HeadDim, NoRope: true,
	}
}

// quantizations are those that the families of this executor run.
func quantizations() []string {
	return []string{"none", "affine-2", "affine-3", "affine-4", "affine-5", "affine-6", "affine-8", "mxfp4", "mxfp8", "nvfp4", "fp8"}
}

func family(name string, modelTypes ...string) sdk.Family {
	return sdk.Family{Name: name, ModelTypes: modelTypes, Pipeline: true, Quantizations: quantizations()}
}

// mixer is what mixes a sequence's positions in a block.
type mixer interface {
	Forward(p *nn.Pass, x mlx.Array) mlx.Array
}

// block is a mixer and a feed-forward layer, each behind a norm and within a residual connection.
type block struct {
	kind            string
	inputNorm       *nn.RMSNorm
	mixer           mixer
	feedForwardNorm *nn.RMSNorm
	feedForward     nn.FeedForward
}

func (l *block) Kind() string { return l.kind }

func (l *block) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	h, normed := l.feedForwardNorm.AddForward(p, x, l.mixer.Forward(p, l.inputNorm.Forward(p, x)))
	return p.Add(h, l.feedForward.Forward(p, normed))
}

// checkTopK refuses a router that chooses more experts than there are.
func checkTopK(c *config.Object, topK, experts int) {
	if topK > experts {
		c.Fail("num_experts_per_tok", "is %d of %d experts", topK, experts)
	}
}
