package nn

import "github.com/mlxcel/mlxcel/mlxshared/mlx"

// LayerNorm is (x - mean(x)) / sqrt(var(x) + eps) · weight + bias (Ba et al. 2016), in float32 and rounded once.
type LayerNorm struct {
	weight, bias mlx.Array
	mean         mlx.Array // float32 [width]: 1/width
	width        int
	eps          float32
}

// NewLayerNorm loads <path>.weight and <path>.bias [width].
func NewLayerNorm(b *Builder, path string, width int, eps float64) *LayerNorm {
	mean := make([]float32, width)
	for i := range mean {
		mean[i] = 1 / float32(width)
	}
	return &LayerNorm{
		weight: b.Vector(path+".weight", width), bias: b.Vector(path+".bias", width), mean: b.Constant(mean),
		width: width, eps: float32(eps),
	}
}

// Forward normalizes each row of x [rows, width]. The mean is a product and the rest an RMS norm of what is centered, so
// that the sums are a row's own.
func (n *LayerNorm) Forward(p *Pass, x mlx.Array) mlx.Array {
	wide := p.AsType(x, mlx.Float32)
	mean := p.Linear(wide, &mlx.Matrix{Format: mlx.Dense, W: p.Reshape(n.mean, 1, n.width)}, mlx.Array{})
	y := p.RMSNorm(p.Sub(wide, mean), n.weight, n.eps, 0)
	return p.AsType(p.Add(y, p.AsType(n.bias, mlx.Float32)), x.Dtype())
}
