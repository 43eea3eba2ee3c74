package nn

import (
	"math"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
)

// IndexerConfig sizes the part of a sparse attention that picks positions.
type IndexerConfig struct {
	Width, QRank int // inputs
	Heads, Dim   int
	RopeDim      int // leading elements of a head that rotate
	TopK         int // positions that a row attends to
	Rope         RoPEConfig
}

// indexer is the lightning indexer of DeepSeek-V3.2 (2025): small heads over keys and a cache of their own.
type indexer struct {
	q, k    *Linear
	kNorm   *LayerNorm
	weights *Linear
	rope    mlx.RopeSpec
	scale   float64
	c       IndexerConfig
	slot    int
	caches  []*mlx.KVCache // argument buffer
}

// kNormEps is the default of MLX's LayerNorm, which the reference takes.
const kNormEps = 1e-5

func newIndexer(b *Builder, path string, c IndexerConfig) *indexer {
	return &indexer{
		q:       NewLinear(b, path+".wq_b", c.QRank, c.Heads*c.Dim, false),
		k:       NewLinear(b, path+".wk", c.Width, c.Dim, false),
		kNorm:   NewLayerNorm(b, path+".k_norm", c.Dim, kNormEps),
		weights: NewLinear(b, path+".weights_proj", c.Width, c.Heads, false),
		rope:    c.Rope.Spec(b, c.Dim, c.RopeDim),
		scale:   1 / math.Sqrt(float64(c.Heads)) / math.Sqrt(float64(c.Dim)),
		c:       c,
		slot:    b.AddState(KVSpec{KVHeads: 1, KeyDim: c.Dim, ValueDim: c.Dim, Latent: true, Dtype: b.Dtype}),
	}
}

// forward prepares the choice of positions for rows x [rows, width] whose queries' latents are low [rows, QRank].
func (n *indexer) forward(p *Pass, x, low mlx.Array) *mlx.Index {
	n.caches = n.caches[:0]
	for i := range p.Segments {
		n.caches = append(n.caches, p.Segments[i].States[n.slot].(*kvState).cache)
	}
	weights := n.weights.Forward(p, x)
	return &mlx.Index{
		Heads: n.c.Heads, Dim: n.c.Dim, TopK: n.c.TopK, Caches: n.caches,
		Q:       p.RoPE(n.q.Forward(p, low), p.Pos, &n.rope),
		K:       p.RoPE(n.kNorm.Forward(p, n.k.Forward(p, x)), p.Pos, &n.rope),
		Weights: p.AsType(p.Mul(weights, p.Scalar(n.scale, weights.Dtype())), mlx.Float32),
	}
}
