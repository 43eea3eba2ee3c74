package main

import (
	"fmt"
	"math"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk/config"
)

const (
	embedPath   = "model.embed_tokens"
	headPath    = "lm_head"
	layerPrefix = "model.layers."
)

// deepSeekNormEps is fixed in DeepSeek's own code for the norms over the latents, whatever rms_norm_eps is.
const deepSeekNormEps = 1e-6

// latentDecoder is config.json of DeepSeek-V3 and its kin: multi-head latent attention, dense layers first, then experts
// with shared ones beside them.
type latentDecoder struct {
	HiddenSize            int
	NumHiddenLayers       int
	NumAttentionHeads     int
	VocabSize             int
	MaxPositionEmbeddings int // 0: unbounded
	RMSNormEps            float64
	AttentionBias         bool
	Rope                  nn.RoPEConfig

	QLoraRank     int // 0: a plain query projection
	KVLoraRank    int
	QKNopeHeadDim int
	QKRopeHeadDim int
	VHeadDim      int
	LatentNormEps float64
	Indexer       *nn.IndexerConfig // nil for dense attention

	IntermediateSize    int // of the dense layers
	FirstKDenseReplace  int // the first layers, which are dense
	MoELayerFreq        int // of the others, those with a multiple of it as number have experts
	MoEIntermediateSize int // of each expert
	NRoutedExperts      int // 0: every layer is dense
	NSharedExperts      int // 0 for none
	Route               mlx.RouteSpec
}

func readLatentDecoder(c *config.Object) *latentDecoder {
	a := &latentDecoder{
		HiddenSize:         c.Size("hidden_size"),
		NumHiddenLayers:    c.Size("num_hidden_layers"),
		NumAttentionHeads:  c.Size("num_attention_heads"),
		VocabSize:          c.Size("vocab_size"),
		RMSNormEps:         c.Positive("rms_norm_eps"),
		AttentionBias:      c.BoolOr("attention_bias", false),
		Rope:               nn.ReadRoPE(c),
		QLoraRank:          c.CountOr("q_lora_rank", 0),
		KVLoraRank:         c.Size("kv_lora_rank"),
		QKNopeHeadDim:      c.Size("qk_nope_head_dim"),
		QKRopeHeadDim:      c.Size("qk_rope_head_dim"),
		VHeadDim:           c.Size("v_head_dim"),
		IntermediateSize:   c.Size("intermediate_size"),
		FirstKDenseReplace: c.CountOr("first_k_dense_replace", 0),
		MoELayerFreq:       c.SizeOr("moe_layer_freq", 1),
		NRoutedExperts:     c.CountOr("n_routed_experts", 0),
		NSharedExperts:     c.CountOr("n_shared_experts", 0),
	}
	a.MaxPositionEmbeddings = c.SizeOr("max_position_embeddings", 0)
	if a.NRoutedExperts > 0 {
		a.MoEIntermediateSize = c.Size("moe_intermediate_size")
		a.Route = nn.ReadCorrectedRoute(c, a.NRoutedExperts)
	}
	a.Rope.Traditional = true
	a.check(c)
	return a
}

// check refuses what these families do not compute: a key that changes the model is never ignored.
func (a *latentDecoder) check(c *config.Object) {
	c.OneOf("hidden_act", "silu", "silu", "swish")
	if c.BoolOr("tie_word_embeddings", false) {
		c.Unsupported("tie_word_embeddings", "true is not built for these families, which have a projection of their own")
	}
	if !c.BoolOr("rope_interleave", true) {
		c.Unsupported("rope_interleave", "false is not built; built is true")
	}
	c.Even("qk_rope_head_dim", a.QKRopeHeadDim)
}

func (a *latentDecoder) Shape() stage.Shape {
	return stage.Shape{
		Layers: a.NumHiddenLayers, Width: a.HiddenSize, Vocab: a.VocabSize, Context: a.MaxPositionEmbeddings, EmbeddingPath: embedPath,
		Names: weights.Names{
			DropContains: []string{"rotary_emb.inv_freq"}, // precomputed in old checkpoints
			// Multi-token prediction comes as layers behind the last. Their numbers tell, not num_nextn_predict_layers, which
			// conversions keep though they dropped the tensors.
			Layers:  weights.Layers{Prefix: layerPrefix, Count: a.NumHiddenLayers},
			Sources: []weights.Source{{Of: "mlp.switch_mlp.", From: "mlp.experts.{}."}},
		},
	}
}

func (a *latentDecoder) Embedding(b *nn.Builder) nn.Embedder {
	return nn.NewEmbedding(b, embedPath, a.VocabSize, a.HiddenSize)
}

func (a *latentDecoder) Head(b *nn.Builder) nn.Head {
	return nn.NewLMHead(b, a.norm(b, "model.norm"), headPath, a.VocabSize, a.HiddenSize)
}

func (a *latentDecoder) norm(b *nn.Builder, path string) *nn.RMSNorm {
	return nn.NewRMSNorm(b, path, a.HiddenSize, a.RMSNormEps)
}

func (a *latentDecoder) Layer(b *nn.Builder, i int) nn.Layer {
	path := fmt.Sprint(layerPrefix, i)
	return &nn.Block{
		InputNorm:       a.norm(b, path+".input_layernorm"),
		Mixer:           nn.NewLatentAttention(b, path+".self_attn", a.attention()),
		FeedForwardNorm: a.norm(b, path+".post_attention_layernorm"),
		FeedForward:     a.feedForward(b, path+".mlp", i),
	}
}

func (a *latentDecoder) attention() nn.LatentAttentionConfig {
	return nn.LatentAttentionConfig{
		Width: a.HiddenSize, Heads: a.NumAttentionHeads, QRank: a.QLoraRank, Rank: a.KVLoraRank,
		NopeDim: a.QKNopeHeadDim, RopeDim: a.QKRopeHeadDim, ValueDim: a.VHeadDim,
		Bias: a.AttentionBias, NormEps: a.LatentNormEps, Rope: &a.Rope, Indexer: a.Indexer,
		Scale: a.Rope.ScoreScale() / math.Sqrt(float64(a.QKNopeHeadDim+a.QKRopeHeadDim)),
	}
}

func (a *latentDecoder) feedForward(b *nn.Builder, path string, i int) nn.FeedForward {
	if a.NRoutedExperts == 0 || i < a.FirstKDenseReplace || i%a.MoELayerFreq != 0 {
		return nn.NewMLP(b, path, a.HiddenSize, a.IntermediateSize, false)
	}
	m := &nn.MoE{
		Router:  nn.NewCorrectedRouter(b, path+".gate", a.NRoutedExperts, a.HiddenSize, a.Route),
		Experts: nn.NewSwitchGLU(b, path+".switch_mlp", a.NRoutedExperts, a.HiddenSize, a.MoEIntermediateSize, false, nn.SwiGLU),
	}
	if a.NSharedExperts > 0 {
		m.Shared = nn.NewMLP(b, path+".shared_experts", a.HiddenSize, a.MoEIntermediateSize*a.NSharedExperts, false)
	}
	return m
}
