package main

import (
	"math"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// llama4 is the text tower of Llama 4 Scout and Maverick (Meta 2025; reference: mlx_lm/models/llama4.py). Three of four layers
// rotate and see the positions of their own chunk; the fourth sees all positions, without rotation and with queries that
// grow with the position. Vision tensors are left aside.
type llama4 struct{}

func (llama4) Info() sdk.Family { return stage.Info("llama4", "llama4") }

type llama4Config struct {
	decoder
	IntermediateSize       int // of each expert and of the shared one
	IntermediateSizeMLP    int // of the dense layers
	InterleaveMoELayerStep int // every such layer has experts
	NumLocalExperts        int
	AttentionBias          bool
	AttentionChunkSize     int
	UseQKNorm              bool
	TemperatureTuning      bool
	FloorScale             float64 // positions per step of the temperature
	AttnScale              float64
}

// globalStep is the distance of the layers that see everything.
const globalStep = 4

func (llama4) Model(c *config.Object) stage.Model {
	text := c.Object("text_config")
	if text == nil {
		c.Fail("text_config", "is missing")
		return &llama4Config{}
	}
	a := &llama4Config{
		decoder:                readDecoder(text, false),
		IntermediateSize:       text.Size("intermediate_size"),
		IntermediateSizeMLP:    text.Size("intermediate_size_mlp"),
		InterleaveMoELayerStep: text.Size("interleave_moe_layer_step"),
		NumLocalExperts:        text.Size("num_local_experts"),
		AttentionBias:          text.BoolOr("attention_bias", false),
		AttentionChunkSize:     text.Size("attention_chunk_size"),
		UseQKNorm:              text.BoolOr("use_qk_norm", true),
		TemperatureTuning:      truth(text.Value("attn_temperature_tuning"), true),
		FloorScale:             text.PositiveOr("floor_scale", 8192),
		AttnScale:              text.FloatOr("attn_scale", 0.1),
	}
	a.Rope.Traditional = true
	if k := text.Size("num_experts_per_tok"); k != 1 {
		text.Unsupported("num_experts_per_tok", "%d is not built for llama4; built is 1", k)
	}
	a.checkNoRope(text)
	a.prefix = "language_model."
	a.names = weights.Names{
		DropContains: []string{"vision_model", "multi_modal_projector"},
		// The original holds the experts' matrices [inputs, outputs], gate and up side by side.
		Sources: []weights.Source{
			{Of: "experts.gate_proj.weight", From: "experts.gate_up_proj", Transposed: true, Parts: 2, Part: 0, Axis: 1},
			{Of: "experts.up_proj.weight", From: "experts.gate_up_proj", Transposed: true, Parts: 2, Part: 1, Axis: 1},
			{Of: "experts.down_proj.weight", From: "experts.down_proj", Transposed: true},
		},
	}
	return a
}

// truth reads a flag as Python does: configs write attn_temperature_tuning as a truth value or as a number.
func truth(v any, def bool) bool {
	switch v := v.(type) {
	case nil:
		return def
	case bool:
		return v
	}
	n, isNumber := config.Integer(v)
	return !isNumber || n != 0
}

// checkNoRope refuses a list of layers without rotation that differs from every fourth, which mlx-lm assumes too.
func (a *llama4Config) checkNoRope(c *config.Object) {
	for i, n := range c.Integers("no_rope_layers") {
		// The key says the opposite of its name: 1 rotates.
		if (n != 0) != a.local(i) {
			c.Unsupported("no_rope_layers", "entry %d is %d; built are models in which every %dth layer does not rotate", i, n, globalStep)
			return
		}
	}
}

// local reports whether layer i rotates and sees its chunk only.
func (a *llama4Config) local(i int) bool { return (i+1)%globalStep != 0 }

func (a *llama4Config) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	l := a.block(b, path)
	l.Mixer = a.newAttention(b, path+".self_attn", a.local(i))
	l.FeedForward = a.feedForward(b, path+".feed_forward", i)
	return l
}

func (a *llama4Config) feedForward(b *nn.Builder, path string, i int) nn.FeedForward {
	if i%a.InterleaveMoELayerStep != a.InterleaveMoELayerStep-1 {
		return nn.NewMLP(b, path, a.HiddenSize, a.IntermediateSizeMLP, false)
	}
	return &llama4MoE{
		router: nn.NewRouter(b, path+".router", a.NumLocalExperts, a.HiddenSize, false,
			mlx.RouteSpec{TopK: 1, Scores: mlx.RouteSigmoid}),
		experts: nn.NewSwitchGLU(b, path+".experts", a.NumLocalExperts, a.HiddenSize, a.IntermediateSize, false, nn.SwiGLU),
		shared:  nn.NewMLP(b, path+".shared_expert", a.HiddenSize, a.IntermediateSize, false),
	}
}

// llama4MoE weighs the input of the one chosen expert, not its output.
type llama4MoE struct {
	router  *nn.Router
	experts *nn.SwitchGLU
	shared  *nn.MLP
}

func (m *llama4MoE) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	ids, weights := m.router.Forward(p, x)
	y := m.experts.Forward(p, p.Mul(x, p.AsType(weights, p.Dtype)), ids)
	return p.Add(p.Squeeze(y, 1), m.shared.Forward(p, x))
}

// qkNormEps is fixed in the reference.
const qkNormEps = 1e-6

type llama4Attention struct {
	config     *llama4Config
	q, k, v, o *nn.Linear
	local      bool
	rope       mlx.RopeSpec
	spec       mlx.AttentionSpec
	slot       int
}

func (a *llama4Config) newAttention(b *nn.Builder, path string, local bool) *llama4Attention {
	queries, keys := a.NumAttentionHeads*a.HeadDim, a.NumKeyValueHeads*a.HeadDim
	l := &llama4Attention{
		config: a, local: local,
		q: nn.NewLinear(b, path+".q_proj", a.HiddenSize, queries, a.AttentionBias),
		k: nn.NewLinear(b, path+".k_proj", a.HiddenSize, keys, a.AttentionBias),
		v: nn.NewLinear(b, path+".v_proj", a.HiddenSize, keys, a.AttentionBias),
		o: nn.NewLinear(b, path+".o_proj", queries, a.HiddenSize, a.AttentionBias),
		spec: mlx.AttentionSpec{
			Heads: a.NumAttentionHeads, KVHeads: a.NumKeyValueHeads, HeadDim: a.HeadDim, ValueDim: a.HeadDim,
			Scale: float32(1 / math.Sqrt(float64(a.HeadDim))),
		},
		slot: b.AddState(nn.KVSpec{KVHeads: a.NumKeyValueHeads, KeyDim: a.HeadDim, ValueDim: a.HeadDim, Dtype: b.Dtype}),
	}
	if local {
		l.rope = a.Rope.Spec(b, a.HeadDim, 0)
		l.spec.Chunk = a.AttentionChunkSize
	}
	return l
}

func (l *llama4Attention) Kind() string {
	if l.local {
		return "chunked-attention"
	}
	return "attention"
}

func (l *llama4Attention) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	q, k, v := l.q.Forward(p, x), l.k.Forward(p, x), l.v.Forward(p, x)
	switch {
	case l.local:
		q, k = l.rotate(p, q, l.spec.Heads), l.rotate(p, k, l.spec.KVHeads)
	case l.config.TemperatureTuning:
		q = p.AsType(p.Mul(q, l.temperature(p)), p.Dtype)
	}
	return l.o.Forward(p, p.Attend(q, k, v, &l.spec, l.slot))
}

// rotate turns heads by their positions and, if configured, norms them afterwards, without weights.
func (l *llama4Attention) rotate(p *nn.Pass, x mlx.Array, heads int) mlx.Array {
	x = p.RoPE(x, p.Pos, &l.rope)
	if !l.config.UseQKNorm {
		return x
	}
	return p.RMSNorm(p.Reshape(x, -1, heads, l.spec.HeadDim), mlx.Array{}, qkNormEps, 0)
}

// temperature is float32 [rows, 1]: what each row's queries are multiplied by, 1 + attn_scale·ln(1 + ⌊(position+1) /
// floor_scale⌋).
func (l *llama4Attention) temperature(p *nn.Pass) mlx.Array {
	var scales []float32
	for i := range p.Segments {
		s := &p.Segments[i]
		for j := range s.Rows {
			step := math.Floor(float64(s.Pos+j+1) / l.config.FloorScale)
			scales = append(scales, float32(math.Log(step+1)*l.config.AttnScale+1))
		}
	}
	return p.FromFloat32s(scales, len(scales), 1)
}
