package nn

import "github.com/mlxcel/mlxcel/mlxshared/mlx"

// GatedDeltaConfig sizes a GatedDeltaNet.
type GatedDeltaConfig struct {
	Width                int // of the residual stream
	KeyHeads, ValueHeads int // ValueHeads is a multiple
	KeyDim, ValueDim     int
	Conv                 int // width of the convolution
	NormEps              float64

	// Fused: one projection holds queries, keys, values and output gates, another the write and decay gates, both grouped by
	// key head (Qwen3-Next). Else each has a projection of its own but queries, keys and values (Qwen 3.5).
	Fused bool
}

// GatedDeltaNet is linear attention with the gated delta rule (Yang et al. 2024) as Qwen3-Next and Qwen 3.5 have it.
type GatedDeltaNet struct {
	qkv, z, beta, alpha *Linear // qkv and beta alone if fused
	conv                *CausalConv
	rates, dtBias       mlx.Array // float32 [valueHeads]
	norm                *RMSNorm  // of each head
	out                 *Linear
	c                   GatedDeltaConfig
	spec                mlx.GatedDeltaSpec
	slot                int
}

// NewGatedDeltaNet loads the tensors under path.
func NewGatedDeltaNet(b *Builder, path string, c GatedDeltaConfig) *GatedDeltaNet {
	keys, values := c.KeyHeads*c.KeyDim, c.ValueHeads*c.ValueDim
	g := &GatedDeltaNet{
		conv:   NewCausalConv(b, path+".conv1d", 2*keys+values, c.Conv, false),
		dtBias: b.Float32Tensor(path+".dt_bias", c.ValueHeads),
		norm:   NewRMSNorm(b, path+".norm", c.ValueDim, c.NormEps),
		out:    NewLinear(b, path+".out_proj", values, c.Width, false),
		c:      c,
		spec:   mlx.GatedDeltaSpec{KeyHeads: c.KeyHeads, ValueHeads: c.ValueHeads, KeyDim: c.KeyDim, ValueDim: c.ValueDim},
		slot:   b.AddState(RecurrentSpec{Rows: c.ValueHeads * c.KeyDim, Cols: c.ValueDim, Dtype: mlx.Float32}),
	}
	logs := b.Tensor(path+".A_log", c.ValueHeads)
	g.rates = b.Derive(func(s *mlx.Scope) mlx.Array { return s.Exp(s.AsType(logs, mlx.Float32)) })
	if c.Fused {
		g.qkv = NewLinear(b, path+".in_proj_qkvz", c.Width, 2*keys+2*values, false)
		g.beta = NewLinear(b, path+".in_proj_ba", c.Width, 2*c.ValueHeads, false)
		return g
	}
	g.qkv = NewLinear(b, path+".in_proj_qkv", c.Width, 2*keys+values, false)
	g.z = NewLinear(b, path+".in_proj_z", c.Width, values, false)
	g.beta = NewLinear(b, path+".in_proj_b", c.Width, c.ValueHeads, false)
	g.alpha = NewLinear(b, path+".in_proj_a", c.Width, c.ValueHeads, false)
	return g
}

// Kind is "gated-delta".
func (g *GatedDeltaNet) Kind() string { return "gated-delta" }

// Forward maps [rows, width] to [rows, width] and advances the sequences' states.
func (g *GatedDeltaNet) Forward(p *Pass, x mlx.Array) mlx.Array {
	qkv, z, beta, alpha := g.project(p, x)
	y := p.GatedDelta(g.conv.Forward(p, qkv), alpha, beta, g.rates, g.dtBias, &g.spec, p.stateSegments(g.slot))
	rows := y.Dim(0)
	heads := func(a mlx.Array) mlx.Array { return p.Reshape(a, rows, g.c.ValueHeads, g.c.ValueDim) }
	y = p.SiluMul(heads(z), g.norm.Forward(p, heads(y)))
	return g.out.Forward(p, p.Reshape(y, rows, g.c.ValueHeads*g.c.ValueDim))
}

// project returns queries, keys and values beside each other, and the gates of output, write and decay.
func (g *GatedDeltaNet) project(p *Pass, x mlx.Array) (qkv, z, beta, alpha mlx.Array) {
	if !g.c.Fused {
		return g.qkv.Forward(p, x), g.z.Forward(p, x), g.beta.Forward(p, x), g.alpha.Forward(p, x)
	}
	rows, ratio := x.Dim(0), g.c.ValueHeads/g.c.KeyHeads
	k, v := g.c.KeyDim, ratio*g.c.ValueDim
	all := p.Reshape(g.qkv.Forward(p, x), rows, g.c.KeyHeads, 2*k+2*v)
	part := func(a mlx.Array, from, to int) mlx.Array { // of every key head, beside each other
		return p.Reshape(p.SliceAxis(a, 2, from, to), rows, g.c.KeyHeads*(to-from))
	}
	qkv = p.Concat(1, part(all, 0, k), part(all, k, 2*k), part(all, 2*k, 2*k+v))
	gates := p.Reshape(g.beta.Forward(p, x), rows, g.c.KeyHeads, 2*ratio)
	return qkv, part(all, 2*k+v, 2*k+2*v), part(gates, 0, ratio), part(gates, ratio, 2*ratio)
}

// GatedAttentionConfig sizes a GatedAttention.
type GatedAttentionConfig struct {
	Width          int // of the residual stream
	Heads, KVHeads int
	HeadDim        int
	RotDim         int // leading elements of a head that rotate
	Bias           bool
	Rope           RoPEConfig
	NormEps        float64
	NormOffset     float64 // what the checkpoint's norm weights lack
}

// GatedAttention is grouped-query attention with norms over queries and keys, partial rotary positions, and a sigmoid
// gate over its output (Qwen3-Next).
type GatedAttention struct {
	q, k, v, o   *Linear // q holds query and gate of each head
	qNorm, kNorm *RMSNorm
	rope         mlx.RopeSpec
	spec         mlx.AttentionSpec
	slot         int
}

// NewGatedAttention loads the tensors under path.
func NewGatedAttention(b *Builder, path string, c GatedAttentionConfig) *GatedAttention {
	return &GatedAttention{
		q:     NewLinear(b, path+".q_proj", c.Width, 2*c.Heads*c.HeadDim, c.Bias),
		k:     NewLinear(b, path+".k_proj", c.Width, c.KVHeads*c.HeadDim, c.Bias),
		v:     NewLinear(b, path+".v_proj", c.Width, c.KVHeads*c.HeadDim, c.Bias),
		o:     NewLinear(b, path+".o_proj", c.Heads*c.HeadDim, c.Width, c.Bias),
		qNorm: NewOffsetRMSNorm(b, path+".q_norm", c.HeadDim, c.NormEps, c.NormOffset),
		kNorm: NewOffsetRMSNorm(b, path+".k_norm", c.HeadDim, c.NormEps, c.NormOffset),
		rope:  c.Rope.Spec(b, c.HeadDim, c.RotDim),
		spec: mlx.AttentionSpec{
			Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, ValueDim: c.HeadDim, Scale: float32(inverseSqrt(c.HeadDim)),
		},
		slot: b.AddState(KVSpec{KVHeads: c.KVHeads, KeyDim: c.HeadDim, ValueDim: c.HeadDim, Dtype: b.Dtype}),
	}
}

// Kind is "gated-attention".
func (a *GatedAttention) Kind() string { return "gated-attention" }

// Forward maps [rows, width] to [rows, width] and extends the sequences' caches.
func (a *GatedAttention) Forward(p *Pass, x mlx.Array) mlx.Array {
	rows, s := x.Dim(0), &a.spec
	both := p.SplitAxis(p.Reshape(a.q.Forward(p, x), rows, s.Heads, 2*s.HeadDim), 2, 2)
	k := p.Reshape(a.k.Forward(p, x), rows, s.KVHeads, s.HeadDim)
	q := p.RoPE(a.qNorm.Forward(p, both[0]), p.Pos, &a.rope)
	k = p.RoPE(a.kNorm.Forward(p, k), p.Pos, &a.rope)
	y := p.Attend(q, k, a.v.Forward(p, x), s, a.slot)
	return a.o.Forward(p, p.SigmoidMul(y, p.Reshape(both[1], rows, s.Heads*s.HeadDim)))
}

// GatedExpert is a shared expert behind a sigmoid gate of one number a row (Qwen MoE).
type GatedExpert struct {
	gate   *Linear
	expert *MLP
}

// NewGatedExpert loads the expert's projections under path and <path>_gate.
func NewGatedExpert(b *Builder, path string, width, hidden int) *GatedExpert {
	return &GatedExpert{gate: NewLinear(b, path+"_gate", width, 1, false), expert: NewMLP(b, path, width, hidden, false)}
}

// Forward maps [rows, width] to [rows, width].
func (g *GatedExpert) Forward(p *Pass, x mlx.Array) mlx.Array {
	return p.SigmoidMul(g.expert.Forward(p, x), g.gate.Forward(p, x))
}
