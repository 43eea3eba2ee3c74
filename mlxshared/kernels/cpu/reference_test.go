package cpu_test

import (
	"encoding/binary"
	"math"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

// The naive reference: plain Go, one element at a time, in the canonical order that kernels.h promises. Explicit
// conversions keep the compiler from fusing.

// fma32 is a*b+c rounded once to float32. The product is exact in float64; the sum is rounded to odd there, which
// leaves the rounding to float32 right.
func fma32(a, b, c float32) float32 {
	p, d := float64(a)*float64(b), float64(c)
	s := float64(p + d)
	if math.IsNaN(s) || math.IsInf(s, 0) {
		return float32(s)
	}
	bb := float64(s - p)
	err := float64(float64(p-float64(s-bb)) + float64(d-bb))
	if bits := math.Float64bits(s); err != 0 && bits&1 == 0 {
		if (err > 0) == (s > 0) {
			bits++
		} else {
			bits--
		}
		s = math.Float64frombits(bits)
	}
	return float32(s)
}

func mul32(a, b float32) float32 { return float32(a * b) }
func add32(a, b float32) float32 { return float32(a + b) }
func sub32(a, b float32) float32 { return float32(a - b) }
func div32(a, b float32) float32 { return float32(a / b) }

// tree sums sixteen lanes pairwise: 8, 4, 2, 1.
func tree(lanes [16]float32) float32 {
	for n := 8; n > 0; n /= 2 {
		for i := 0; i < n; i++ {
			lanes[i] = add32(lanes[i], lanes[i+n])
		}
	}
	return lanes[0]
}

// dot is the canonical dot product; elements past the end are zero.
func dot(a, b []float32) float32 {
	var lanes [16]float32
	for i := 0; i < (len(a)+15)/16*16; i++ {
		var x, y float32
		if i < len(a) {
			x, y = a[i], b[i]
		}
		lanes[i%16] = fma32(x, y, lanes[i%16])
	}
	return tree(lanes)
}

// exp32 is the kernels' exponential.
func exp32(x float32) float32 {
	if x != x {
		return x
	}
	const magic = 0x1.8p23
	t := x
	if !(t < 89) {
		t = 89
	}
	if !(t > -105) {
		t = -105
	}
	n := sub32(fma32(t, 0x1.715476p0, magic), magic)
	r := fma32(n, -0.693359375, t)
	r = fma32(n, 2.12194440e-4, r)
	p := float32(1.9875691500e-4)
	for _, c := range []float32{1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1} {
		p = fma32(p, r, c)
	}
	p = add32(fma32(p, mul32(r, r), r), 1)
	return float32(math.Ldexp(float64(p), int(n)))
}

func tanh32(x float32) float32 {
	a, z := float32(math.Abs(float64(x))), mul32(x, x)
	if a < 0.625 {
		p := float32(-5.70498872745e-3)
		for _, c := range []float32{2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1} {
			p = fma32(p, z, c)
		}
		return fma32(mul32(p, z), x, x)
	}
	far := sub32(1, div32(2, add32(exp32(add32(a, a)), 1)))
	return float32(math.Copysign(float64(far), float64(x)))
}

func silu32(x float32) float32 { return div32(x, add32(1, exp32(sub32(0, x)))) }

// Element types.

func halfToFloat(h uint16) float32 {
	sign, exponent, fraction := h>>15, int(h>>10&31), float64(h&0x3ff)
	var v float64
	switch {
	case exponent == 31 && fraction == 0:
		v = math.Inf(1)
	case exponent == 31:
		v = math.NaN()
	case exponent == 0:
		v = math.Ldexp(fraction, -24)
	default:
		v = math.Ldexp(1024+fraction, exponent-25)
	}
	if sign == 1 {
		v = math.Copysign(v, -1)
	}
	return float32(v)
}

func floatToHalf(x float32) uint16 {
	sign := uint16(math.Float32bits(x) >> 16 & 0x8000)
	a := math.Abs(float64(x))
	switch {
	case x != x:
		return 0x7e00
	case a >= 65520:
		return sign | 0x7c00
	case a < 0x1p-14:
		return sign | uint16(math.RoundToEven(a*0x1p24))
	}
	f, e := math.Frexp(a) // f in [0.5, 1)
	n := uint16(math.RoundToEven(f * 2048))
	return sign | (uint16(e+14)<<10 + n - 1024)
}

func floatToBFloat(x float32) uint16 {
	if x != x {
		return 0x7fc0
	}
	b := math.Float32bits(x)
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// encode rounds values to an element type; every NaN becomes the quiet one.
func encode(t cpu.DType, v []float32) []byte {
	out := make([]byte, len(v)*t.Size())
	for i, x := range v {
		switch t {
		case cpu.F16:
			binary.LittleEndian.PutUint16(out[2*i:], floatToHalf(x))
		case cpu.BF16:
			binary.LittleEndian.PutUint16(out[2*i:], floatToBFloat(x))
		default:
			bits := math.Float32bits(x)
			if x != x {
				bits = 0x7fc00000
			}
			binary.LittleEndian.PutUint32(out[4*i:], bits)
		}
	}
	return out
}

func decode(t cpu.DType, b []byte) []float32 {
	out := make([]float32, len(b)/t.Size())
	for i := range out {
		switch t {
		case cpu.F16:
			out[i] = halfToFloat(binary.LittleEndian.Uint16(b[2*i:]))
		case cpu.BF16:
			out[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16)
		default:
			out[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
		}
	}
	return out
}

var e2m1 = [16]float32{0, .5, 1, 1.5, 2, 3, 4, 6, float32(math.Copysign(0, -1)), -.5, -1, -1.5, -2, -3, -4, -6}

func e4m3(b byte) float32 {
	if b&0x7f == 0x7f {
		return float32(math.NaN())
	}
	e, f := int(b>>3&15), float64(b&7)
	v := math.Ldexp(f, -9)
	if e > 0 {
		v = math.Ldexp(8+f, e-10)
	}
	if b >= 0x80 {
		v = math.Copysign(v, -1)
	}
	return float32(v)
}

func e8m0(b byte) float32 {
	if b == 255 {
		return float32(math.NaN())
	}
	return float32(math.Ldexp(1, int(b)-127))
}

// streamBits reads value i of a little-endian stream of `bits`-wide values.
func streamBits(b []byte, i, bits int) int {
	v := 0
	for k := 0; k < bits; k++ {
		at := i*bits + k
		v |= int(b[at/8]>>(at%8)&1) << k
	}
	return v
}

// dequantize is row r of w.
func dequantize(w *cpu.Matrix, r int) []float32 {
	out := make([]float32, w.Cols)
	if w.Format == cpu.Dense {
		size := w.DType.Size()
		return decode(w.DType, w.Data[r*w.Cols*size:(r+1)*w.Cols*size])
	}
	stride := w.Cols * w.Bits / 8
	row := w.Data[r*stride : (r+1)*stride]
	groups := w.Cols / w.Group
	for i := range out {
		g := r*groups + i/w.Group
		q := streamBits(row, i, w.Bits)
		switch w.Format {
		case cpu.Affine:
			size := w.DType.Size()
			s := decode(w.DType, w.Scales[g*size:(g+1)*size])[0]
			b := decode(w.DType, w.Biases[g*size:(g+1)*size])[0]
			out[i] = fma32(float32(q), s, b)
		case cpu.MXFP4:
			out[i] = mul32(e2m1[q], e8m0(w.Scales[g]))
		case cpu.NVFP4:
			out[i] = mul32(e2m1[q], e4m3(w.Scales[g]))
		case cpu.MXFP8:
			out[i] = mul32(e4m3(byte(q)), e8m0(w.Scales[g]))
		}
	}
	return out
}

// linear is the reference of Pool.Linear in float32, before rounding.
func linear(w *cpu.Matrix, bias, x []float32, rows int) []float32 {
	y := make([]float32, rows*w.Rows)
	for n := 0; n < w.Rows; n++ {
		weights := dequantize(w, n)
		for m := 0; m < rows; m++ {
			v := dot(weights, x[m*w.Cols:(m+1)*w.Cols])
			if bias != nil {
				v = add32(v, bias[n])
			}
			y[m*w.Rows+n] = v
		}
	}
	return y
}

// rmsNorm is the reference of Pool.RMSNorm.
func rmsNorm(x, weight []float32, offset, eps float32, dim int) []float32 {
	y := make([]float32, len(x))
	for r := 0; r < len(x); r += dim {
		row := x[r : r+dim]
		mean := div32(dot(row, row), float32(dim))
		inverse := div32(1, float32(math.Sqrt(float64(add32(mean, eps)))))
		for i, v := range row {
			y[r+i] = mul32(v, inverse)
			if weight != nil {
				y[r+i] = mul32(y[r+i], add32(weight[i], offset))
			}
		}
	}
	return y
}

// rope is the reference of Pool.RoPE; its angles' cosines come from Go's math package.
func rope(r cpu.RoPE, x []float32, pos []int32) []float32 {
	y := append([]float32(nil), x...)
	half := r.RotDim / 2
	for row, p := range pos {
		for h := 0; h < r.Heads; h++ {
			at := (row*r.Heads + h) * r.HeadDim
			for i := 0; i < half; i++ {
				angle := float64(mul32(float32(p), r.InvFreq[i]))
				c, s := float32(math.Cos(angle)), float32(math.Sin(angle))
				a, b := at+i, at+i+half
				if r.Traditional {
					a, b = at+2*i, at+2*i+1
				}
				u, v := mul32(x[a], r.Scale), mul32(x[b], r.Scale)
				y[a] = fma32(u, c, sub32(0, mul32(v, s)))
				y[b] = fma32(u, s, mul32(v, c))
			}
		}
	}
	return y
}

// cache is one sequence's keys and values as plain rows [position][kv head][dim].
type cache struct {
	heads, kDim, vDim int
	k, v              []float32
}

func (c *cache) key(pos, head int) []float32 {
	at := (pos*c.heads + head) * c.kDim
	return c.k[at : at+c.kDim]
}

func (c *cache) value(pos, head int) []float32 {
	at := (pos*c.heads + head) * c.vDim
	return c.v[at : at+c.vDim]
}

// span is the unit of positions that attention reduces on its own.
const span = 1024

// partial is a running softmax.
type partial struct {
	top    float32
	lanes  [16]float32
	output []float32
}

func emptyPartial(dim int) partial {
	return partial{top: float32(math.Inf(-1)), output: make([]float32, dim)}
}

func finite(top float32) float32 {
	if math.IsInf(float64(top), -1) {
		return 0
	}
	return top
}

// block adds positions [low, high), all in one block.
func (p *partial) block(a cpu.Attention, c *cache, head int, q []float32, low, high int) {
	scores := make([]float32, high-low)
	top := float32(math.Inf(-1))
	for i := range scores {
		s := mul32(dot(q, c.key(low+i, head)), a.Scale)
		if a.Softcap > 0 {
			s = mul32(a.Softcap, tanh32(div32(s, a.Softcap)))
		}
		scores[i] = s
		if s > top {
			top = s
		}
	}
	if top > p.top {
		f := exp32(sub32(p.top, top))
		for i := range p.lanes {
			p.lanes[i] = mul32(p.lanes[i], f)
		}
		for i := range p.output {
			p.output[i] = mul32(p.output[i], f)
		}
		p.top = top
	}
	for i, s := range scores {
		w := exp32(sub32(s, finite(p.top)))
		lane := (low + i) % 16
		p.lanes[lane] = add32(p.lanes[lane], w)
		for d, v := range c.value(low+i, head) {
			p.output[d] = fma32(w, v, p.output[d])
		}
	}
}

func (p *partial) merge(next partial) {
	top := p.top
	if next.top > top {
		top = next.top
	}
	a, b := exp32(sub32(p.top, finite(top))), exp32(sub32(next.top, finite(top)))
	for i := range p.lanes {
		p.lanes[i] = fma32(next.lanes[i], b, mul32(p.lanes[i], a))
	}
	for i := range p.output {
		p.output[i] = fma32(next.output[i], b, mul32(p.output[i], a))
	}
	p.top = top
}

// attend is the reference of Pool.Attention for one query row and head; first is the oldest position still held.
func attend(a cpu.Attention, c *cache, head int, q []float32, pos, first int) []float32 {
	low := first
	if a.Window > 0 && pos+1-a.Window > low {
		low = pos + 1 - a.Window
	}
	var total partial
	for s := low / span; s*span <= pos; s++ {
		part := emptyPartial(c.vDim)
		for at := max(low, s*span); at < min(pos+1, (s+1)*span); {
			end := min((at/cpu.BlockPositions+1)*cpu.BlockPositions, pos+1)
			part.block(a, c, head/(a.Heads/c.heads), q, at, end)
			at = end
		}
		if s == low/span {
			total = part
		} else {
			total.merge(part)
		}
	}
	sum, factor := tree(total.lanes), float32(1)
	if a.Sinks != nil {
		top := max(total.top, a.Sinks[head])
		factor = exp32(sub32(total.top, finite(top)))
		sum = fma32(sum, factor, exp32(sub32(a.Sinks[head], finite(top))))
	}
	out := make([]float32, c.vDim)
	for d := range out {
		out[d] = div32(mul32(total.output[d], factor), sum)
	}
	return out
}
