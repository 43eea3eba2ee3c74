package nn

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// The values of layer_types in configs of attention with and without windows.
const (
	FullAttention    = "full_attention"
	SlidingAttention = "sliding_attention"
)

// ReadLayerTypes reads layer_types: FullAttention or SlidingAttention for each layer, nil if the key is absent.
func ReadLayerTypes(c *config.Object, layers int) []string {
	return c.PerLayer("layer_types", layers, FullAttention, SlidingAttention)
}

// AttentionConfig sizes an Attention.
type AttentionConfig struct {
	Width          int // of the residual stream
	Heads, KVHeads int
	HeadDim        int
	Bias           bool    // of the query, key and value projections
	OutputBias     bool    // of the output projection
	QKNorm         float64 // epsilon of the norms of each query and key head before the rotation; 0 for no norms
	NormOffset     float64 // what the checkpoint's norm weights lack
	Scale          float64 // of the scores; 0 for 1/sqrt(HeadDim)
	Sinks          bool    // a learned logit per head joins the softmax's denominator (gpt-oss)
	Window         int     // last positions that a row sees, itself included; 0 for all
	Rope           RoPEConfig
	NoRope         bool // positions are not encoded (Jamba, Nemotron-H)
	RotaryDim      int  // leading elements of each head that rotate; 0 for all
}

// Attention is grouped-query attention with rotary positions and a cache per sequence (Ainslie et al. 2023).
type Attention struct {
	q, k, v, o   *Linear
	qNorm, kNorm *RMSNorm      // nil for none
	rope         *mlx.RopeSpec // nil for none
	spec         mlx.AttentionSpec
	slot         int
}

// NewAttention loads q_proj, k_proj, v_proj and o_proj under path, and q_norm, k_norm and sinks as configured.
func NewAttention(b *Builder, path string, c AttentionConfig) *Attention {
	a := &Attention{
		q: NewLinear(b, path+".q_proj", c.Width, c.Heads*c.HeadDim, c.Bias),
		k: NewLinear(b, path+".k_proj", c.Width, c.KVHeads*c.HeadDim, c.Bias),
		v: NewLinear(b, path+".v_proj", c.Width, c.KVHeads*c.HeadDim, c.Bias),
		o: NewLinear(b, path+".o_proj", c.Heads*c.HeadDim, c.Width, c.OutputBias),
		spec: mlx.AttentionSpec{
			Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, ValueDim: c.HeadDim,
			Scale: float32(inverseSqrt(c.HeadDim)), Window: c.Window,
		},
		slot: b.AddState(KVSpec{KVHeads: c.KVHeads, KeyDim: c.HeadDim, ValueDim: c.HeadDim, Sliding: c.Window, Dtype: b.Dtype}),
	}
	if c.Scale > 0 {
		a.spec.Scale = float32(c.Scale)
	}
	if !c.NoRope {
		rope := c.Rope.Spec(b, c.HeadDim, c.RotaryDim)
		a.rope = &rope
	}
	if c.QKNorm > 0 {
		a.qNorm = NewOffsetRMSNorm(b, path+".q_norm", c.HeadDim, c.QKNorm, c.NormOffset)
		a.kNorm = NewOffsetRMSNorm(b, path+".k_norm", c.HeadDim, c.QKNorm, c.NormOffset)
	}
	if c.Sinks {
		a.spec.Sinks = b.Float32Tensor(path+".sinks", c.Heads)
	}
	return a
}

// Forward maps [rows, width] to [rows, width] and extends the sequences' caches.
func (a *Attention) Forward(p *Pass, x mlx.Array) mlx.Array {
	q, k, v := a.q.Forward(p, x), a.k.Forward(p, x), a.v.Forward(p, x)
	if a.qNorm != nil {
		q = a.qNorm.Forward(p, p.Reshape(q, -1, a.spec.Heads, a.spec.HeadDim))
		k = a.kNorm.Forward(p, p.Reshape(k, -1, a.spec.KVHeads, a.spec.HeadDim))
	}
	if a.rope != nil {
		q, k = p.RoPE(q, p.Pos, a.rope), p.RoPE(k, p.Pos, a.rope)
	}
	return a.o.Forward(p, p.Attend(q, k, v, &a.spec, a.slot))
}

// Kind is "attention", or "sliding-attention" with a window.
func (a *Attention) Kind() string {
	if a.spec.Window > 0 {
		return "sliding-attention"
	}
	return "attention"
}
