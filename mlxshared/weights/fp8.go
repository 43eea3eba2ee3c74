package weights

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// Block-scaled float8 as DeepSeek-V3 and its kin are published (quantization_config's quant_method "fp8"): E4M3 values
// [rows, cols] in <name>, and float32 factors [rows/128, cols/128], rounded up, in <name>_scale_inv. A load widens them to
// bfloat16, as mlx-lm does.
const (
	fp8            = "F8_E4M3" // safetensors' name
	fp8Block       = 128
	fp8ScaleSuffix = "_scale_inv"
)

// checkFP8 refuses other kinds of float8.
func checkFP8(q *config.Object) {
	q.OneOf("fmt", "e4m3", "e4m3")
	if !q.Has("weight_block_size") {
		q.Unsupported("weight_block_size", "is missing; built is [%d, %d]", fp8Block, fp8Block)
		return
	}
	size, ok := q.Value("weight_block_size").([]any)
	for _, v := range size {
		n, whole := config.Integer(v)
		ok = ok && whole && n == fp8Block
	}
	if !ok || len(size) != 2 {
		q.Unsupported("weight_block_size", "is not built; built is [%d, %d]", fp8Block, fp8Block)
	}
}

// blockScales finds the factors of a float8 tensor and marks them as used.
func (l *Loader) blockScales(t *safetensors.Tensor) (*safetensors.Tensor, error) {
	name := t.Name + fp8ScaleSuffix
	scales, ok := l.o.Store.Lookup(name)
	if !ok {
		return nil, l.missing(name)
	}
	if len(t.Shape) != 2 {
		return nil, corrupt(t, "has shape %v, want float8 as a matrix", t.Shape)
	}
	rows, cols := fp8Blocks(t.Shape[0]), fp8Blocks(t.Shape[1])
	if scales.Dtype != "F32" || !sameShape(scales.Shape, []int{int(rows), int(cols)}) {
		return nil, corrupt(&scales, "is %s %v, want F32 [%d %d] for the float8 %v", scales.Dtype, scales.Shape, rows, cols, t.Shape)
	}
	l.used[name] = true
	return &scales, nil
}

func fp8Blocks(n int64) int64 { return (n + fp8Block - 1) / fp8Block }

// widen is the bytes of a float8 tensor as bfloat16.
func (l *Loader) widen(t *safetensors.Tensor, data []byte) ([]byte, error) {
	header, err := l.blockScales(t)
	if err != nil {
		return nil, err
	}
	raw, err := l.o.Store.read(header)
	if err != nil {
		return nil, err
	}
	defer l.o.Store.release(header)
	cols := int(t.Shape[1])
	if len(data) != int(t.Shape[0])*cols {
		return nil, fmt.Errorf("%s: %d bytes of float8 for %v", t.Name, len(data), t.Shape)
	}
	return widenFP8(data, raw, cols), nil
}

// widenFP8 multiplies each value by its block's factor in float32 and rounds once.
func widenFP8(data, scales []byte, cols int) []byte {
	table := e4m3Table()
	out := make([]byte, 2*len(data))
	perRow := int(fp8Blocks(int64(cols)))
	for at := 0; at < len(data); at += cols {
		row := at / cols / fp8Block * perRow
		for c := 0; c < cols; c += fp8Block {
			scale := math.Float32frombits(binary.LittleEndian.Uint32(scales[4*(row+c/fp8Block):]))
			for i := at + c; i < at+min(c+fp8Block, cols); i++ {
				binary.LittleEndian.PutUint16(out[2*i:], bfloat16(table[data[i]]*scale))
			}
		}
	}
	return out
}

// e4m3Table is every E4M3 value: a sign, four bits of exponent biased by 7, three of fraction, no infinity; all ones but
// the sign is NaN (Micikevicius et al. 2022, "FP8 formats for deep learning").
func e4m3Table() *[256]float32 {
	var table [256]float32
	for i := range table {
		exponent, fraction := i>>3&15, float64(i&7)
		v := math.Ldexp(8+fraction, exponent-10)
		switch {
		case i&0x7f == 0x7f:
			v = math.NaN()
		case exponent == 0:
			v = math.Ldexp(fraction, -9)
		}
		if i >= 0x80 {
			v = -v
		}
		table[i] = float32(v)
	}
	return &table
}

// bfloat16 rounds to nearest even.
func bfloat16(x float32) uint16 {
	if x != x {
		return 0x7fc0
	}
	b := math.Float32bits(x)
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}
