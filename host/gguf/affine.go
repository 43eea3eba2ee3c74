package gguf

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
)

// Group is the number of weights that share a scale: ggml's block, and MLX's group after conversion.
const Group = 32

// Affine is a matrix in MLX's affine quantization: w = q*scale + bias, a group of 32 at a time.
//
// Data holds rows of packed little-endian uint32 words, the first element in the lowest bits; Scales and
// Biases hold one binary16 per group, in row order.
type Affine struct {
	Bits   int
	Rows   int64
	Cols   int64
	Data   []byte
	Scales []byte
	Biases []byte
}

// AffineBits returns the width that a block type has as MLX affine, 0 for a type that has no such form.
func (t Type) AffineBits() int {
	switch t {
	case Q4_0, Q4_1:
		return 4
	case Q8_0:
		return 8
	}
	return 0
}

// SafetensorsDtype returns the dtype of a type that is stored plainly, "" for block types.
func (t Type) SafetensorsDtype() string {
	switch t {
	case F32:
		return "F32"
	case F16:
		return "F16"
	case BF16:
		return "BF16"
	}
	return ""
}

// UnsupportedTypeError reports a tensor whose type can't be converted without loss.
type UnsupportedTypeError struct {
	Tensor string
	Type   Type
}

func (e *UnsupportedTypeError) Error() string {
	return fmt.Sprintf("tensor %s has type %s, which can't be converted without loss; "+
		"use a file quantized as F32, F16, BF16, Q4_0, Q4_1 or Q8_0", e.Tensor, e.Type)
}

// ReadAffine converts a matrix [rows, cols] of Q4_0, Q4_1 or Q8_0 blocks without loss: every weight's value,
// dequantized in float32, is the same before and after.
func (f *File) ReadAffine(t Tensor) (*Affine, error) {
	bits := t.Type.AffineBits()
	if bits == 0 {
		return nil, &UnsupportedTypeError{Tensor: t.Name, Type: t.Type}
	}
	if len(t.Shape) != 2 {
		return nil, fmt.Errorf("tensor %s: shape %v, want a matrix", t.Name, t.Shape)
	}
	raw := make([]byte, t.Size)
	if _, err := io.ReadFull(f.Section(t), raw); err != nil {
		return nil, fmt.Errorf("%s: tensor %s: %w", f.Path, t.Name, err)
	}
	a := &Affine{Bits: bits, Rows: t.Shape[0], Cols: t.Shape[1]}
	groups := a.Rows * a.Cols / Group
	a.Data = make([]byte, 0, groups*Group*int64(bits)/8)
	a.Scales = make([]byte, 0, groups*2)
	a.Biases = make([]byte, 0, groups*2)
	l, _ := t.Type.layout()
	for at := int64(0); at < t.Size; at += l.bytes {
		if err := a.block(t.Type, raw[at:at+l.bytes]); err != nil {
			return nil, fmt.Errorf("tensor %s, block %d: %w", t.Name, at/l.bytes, err)
		}
	}
	return a, nil
}

// block appends one ggml block (ggml-common.h: block_q4_0, block_q4_1, block_q8_0).
func (a *Affine) block(t Type, b []byte) error {
	scale := binary.LittleEndian.Uint16(b)
	switch t {
	case Q4_0: // w = scale*(q-8)
		bias, err := timesPowerOfTwo(scale, 3)
		if err != nil {
			return err
		}
		a.group(scale, bias)
		a.nibbles(b[2:])
	case Q4_1: // w = scale*q + min
		a.group(scale, binary.LittleEndian.Uint16(b[2:]))
		a.nibbles(b[4:])
	case Q8_0: // w = scale*q with signed q
		bias, err := timesPowerOfTwo(scale, 7)
		if err != nil {
			return err
		}
		a.group(scale, bias)
		for _, q := range b[2:] {
			a.Data = append(a.Data, q^0x80) // q+128
		}
	}
	return nil
}

func (a *Affine) group(scale, bias uint16) {
	a.Scales = binary.LittleEndian.AppendUint16(a.Scales, scale)
	a.Biases = binary.LittleEndian.AppendUint16(a.Biases, bias)
}

// nibbles reorders a block's 16 bytes: ggml keeps elements i and i+16 in one byte, MLX elements 2i and 2i+1.
func (a *Affine) nibbles(b []byte) {
	for i := 0; i < 16; i += 2 {
		a.Data = append(a.Data, b[i]&15|b[i+1]<<4)
	}
	for i := 0; i < 16; i += 2 {
		a.Data = append(a.Data, b[i]>>4|b[i+1]&0xf0)
	}
}

// timesPowerOfTwo returns the binary16 of -(h * 2^k). It is exact, except where it would overflow.
func timesPowerOfTwo(h uint16, k int) (uint16, error) {
	sign, exp, frac := h&0x8000, int(h>>10&31), h&0x3ff
	neg := sign ^ 0x8000
	switch {
	case exp == 31:
		return 0, fmt.Errorf("scale is not finite")
	case exp == 0: // zero or subnormal: frac * 2^-24
		v := math.Ldexp(float64(frac), k-24)
		return neg | encodeExact(v), nil
	case exp+k >= 31:
		return 0, fmt.Errorf("scale %g is too large to convert without loss", math.Ldexp(float64(frac|0x400), exp-25))
	}
	return neg | uint16(exp+k)<<10 | frac, nil
}

// encodeExact returns the binary16 of a non-negative value that has one.
func encodeExact(v float64) uint16 {
	if v == 0 {
		return 0
	}
	frac, exp := math.Frexp(v) // v = frac * 2^exp, frac in [0.5, 1)
	if exp < -13 {             // subnormal
		return uint16(math.Ldexp(v, 24))
	}
	return uint16(exp+14)<<10 | uint16(math.Ldexp(frac, 11))&0x3ff
}

// Permute reorders whole rows in place: the rows are viewed as shape and transposed by perm.
func (a *Affine) Permute(shape, perm []int) error {
	order, err := RowOrder(int(a.Rows), shape, perm)
	if err != nil {
		return err
	}
	a.Data = gather(a.Data, order)
	a.Scales = gather(a.Scales, order)
	a.Biases = gather(a.Biases, order)
	return nil
}

func gather(data []byte, order []int) []byte {
	width := len(data) / len(order)
	out := make([]byte, 0, len(data))
	for _, r := range order {
		out = append(out, data[r*width:(r+1)*width]...)
	}
	return out
}

// RowOrder returns, for each row after the transposition, the row it came from: rows are viewed as an array of the given
// shape, whose axes are then permuted (numpy's transpose).
func RowOrder(rows int, shape, perm []int) ([]int, error) {
	if len(shape) != len(perm) {
		return nil, fmt.Errorf("row shape %v and permutation %v differ in length", shape, perm)
	}
	stride := make([]int, len(shape))
	n := 1
	for i := len(shape) - 1; i >= 0; i-- {
		stride[i] = n
		n *= shape[i]
	}
	if n != rows || rows == 0 {
		return nil, fmt.Errorf("row shape %v does not fit %d rows", shape, rows)
	}
	seen := make([]bool, len(perm))
	for _, p := range perm {
		if p < 0 || p >= len(perm) || seen[p] {
			return nil, fmt.Errorf("%v is no permutation", perm)
		}
		seen[p] = true
	}
	order := make([]int, 0, rows)
	index := make([]int, len(perm))
	for range rows {
		at := 0
		for i, p := range perm {
			at += index[i] * stride[p]
		}
		order = append(order, at)
		for i := len(perm) - 1; i >= 0; i-- {
			if index[i]++; index[i] < shape[perm[i]] {
				break
			}
			index[i] = 0
		}
	}
	return order, nil
}
