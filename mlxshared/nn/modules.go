package nn

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
)

// Linear is x·Wᵀ + b.
type Linear struct {
	weight *mlx.Matrix
	bias   mlx.Array // zero without bias
}

// NewLinear loads <path>.weight [out, in], plain or packed, and <path>.bias [out].
func NewLinear(b *Builder, path string, in, out int, bias bool) *Linear {
	l := &Linear{weight: b.Matrix(path, out, in)}
	if bias {
		l.bias = b.Vector(path+".bias", out)
	}
	return l
}

// Forward maps [rows, in] to [rows, out] in x's dtype.
func (l *Linear) Forward(p *Pass, x mlx.Array) mlx.Array { return p.Linear(x, l.weight, l.bias) }

// Embedding is a table of one row per token.
type Embedding struct{ weight *mlx.Matrix }

// NewEmbedding loads <path>.weight [vocab, width], plain or packed.
func NewEmbedding(b *Builder, path string, vocab, width int) *Embedding {
	return &Embedding{b.Matrix(path, vocab, width)}
}

// Forward picks the rows of ids.
func (e *Embedding) Forward(p *Pass, ids mlx.Array) mlx.Array {
	return p.Embedding(ids, e.weight, p.Dtype)
}

// RMSNorm is x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019).
type RMSNorm struct {
	weight mlx.Array
	eps    float32
	offset float32 // added to the weight
}

// NewRMSNorm loads <path>.weight [width].
func NewRMSNorm(b *Builder, path string, width int, eps float64) *RMSNorm {
	return NewOffsetRMSNorm(b, path, width, eps, 0)
}

// NewOffsetRMSNorm is NewRMSNorm for checkpoints that store the weight minus offset.
func NewOffsetRMSNorm(b *Builder, path string, width int, eps, offset float64) *RMSNorm {
	return &RMSNorm{b.Vector(path+".weight", width), float32(eps), float32(offset)}
}

// Forward normalizes each row of x.
func (n *RMSNorm) Forward(p *Pass, x mlx.Array) mlx.Array {
	return p.RMSNorm(x, n.weight, n.eps, n.offset)
}

// AddForward returns x + y and its norm: a residual connection and the norm that follows it.
func (n *RMSNorm) AddForward(p *Pass, x, y mlx.Array) (sum, norm mlx.Array) {
	return p.AddRMSNorm(x, y, n.weight, n.eps, n.offset)
}

// Activation joins the gate's and the up projection's outputs.
type Activation func(p *Pass, gate, up mlx.Array) mlx.Array

// SwiGLU is silu(gate) · up.
func SwiGLU(p *Pass, gate, up mlx.Array) mlx.Array { return p.SiluMul(gate, up) }

// GeGLU is gelu(gate) · up, with the tanh approximation.
func GeGLU(p *Pass, gate, up mlx.Array) mlx.Array { return p.GeluMul(gate, up) }

// MLP is the gated feed-forward layer (Shazeer 2020): down(activation(gate(x), up(x))).
type MLP struct {
	gate, up, down *Linear
	activation     Activation
}

// NewMLP is NewGatedMLP with SwiGLU.
func NewMLP(b *Builder, path string, width, hidden int, bias bool) *MLP {
	return NewGatedMLP(b, path, width, hidden, bias, SwiGLU)
}

// NewGatedMLP loads gate_proj, up_proj and down_proj under path.
func NewGatedMLP(b *Builder, path string, width, hidden int, bias bool, activation Activation) *MLP {
	return &MLP{
		gate:       NewLinear(b, path+".gate_proj", width, hidden, bias),
		up:         NewLinear(b, path+".up_proj", width, hidden, bias),
		down:       NewLinear(b, path+".down_proj", hidden, width, bias),
		activation: activation,
	}
}

// Forward maps [rows, width] to [rows, width].
func (m *MLP) Forward(p *Pass, x mlx.Array) mlx.Array {
	return m.down.Forward(p, m.activation(p, m.gate.Forward(p, x), m.up.Forward(p, x)))
}

// LMHead is the final norm and the projection to the vocabulary. Logits are float32 whatever the activations are: the
// normalized rows are widened first, so that rounding to 16 bits makes no ties.
type LMHead struct {
	norm   *RMSNorm
	weight *mlx.Matrix
}

// NewLMHead makes a head over the matrix at path [vocab, width]: the embedding's path where they are tied.
func NewLMHead(b *Builder, norm *RMSNorm, path string, vocab, width int) *LMHead {
	return &LMHead{norm: norm, weight: b.Matrix(path, vocab, width)}
}

// Forward maps [rows, width] to float32 [rows, vocab].
func (h *LMHead) Forward(p *Pass, x mlx.Array) mlx.Array {
	x = h.norm.Forward(p, x)
	if p.Dtype != mlx.Float32 {
		x = p.AsType(x, mlx.Float32)
	}
	return p.Linear(x, h.weight, mlx.Array{})
}
