package main

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
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
	h.MaxPositionEmbeddings = c.SizeOr("max_position_embeddings", 0)
	c.Divides("num_key_value_heads", h.NumKeyValueHeads, "num_attention_heads", h.NumAttentionHeads)
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

// checkConv refuses a convolution that keeps no state.
func checkConv(c *config.Object, key string, width int) {
	if width < 2 {
		c.Unsupported(key, "%d is not built; built is 2 and more", width)
	}
}
