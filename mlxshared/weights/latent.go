package weights

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// LatentProjections returns the two matrices per head between the latent and the heads of multi-head latent attention
// (DeepSeek-V2, 2024): embed_q [heads, rank, nope] and unembed_out [heads, value, rank] under path. Conversions hold them
// under these names. Originals hold kv_b_proj [heads*(nope+value), rank], of which each head's first rows are embed_q
// transposed and the rest unembed_out; one that is packed is unpacked, cut, and packed again the same way, as mlx-lm does.
func (l *Loader) LatentProjections(path string, heads, rank, nope, value int) (embedQ, unembedOut *mlx.Experts) {
	source := path + ".kv_b_proj"
	if l.err != nil || l.o.Store == nil || !l.cutsLatent(path, source) {
		return l.Experts(path+".embed_q", heads, rank, nope), l.Experts(path+".unembed_out", heads, value, rank)
	}
	first := len(l.arrays)
	whole := l.Matrix(source, heads*(nope+value), rank)
	if l.err == nil && whole.Format != mlx.Dense && nope%whole.Group != 0 {
		l.fail(sdk.Errorf(sdk.CodeUnsupported, "%s: %d of a head's rows in %s do not divide into its groups of %d; convert the model with mlx_lm.convert", source, nope, config.FileName, whole.Group))
	}
	if l.err != nil || l.Planning() {
		return &mlx.Experts{}, &mlx.Experts{}
	}
	s := l.o.Scope
	values := whole.W
	if whole.Format != mlx.Dense {
		values = s.Dequantize(whole, l.dtypes[source])
	}
	perHead := s.Reshape(values, heads, nope+value, rank)
	embedQ = l.repacked(whole, s.Contiguous(s.Transpose(s.SliceAxis(perHead, 1, 0, nope), 0, 2, 1)))
	unembedOut = l.repacked(whole, s.Contiguous(s.SliceAxis(perHead, 1, nope, nope+value)))
	l.forget(source, first, whole)
	return embedQ, unembedOut
}

func (l *Loader) cutsLatent(path, source string) bool {
	_, converted := l.locate(path + ".embed_q.weight")
	_, original := l.locate(source + ".weight")
	return original && !converted
}

// repacked keeps values [heads, rows, cols] in the format of like.
func (l *Loader) repacked(like *mlx.Matrix, values mlx.Array) *mlx.Experts {
	m := mlx.Matrix{Format: mlx.Dense, W: values}
	if like.Format != mlx.Dense {
		m = l.o.Scope.Quantize(values, like.Format, like.Bits, like.Group)
		m.Bits, m.Group = like.Bits, like.Group
	}
	arrays := []mlx.Array{m.W}
	for _, a := range []mlx.Array{m.Scales, m.Biases} {
		if !a.IsZero() {
			arrays = append(arrays, a)
		}
	}
	if err := l.o.Scope.Eval(arrays...); err != nil {
		l.fail(fmt.Errorf("cutting kv_b_proj: %w", err))
		return nil
	}
	for _, a := range arrays {
		l.keep(a)
	}
	return &mlx.Experts{Matrix: m}
}

// forget frees the matrix at path, whose arrays are among the first that were kept from there on.
func (l *Loader) forget(path string, first int, m *mlx.Matrix) {
	n := 1
	for _, a := range []mlx.Array{m.Scales, m.Biases} {
		if !a.IsZero() {
			n++
		}
	}
	for _, a := range l.arrays[first : first+n] {
		a.Free()
	}
	l.arrays = append(l.arrays[:first], l.arrays[first+n:]...)
	delete(l.matrices, path)
}
