package nn

import (
	"math"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
)

// A row's result is the formula's, and the same beside others.
func TestLayerNorm(t *testing.T) {
	const width, rows, eps = 24, 5, 1e-5
	scope := open(t).NewScope()
	defer scope.Close()
	p := &Pass{Scope: scope, Dtype: mlx.Float32}
	values, weight, bias, mean := make([]float32, rows*width), make([]float32, width), make([]float32, width), make([]float32, width)
	for i := range values {
		values[i] = float32(math.Sin(float64(i*i))) + 3
	}
	for i := range weight {
		weight[i], bias[i], mean[i] = 1+float32(i)/10, float32(i)/7, 1./width
	}
	n := &LayerNorm{
		weight: scope.FromFloat32s(weight, width), bias: scope.FromFloat32s(bias, width), mean: scope.FromFloat32s(mean, width),
		width: width, eps: eps,
	}
	got, err := scope.Float32s(n.Forward(p, scope.FromFloat32s(values, rows, width)))
	if err != nil {
		t.Fatal(err)
	}
	for r := range rows {
		row := values[r*width : (r+1)*width]
		var mean, variance float64
		for _, v := range row {
			mean += float64(v) / width
		}
		for _, v := range row {
			variance += (float64(v) - mean) * (float64(v) - mean) / width
		}
		for i, v := range row {
			want := (float64(v)-mean)/math.Sqrt(variance+eps)*float64(weight[i]) + float64(bias[i])
			if off := math.Abs(float64(got[r*width+i]) - want); off > 1e-5 {
				t.Errorf("row %d, element %d is %v, want %v", r, i, got[r*width+i], want)
			}
		}
		alone, err := scope.Float32s(n.Forward(p, scope.FromFloat32s(row, 1, width)))
		if err != nil {
			t.Fatal(err)
		}
		for i := range alone {
			if alone[i] != got[r*width+i] {
				t.Errorf("row %d, element %d is %v alone, %v beside others", r, i, alone[i], got[r*width+i])
			}
		}
	}
}
