package nn

import "github.com/mlxcel/mlxcel/mlxshared/mlx"

// LatentAttentionConfig sizes a LatentAttention.
type LatentAttentionConfig struct {
	Width    int // of the residual stream
	Heads    int
	QRank    int // of the query's low-rank projection; 0 for a plain one
	Rank     int // of the latent that keys and values share
	NopeDim  int // elements of a query head that meet the latent
	RopeDim  int // elements of a query head that meet the key without a head of its own
	ValueDim int
	Bias     bool // of q_a_proj, kv_a_proj_with_mqa and o_proj
	NormEps  float64
	Rope     *RoPEConfig // of the RopeDim elements; nil leaves them as they are
	Scale    float64     // of the scores
	Gate     bool        // the heads' output is multiplied by sigmoid(g_proj(x))
	Indexer  *IndexerConfig
}

// LatentAttention is multi-head latent attention (DeepSeek-V2, 2024): a position's keys and values are one latent vector
// and one rotated key that all heads share. Prompt and generated rows take one formula, the absorbed one: queries are
// mapped into the latent's space, attend to the latents themselves, and what comes out is mapped to each head's values.
type LatentAttention struct {
	q          *Linear // with QRank, from the normalized latent of the query
	qA         *Linear // nil without QRank
	qNorm      *RMSNorm
	kvA        *Linear
	kvNorm     *RMSNorm
	embedQ     *mlx.Experts
	unembedOut *mlx.Experts
	o, g       *Linear // g nil without a gate
	indexer    *indexer
	rope       *mlx.RopeSpec
	spec       mlx.AttentionSpec
	c          LatentAttentionConfig
	slot       int
}

// NewLatentAttention loads the projections under path: q_proj, or q_a_proj, q_a_layernorm and q_b_proj; kv_a_proj_with_mqa,
// kv_a_layernorm, embed_q and unembed_out or kv_b_proj; o_proj; g_proj and indexer where there are any.
func NewLatentAttention(b *Builder, path string, c LatentAttentionConfig) *LatentAttention {
	a := &LatentAttention{c: c}
	heads := c.Heads * (c.NopeDim + c.RopeDim)
	if c.QRank > 0 {
		a.qA = NewLinear(b, path+".q_a_proj", c.Width, c.QRank, c.Bias)
		a.qNorm = NewRMSNorm(b, path+".q_a_layernorm", c.QRank, c.NormEps)
		a.q = NewLinear(b, path+".q_b_proj", c.QRank, heads, false)
	} else {
		a.q = NewLinear(b, path+".q_proj", c.Width, heads, false)
	}
	a.kvA = NewLinear(b, path+".kv_a_proj_with_mqa", c.Width, c.Rank+c.RopeDim, c.Bias)
	a.kvNorm = NewRMSNorm(b, path+".kv_a_layernorm", c.Rank, c.NormEps)
	a.embedQ, a.unembedOut = b.LatentProjections(path, c.Heads, c.Rank, c.NopeDim, c.ValueDim)
	a.o = NewLinear(b, path+".o_proj", c.Heads*c.ValueDim, c.Width, c.Bias)
	if c.Gate {
		a.g = NewLinear(b, path+".g_proj", c.Width, c.Heads*c.ValueDim, false)
	}
	if c.Rope != nil {
		rope := c.Rope.Spec(b, c.RopeDim, 0)
		a.rope = &rope
	}
	a.spec = mlx.AttentionSpec{Heads: c.Heads, KVHeads: 1, HeadDim: c.Rank + c.RopeDim, ValueDim: c.Rank, Scale: float32(c.Scale)}
	a.slot = b.AddState(KVSpec{KVHeads: 1, KeyDim: a.spec.HeadDim, ValueDim: c.Rank, Latent: true, Dtype: b.Dtype})
	if c.Indexer != nil {
		a.indexer = newIndexer(b, path+".indexer", *c.Indexer)
	}
	return a
}

// Kind is "latent-attention", or "sparse-latent-attention" with an indexer.
func (a *LatentAttention) Kind() string {
	if a.indexer != nil {
		return "sparse-latent-attention"
	}
	return "latent-attention"
}

// Forward maps [rows, width] to [rows, width] and extends the sequences' caches.
func (a *LatentAttention) Forward(p *Pass, x mlx.Array) mlx.Array {
	low := x
	if a.qA != nil {
		low = a.qNorm.Forward(p, a.qA.Forward(p, x))
	}
	q, k := a.query(p, a.q.Forward(p, low)), a.key(p, x)
	var latent mlx.Array
	if a.indexer == nil {
		latent = p.Attention(q, k, mlx.Array{}, &a.spec, p.kvSegments(a.slot))
	} else {
		index := a.indexer.forward(p, x, low)
		latent = p.SparseAttention(q, k, &a.spec, index, p.kvSegments(a.slot))
	}
	y := p.MultiLinear(latent, a.unembedOut)
	if a.g != nil {
		y = p.SigmoidMul(y, a.g.Forward(p, x))
	}
	return a.o.Forward(p, y)
}

// query maps [rows, heads*(nope+rope)] into the latent's space: [rows, heads*(rank+rope)].
func (a *LatentAttention) query(p *Pass, q mlx.Array) mlx.Array {
	rows, heads, nope := q.Dim(0), a.c.Heads, a.c.NopeDim
	q = p.Reshape(q, rows, heads, nope+a.c.RopeDim)
	latent := p.MultiLinear(p.Reshape(p.SliceAxis(q, 2, 0, nope), rows, heads*nope), a.embedQ)
	turned := a.rotate(p, p.Reshape(p.SliceAxis(q, 2, nope, nope+a.c.RopeDim), rows, heads*a.c.RopeDim))
	joined := p.Concat(2, p.Reshape(latent, rows, heads, a.c.Rank), p.Reshape(turned, rows, heads, a.c.RopeDim))
	return p.Reshape(joined, rows, heads*a.spec.HeadDim)
}

// key is the latent and the shared rotated key of each row: [rows, rank+rope].
func (a *LatentAttention) key(p *Pass, x mlx.Array) mlx.Array {
	both := a.kvA.Forward(p, x)
	latent := a.kvNorm.Forward(p, p.SliceAxis(both, 1, 0, a.c.Rank))
	return p.Concat(1, latent, a.rotate(p, p.SliceAxis(both, 1, a.c.Rank, a.spec.HeadDim)))
}

func (a *LatentAttention) rotate(p *Pass, x mlx.Array) mlx.Array {
	if a.rope == nil {
		return x
	}
	return p.RoPE(x, p.Pos, a.rope)
}

// ScoreScale is the factor by which yarn raises the scores of latent attention beyond 1/sqrt(head): the square of
// 0.1·mscale_all_dim·ln(factor) + 1. 1 for other kinds of rope.
func (c *RoPEConfig) ScoreScale() float64 {
	if c.Type != "yarn" {
		return 1
	}
	s := yarnMScale(c.Factor, c.MScaleAllDim)
	return s * s
}
