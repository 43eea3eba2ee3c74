package nn

import "github.com/mlxcel/mlxcel/mlxshared/mlx"

// KimiDeltaConfig sizes a KimiDelta.
type KimiDeltaConfig struct {
	Width      int // of the residual stream
	Heads      int
	HeadDim    int
	Conv       int     // width of the convolution
	LowerBound float64 // negative: the log of the strongest decay; 0 for none
	FullGate   bool    // the output's gate is one projection, else two with HeadDim between
	NormEps    float64
}

// KimiDelta is Kimi delta attention (Kimi Linear, 2025): the gated delta rule with a decay for each element of a key.
type KimiDelta struct {
	qkv           *Linear
	conv          *CausalConv
	fA, fB        *Linear // decay
	beta          *Linear
	gA, gB        *Linear // the output's gate; gA nil if it is one projection
	rates, dtBias mlx.Array
	norm          *RMSNorm // of each head
	out           *Linear
	c             KimiDeltaConfig
	spec          mlx.GatedDeltaSpec
	slot          int
}

// NewKimiDelta loads the tensors under path.
func NewKimiDelta(b *Builder, path string, c KimiDeltaConfig) *KimiDelta {
	inner := c.Heads * c.HeadDim
	k := &KimiDelta{
		qkv:    NewLinear(b, path+".qkv_proj", c.Width, 3*inner, false),
		conv:   NewCausalConv(b, path+".qkv_conv.conv", 3*inner, c.Conv, false),
		fA:     NewLinear(b, path+".f_a_proj", c.Width, c.HeadDim, false),
		fB:     NewLinear(b, path+".f_b_proj", c.HeadDim, inner, false),
		beta:   NewLinear(b, path+".b_proj", c.Width, c.Heads, false),
		dtBias: b.StoredFloat32(path+".dt_bias", inner),
		norm:   NewRMSNorm(b, path+".o_norm", c.HeadDim, c.NormEps),
		out:    NewLinear(b, path+".o_proj", inner, c.Width, false),
		c:      c,
		spec: mlx.GatedDeltaSpec{
			KeyHeads: c.Heads, ValueHeads: c.Heads, KeyDim: c.HeadDim, ValueDim: c.HeadDim, ChannelGate: true, LowerBound: float32(c.LowerBound),
		},
		slot: b.AddState(RecurrentSpec{Rows: inner, Cols: c.HeadDim, Dtype: mlx.Float32}),
	}
	logs := b.StoredFloat32(path+".A_log", c.Heads)
	k.rates = b.Derive(func(s *mlx.Scope) mlx.Array { return s.Exp(logs) })
	if c.FullGate {
		k.gB = NewLinear(b, path+".g_proj", c.Width, inner, false)
	} else {
		k.gA = NewLinear(b, path+".g_a_proj", c.Width, c.HeadDim, false)
		k.gB = NewLinear(b, path+".g_b_proj", c.HeadDim, inner, false)
	}
	return k
}

// Kind is "delta-attention".
func (k *KimiDelta) Kind() string { return "delta-attention" }

// Forward maps [rows, width] to [rows, width] and advances the sequences' states.
func (k *KimiDelta) Forward(p *Pass, x mlx.Array) mlx.Array {
	decay := k.fB.Forward(p, k.fA.Forward(p, x))
	y := p.GatedDelta(k.conv.Forward(p, k.qkv.Forward(p, x)), decay, k.beta.Forward(p, x), k.rates, k.dtBias, &k.spec, p.stateSegments(k.slot))
	rows := y.Dim(0)
	y = k.norm.Forward(p, p.Reshape(y, rows, k.c.Heads, k.c.HeadDim))
	gate := x
	if k.gA != nil {
		gate = k.gA.Forward(p, gate)
	}
	return k.out.Forward(p, p.SigmoidMul(p.Reshape(y, rows, k.c.Heads*k.c.HeadDim), k.gB.Forward(p, gate)))
}
