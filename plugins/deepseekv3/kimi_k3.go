package main

import (
	"fmt"
	"math"
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// kimiK3 is Kimi K3 (Moonshot AI 2026; reference: mlx_lm/models/kimi_k3.py), its text model: layers of Kimi delta
// attention with latent attention without positions between them, experts that work in a latent of their own, and
// residual blocks that every layer mixes anew. It is planned, and runs in one process; it does not pipeline.
type kimiK3 struct{}

func (kimiK3) Info() sdk.Family {
	f := stage.Info("kimi_k3", "kimi_k3")
	f.Pipeline = false
	return f
}

const kimiPrefix = "language_model."

type kimiConfig struct {
	HiddenSize            int
	NumHiddenLayers       int
	NumAttentionHeads     int
	VocabSize             int
	MaxPositionEmbeddings int // 0: unbounded
	RMSNormEps            float64
	TieWordEmbeddings     bool

	QLoraRank          int // 0: a plain query projection
	KVLoraRank         int
	QKNopeHeadDim      int
	QKRopeHeadDim      int // not rotated
	VHeadDim           int
	MLAUseOutputGate   bool
	KDALayers          []int64 // counted from 1; the others have latent attention
	KDA                nn.KimiDeltaConfig
	AttnResBlockSize   int // layers whose sum is a residual block; 0: plain residual connections
	SituBeta           float64
	SituLinearBeta     float64 // 0: the linear side is not bounded
	IntermediateSize   int     // of dense layers
	FirstKDenseReplace int
	MoELayerFreq       int

	NumExperts             int // 0: every layer is dense
	NumSharedExperts       int
	MoEIntermediateSize    int // of each expert
	RoutedExpertHiddenSize int // width that routed experts work in; 0: the residual stream's
	LatentMoEUseNorm       bool
	Route                  mlx.RouteSpec
}

func (kimiK3) Model(c *config.Object) stage.Model {
	if text := c.Object("text_config"); text != nil {
		c = text
	}
	a := &kimiConfig{
		HiddenSize:         c.Size("hidden_size"),
		NumHiddenLayers:    c.Size("num_hidden_layers"),
		NumAttentionHeads:  c.Size("num_attention_heads"),
		VocabSize:          c.Size("vocab_size"),
		RMSNormEps:         c.PositiveOr("rms_norm_eps", 1e-5),
		TieWordEmbeddings:  c.BoolOr("tie_word_embeddings", false),
		QLoraRank:          c.CountOr("q_lora_rank", 0),
		KVLoraRank:         c.Size("kv_lora_rank"),
		QKNopeHeadDim:      c.Size("qk_nope_head_dim"),
		QKRopeHeadDim:      c.Size("qk_rope_head_dim"),
		VHeadDim:           c.Size("v_head_dim"),
		MLAUseOutputGate:   c.BoolOr("mla_use_output_gate", false),
		AttnResBlockSize:   c.CountOr("attn_res_block_size", 0),
		SituBeta:           c.PositiveOr("activation_situ_beta", 1),
		SituLinearBeta:     c.FloatOr("activation_situ_linear_beta", 0),
		IntermediateSize:   c.Size("intermediate_size"),
		FirstKDenseReplace: c.CountOr("first_k_dense_replace", 0),
		MoELayerFreq:       c.SizeOr("moe_layer_freq", 1),
		NumExperts:         c.CountOr("num_experts", 0),
	}
	a.MaxPositionEmbeddings = c.SizeOr("max_position_embeddings", 0)
	a.readDelta(c)
	if a.NumExperts > 0 {
		a.readExperts(c)
	}
	c.OneOf("hidden_act", "situ", "situ")
	if !c.BoolOr("mla_use_nope", true) {
		c.Unsupported("mla_use_nope", "false is not built; built is true")
	}
	return a
}

func (a *kimiConfig) readDelta(c *config.Object) {
	l := c.Object("linear_attn_config")
	if l == nil {
		c.Fail("linear_attn_config", "is missing")
		return
	}
	a.KDA = nn.KimiDeltaConfig{
		Width: a.HiddenSize, Heads: l.Size("num_heads"), HeadDim: l.Size("head_dim"), Conv: l.Size("short_conv_kernel_size"),
		LowerBound: l.FloatOr("gate_lower_bound", 0), FullGate: l.BoolOr("use_full_rank_gate", false), NormEps: a.RMSNormEps,
	}
	if a.KDA.LowerBound > 0 {
		l.Fail("gate_lower_bound", "is %v, want it negative", a.KDA.LowerBound)
	}
	if !l.Has("kda_layers") {
		l.Fail("kda_layers", "is missing")
	}
	a.KDALayers = l.Integers("kda_layers")
}

func (a *kimiConfig) readExperts(c *config.Object) {
	a.NumSharedExperts = c.CountOr("num_shared_experts", 0)
	a.MoEIntermediateSize = c.Size("moe_intermediate_size")
	a.RoutedExpertHiddenSize = c.CountOr("routed_expert_hidden_size", 0)
	a.LatentMoEUseNorm = c.BoolOr("latent_moe_use_norm", false)
	a.Route = mlx.RouteSpec{
		Scores: mlx.RouteSigmoid, TopK: c.SizeOr("num_experts_per_token", 16), Normalize: c.BoolOr("moe_renormalize", true), Epsilon: 1e-20,
		Scale: float32(c.PositiveOr("routed_scaling_factor", 1)), Groups: c.SizeOr("num_expert_group", 1), TopGroups: c.SizeOr("topk_group", 1),
	}
	c.OneOf("moe_router_activation_func", "sigmoid", "sigmoid")
	nn.CheckTopK(c, "num_experts_per_token", a.Route.TopK, a.NumExperts)
	nn.CheckGroups(c, "num_expert_group", &a.Route, a.NumExperts)
}

func (a *kimiConfig) Shape() stage.Shape {
	s := stage.Shape{
		Layers: a.NumHiddenLayers, Width: a.HiddenSize, Vocab: a.VocabSize, Context: a.MaxPositionEmbeddings,
		EmbeddingPath: kimiPrefix + embedPath,
		Names: weights.Names{
			DropContains: []string{"vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector.", "mtp."},
			Layers:       weights.Layers{Prefix: kimiPrefix + layerPrefix, Count: a.NumHiddenLayers},
		},
	}
	if a.TieWordEmbeddings {
		s.Names.Drop = []string{kimiPrefix + headPath + ".weight"}
	}
	return s
}

func (a *kimiConfig) Embedding(b *nn.Builder) nn.Embedder {
	return nn.NewEmbedding(b, kimiPrefix+embedPath, a.VocabSize, a.HiddenSize)
}

func (a *kimiConfig) norm(b *nn.Builder, path string) *nn.RMSNorm {
	return nn.NewRMSNorm(b, path, a.HiddenSize, a.RMSNormEps)
}

// kimiHead mixes the residual blocks a last time.
type kimiHead struct {
	mix *residualMix // nil with plain residual connections
	nn.Head
}

func (a *kimiConfig) Head(b *nn.Builder) nn.Head {
	h := &kimiHead{}
	if a.AttnResBlockSize > 0 {
		h.mix = a.residualMix(b, kimiPrefix+"model.output_attn_res")
	}
	path := kimiPrefix + headPath
	if a.TieWordEmbeddings {
		path = kimiPrefix + embedPath
	}
	h.Head = nn.NewLMHead(b, a.norm(b, kimiPrefix+"model.norm"), path, a.VocabSize, a.HiddenSize)
	return h
}

func (h *kimiHead) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	if h.mix != nil {
		x = h.mix.Forward(p, x)
	}
	return h.Head.Forward(p, x)
}

// kimiBlock maps the finished residual blocks and the sum since the last of them, beside each other in each row, to the
// same after the layer: [rows, (blocks+1)*width], one block more where the layer begins one.
type kimiBlock struct {
	inputNorm       *nn.RMSNorm
	attention       nn.Mixer
	feedForwardNorm *nn.RMSNorm
	feedForward     nn.FeedForward

	attentionMix, feedForwardMix *residualMix // nil with plain residual connections
	begins                       bool         // a residual block
	width                        int
}

func (a *kimiConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := fmt.Sprint(kimiPrefix, layerPrefix, i)
	l := &kimiBlock{
		inputNorm:       a.norm(b, path+".input_layernorm"),
		attention:       a.attention(b, path+".self_attn", i),
		feedForwardNorm: a.norm(b, path+".post_attention_layernorm"),
		feedForward:     a.feedForward(b, path+".mlp", i),
		width:           a.HiddenSize,
	}
	if a.AttnResBlockSize > 0 {
		l.begins = i%a.AttnResBlockSize == 0
		l.attentionMix = a.residualMix(b, path+".self_attention_res")
		l.feedForwardMix = a.residualMix(b, path+".mlp_res")
	}
	return l
}

func (a *kimiConfig) attention(b *nn.Builder, path string, i int) nn.Mixer {
	if slices.Contains(a.KDALayers, int64(i)+1) {
		return nn.NewKimiDelta(b, path, a.KDA)
	}
	return nn.NewLatentAttention(b, path, nn.LatentAttentionConfig{
		Width: a.HiddenSize, Heads: a.NumAttentionHeads, QRank: a.QLoraRank, Rank: a.KVLoraRank,
		NopeDim: a.QKNopeHeadDim, RopeDim: a.QKRopeHeadDim, ValueDim: a.VHeadDim, NormEps: deepSeekNormEps,
		Scale: 1 / math.Sqrt(float64(a.QKNopeHeadDim+a.QKRopeHeadDim)), Gate: a.MLAUseOutputGate,
	})
}

// Kind is the attention's, with "moe" where experts follow.
func (l *kimiBlock) Kind() string { return nn.BlockKind(l.attention, l.feedForward) }

func (l *kimiBlock) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	if l.attentionMix == nil {
		h := p.Add(x, l.attention.Forward(p, l.inputNorm.Forward(p, x)))
		return p.Add(h, l.feedForward.Forward(p, l.feedForwardNorm.Forward(p, h)))
	}
	y := l.attention.Forward(p, l.inputNorm.Forward(p, l.attentionMix.Forward(p, x)))
	blocks := x
	if !l.begins {
		last := x.Dim(1) - l.width
		y = p.Add(p.SliceAxis(x, 1, last, last+l.width), y)
		blocks = p.SliceAxis(x, 1, 0, last)
	}
	h := l.feedForwardMix.Forward(p, p.Concat(1, blocks, y))
	y = p.Add(y, l.feedForward.Forward(p, l.feedForwardNorm.Forward(p, h)))
	return p.Concat(1, blocks, y)
}

// residualMix is attention over residual blocks (Kimi K3): the weighted sum of a row's blocks and its running sum, weighted
// by the softmax of their normalized products with one learned vector.
type residualMix struct {
	query mlx.Array // float32 [1, width]
	width int
	eps   float32
}

// residualMix loads <path>_norm.weight [width] and <path>_proj.weight [1, width], which no conversion packs.
func (a *kimiConfig) residualMix(b *nn.Builder, path string) *residualMix {
	norm := b.Vector(path+"_norm.weight", a.HiddenSize)
	proj := b.DenseMatrix(path+"_proj", 1, a.HiddenSize)
	return &residualMix{
		query: b.Derive(func(s *mlx.Scope) mlx.Array {
			return s.Mul(s.AsType(norm, mlx.Float32), s.AsType(proj.W, mlx.Float32))
		}),
		width: a.HiddenSize, eps: float32(a.RMSNormEps),
	}
}

// Forward maps [rows, n*width] to [rows, width].
func (m *residualMix) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	rows, n := x.Dim(0), x.Dim(1)/m.width
	if n == 1 {
		return x
	}
	x = p.Reshape(x, rows, n, m.width)
	normed := p.RMSNorm(p.AsType(x, mlx.Float32), mlx.Array{}, m.eps, 0)
	scores := p.Linear(normed, &mlx.Matrix{Format: mlx.Dense, W: m.query}, mlx.Array{})
	return p.WeightedSum(x, p.Softmax(p.Reshape(scores, rows, n), 1, true))
}

// situ is Kimi K3's activation: β·tanh(gate/β)·sigmoid(gate) · γ·tanh(up/γ), in float32 and rounded once; without γ the
// up side is taken as it is.
func (a *kimiConfig) situ(p *nn.Pass, gate, up mlx.Array) mlx.Array {
	dtype, shape := gate.Dtype(), gate.Shape()
	wide := func(x mlx.Array) mlx.Array {
		width := x.Dim(-1)
		return p.AsType(p.Reshape(x, x.Size()/max(width, 1), width), mlx.Float32)
	}
	gate, up = wide(gate), wide(up)
	y := p.SigmoidMul(p.Softcap(gate, float32(a.SituBeta)), gate)
	if a.SituLinearBeta > 0 {
		up = p.Softcap(up, float32(a.SituLinearBeta))
	}
	return p.Reshape(p.AsType(p.Mul(y, up), dtype), shape...)
}

// kimiMoE routes by the residual stream, and computes the routed experts in a narrower one.
type kimiMoE struct {
	router   *nn.Router
	down, up *nn.Linear // nil without a latent
	experts  *nn.SwitchGLU
	norm     *nn.RMSNorm // of the latent; nil for none
	shared   nn.FeedForward
}

func (a *kimiConfig) feedForward(b *nn.Builder, path string, i int) nn.FeedForward {
	if a.NumExperts == 0 || i < a.FirstKDenseReplace || i%a.MoELayerFreq != 0 {
		return nn.NewGatedMLP(b, path, a.HiddenSize, a.IntermediateSize, false, a.situ)
	}
	route := a.Route
	route.Bias = b.StoredFloat32(path+".e_score_correction_bias", a.NumExperts)
	m := &kimiMoE{router: nn.NewRouter(b, path+".gate", a.NumExperts, a.HiddenSize, false, route)}
	width := a.HiddenSize
	if latent := a.RoutedExpertHiddenSize; latent > 0 {
		width = latent
		m.down = nn.NewLinear(b, path+".routed_expert_down_proj", a.HiddenSize, latent, false)
		m.up = nn.NewLinear(b, path+".routed_expert_up_proj", latent, a.HiddenSize, false)
		if a.LatentMoEUseNorm {
			m.norm = nn.NewRMSNorm(b, path+".routed_expert_norm", latent, a.RMSNormEps)
		}
	}
	m.experts = nn.NewSwitchGLU(b, path+".switch_mlp", a.NumExperts, width, a.MoEIntermediateSize, false, a.situ)
	if a.NumSharedExperts > 0 {
		m.shared = nn.NewGatedMLP(b, path+".shared_experts", a.HiddenSize, a.MoEIntermediateSize*a.NumSharedExperts, false, a.situ)
	}
	return m
}

func (m *kimiMoE) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	ids, weights := m.router.Forward(p, x)
	y := x
	if m.down != nil {
		y = m.down.Forward(p, y)
	}
	y = p.WeightedSum(m.experts.Forward(p, y, ids), weights)
	if m.norm != nil {
		y = m.norm.Forward(p, y)
	}
	if m.up != nil {
		y = m.up.Forward(p, y)
	}
	if m.shared == nil {
		return y
	}
	return p.Add(y, m.shared.Forward(p, x))
}
