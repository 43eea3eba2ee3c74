package nn

import (
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
)

// full makes an array of one value.
func full(s *mlx.Scope, v float32, dtype mlx.Dtype, shape ...int) mlx.Array {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return s.AsType(s.FromFloat32s(slices.Repeat([]float32{v}, n), shape...), dtype)
}
