package nn

import "github.com/mlxcel/mlxcel/mlxshared/mlx"

// AttentionConfig sizes an Attention.
type AttentionConfig struct {
	Width          int // of the residual stream
	Heads, KVHeads int
	HeadDim        int
	Bias           bool // of all four projections
	Window         int  // last positions that a row sees, itself included; 0 for all
	Rope           RoPEConfig
}

// Attention is grouped-query attention with rotary positions and a cache per sequence (Ainslie et al. 2023).
type Attention struct {
	q, k, v, o *Linear
	rope       mlx.RopeSpec
	spec       mlx.AttentionSpec
	slot       int
}

// NewAttention loads q_proj, k_proj, v_proj and o_proj under path.
func NewAttention(b *Builder, path string, c AttentionConfig) *Attention {
	return &Attention{
		q:    NewLinear(b, path+".q_proj", c.Width, c.Heads*c.HeadDim, c.Bias),
		k:    NewLinear(b, path+".k_proj", c.Width, c.KVHeads*c.HeadDim, c.Bias),
		v:    NewLinear(b, path+".v_proj", c.Width, c.KVHeads*c.HeadDim, c.Bias),
		o:    NewLinear(b, path+".o_proj", c.Heads*c.HeadDim, c.Width, c.Bias),
		rope: c.Rope.spec(b, c.HeadDim),
		spec: mlx.AttentionSpec{
			Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, ValueDim: c.HeadDim,
			Scale: float32(inverseSqrt(c.HeadDim)), Window: c.Window,
		},
		slot: b.AddState(KVSpec{KVHeads: c.KVHeads, KeyDim: c.HeadDim, ValueDim: c.HeadDim, Sliding: c.Window, Dtype: b.Dtype}),
	}
}

// Forward maps [rows, width] to [rows, width] and extends the sequences' caches.
func (a *Attention) Forward(p *Pass, x mlx.Array) mlx.Array {
	q := p.RoPE(a.q.Forward(p, x), p.Pos, &a.rope)
	k := p.RoPE(a.k.Forward(p, x), p.Pos, &a.rope)
	v := a.v.Forward(p, x)
	return a.o.Forward(p, p.Attention(q, k, v, &a.spec, p.kvSegments(a.slot)))
}

// Kind is "attention", or "sliding-attention" with a window.
func (a *Attention) Kind() string {
	if a.spec.Window > 0 {
		return "sliding-attention"
	}
	return "attention"
}
