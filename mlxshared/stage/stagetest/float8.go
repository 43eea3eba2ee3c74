package stagetest

import (
	"encoding/binary"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
)

// Float8 stores the projections of the 4-bit checkpoint dir as block-scaled float8 of made-up values, and wants the tokens that
// the same values give as bfloat16.
func Float8(t *testing.T, families []stage.Family, dir string) {
	packed := ReadTensors(t, dir)
	plain := maps.Clone(packed)
	random, packs := rand.New(rand.NewPCG(1, 2)), 0
	for _, name := range slices.Sorted(maps.Keys(plain)) {
		x, scaled := plain[strings.TrimSuffix(name, "weight")+"scales"]
		if !strings.HasSuffix(name, "_proj.weight") || !scaled || len(x.Shape) != 2 {
			continue
		}
		packs++
		m := madeUp(random, int(x.Shape[0]), 8*int(plain[name].Shape[1])) // a word holds 8 values of 4 bits
		packed[name], packed[name+"_scale_inv"], plain[name] = m.codes, m.factors, m.widened
		for _, all := range []map[string]Tensor{packed, plain} {
			delete(all, strings.TrimSuffix(name, "weight")+"scales")
			delete(all, strings.TrimSuffix(name, "weight")+"biases")
		}
	}
	if packs == 0 {
		t.Fatalf("%s has no projection in 4 bits", dir)
	}
	tokens := func(tensors map[string]Tensor) []int32 {
		to := Bare(t, ReadConfig(t, dir, nil))
		WriteTensors(t, to, tensors)
		p := Open(t, families, to, Options{Stages: 2})
		ids := []int32{2, 5, 6, 7, 8}
		p.Reserve(sdk.Reservation{Seq: 1, Prompt: ids})
		return p.Generate(1, ids, 16, 512)
	}
	if got, want := tokens(packed), tokens(plain); !slices.Equal(got, want) {
		t.Errorf("%v, as bfloat16 %v", got, want)
	}
}

type float8Matrix struct{ codes, factors, widened Tensor }

// madeUp is a matrix of signed powers of two, each block's factor another one.
func madeUp(random *rand.Rand, rows, cols int) float8Matrix {
	const block = 128
	down, across := (rows+block-1)/block, (cols+block-1)/block
	m := float8Matrix{
		codes:   Tensor{Dtype: "F8_E4M3", Shape: []int64{int64(rows), int64(cols)}},
		factors: Tensor{Dtype: "F32", Shape: []int64{int64(down), int64(across)}},
		widened: Tensor{Dtype: "BF16", Shape: []int64{int64(rows), int64(cols)}},
	}
	shift := func(i int) int { return 4 + i%3 }
	for i := range down * across {
		m.factors.Data = binary.LittleEndian.AppendUint32(m.factors.Data, math.Float32bits(float32(math.Ldexp(1, -shift(i)))))
	}
	for i := range rows * cols {
		exponent, sign := random.IntN(4)-2, random.IntN(2) // of the value over its factor
		m.codes.Data = append(m.codes.Data, byte(sign<<7|(exponent+7)<<3))
		value := float32(math.Ldexp(float64(1-2*sign), exponent-shift(i/cols/block*across+i%cols/block)))
		m.widened.Data = binary.LittleEndian.AppendUint16(m.widened.Data, uint16(math.Float32bits(value)>>16))
	}
	return m
}
