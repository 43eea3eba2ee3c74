package weights

import (
	"encoding/binary"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

func TestE4M3(t *testing.T) {
	table := e4m3Table()
	for code, want := range map[byte]float32{
		0x00: 0, 0x01: 0x1p-9, 0x07: 7 * 0x1p-9, 0x08: 0x1p-6, 0x38: 1, 0x3c: 1.5, 0x7e: 448, 0xb8: -1, 0xfe: -448,
	} {
		if got := table[code]; got != want {
			t.Errorf("%#02x is %v, want %v", code, got, want)
		}
	}
	for _, code := range []byte{0x7f, 0xff} {
		if got := table[code]; got == got {
			t.Errorf("%#02x is %v, want NaN", code, got)
		}
	}
	if got := math.Float32bits(table[0x80]); got != 1<<31 {
		t.Errorf("0x80 has bits %#x, want minus zero", got)
	}
}

func TestBFloat16RoundsToEven(t *testing.T) {
	for x, want := range map[float32]uint16{
		1: 0x3f80, 1 + 0x1p-8: 0x3f80, 1 + 0x1.8p-7: 0x3f82, 1 + 0x1p-8 + 0x1p-20: 0x3f81, -2: 0xc000, 0x1.fep127 + 0x1p119: 0x7f80,
	} {
		if got := bfloat16(x); got != want {
			t.Errorf("%v is %#x, want %#x", x, got, want)
		}
	}
}

// floats is a float32 tensor of the given values.
func floats(name string, values []float32, shape ...int64) safetensors.Entry {
	return safetensors.Entry{Name: name, Dtype: "F32", Shape: shape, Write: func(w io.Writer) error {
		for _, v := range values {
			if _, err := w.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(v))); err != nil {
				return err
			}
		}
		return nil
	}}
}

// ones is a float8 tensor of ones.
func ones(name string, shape ...int64) safetensors.Entry {
	return safetensors.Entry{Name: name, Dtype: fp8, Shape: shape, Write: func(w io.Writer) error {
		b := make([]byte, shape[0]*shape[1])
		for i := range b {
			b[i] = 0x38
		}
		_, err := w.Write(b)
		return err
	}}
}

// A block's factor reaches its 128 by 128 values, and the last blocks are what is left.
func TestFloat8Blocks(t *testing.T) {
	l, scope := sourced(t, nil, ones("w.weight", 129, 130), floats("w.weight_scale_inv", []float32{1, 2, 3, 4}, 2, 2))
	m := l.Matrix("w", 129, 130)
	if l.Err() != nil {
		t.Fatal(l.Err())
	}
	if m.W.Dtype() != mlx.BFloat16 || l.MatrixDtype("w") != mlx.BFloat16 || l.Bytes() != 129*130*2 {
		t.Errorf("%v in %d bytes, want bfloat16 in %d", m.W.Dtype(), l.Bytes(), 129*130*2)
	}
	got, err := scope.Float32s(m.W)
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range got {
		row, col := i/130, i%130
		if want := float32(1 + 2*(row/128) + col/128); v != want {
			t.Fatalf("row %d, column %d is %v, want %v", row, col, v, want)
		}
	}
	if err := l.CheckUnused(&Names{}); err != nil {
		t.Errorf("the factors count as left over: %v", err)
	}
}

func TestFloat8Faults(t *testing.T) {
	for name, c := range map[string]struct {
		entries []safetensors.Entry
		want    string
	}{
		"no factors":   {[]safetensors.Entry{ones("w.weight", 4, 4)}, "no tensor w.weight_scale_inv"},
		"wrong shape":  {[]safetensors.Entry{ones("w.weight", 4, 4), floats("w.weight_scale_inv", []float32{1, 1}, 2, 1)}, "want F32 [1 1]"},
		"wrong dtype":  {[]safetensors.Entry{ones("w.weight", 4, 4), entry("w.weight_scale_inv", "BF16", 1, 1, 1)}, "is BF16"},
		"not a matrix": {[]safetensors.Entry{entryOf(ones("w.weight", 4, 4), 2, 2, 4), floats("w.weight_scale_inv", []float32{1}, 1, 1)}, "has shape [2 2 4]"},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := sourced(t, nil, c.entries...)
			if name == "not a matrix" {
				l.Experts("w", 2, 2, 4)
			} else {
				l.Matrix("w", 4, 4)
			}
			if err := l.Err(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// entryOf is e with another shape of as many elements.
func entryOf(e safetensors.Entry, shape ...int64) safetensors.Entry {
	e.Shape = shape
	return e
}

// Any bytes widen to what the definition says: the value of the eight bits times its block's factor, in float32, rounded to the
// nearest bfloat16, of two as near to the even one.
func FuzzWidenFP8(f *testing.F) {
	f.Add([]byte{0x38, 0x7f, 0x01, 0xfe, 0x80, 0x08}, uint32(0x3f800000), uint16(3))
	f.Add([]byte("any bytes at all"), uint32(0x7f7fffff), uint16(300))
	f.Add([]byte{0x3c, 0xbc}, uint32(0x3f808000), uint16(129))
	f.Fuzz(func(t *testing.T, seed []byte, factor uint32, width uint16) {
		cols := 1 + int(width)%300
		rows := min(1+len(seed)*2/cols, 300)
		data := make([]byte, rows*cols)
		for i := range data {
			if len(seed) > 0 {
				data[i] = seed[i%len(seed)]
			}
		}
		wide := int(fp8Blocks(int64(cols)))
		var scales []byte
		for i := range int(fp8Blocks(int64(rows))) * wide {
			scales = binary.LittleEndian.AppendUint32(scales, factor+uint32(i))
		}
		out := widenFP8(data, scales, cols)
		for i, code := range data {
			block := i/cols/fp8Block*wide + i%cols/fp8Block
			want := nearestBFloat16(e4m3(code) * math.Float32frombits(factor+uint32(block)))
			if got := binary.LittleEndian.Uint16(out[2*i:]); got != want {
				t.Fatalf("%#02x times %v is %#04x, want %#04x", code, math.Float32frombits(factor+uint32(block)), got, want)
			}
		}
	})
}

// e4m3 decodes by the definition of the format.
func e4m3(code byte) float32 {
	sign, exponent, fraction := 1-2*float64(code>>7), int(code>>3&15), float64(code&7)/8
	switch {
	case code&0x7f == 0x7f:
		return float32(math.NaN())
	case exponent == 0:
		return float32(math.Copysign(math.Ldexp(fraction, -6), sign))
	}
	return float32(sign * math.Ldexp(1+fraction, exponent-7))
}

// nearestBFloat16 compares the two neighbours of x.
func nearestBFloat16(x float32) uint16 {
	if x != x {
		return 0x7fc0
	}
	down := uint16(math.Float32bits(x) >> 16)
	if math.IsInf(float64(x), 0) {
		return down
	}
	value := func(b uint16) float64 {
		if b&0x7fff == 0x7f80 { // past the largest number the next step would have led here
			return math.Copysign(0x1p128, float64(x))
		}
		return float64(math.Float32frombits(uint32(b) << 16))
	}
	below, above := math.Abs(float64(x)-value(down)), math.Abs(value(down+1)-float64(x))
	if below < above || below == above && down%2 == 0 {
		return down
	}
	return down + 1
}
