package main

import (
	"math"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// gemma3 is the text model of Gemma 3 (Google 2025; reference: mlx_lm/models/gemma3_text.py), alone or within the model for
// images, whose other tensors are left aside. Of every sliding_window_pattern layers the last sees everything, the others
// a window, with a rotation of their own.
type gemma3 struct{}

func (gemma3) Info() sdk.Family { return stage.Info("gemma3", "gemma3", "gemma3_text") }

type gemma3Config struct {
	text
	SlidingWindowPattern int
	QueryPreAttnScalar   float64 // scores are scaled by its inverse square root
	global, local        nn.RoPEConfig
}

// gemma3NormOffset is what the checkpoint's norm weights lack.
const gemma3NormOffset = 1

func (gemma3) Model(c *config.Object) stage.Model {
	a := &gemma3Config{text: text{
		HiddenSize: 1152, NumHiddenLayers: 26, IntermediateSize: 6912, NumAttentionHeads: 4, NumKeyValueHeads: 1, HeadDim: 256,
		VocabSize: 262144, MaxPositionEmbeddings: 32768, SlidingWindow: 512,
	}}
	wrapped := c.StringOr("model_type", "") == "gemma3"
	if wrapped {
		a.VocabSize, a.NumAttentionHeads, a.NumKeyValueHeads = 262208, 8, 4
	}
	if c = a.read(c, wrapped); c == nil {
		return a
	}
	a.SlidingWindowPattern = c.SizeOr("sliding_window_pattern", 6)
	a.QueryPreAttnScalar = c.PositiveOr("query_pre_attn_scalar", 256)
	if c.Has("final_logit_softcapping") {
		c.Unsupported("final_logit_softcapping", "%v is not built for gemma3; built is null", c.Value("final_logit_softcapping"))
	}
	a.readRopes(c)
	return a
}

// readRopes reads rope_theta, rope_scaling and rope_local_base_freq, or newer transformers' rope_parameters by kind of layer.
func (a *gemma3Config) readRopes(c *config.Object) {
	const base, localBase = 1e6, 1e4
	if kinds := c.Object("rope_parameters"); kinds != nil && (kinds.Has(nn.FullAttention) || kinds.Has(nn.SlidingAttention)) {
		a.global = readRope(kinds.Object(nn.FullAttention), base, a.HeadDim)
		a.local = readRope(kinds.Object(nn.SlidingAttention), localBase, a.HeadDim)
		return
	}
	a.global = nn.ReadRoPE(c)
	if !c.Has("rope_theta") && !c.Has("rope_parameters") {
		a.global.Base = base
	}
	a.global.Traditional = false
	a.local = nn.RoPEConfig{Base: c.PositiveOr("rope_local_base_freq", localBase), Type: "default"}
}

func (a *gemma3Config) Shape() stage.Shape { return a.shape() }

func (a *gemma3Config) Embedding(b *nn.Builder) nn.Embedder {
	return &gemma3Embedding{nn.NewEmbedding(b, a.embedPath(), a.VocabSize, a.HiddenSize), math.Sqrt(float64(a.HiddenSize))}
}

// gemma3Embedding scales the tokens' rows by a factor that is rounded to bfloat16 whatever the activations are, as it was in
// training.
type gemma3Embedding struct {
	table *nn.Embedding
	scale float64
}

func (e *gemma3Embedding) Forward(p *nn.Pass, ids mlx.Array) mlx.Array {
	return p.Mul(e.table.Forward(p, ids), p.AsType(p.Scalar(e.scale, mlx.BFloat16), p.Dtype))
}

func (a *gemma3Config) norm(b *nn.Builder, path string) *nn.RMSNorm {
	return nn.NewOffsetRMSNorm(b, path, a.HiddenSize, a.RMSNormEps, gemma3NormOffset)
}

// Head is tied unless the checkpoint has a projection, whatever the config says; without a checkpoint the config decides.
func (a *gemma3Config) Head(b *nn.Builder) nn.Head {
	path := a.embedPath()
	if b.Shape(a.headPath()+".weight") != nil || (!b.Exact() && !a.TieWordEmbeddings) {
		path = a.headPath()
	}
	return nn.NewLMHead(b, a.norm(b, a.prefix+"model.norm"), path, a.VocabSize, a.HiddenSize)
}

type gemma3Layer struct {
	inputNorm, attentionNorm    *nn.RMSNorm // before and after attention
	attention                   *nn.Attention
	feedForwardNorm, outputNorm *nn.RMSNorm // before and after feedForward
	feedForward                 *nn.MLP
}

func (a *gemma3Config) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := nn.AttentionConfig{
		Width: a.HiddenSize, Heads: a.NumAttentionHeads, KVHeads: a.NumKeyValueHeads, HeadDim: a.HeadDim,
		QKNorm: a.RMSNormEps, NormOffset: gemma3NormOffset, Scale: 1 / math.Sqrt(a.QueryPreAttnScalar), Rope: a.global,
	}
	if (i+1)%a.SlidingWindowPattern != 0 {
		attention.Rope, attention.Window = a.local, a.SlidingWindow
	}
	return &gemma3Layer{
		inputNorm:       a.norm(b, path+".input_layernorm"),
		attention:       nn.NewAttention(b, path+".self_attn", attention),
		attentionNorm:   a.norm(b, path+".post_attention_layernorm"),
		feedForwardNorm: a.norm(b, path+".pre_feedforward_layernorm"),
		feedForward:     nn.NewGatedMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, false, nn.GeGLU),
		outputNorm:      a.norm(b, path+".post_feedforward_layernorm"),
	}
}

func (l *gemma3Layer) Kind() string { return l.attention.Kind() }

func (l *gemma3Layer) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	h := addClipped(p, x, l.attentionNorm.Forward(p, l.attention.Forward(p, l.inputNorm.Forward(p, x))))
	return addClipped(p, h, l.outputNorm.Forward(p, l.feedForward.Forward(p, l.feedForwardNorm.Forward(p, h))))
}

// addClipped is x + y; in float16, whose range the residual stream of Gemma 3 leaves, it stops at the largest finite value.
func addClipped(p *nn.Pass, x, y mlx.Array) mlx.Array {
	if x.Dtype() != mlx.Float16 {
		return p.Add(x, y)
	}
	const largest = 65504
	sum := p.Add(p.AsType(x, mlx.Float32), p.AsType(y, mlx.Float32))
	sum = p.Minimum(p.Maximum(sum, p.Scalar(-largest, mlx.Float32)), p.Scalar(largest, mlx.Float32))
	return p.AsType(sum, mlx.Float16)
}
