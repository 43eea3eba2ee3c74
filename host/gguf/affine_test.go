package gguf

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/gguf/gguftest"
)

func half(h uint16) float32 {
	sign := float64(1)
	if h&0x8000 != 0 {
		sign = -1
	}
	exp, frac := int(h>>10&31), float64(h&0x3ff)
	if exp == 0 {
		return float32(sign * math.Ldexp(frac, -24))
	}
	return float32(sign * math.Ldexp(frac+1024, exp-25))
}

// ggmlValue dequantizes element i of a block as ggml's dequantize_row_* do, in float32.
func ggmlValue(t Type, b []byte, i int) float32 {
	d := half(binary.LittleEndian.Uint16(b))
	nibble := func(b []byte) int {
		if i < 16 {
			return int(b[i] & 15)
		}
		return int(b[i-16] >> 4)
	}
	switch t {
	case Q4_0:
		return float32(nibble(b[2:])-8) * d
	case Q4_1:
		return float32(float32(nibble(b[4:]))*d) + half(binary.LittleEndian.Uint16(b[2:]))
	default:
		return float32(int8(b[2+i])) * d
	}
}

// mlxValue dequantizes element i of row-major affine data as mlx does: q*scale + bias in float32.
func mlxValue(a *Affine, i int) float32 {
	per := 32 / a.Bits
	word := binary.LittleEndian.Uint32(a.Data[i/per*4:])
	q := word >> (i % per * a.Bits) & (1<<a.Bits - 1)
	scale, bias := half(binary.LittleEndian.Uint16(a.Scales[i/Group*2:])), half(binary.LittleEndian.Uint16(a.Biases[i/Group*2:]))
	return float32(float32(q)*scale) + bias
}

// blocks returns n random blocks whose scales are finite and, for types with a derived bias, in range.
func blocks(r *rand.Rand, t Type, n int) []byte {
	l := layouts[t]
	out := make([]byte, int64(n)*l.bytes)
	for i := range out {
		out[i] = byte(r.Uint32())
	}
	for at := int64(0); at < int64(len(out)); at += l.bytes {
		exp := uint16(r.IntN(24)) // 0 gives subnormals
		binary.LittleEndian.PutUint16(out[at:], uint16(r.Uint32())&0x83ff|exp<<10)
		if t == Q4_1 {
			binary.LittleEndian.PutUint16(out[at+2:], uint16(r.Uint32())&0x83ff|uint16(r.IntN(31))<<10)
		}
	}
	return out
}

func openBytes(t *testing.T, data []byte) *File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.gguf")
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestAffineLosesNothing(t *testing.T) {
	for _, typ := range []Type{Q4_0, Q4_1, Q8_0} {
		t.Run(typ.String(), func(t *testing.T) {
			const rows, cols = 16, 256
			raw := blocks(rand.New(rand.NewPCG(1, uint64(typ))), typ, rows*cols/Group)
			var b gguftest.Builder
			b.Tensor("w", uint32(typ), []int64{rows, cols}, raw)
			f := openBytes(t, b.Bytes())
			a, err := f.ReadAffine(f.Tensors[0])
			if err != nil {
				t.Fatal(err)
			}
			if a.Bits != typ.AffineBits() || len(a.Scales) != rows*cols/Group*2 || len(a.Data) != rows*cols*a.Bits/8 {
				t.Fatalf("%d bits, %d scale bytes, %d data bytes", a.Bits, len(a.Scales), len(a.Data))
			}
			size := int(layouts[typ].bytes)
			for i := range rows * cols {
				want := ggmlValue(typ, raw[i/Group*size:(i/Group+1)*size], i%Group)
				if got := mlxValue(a, i); math.Float32bits(got) != math.Float32bits(want) && (got != 0 || want != 0) {
					t.Fatalf("element %d: %v (%#x), want %v (%#x)", i, got, math.Float32bits(got), want, math.Float32bits(want))
				}
			}
		})
	}
}

func TestAffineRefuses(t *testing.T) {
	scale := func(h uint16, t Type) []byte {
		b := make([]byte, layouts[t].bytes)
		binary.LittleEndian.PutUint16(b, h)
		return b
	}
	for _, tc := range []struct {
		name, want string
		typ        Type
		raw        []byte
	}{
		{"bias overflows", "too large to convert without loss", Q8_0, scale(0x7800, Q8_0)},
		{"bias overflows 4 bit", "too large to convert without loss", Q4_0, scale(0x7800, Q4_0)},
		{"infinite scale", "not finite", Q8_0, scale(0x7c00, Q8_0)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var b gguftest.Builder
			b.Tensor("blk.0.w", uint32(tc.typ), []int64{1, 32}, tc.raw)
			f := openBytes(t, b.Bytes())
			if _, err := f.ReadAffine(f.Tensors[0]); err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "blk.0.w") {
				t.Fatalf("error %v, want one that names the tensor and has %q", err, tc.want)
			}
		})
	}
	var b gguftest.Builder
	b.Tensor("blk.0.w", 12, []int64{1, 256}, make([]byte, 144))
	f := openBytes(t, b.Bytes())
	_, err := f.ReadAffine(f.Tensors[0])
	if err == nil || !strings.Contains(err.Error(), "blk.0.w") || !strings.Contains(err.Error(), "Q4_K") {
		t.Fatalf("error %v, want tensor and type", err)
	}
}

func TestTimesPowerOfTwo(t *testing.T) {
	for h := 0; h < 1<<16; h++ {
		for _, k := range []int{3, 7} {
			got, err := timesPowerOfTwo(uint16(h), k)
			if h>>10&31 == 31 {
				if err == nil {
					t.Fatalf("%#x: no error for a scale that is not finite", h)
				}
				continue
			}
			want := -float64(half(uint16(h))) * math.Ldexp(1, k)
			if math.Abs(want) > 65504 {
				if err == nil {
					t.Fatalf("%#x: no error for %g", h, want)
				}
				continue
			}
			if err != nil || float64(half(got)) != want {
				t.Fatalf("%#x * -2^%d = %v (%v), want %v", h, k, half(got), err, want)
			}
		}
	}
}

func TestRowOrder(t *testing.T) {
	// Two heads of four rows, stored as pairs (0,2) (1,3) by llama.cpp.
	got, err := RowOrder(8, []int{2, 2, 2}, []int{0, 2, 1})
	if want := []int{0, 2, 1, 3, 4, 6, 5, 7}; err != nil || !slices.Equal(got, want) {
		t.Fatalf("%v (%v), want %v", got, err, want)
	}
	for _, bad := range []struct{ shape, perm []int }{{[]int{3, 2}, []int{0, 1}}, {[]int{2, 4}, []int{0, 0}}, {[]int{8}, []int{0, 1}}, {[]int{8}, []int{1}}} {
		if _, err := RowOrder(8, bad.shape, bad.perm); err == nil {
			t.Errorf("shape %v, permutation %v: no error", bad.shape, bad.perm)
		}
	}
}
