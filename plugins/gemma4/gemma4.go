package main

import (
	"fmt"
	"math"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// gemma4 is the text model of Gemma 4 (Google 2026; reference: mlx_lm/models/gemma4_text.py), alone or within the model for
// images and sound, whose other tensors are left aside; the name with _vlm is the same model. Layers see a window or
// everything, with heads of different sizes. Small variants give each layer an input of its own made of the tokens, and let
// the last layers read the keys and values of earlier ones; large ones add experts.
type gemma4 struct{ name string }

func (f gemma4) Info() sdk.Family { return stage.Info(f.name, "gemma4", "gemma4_text") }

type gemma4Config struct {
	text
	LayerTypes              []string
	GlobalHeadDim           int // of layers that see everything
	GlobalKeyValueHeads     int // of those
	AttentionKEqV           bool
	NumKVSharedLayers       int                      // last layers, which read another layer's keys and values
	UseDoubleWideMLP        bool                     // in those
	HiddenSizePerLayerInput int                      // 0: layers have no inputs of their own
	FinalLogitSoftcapping   float64                  // 0: none
	ropes                   map[string]nn.RoPEConfig // by layer type

	NumExperts          int // 0: no experts
	TopKExperts         int
	MoEIntermediateSize int
}

func (gemma4) Model(c *config.Object) stage.Model {
	a := &gemma4Config{text: text{
		HiddenSize: 1536, NumHiddenLayers: 35, IntermediateSize: 6144, NumAttentionHeads: 8, NumKeyValueHeads: 1, HeadDim: 256,
		VocabSize: 262144, MaxPositionEmbeddings: 131072, SlidingWindow: 512,
	}}
	if c = a.read(c, c.StringOr("model_type", "") == "gemma4"); c == nil {
		return a
	}
	a.readAttention(c)
	a.readSharing(c)
	a.HiddenSizePerLayerInput = c.CountOr("hidden_size_per_layer_input", 256)
	if null(c, "hidden_size_per_layer_input") {
		a.HiddenSizePerLayerInput = 0
	}
	if n := c.SizeOr("vocab_size_per_layer_input", 262144); a.HiddenSizePerLayerInput > 0 && n != a.VocabSize {
		c.Unsupported("vocab_size_per_layer_input", "%d is not built beside vocab_size %d; built are equal sizes", n, a.VocabSize)
	}
	if !null(c, "final_logit_softcapping") {
		a.FinalLogitSoftcapping = c.PositiveOr("final_logit_softcapping", 30)
	}
	if c.BoolOr("enable_moe_block", false) {
		a.NumExperts, a.TopKExperts = c.Size("num_experts"), c.Size("top_k_experts")
		a.MoEIntermediateSize = c.Size("moe_intermediate_size")
		nn.CheckTopK(c, "top_k_experts", a.TopKExperts, a.NumExperts)
	}
	return a
}

func (a *gemma4Config) readAttention(c *config.Object) {
	a.GlobalHeadDim = c.CountOr("global_head_dim", 512)
	if null(c, "global_head_dim") || a.GlobalHeadDim == 0 {
		a.GlobalHeadDim = a.HeadDim
	}
	c.Even("global_head_dim", a.GlobalHeadDim)
	a.AttentionKEqV = c.BoolOr("attention_k_eq_v", false)
	a.GlobalKeyValueHeads = a.NumKeyValueHeads
	if a.AttentionKEqV {
		a.GlobalKeyValueHeads = c.SizeOr("num_global_key_value_heads", a.NumKeyValueHeads)
		c.Divides("num_global_key_value_heads", a.GlobalKeyValueHeads, "num_attention_heads", a.NumAttentionHeads)
	}
	a.ropes = map[string]nn.RoPEConfig{
		nn.SlidingAttention: {Base: 1e4, Type: "default"},
		nn.FullAttention:    {Base: 1e6, Type: "proportional", Factor: 1, RotatedPairs: a.GlobalHeadDim / 8},
	}
	if kinds := c.Object("rope_parameters"); kinds != nil {
		a.ropes[nn.SlidingAttention] = readRope(kinds.Object(nn.SlidingAttention), 1e4, a.HeadDim)
		a.ropes[nn.FullAttention] = readRope(kinds.Object(nn.FullAttention), 1e4, a.GlobalHeadDim)
	}
	if c.BoolOr("rope_traditional", false) {
		c.Unsupported("rope_traditional", "true is not built for gemma4; built is false")
	}
	a.readLayerTypes(c)
}

func (a *gemma4Config) readLayerTypes(c *config.Object) {
	pattern := c.SizeOr("sliding_window_pattern", 5)
	a.LayerTypes = nn.ReadLayerTypes(c, a.NumHiddenLayers)
	if a.LayerTypes != nil {
		return
	}
	for i := range min(a.NumHiddenLayers, stage.MaxLayers) {
		kind := nn.SlidingAttention
		if (i+1)%pattern == 0 {
			kind = nn.FullAttention
		}
		a.LayerTypes = append(a.LayerTypes, kind)
	}
}

func (a *gemma4Config) readSharing(c *config.Object) {
	a.UseDoubleWideMLP = c.BoolOr("use_double_wide_mlp", true)
	a.NumKVSharedLayers = c.CountOr("num_kv_shared_layers", 20)
	if c.Err() != nil {
		return
	}
	if a.NumKVSharedLayers >= a.NumHiddenLayers {
		c.Fail("num_kv_shared_layers", "is %d of %d layers; want some that own their keys", a.NumKVSharedLayers, a.NumHiddenLayers)
		return
	}
	for i := a.firstShared(); i < len(a.LayerTypes); i++ {
		if a.source(i) < 0 {
			c.Fail("num_kv_shared_layers", "is %d, which leaves layer %d no %s layer to read from", a.NumKVSharedLayers, i, a.LayerTypes[i])
			return
		}
	}
}

// firstShared is the first layer that reads another layer's keys and values.
func (a *gemma4Config) firstShared() int { return a.NumHiddenLayers - a.NumKVSharedLayers }

// source is the layer whose keys and values layer i attends to: itself, or the last of its type that owns some.
func (a *gemma4Config) source(i int) int {
	if i < a.firstShared() {
		return i
	}
	for j := a.firstShared() - 1; j >= 0; j-- {
		if a.LayerTypes[j] == a.LayerTypes[i] {
			return j
		}
	}
	return -1
}

func (a *gemma4Config) Shape() stage.Shape {
	s := a.shape()
	s.Carried = a.NumHiddenLayers * a.HiddenSizePerLayerInput
	s.Names.DropContains = append(s.Names.DropContains, ".input_max", ".input_min", ".output_max", ".output_min")
	for i := a.firstShared(); i < len(a.LayerTypes); i++ {
		source := a.source(i)
		s.Adjacency = append(s.Adjacency, sdk.AdjacencyGroup{
			Source: source, Consumer: i, Reason: fmt.Sprintf("layer %d reads the keys and values of layer %d", i, source),
		})
		// The original files hold projections that these layers do not use.
		for _, name := range []string{"k_proj", "v_proj", "k_norm"} {
			s.Names.DropContains = append(s.Names.DropContains, fmt.Sprintf("%s.self_attn.%s.", originalLayer(i), name))
		}
	}
	s.Names.Sources = append(s.Names.Sources,
		weights.Source{Of: "experts.switch_glu.gate_proj.weight", From: "experts.gate_up_proj", Parts: 2, Part: 0, Axis: 1},
		weights.Source{Of: "experts.switch_glu.up_proj.weight", From: "experts.gate_up_proj", Parts: 2, Part: 1, Axis: 1},
		weights.Source{Of: "experts.switch_glu.down_proj.weight", From: "experts.down_proj"},
	)
	if a.TieWordEmbeddings {
		s.Names.Drop = []string{a.headPath() + ".weight", "lm_head.weight"}
	}
	return s
}

// originalLayer is the end of a layer's path in every checkpoint.
func originalLayer(i int) string { return fmt.Sprintf(".layers.%d", i) }

func (a *gemma4Config) norm(b *nn.Builder, path string) *nn.RMSNorm {
	return nn.NewRMSNorm(b, path, a.HiddenSize, a.RMSNormEps)
}

// gemma4Embedding makes the residual stream and, where layers have inputs of their own, carries those beside it: a table's
// rows and a projection of the stream, for each layer [rows, size].
type gemma4Embedding struct {
	tokens     *nn.Embedding
	width      int
	perLayer   *nn.Embedding // nil for none
	projection *nn.Linear
	norm       *nn.RMSNorm // of each layer's part
	layers     int
	size       int
}

func (a *gemma4Config) Embedding(b *nn.Builder) nn.Embedder {
	e := &gemma4Embedding{
		tokens: nn.NewEmbedding(b, a.embedPath(), a.VocabSize, a.HiddenSize), width: a.HiddenSize,
		layers: a.NumHiddenLayers, size: a.HiddenSizePerLayerInput,
	}
	if e.size > 0 {
		model, all := a.prefix+"model.", e.layers*e.size
		e.perLayer = nn.NewEmbedding(b, model+"embed_tokens_per_layer", a.VocabSize, all)
		e.projection = nn.NewLinear(b, model+"per_layer_model_projection", a.HiddenSize, all, false)
		e.norm = nn.NewRMSNorm(b, model+"per_layer_projection_norm", e.size, a.RMSNormEps)
	}
	return e
}

func (e *gemma4Embedding) Forward(p *nn.Pass, ids mlx.Array) mlx.Array {
	scaled := func(x mlx.Array, by float64) mlx.Array { return p.Mul(x, p.Scalar(by, p.Dtype)) }
	x := scaled(e.tokens.Forward(p, ids), math.Sqrt(float64(e.width)))
	if e.perLayer == nil {
		return x
	}
	byLayer := func(x mlx.Array) mlx.Array { return p.Reshape(x, x.Dim(0), e.layers, e.size) }
	own := scaled(e.perLayer.Forward(p, ids), math.Sqrt(float64(e.size)))
	projected := scaled(e.projection.Forward(p, x), 1/math.Sqrt(float64(e.width)))
	both := p.Add(e.norm.Forward(p, byLayer(projected)), byLayer(own))
	p.Carried = p.Reshape(scaled(both, math.Sqrt2/2), x.Dim(0), e.layers*e.size)
	return x
}

// gemma4Head bounds the logits.
type gemma4Head struct {
	*nn.LMHead
	softcap float32 // 0: none
}

func (a *gemma4Config) Head(b *nn.Builder) nn.Head {
	path := a.headPath()
	if a.TieWordEmbeddings {
		path = a.embedPath()
	}
	return &gemma4Head{
		nn.NewLMHead(b, a.norm(b, a.prefix+"model.norm"), path, a.VocabSize, a.HiddenSize), float32(a.FinalLogitSoftcapping),
	}
}

func (h *gemma4Head) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	x = h.LMHead.Forward(p, x)
	if h.softcap == 0 {
		return x
	}
	return p.Softcap(x, h.softcap)
}

type gemma4Layer struct {
	inputNorm, attentionNorm    *nn.RMSNorm // before and after attention
	attention                   *gemma4Attention
	feedForwardNorm, outputNorm *nn.RMSNorm // before and after the feed-forward part
	feedForward                 *nn.MLP
	experts                     *gemma4Experts // nil for none
	input                       *gemma4Input   // nil for none
	scalar                      mlx.Array      // [1]
}

func (a *gemma4Config) Layer(b *nn.Builder, i int) nn.Layer {
	path, hidden := a.layerPath(i), a.IntermediateSize
	if a.UseDoubleWideMLP && i >= a.firstShared() {
		hidden *= 2
	}
	l := &gemma4Layer{
		inputNorm:       a.norm(b, path+".input_layernorm"),
		attention:       a.attention(b, i),
		attentionNorm:   a.norm(b, path+".post_attention_layernorm"),
		feedForwardNorm: a.norm(b, path+".pre_feedforward_layernorm"),
		feedForward:     nn.NewGatedMLP(b, path+".mlp", a.HiddenSize, hidden, false, nn.GeGLU),
		outputNorm:      a.norm(b, path+".post_feedforward_layernorm"),
		scalar:          b.Vector(path+".layer_scalar", 1),
	}
	if a.NumExperts > 0 {
		l.experts = a.experts(b, path)
	}
	if a.HiddenSizePerLayerInput > 0 {
		l.input = a.input(b, path, i)
	}
	return l
}

// Kind is the attention's, with "moe" where there are experts.
func (l *gemma4Layer) Kind() string {
	if l.experts != nil {
		return l.attention.Kind() + "-moe"
	}
	return l.attention.Kind()
}

func (l *gemma4Layer) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	y := l.attentionNorm.Forward(p, l.attention.Forward(p, l.inputNorm.Forward(p, x)))
	h, normed := l.feedForwardNorm.AddForward(p, x, y)
	y = l.feedForward.Forward(p, normed)
	if l.experts != nil {
		y = l.experts.Forward(p, h, y)
	}
	h = p.Add(h, l.outputNorm.Forward(p, y))
	if l.input != nil {
		h = p.Add(h, l.input.Forward(p, h))
	}
	return p.Mul(h, p.AsType(l.scalar, p.Dtype))
}

// gemma4Attention is attention with norms over queries, keys and values and without a scale.
type gemma4Attention struct {
	q, o  *nn.Linear
	k     *nn.Linear // nil: the keys and values are another layer's
	v     *nn.Linear // nil: the values are the keys before their norm and rotation
	qNorm *nn.RMSNorm
	kNorm *nn.RMSNorm
	rope  mlx.RopeSpec
	spec  mlx.AttentionSpec
	eps   float32
	slot  int
}

func (a *gemma4Config) attention(b *nn.Builder, i int) *gemma4Attention {
	path, kind := a.layerPath(i)+".self_attn", a.LayerTypes[i]
	s := mlx.AttentionSpec{Heads: a.NumAttentionHeads, KVHeads: a.NumKeyValueHeads, HeadDim: a.HeadDim, Scale: 1, Window: a.SlidingWindow}
	if kind == nn.FullAttention {
		s.KVHeads, s.HeadDim, s.Window = a.GlobalKeyValueHeads, a.GlobalHeadDim, 0
	}
	s.ValueDim = s.HeadDim
	rope := a.ropes[kind]
	l := &gemma4Attention{
		q:     nn.NewLinear(b, path+".q_proj", a.HiddenSize, s.Heads*s.HeadDim, false),
		o:     nn.NewLinear(b, path+".o_proj", s.Heads*s.HeadDim, a.HiddenSize, false),
		qNorm: nn.NewRMSNorm(b, path+".q_norm", s.HeadDim, a.RMSNormEps),
		rope:  rope.Spec(b, s.HeadDim, 0),
		spec:  s,
		eps:   float32(a.RMSNormEps),
	}
	if source := a.source(i); source != i {
		l.slot = b.Shared(a.layerPath(source))
		return l
	}
	l.k = nn.NewLinear(b, path+".k_proj", a.HiddenSize, s.KVHeads*s.HeadDim, false)
	l.kNorm = nn.NewRMSNorm(b, path+".k_norm", s.HeadDim, a.RMSNormEps)
	if !a.AttentionKEqV || kind == nn.SlidingAttention {
		l.v = nn.NewLinear(b, path+".v_proj", a.HiddenSize, s.KVHeads*s.HeadDim, false)
	}
	l.slot = b.AddState(nn.KVSpec{KVHeads: s.KVHeads, KeyDim: s.HeadDim, ValueDim: s.HeadDim, Sliding: s.Window, Dtype: b.Dtype})
	b.Share(a.layerPath(i), l.slot)
	return l
}

// Kind is "attention" or "sliding-attention", with "shared" before it where the keys and values are another layer's.
func (l *gemma4Attention) Kind() string {
	kind := "attention"
	if l.spec.Window > 0 {
		kind = "sliding-" + kind
	}
	if l.k == nil {
		kind = "shared-" + kind
	}
	return kind
}

func (l *gemma4Attention) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	heads := func(y mlx.Array, n int) mlx.Array { return p.Reshape(y, x.Dim(0), n, l.spec.HeadDim) }
	q := p.RoPE(l.qNorm.Forward(p, heads(l.q.Forward(p, x), l.spec.Heads)), p.Pos, &l.rope)
	var k, v mlx.Array
	if l.k != nil {
		k = heads(l.k.Forward(p, x), l.spec.KVHeads)
		v = k
		if l.v != nil {
			v = heads(l.v.Forward(p, x), l.spec.KVHeads)
		}
		v = p.RMSNorm(v, mlx.Array{}, l.eps, 0)
		k = p.RoPE(l.kNorm.Forward(p, k), p.Pos, &l.rope)
	}
	return l.o.Forward(p, p.Attend(q, k, v, &l.spec, l.slot))
}

// gemma4Experts is a mixture of experts beside the dense part, each with norms of its own. The router reads the residual
// stream before the norm.
type gemma4Experts struct {
	denseNorm, inputNorm, outputNorm *nn.RMSNorm
	routerNorm                       mlx.Array // weight: the learned scale times 1/sqrt(width)
	eps                              float32
	router                           *nn.Router
	expertScale                      mlx.Array // float32 [experts]
	experts                          *nn.SwitchGLU
}

func (a *gemma4Config) experts(b *nn.Builder, path string) *gemma4Experts {
	e := &gemma4Experts{
		denseNorm:  a.norm(b, path+".post_feedforward_layernorm_1"),
		inputNorm:  a.norm(b, path+".pre_feedforward_layernorm_2"),
		outputNorm: a.norm(b, path+".post_feedforward_layernorm_2"),
		eps:        float32(a.RMSNormEps),
		// Of equal logits mlx-lm's partition takes the expert with the higher number.
		router:      nn.NewRouter(b, path+".router.proj", a.NumExperts, a.HiddenSize, false, mlx.RouteSpec{TopK: a.TopKExperts, HighTies: true}),
		expertScale: b.Float32Tensor(path+".router.per_expert_scale", a.NumExperts),
		experts:     nn.NewSwitchGLU(b, path+".experts.switch_glu", a.NumExperts, a.HiddenSize, a.MoEIntermediateSize, false, nn.GeGLU),
	}
	scale := b.Vector(path+".router.scale", a.HiddenSize)
	e.routerNorm = b.Derive(func(s *mlx.Scope) mlx.Array {
		return s.Mul(s.AsType(scale, b.Dtype), s.Scalar(1/math.Sqrt(float64(a.HiddenSize)), b.Dtype))
	})
	return e
}

// Forward adds the experts' part, of the residual stream h, to the dense part's output.
func (e *gemma4Experts) Forward(p *nn.Pass, h, dense mlx.Array) mlx.Array {
	ids, weights := e.router.Forward(p, p.RMSNorm(h, e.routerNorm, e.eps, 0))
	weights = p.Mul(weights, p.Take(e.expertScale, ids, 0))
	y := p.WeightedSum(e.experts.Forward(p, e.inputNorm.Forward(p, h), ids), weights)
	return p.Add(e.denseNorm.Forward(p, dense), e.outputNorm.Forward(p, y))
}

// gemma4Input lets a layer's own input into the residual stream through a gate.
type gemma4Input struct {
	gate, projection *nn.Linear
	norm             *nn.RMSNorm
	from, to         int // of the layer's part in what is carried
}

func (a *gemma4Config) input(b *nn.Builder, path string, i int) *gemma4Input {
	size := a.HiddenSizePerLayerInput
	return &gemma4Input{
		gate:       nn.NewLinear(b, path+".per_layer_input_gate", a.HiddenSize, size, false),
		projection: nn.NewLinear(b, path+".per_layer_projection", size, a.HiddenSize, false),
		norm:       a.norm(b, path+".post_per_layer_input_norm"),
		from:       i * size, to: (i + 1) * size,
	}
}

func (l *gemma4Input) Forward(p *nn.Pass, h mlx.Array) mlx.Array {
	y := p.GeluMul(l.gate.Forward(p, h), p.SliceAxis(p.Carried, 1, l.from, l.to))
	return l.norm.Forward(p, l.projection.Forward(p, y))
}
