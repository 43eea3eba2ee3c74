package cpu_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

var (
	dtypes = []cpu.DType{cpu.F32, cpu.F16, cpu.BF16}
	isas   = []cpu.ISA{cpu.Plain, cpu.AVX2, cpu.AVX512, cpu.NEON}
)

// wanted says which instruction sets a machine may not lack, so that a path cannot go untested by mistake.
func wanted(isa cpu.ISA) bool {
	return isa == cpu.Plain || (isa == cpu.NEON && runtime.GOARCH == "arm64")
}

// pools calls f with a pool of every instruction set of this machine and of 1, 2 and 3 threads.
func pools(t *testing.T, f func(t *testing.T, p *cpu.Pool)) {
	t.Helper()
	for _, isa := range isas {
		for _, threads := range []int{1, 2, 3} {
			p, err := cpu.NewPool(threads, isa)
			if err != nil {
				if wanted(isa) {
					t.Fatal(err)
				}
				continue
			}
			if p.Threads() != threads || p.ISA() != isa {
				t.Fatalf("pool of %d threads, %v; want %d, %v", p.Threads(), p.ISA(), threads, isa)
			}
			t.Run(fmt.Sprintf("%v/%d", isa, threads), func(t *testing.T) { f(t, p) })
			p.Free()
		}
	}
}

func source(name string) *rand.Rand {
	var seed [32]byte
	copy(seed[:], name)
	return rand.New(rand.NewChaCha8(seed))
}

func normals(r *rand.Rand, n int, scale float64) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64() * scale)
	}
	return v
}

func randomBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// unaligned copies b to an odd address.
func unaligned(b []byte) []byte {
	if b == nil {
		return nil
	}
	return append(make([]byte, 1, len(b)+1), b...)[1:]
}

// equal compares bit for bit.
func equal(t *testing.T, what string, dt cpu.DType, got, want []byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d bytes, want %d", what, len(got), len(want))
	}
	size := dt.Size()
	for i := 0; i < len(want); i += size {
		if string(got[i:i+size]) != string(want[i:i+size]) {
			t.Fatalf("%s: element %d is %x (%v), want %x (%v)", what, i/size, got[i:i+size],
				decode(dt, got[i:i+size])[0], want[i:i+size], decode(dt, want[i:i+size])[0])
		}
	}
}

// near compares with the truth in float64, relative to `scale` and to the type's precision.
func near(t *testing.T, what string, dt cpu.DType, got float32, want, scale float64) {
	t.Helper()
	epsilon := map[cpu.DType]float64{cpu.F32: 0x1p-20, cpu.F16: 0x1p-10, cpu.BF16: 0x1p-7}[dt]
	if math.Abs(float64(got)-want) > epsilon*(math.Abs(want)+0x1p-20*scale/epsilon+0x1p-24) {
		t.Fatalf("%s: %v, true value %v", what, got, want)
	}
}

// layout names a kind of weight matrix.
type layout struct {
	format      cpu.Format
	bits, group int
}

func layouts() map[string]layout {
	all := map[string]layout{
		"dense": {format: cpu.Dense},
		"mxfp4": {cpu.MXFP4, 4, 32},
		"mxfp8": {cpu.MXFP8, 8, 32},
		"nvfp4": {cpu.NVFP4, 4, 16},
	}
	for _, bits := range []int{2, 3, 4, 5, 6, 8} {
		for _, group := range []int{32, 64, 128} {
			all[fmt.Sprintf("affine%d/%d", bits, group)] = layout{cpu.Affine, bits, group}
		}
	}
	return all
}

// matrix makes random weights; edge adds scales and values at the ends of their ranges.
func matrix(r *rand.Rand, l layout, dt cpu.DType, rows, cols int, edge bool) *cpu.Matrix {
	w := &cpu.Matrix{Format: l.format, DType: dt, Bits: l.bits, Group: l.group, Rows: rows, Cols: cols}
	if l.format == cpu.Dense {
		w.Data = unaligned(encode(dt, normals(r, rows*cols, 0.1)))
		return w
	}
	w.Data = unaligned(randomBytes(r, rows*cols*l.bits/8))
	groups := rows * cols / l.group
	switch l.format {
	case cpu.Affine:
		w.Scales = unaligned(encode(dt, normals(r, groups, 0.02)))
		w.Biases = unaligned(encode(dt, normals(r, groups, 0.1)))
	default:
		w.Scales = make([]byte, groups)
		for i := range w.Scales {
			w.Scales[i] = byte(117 + r.IntN(8))
			if l.format == cpu.NVFP4 {
				w.Scales[i] = byte(r.IntN(0x40))
			}
			if edge {
				w.Scales[i] = byte(r.Uint32())
			}
		}
		if l.format == cpu.MXFP8 && !edge { // no NaN
			for i, b := range w.Data {
				if b&0x7f == 0x7f {
					w.Data[i] = 0x3a
				}
			}
		}
	}
	return w
}

// columns is a legal width with, where the format allows it, a tail.
func columns(r *rand.Rand, l layout) int {
	if l.format == cpu.Dense {
		return 1 + r.IntN(150)
	}
	return l.group * (1 + r.IntN(200/l.group))
}

func TestLinear(t *testing.T) {
	for name, l := range layouts() {
		t.Run(name, func(t *testing.T) {
			pools(t, func(t *testing.T, p *cpu.Pool) {
				r := source("linear" + name)
				for _, wt := range dtypes {
					for _, xt := range dtypes {
						if (l.format == cpu.MXFP4 || l.format == cpu.MXFP8 || l.format == cpu.NVFP4) && wt != cpu.F32 {
							continue // dtype says nothing there
						}
						for _, m := range []int{1, 2, 4, 5, 6, 13, 33} {
							cols, rows := columns(r, l), 1+r.IntN(40)
							w := matrix(r, l, wt, rows, cols, false)
							if err := w.Check(); err != nil {
								t.Fatal(err)
							}
							x := unaligned(encode(xt, normals(r, m*cols, 1)))
							var bias []byte
							var wide []float32
							if r.IntN(2) == 0 {
								bias = unaligned(encode(wt, normals(r, rows, 1)))
								wide = decode(wt, bias)
							}
							y := unaligned(make([]byte, m*rows*xt.Size()))
							p.Linear(w, bias, wt, x, xt, y, m)
							want := linear(w, wide, decode(xt, x), m)
							what := fmt.Sprintf("%s [%d, %d] x %d in %v", name, rows, cols, m, xt)
							equal(t, what, xt, y, encode(xt, want))
							linearTruth(t, what, w, wide, decode(xt, x), xt, decode(xt, y), m)
						}
					}
				}
			})
		})
	}
}

// linearTruth compares with float64.
func linearTruth(t *testing.T, what string, w *cpu.Matrix, bias, x []float32, xt cpu.DType, y []float32, m int) {
	t.Helper()
	for n := 0; n < w.Rows; n++ {
		weights := dequantize(w, n)
		for i := 0; i < m; i++ {
			var sum, size float64
			for k, v := range weights {
				product := float64(v) * float64(x[i*w.Cols+k])
				sum += product
				size += math.Abs(product)
			}
			if bias != nil {
				sum += float64(bias[n])
			}
			near(t, what, xt, y[i*w.Rows+n], sum, size)
		}
	}
}

// TestLinearSpecial feeds infinities, NaN, subnormals and zeros.
func TestLinearSpecial(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	special := []float32{0, float32(math.Copysign(0, -1)), inf, -inf, nan, 1e-42, -1e-42, 3e38, -3e38, 1, -1, 1e-30, -1e-30}
	for name, l := range layouts() {
		t.Run(name, func(t *testing.T) {
			pools(t, func(t *testing.T, p *cpu.Pool) {
				r := source("special" + name)
				for _, xt := range dtypes {
					for _, rare := range []int{3, 200} {
						for _, m := range []int{1, 3, 7} {
							cols, rows := columns(r, l), 18
							w := matrix(r, l, xt, rows, cols, true)
							if l.format == cpu.Dense {
								v := normals(r, rows*cols, 1)
								for i := range v {
									if r.IntN(rare) == 0 {
										v[i] = special[r.IntN(len(special))]
									}
								}
								w.Data = encode(xt, v)
							}
							v := normals(r, m*cols, 1)
							for i := range v {
								if r.IntN(rare) == 0 {
									v[i] = special[r.IntN(len(special))]
								}
							}
							x := encode(xt, v)
							y := make([]byte, m*rows*xt.Size())
							p.Linear(w, nil, cpu.F32, x, xt, y, m)
							equal(t, fmt.Sprintf("%s x %d", name, m), xt, y, encode(xt, linear(w, nil, decode(xt, x), m)))
						}
					}
				}
			})
		})
	}
}

// TestLinearNegativeZero pins the sign of zero of a sum that underflows.
func TestLinearNegativeZero(t *testing.T) {
	pools(t, func(t *testing.T, p *cpu.Pool) {
		for cols := 1; cols < 40; cols++ {
			x := make([]float32, cols)
			for i := range x {
				x[i] = -1e-30
			}
			v := make([]float32, 3*cols)
			for i := range v {
				v[i] = 1e-30
			}
			w := &cpu.Matrix{Format: cpu.Dense, DType: cpu.F32, Rows: 3, Cols: cols, Data: encode(cpu.F32, v)}
			y := make([]byte, 3*4)
			p.Linear(w, nil, cpu.F32, encode(cpu.F32, x), cpu.F32, y, 1)
			equal(t, fmt.Sprint(cols, " columns"), cpu.F32, y, encode(cpu.F32, linear(w, nil, x, 1)))
		}
	})
}

// TestLinearShapes compares wide matrices and many rows with the same rows one by one, at sizes where the work is cut into
// pieces and blocks of rows.
func TestLinearShapes(t *testing.T) {
	r := source("shapes")
	for _, c := range []struct {
		l             layout
		rows, cols, m int
	}{
		{layout{cpu.Affine, 4, 32}, 192, 576, 70},
		{layout{cpu.Affine, 4, 64}, 576, 1536, 50},
		{layout{cpu.Affine, 8, 32}, 1000, 576, 9},
		{layout{cpu.MXFP4, 4, 32}, 333, 2880, 61},
		{layout{format: cpu.Dense}, 130, 8192, 101},
		{layout{format: cpu.Dense}, 67, 1001, 530},
	} {
		w := matrix(r, c.l, cpu.F16, c.rows, c.cols, false)
		x := encode(cpu.F16, normals(r, c.m*c.cols, 1))
		want := make([]byte, c.m*c.rows*2)
		one, err := cpu.NewPool(1, cpu.Plain)
		if err != nil {
			t.Fatal(err)
		}
		for m := 0; m < c.m; m++ {
			one.Linear(w, nil, cpu.F32, x[m*c.cols*2:(m+1)*c.cols*2], cpu.F16, want[m*c.rows*2:(m+1)*c.rows*2], 1)
		}
		one.Free()
		pools(t, func(t *testing.T, p *cpu.Pool) {
			if p.ISA() == cpu.Plain && p.Threads() > 1 {
				return // slow, and no other code than with one
			}
			got := make([]byte, len(want))
			p.Linear(w, nil, cpu.F32, x, cpu.F16, got, c.m)
			equal(t, fmt.Sprintf("%+v", c), cpu.F16, got, want)
			for m := 0; m < 2; m++ {
				p.Linear(w, nil, cpu.F32, x[m*c.cols*2:(m+1)*c.cols*2], cpu.F16, got[m*c.rows*2:(m+1)*c.rows*2], 1)
			}
			equal(t, fmt.Sprintf("%+v one by one", c), cpu.F16, got, want)
		})
	}
}

func TestEmbedAndDequantize(t *testing.T) {
	for name, l := range layouts() {
		t.Run(name, func(t *testing.T) {
			pools(t, func(t *testing.T, p *cpu.Pool) {
				r := source("embed" + name)
				for _, wt := range dtypes {
					for _, yt := range dtypes {
						for _, edge := range []bool{false, true} {
							cols, rows := columns(r, l), 1+r.IntN(9)
							w := matrix(r, l, wt, rows, cols, edge)
							ids := make([]int32, 1+r.IntN(20))
							var want []float32
							for i := range ids {
								ids[i] = int32(r.IntN(rows))
								want = append(want, dequantize(w, int(ids[i]))...)
							}
							y := unaligned(make([]byte, len(ids)*cols*yt.Size()))
							p.Embed(w, ids, y, yt)
							equal(t, name, yt, y, encode(yt, want))
							row := make([]float32, cols)
							w.DequantizeRow(int(ids[0]), row)
							equal(t, name+" row", cpu.F32, encode(cpu.F32, row), encode(cpu.F32, want[:cols]))
						}
					}
				}
			})
		})
	}
}

// TestEveryElement decodes every code of every small type through a matrix.
func TestEveryElement(t *testing.T) {
	pools(t, func(t *testing.T, p *cpu.Pool) {
		for _, wt := range []cpu.DType{cpu.F16, cpu.BF16} {
			w := &cpu.Matrix{Format: cpu.Dense, DType: wt, Rows: 256, Cols: 256, Data: make([]byte, 2*65536)}
			ids := make([]int32, 256)
			for i := 0; i < 65536; i++ {
				w.Data[2*i], w.Data[2*i+1] = byte(i), byte(i>>8)
				ids[i/256] = int32(i / 256)
			}
			for _, yt := range dtypes {
				y := make([]byte, 65536*yt.Size())
				p.Embed(w, ids, y, yt)
				equal(t, "every 16-bit code", yt, y, encode(yt, decode(wt, w.Data)))
			}
		}
		var data, scales []byte
		for s := 0; s < 256; s++ {
			for q := 0; q < 256; q++ {
				data = append(data, byte(q))
			}
			for g := 0; g < 8; g++ {
				scales = append(scales, byte(s))
			}
		}
		w := &cpu.Matrix{Format: cpu.MXFP8, Bits: 8, Group: 32, Rows: 256, Cols: 256, Data: data, Scales: scales}
		var want []float32
		ids := make([]int32, 256)
		for i := range ids {
			ids[i] = int32(i)
			want = append(want, dequantize(w, i)...)
		}
		y := make([]byte, 65536*4)
		p.Embed(w, ids, y, cpu.F32)
		equal(t, "every E4M3 at every E8M0", cpu.F32, y, encode(cpu.F32, want))
	})
}

// TestRounding rounds float32 values around every 16-bit value.
func TestRounding(t *testing.T) {
	r := source("rounding")
	const n = 1 << 16
	v := make([]float32, n)
	for i := range v {
		switch i % 4 {
		case 0:
			v[i] = math.Float32frombits(r.Uint32())
		case 1: // halfway between two halves, and its neighbours
			v[i] = math.Float32frombits(math.Float32bits(halfToFloat(uint16(r.Uint32()))) + 0x1000 + r.Uint32N(3) - 1)
		case 2:
			v[i] = math.Float32frombits(r.Uint32()<<16 + 0x8000 + r.Uint32N(3) - 1)
		default: // subnormal halves
			v[i] = float32((r.Float64() - 0.5) * 0x1p-13)
		}
	}
	w := &cpu.Matrix{Format: cpu.Dense, DType: cpu.F32, Rows: 1, Cols: n, Data: encode(cpu.F32, v)}
	pools(t, func(t *testing.T, p *cpu.Pool) {
		for _, yt := range dtypes {
			y := make([]byte, n*yt.Size())
			p.Embed(w, []int32{0}, y, yt)
			equal(t, yt.String(), yt, y, encode(yt, v))
		}
	})
}

func TestMatrixCheck(t *testing.T) {
	b := make([]byte, 1)
	for name, c := range map[string]struct {
		w  cpu.Matrix
		ok bool
	}{
		"dense":              {cpu.Matrix{Format: cpu.Dense, Rows: 1, Cols: 7, Data: b}, true},
		"dense without data": {cpu.Matrix{Format: cpu.Dense, Rows: 1, Cols: 7}, false},
		"no columns":         {cpu.Matrix{Format: cpu.Dense, Rows: 1, Data: b}, false},
		"no rows":            {cpu.Matrix{Format: cpu.Dense, Cols: 3}, true},
		"negative rows":      {cpu.Matrix{Format: cpu.Dense, Rows: -1, Cols: 3, Data: b}, false},
		"bad dtype":          {cpu.Matrix{Format: cpu.Dense, DType: 9, Rows: 1, Cols: 7, Data: b}, false},
		"bad format":         {cpu.Matrix{Format: 9, Rows: 1, Cols: 7, Data: b}, false},
		"affine":             {cpu.Matrix{Format: cpu.Affine, Bits: 3, Group: 64, Rows: 1, Cols: 128, Data: b, Scales: b, Biases: b}, true},
		"affine cols":        {cpu.Matrix{Format: cpu.Affine, Bits: 3, Group: 64, Rows: 1, Cols: 96, Data: b, Scales: b, Biases: b}, false},
		"affine bits 7":      {cpu.Matrix{Format: cpu.Affine, Bits: 7, Group: 64, Rows: 1, Cols: 128, Data: b, Scales: b, Biases: b}, false},
		"affine bits 1":      {cpu.Matrix{Format: cpu.Affine, Bits: 1, Group: 64, Rows: 1, Cols: 128, Data: b, Scales: b, Biases: b}, false},
		"affine group 16":    {cpu.Matrix{Format: cpu.Affine, Bits: 4, Group: 16, Rows: 1, Cols: 128, Data: b, Scales: b, Biases: b}, false},
		"affine no biases":   {cpu.Matrix{Format: cpu.Affine, Bits: 4, Group: 32, Rows: 1, Cols: 128, Data: b, Scales: b}, false},
		"affine no scales":   {cpu.Matrix{Format: cpu.Affine, Bits: 4, Group: 32, Rows: 1, Cols: 128, Data: b, Biases: b}, false},
		"mxfp4":              {cpu.Matrix{Format: cpu.MXFP4, Bits: 4, Group: 32, Rows: 1, Cols: 64, Data: b, Scales: b}, true},
		"mxfp4 group 64":     {cpu.Matrix{Format: cpu.MXFP4, Bits: 4, Group: 64, Rows: 1, Cols: 64, Data: b, Scales: b}, false},
		"mxfp8 bits 4":       {cpu.Matrix{Format: cpu.MXFP8, Bits: 4, Group: 32, Rows: 1, Cols: 64, Data: b, Scales: b}, false},
		"nvfp4":              {cpu.Matrix{Format: cpu.NVFP4, Bits: 4, Group: 16, Rows: 1, Cols: 48, Data: b, Scales: b}, true},
		"nvfp4 group 32":     {cpu.Matrix{Format: cpu.NVFP4, Bits: 4, Group: 32, Rows: 1, Cols: 64, Data: b, Scales: b}, false},
	} {
		if err := c.w.Check(); (err == nil) != c.ok {
			t.Errorf("%s: %v, want ok %v", name, err, c.ok)
		}
	}
}

func TestPoolRefuses(t *testing.T) {
	foreign := cpu.NEON
	if runtime.GOARCH == "arm64" {
		foreign = cpu.AVX2
	}
	for _, c := range []struct {
		threads int
		isa     cpu.ISA
	}{{0, cpu.Plain}, {-1, cpu.Auto}, {1, foreign}, {1, 99}} {
		if p, err := cpu.NewPool(c.threads, c.isa); err == nil {
			p.Free()
			t.Errorf("%+v: no error", c)
		}
	}
	p, err := cpu.NewPool(2, cpu.Auto)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Free()
	if p.ISA() != cpu.BestISA() {
		t.Errorf("auto is %v, want %v", p.ISA(), cpu.BestISA())
	}
}

func TestRMSNorm(t *testing.T) {
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("norm")
		for _, xt := range dtypes {
			for _, wt := range dtypes {
				for _, dim := range []int{1, 15, 16, 17, 64, 576, 1000} {
					for _, rows := range []int{0, 1, 3, 300} {
						x := unaligned(encode(xt, normals(r, rows*dim, 3)))
						var weight []byte
						var wide []float32
						if r.IntN(3) > 0 {
							weight = unaligned(encode(wt, normals(r, dim, 1)))
							wide = decode(wt, weight)
						}
						offset := float32(r.IntN(2))
						y := unaligned(make([]byte, len(x)))
						p.RMSNorm(x, xt, weight, wt, offset, 1e-5, rows, dim, y)
						equal(t, fmt.Sprintf("dim %d, %d rows", dim, rows), xt, y, encode(xt, rmsNorm(decode(xt, x), wide, offset, 1e-5, dim)))
					}
				}
			}
		}
	})
}

func TestRMSNormTruth(t *testing.T) {
	p, err := cpu.NewPool(1, cpu.Auto)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Free()
	r := source("norm truth")
	x := normals(r, 576, 2)
	y := make([]byte, 4*len(x))
	p.RMSNorm(encode(cpu.F32, x), cpu.F32, nil, cpu.F32, 0, 1e-5, 1, len(x), y)
	var squares float64
	for _, v := range x {
		squares += float64(v) * float64(v)
	}
	for i, v := range decode(cpu.F32, y) {
		near(t, "norm", cpu.F32, v, float64(x[i])/math.Sqrt(squares/float64(len(x))+1e-5), 1)
	}
}

func inverseFrequencies(dims int, base float64) []float32 {
	f := make([]float32, dims/2)
	for i := range f {
		f[i] = float32(math.Pow(base, -2*float64(i)/float64(dims)))
	}
	return f
}

func TestRoPE(t *testing.T) {
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("rope")
		for _, xt := range dtypes {
			for _, shape := range []cpu.RoPE{
				{Heads: 3, HeadDim: 64, RotDim: 64, Scale: 1},
				{Heads: 3, HeadDim: 64, RotDim: 64, Scale: 1, Traditional: true},
				{Heads: 2, HeadDim: 80, RotDim: 20, Scale: 1.25},
				{Heads: 2, HeadDim: 80, RotDim: 20, Scale: 1.25, Traditional: true},
				{Heads: 1, HeadDim: 34, RotDim: 34, Scale: 1},
				{Heads: 1, HeadDim: 128, RotDim: 64, Scale: 1},
				{Heads: 1, HeadDim: 6, RotDim: 2, Scale: 1, Traditional: true},
			} {
				shape.InvFreq = inverseFrequencies(shape.RotDim, 10000)
				for _, pos := range [][]int32{{0}, {7, 1000, 3}, {999999, 1048575, 1}, make([]int32, 400)} {
					x := unaligned(encode(xt, normals(r, len(pos)*shape.Heads*shape.HeadDim, 1)))
					want := encode(xt, rope(shape, decode(xt, x), pos))
					y := unaligned(make([]byte, len(x)))
					p.RoPE(shape, x, xt, pos, y)
					equal(t, fmt.Sprintf("%v %+v", xt, shape), xt, y, want)
					p.RoPE(shape, x, xt, pos, x)
					equal(t, fmt.Sprintf("%v %+v in place", xt, shape), xt, x, want)
				}
			}
		}
	})
}

func TestSiluMul(t *testing.T) {
	edges := []float32{0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()), 88, 89, -87, -88, -89, -103, -104, -106, 1e30, -1e30, 1e-40}
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("silu")
		for _, xt := range dtypes {
			for _, n := range []int{0, 1, 15, 16, 17, 1536, 40001} {
				gate := normals(r, n, 4)
				for i := range gate {
					if r.IntN(5) == 0 {
						gate[i] = edges[r.IntN(len(edges))]
					}
				}
				g, u := unaligned(encode(xt, gate)), unaligned(encode(xt, normals(r, n, 1)))
				want := make([]float32, n)
				wide, up := decode(xt, g), decode(xt, u)
				for i := range want {
					want[i] = mul32(silu32(wide[i]), up[i])
				}
				y := unaligned(make([]byte, len(g)))
				p.SiluMul(g, u, xt, n, y)
				equal(t, fmt.Sprint(xt, " ", n), xt, y, encode(xt, want))
			}
		}
	})
}

func TestConvert(t *testing.T) {
	inf := float32(math.Inf(1))
	edges := []float32{0, float32(math.Copysign(0, -1)), inf, -inf, float32(math.NaN()), 65504, 65519, 65520, 3.4e38, 1e-40, 6e-8, 2.9e-8, 1.00390625}
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("convert")
		for _, xt := range dtypes {
			for _, yt := range dtypes {
				for _, n := range []int{0, 1, 15, 16, 17, 100003} {
					v := normals(r, n, 4)
					copy(v, edges)
					x := unaligned(encode(xt, v))
					y := unaligned(make([]byte, len(encode(yt, v))))
					p.Convert(x, xt, n, y, yt)
					equal(t, fmt.Sprintf("%v to %v, %d", xt, yt, n), yt, y, encode(yt, decode(xt, x)))
				}
			}
		}
	})
}

func TestBinary(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	edges := []float32{0, float32(math.Copysign(0, -1)), inf, -inf, nan, 65504, -65504, 3e38, -3e38, 1e-40, 6e-8}
	ops := map[cpu.BinaryOp]func(a, b float32) float32{cpu.Add: add32, cpu.Mul: mul32}
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("binary")
		for _, dt := range dtypes {
			for _, shape := range [][2]int{
				{0, 1}, {1, 1}, {15, 15}, {16, 16}, {17, 17}, {100003, 100003}, // each its own
				{17, 1}, {100003, 1}, // a scalar
				{9 * 16, 16}, {12 * 3, 3}, {5 * 17, 17}, {300 * 576, 576}, {100 * 1001, 1001}, // rows
			} {
				n, period := shape[0], shape[1]
				edgy := func(n int) []byte {
					v := normals(r, n, 4)
					for i := range v {
						if r.IntN(5) == 0 {
							v[i] = edges[r.IntN(len(edges))]
						}
					}
					return unaligned(encode(dt, v))
				}
				a, b := edgy(n), edgy(period)
				wideA, wideB := decode(dt, a), decode(dt, b)
				for op, f := range ops {
					want := make([]float32, n)
					for i := range want {
						want[i] = f(wideA[i], wideB[i%period])
					}
					what := fmt.Sprintf("op %d, %v, %d by %d", op, dt, n, period)
					y := unaligned(make([]byte, len(a)))
					p.Binary(op, a, b, dt, n, period, y)
					equal(t, what, dt, y, encode(dt, want))
					copy(y, a)
					p.Binary(op, y, b, dt, n, period, y)
					equal(t, what+" in place", dt, y, encode(dt, want))
				}
			}
		}
	})
}

func TestAddRMSNorm(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("add norm")
		for _, dt := range dtypes {
			for _, wt := range dtypes {
				for _, dim := range []int{1, 15, 16, 17, 576, 1000} {
					for _, rows := range []int{0, 1, 3, 100} {
						v := normals(r, rows*dim, 3)
						copy(v, []float32{inf, nan}[:min(len(v), r.IntN(3))])
						x, y := unaligned(encode(dt, v)), unaligned(encode(dt, normals(r, rows*dim, 3)))
						var weight []byte
						var wide []float32
						if r.IntN(3) > 0 {
							weight = unaligned(encode(wt, normals(r, dim, 1)))
							wide = decode(wt, weight)
						}
						sums, other := decode(dt, x), decode(dt, y)
						for i := range sums {
							sums[i] = add32(sums[i], other[i])
						}
						wantSum, offset := encode(dt, sums), float32(r.IntN(2))
						want := encode(dt, rmsNorm(decode(dt, wantSum), wide, offset, 1e-5, dim))
						what := fmt.Sprintf("%v, weight %v, dim %d, %d rows", dt, wt, dim, rows)
						sum, norm := unaligned(make([]byte, len(x))), unaligned(make([]byte, len(x)))
						p.AddRMSNorm(x, y, dt, weight, wt, offset, 1e-5, rows, dim, sum, norm)
						equal(t, what+": sum", dt, sum, wantSum)
						equal(t, what+": norm", dt, norm, want)
						clear(norm)
						p.AddRMSNorm(x, y, dt, weight, wt, offset, 1e-5, rows, dim, x, norm)
						equal(t, what+": sum in place", dt, x, wantSum)
						equal(t, what+": norm in place", dt, norm, want)
					}
				}
			}
		}
	})
}

// TestElementary measures the reference's functions against float64; the kernels equal the reference bit for bit.
func TestElementary(t *testing.T) {
	r := source("elementary")
	for i := 0; i < 200000; i++ {
		x := float32(r.Float64()*176 - 88)
		if e := math.Abs(float64(exp32(x))/math.Exp(float64(x)) - 1); e > 1.3e-7 && x > -87 {
			t.Fatalf("exp(%v) is off by %v", x, e)
		}
		x = float32(r.NormFloat64() * 2)
		if e := math.Abs(float64(tanh32(x))/math.Tanh(float64(x)) - 1); e > 2.5e-7 {
			t.Fatalf("tanh(%v) is off by %v", x, e)
		}
		if e := math.Abs(float64(silu32(x))*(1+math.Exp(-float64(x)))/float64(x) - 1); e > 3e-7 {
			t.Fatalf("silu(%v) is off by %v", x, e)
		}
	}
	for x, want := range map[float32]float64{0: 1, 88.73: math.Inf(1), 200: math.Inf(1), -104: 0, -1e30: 0, -100: math.Exp(-100)} {
		if got := exp32(x); math.Abs(float64(got)-want) > 0x1p-149 {
			t.Errorf("exp(%v) = %v, want %v", x, got, want)
		}
	}
}
