package cpu_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

// sequence is a KV and the same content as plain rows.
type sequence struct {
	kv *cpu.KV
	cache
}

// newSequence appends n positions in uneven pieces.
func newSequence(t *testing.T, name string, heads, kDim, vDim int, dt cpu.DType, n int) *sequence {
	t.Helper()
	kv, err := cpu.NewKV(heads, kDim, vDim, dt, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &sequence{kv: kv, cache: cache{heads: heads, kDim: kDim, vDim: vDim}}
	r := source(name)
	for piece := 1; n > 0; piece = piece*3%197 + 1 {
		piece = min(piece, n)
		k, v := encode(dt, normals(r, piece*heads*kDim, 1)), encode(dt, normals(r, piece*heads*vDim, 1))
		s.append(t, dt, k, v, piece)
		n -= piece
	}
	return s
}

func (s *sequence) append(t *testing.T, dt cpu.DType, k, v []byte, n int) {
	t.Helper()
	if err := s.kv.Append(s.kv.Len(), k, v, n); err != nil {
		t.Fatal(err)
	}
	s.k, s.v = append(s.k, decode(dt, k)...), append(s.v, decode(dt, v)...)
}

// attendAll is the reference for rows at pos.. of s.
func attendAll(a cpu.Attention, s *sequence, q []float32, rows, pos, first int) []float32 {
	var out []float32
	for i := 0; i < rows; i++ {
		for h := 0; h < a.Heads; h++ {
			at := (i*a.Heads + h) * s.kDim
			out = append(out, attend(a, &s.cache, h, q[at:at+s.kDim], pos+i, first)...)
		}
	}
	return out
}

type attentionCase struct {
	heads, kvHeads, kDim, vDim int
	length, rows               int // the last `rows` positions ask
	window                     int
	softcap                    float32
	sinks                      bool
}

func attentionCases() []attentionCase {
	return []attentionCase{
		{9, 3, 64, 64, 1, 1, 0, 0, false},
		{9, 3, 64, 64, 64, 1, 0, 0, false},
		{9, 3, 64, 64, 65, 65, 0, 0, false},
		{9, 3, 64, 64, 200, 37, 0, 0, false},
		{4, 4, 80, 48, 130, 20, 0, 0, false},
		{8, 1, 24, 20, 150, 9, 0, 0, false},
		{1, 1, 5, 3, 70, 70, 0, 0, false},
		{30, 1, 16, 16, 33, 3, 0, 0, false},
		{2, 1, 192, 128, 100, 6, 0, 0, false},
		{6, 2, 32, 32, 300, 140, 100, 0, false},
		{6, 2, 32, 32, 150, 150, 1, 0, false},
		{6, 2, 32, 32, 300, 12, 64, 0, true},
		{6, 2, 32, 32, 120, 12, 0, 30, false},
		{6, 2, 32, 32, 120, 12, 0, 0, true},
		{2, 1, 16, 16, 2100, 1, 0, 0, false},
		{2, 1, 16, 16, 2100, 1, 0, 20, true},
		{2, 2, 16, 16, 1100, 90, 0, 0, false},
		{2, 2, 16, 16, 2060, 30, 1020, 0, false},
	}
}

func (c attentionCase) attention(name string) cpu.Attention {
	a := cpu.Attention{Heads: c.heads, Scale: float32(1 / math.Sqrt(float64(c.kDim))), Window: c.window, Softcap: c.softcap}
	if c.sinks {
		a.Sinks = normals(source(name), c.heads, 2)
	}
	return a
}

func TestAttention(t *testing.T) {
	for _, dt := range dtypes {
		for _, c := range attentionCases() {
			t.Run(fmt.Sprintf("%v %+v", dt, c), func(t *testing.T) {
				s := newSequence(t, "kv", c.kvHeads, c.kDim, c.vDim, dt, c.length)
				defer s.kv.Free()
				a := c.attention("sinks")
				q := unaligned(encode(dt, normals(source("q"), c.rows*c.heads*c.kDim, 1)))
				pos := c.length - c.rows
				want := encode(dt, attendAll(a, s, decode(dt, q), c.rows, pos, 0))
				attentionTruth(t, a, s, decode(dt, q), c.rows, pos, dt, decode(dt, want))
				pools(t, func(t *testing.T, p *cpu.Pool) {
					y := unaligned(make([]byte, len(want)))
					p.Attention(a, q, dt, []cpu.Segment{{KV: s.kv, N: c.rows, Pos: pos}}, y)
					equal(t, "whole", dt, y, want)
					// One row at a time, and in chunks of seven, gives the same.
					for _, chunk := range []int{1, 7} {
						clear(y)
						for i := 0; i < c.rows; i += chunk {
							n := min(chunk, c.rows-i)
							p.Attention(a, q, dt, []cpu.Segment{{KV: s.kv, Row: i, N: n, Pos: pos + i}}, y)
						}
						equal(t, fmt.Sprint("chunks of ", chunk), dt, y, want)
					}
				})
			})
		}
	}
}

// attentionTruth compares with a softmax in float64.
func attentionTruth(t *testing.T, a cpu.Attention, s *sequence, q []float32, rows, pos int, dt cpu.DType, got []float32) {
	t.Helper()
	for i := 0; i < rows; i++ {
		for h := 0; h < a.Heads; h++ {
			at := (i*a.Heads + h) * s.kDim
			for d, v := range softmaxAttention(a, &s.cache, h, q[at:at+s.kDim], pos+i) {
				near(t, fmt.Sprintf("row %d head %d element %d", i, h, d), dt, got[(i*a.Heads+h)*s.vDim+d], v, 20)
			}
		}
	}
}

func softmaxAttention(a cpu.Attention, c *cache, head int, q []float32, pos int) []float64 {
	low := 0
	if a.Window > 0 {
		low = max(0, pos+1-a.Window)
	}
	kv := head / (a.Heads / c.heads)
	out, sum := make([]float64, c.vDim), 0.0
	if a.Sinks != nil {
		sum = math.Exp(float64(a.Sinks[head]))
	}
	for p := low; p <= pos; p++ {
		var s float64
		for d, k := range c.key(p, kv) {
			s += float64(k) * float64(q[d])
		}
		s *= float64(a.Scale)
		if a.Softcap > 0 {
			s = float64(a.Softcap) * math.Tanh(s/float64(a.Softcap))
		}
		w := math.Exp(s)
		sum += w
		for d, v := range c.value(p, kv) {
			out[d] += w * float64(v)
		}
	}
	for d := range out {
		out[d] /= sum
	}
	return out
}

// TestAttentionBatch: sequences of one call do not see one another.
func TestAttentionBatch(t *testing.T) {
	a := cpu.Attention{Heads: 4, Scale: 0.2}
	lengths, rows := []int{1, 70, 1300, 5}, []int{1, 3, 1, 5}
	var segments []cpu.Segment
	var q, want []float32
	total := 0
	for i, n := range lengths {
		s := newSequence(t, fmt.Sprint("batch", i), 2, 32, 32, cpu.F16, n)
		defer s.kv.Free()
		own := decode(cpu.F16, encode(cpu.F16, normals(source("q"), rows[i]*4*32, 1)))
		q = append(q, own...)
		want = append(want, attendAll(a, s, own, rows[i], n-rows[i], 0)...)
		segments = append(segments, cpu.Segment{KV: s.kv, Row: total, N: rows[i], Pos: n - rows[i]})
		total += rows[i]
	}
	pools(t, func(t *testing.T, p *cpu.Pool) {
		y := make([]byte, 2*len(want))
		p.Attention(a, encode(cpu.F16, q), cpu.F16, segments, y)
		equal(t, "batch", cpu.F16, y, encode(cpu.F16, want))
	})
}

// TestAttentionUnseen: keys and values that a row must not see do not touch it, whatever they are; those it sees do.
func TestAttentionUnseen(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	const heads, dim, length = 2, 16, 140
	for name, c := range map[string]struct {
		window, poisoned int
		value            float32
	}{
		"future nan":          {0, 120, nan},
		"future infinity":     {0, 120, inf},
		"past a window":       {50, 20, nan},
		"past a window, more": {50, 63, inf},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSequence(t, "unseen", heads, dim, dim, cpu.F32, length)
			defer s.kv.Free()
			poisoned, err := cpu.NewKV(heads, dim, dim, cpu.F32, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer poisoned.Free()
			k, v := append([]float32(nil), s.k...), append([]float32(nil), s.v...)
			for i := 0; i < heads*dim; i++ {
				k[c.poisoned*heads*dim+i], v[c.poisoned*heads*dim+i] = c.value, c.value
			}
			if err := poisoned.Append(0, encode(cpu.F32, k), encode(cpu.F32, v), length); err != nil {
				t.Fatal(err)
			}
			a := cpu.Attention{Heads: 4, Scale: 0.3, Window: c.window}
			from, to := 110, 120
			if c.window > 0 {
				from, to = 115, length
			}
			q := encode(cpu.F32, normals(source("q"), (to-from)*4*dim, 1))
			want := encode(cpu.F32, attendAll(a, s, decode(cpu.F32, q), to-from, from, 0))
			pools(t, func(t *testing.T, p *cpu.Pool) {
				y := make([]byte, len(want))
				p.Attention(a, q, cpu.F32, []cpu.Segment{{KV: poisoned, N: to - from, Pos: from}}, y)
				equal(t, name, cpu.F32, y, want)
				seen := cpu.Segment{KV: poisoned, N: 1, Pos: c.poisoned + 1}
				p.Attention(a, q[:4*dim*4], cpu.F32, []cpu.Segment{seen}, y[:4*dim*4])
				if got := decode(cpu.F32, y[:4]); got[0] == got[0] {
					t.Errorf("a poisoned position in sight gives %v, want NaN", got[0])
				}
			})
		})
	}
}

// TestAttentionExtremes: scores that overflow the exponential, and keys of minus infinity.
func TestAttentionExtremes(t *testing.T) {
	const dim = 16
	for name, c := range map[string]struct {
		scale float32
		key   func(pos int) float32
	}{
		"huge scores":                    {1e6, func(pos int) float32 { return float32(pos%7 - 3) }},
		"first block minus infinity":     {1, func(pos int) float32 { return map[bool]float32{true: float32(math.Inf(-1)), false: 1}[pos < 70] }},
		"all minus infinity":             {1, func(int) float32 { return float32(math.Inf(-1)) }},
		"one plus infinity":              {1, func(pos int) float32 { return map[bool]float32{true: float32(math.Inf(1)), false: 1}[pos == 80] }},
		"ascending, a new maximum every": {3, func(pos int) float32 { return float32(pos) / 16 }},
	} {
		t.Run(name, func(t *testing.T) {
			s := &sequence{cache: cache{heads: 1, kDim: dim, vDim: dim}}
			var err error
			if s.kv, err = cpu.NewKV(1, dim, dim, cpu.F32, nil); err != nil {
				t.Fatal(err)
			}
			defer s.kv.Free()
			r := source("extremes")
			k := make([]float32, 1100*dim)
			for i := range k {
				k[i] = c.key(i / dim)
			}
			s.append(t, cpu.F32, encode(cpu.F32, k), encode(cpu.F32, normals(r, len(k), 1)), 1100)
			q := make([]float32, 3*2*dim)
			for i := range q {
				q[i] = 0.25
			}
			a := cpu.Attention{Heads: 2, Scale: c.scale}
			for _, a.Sinks = range [][]float32{nil, {0, -1e30}} {
				want := encode(cpu.F32, attendAll(a, s, q, 3, 1097, 0))
				pools(t, func(t *testing.T, p *cpu.Pool) {
					y := make([]byte, len(want))
					p.Attention(a, encode(cpu.F32, q), cpu.F32, []cpu.Segment{{KV: s.kv, N: 3, Pos: 1097}}, y)
					equal(t, name, cpu.F32, y, want)
				})
			}
		})
	}
}

func TestKV(t *testing.T) {
	const heads, kDim, vDim = 2, 20, 32 // 20 is padded to 32
	const block = heads * cpu.BlockPositions * (32 + 32) * 2
	kv, err := cpu.NewKV(heads, kDim, vDim, cpu.F16, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer kv.Free()
	expect := func(k *cpu.KV, length, blocks int) {
		t.Helper()
		if k.Len() != length || k.Bytes() != blocks*block {
			t.Fatalf("length %d, %d bytes; want %d, %d", k.Len(), k.Bytes(), length, blocks*block)
		}
	}
	add := func(k *cpu.KV, n int) {
		t.Helper()
		if err := k.Append(k.Len(), make([]byte, n*heads*kDim*2), make([]byte, n*heads*vDim*2), n); err != nil {
			t.Fatal(err)
		}
	}
	expect(kv, 0, 0)
	add(kv, 0)
	expect(kv, 0, 0)
	add(kv, 1)
	expect(kv, 1, 1)
	add(kv, 63)
	expect(kv, 64, 1)
	add(kv, 1)
	expect(kv, 65, 2)
	add(kv, 300)
	expect(kv, 365, 6)
	for _, pos := range []int{0, 364, 366, -1} {
		if err := kv.Append(pos, make([]byte, heads*kDim*2), make([]byte, heads*vDim*2), 1); err == nil {
			t.Errorf("append at %d of %d: no error", pos, kv.Len())
		}
	}
	expect(kv, 365, 6)
	fork, err := kv.Share(kv.Len())
	if err != nil {
		t.Fatal(err)
	}
	expect(fork, 365, 6)
	kv.Truncate(400)
	expect(kv, 365, 6)
	kv.Truncate(320)
	expect(kv, 320, 5)
	kv.Truncate(319)
	expect(kv, 319, 5)
	kv.DropBefore(63)
	expect(kv, 319, 5)
	kv.DropBefore(130)
	expect(kv, 319, 3)
	kv.DropBefore(100)
	expect(kv, 319, 3)
	add(kv, 2)
	expect(kv, 321, 4)
	kv.DropBefore(1000)
	expect(kv, 321, 1)
	kv.Truncate(100) // below what was dropped: nothing is held
	expect(kv, 100, 0)
	add(kv, 1)
	expect(kv, 101, 1)
	kv.Truncate(-3)
	expect(kv, 0, 0)
	expect(fork, 365, 6)
	fork.Free()
}

func TestKVRefuses(t *testing.T) {
	for _, c := range [][3]int{{0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {-1, 4, 4}} {
		if kv, err := cpu.NewKV(c[0], c[1], c[2], cpu.F32, nil); err == nil {
			kv.Free()
			t.Errorf("%v: no error", c)
		}
	}
}

// TestKVFork: forks share what they have in common and nothing they write later.
func TestKVFork(t *testing.T) {
	const heads, dim = 2, 16
	p, err := cpu.NewPool(1, cpu.Auto)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Free()
	a := cpu.Attention{Heads: 2, Scale: 0.5}
	q := normals(source("q"), 2*dim, 1)
	check := func(what string, s *sequence) {
		t.Helper()
		y := make([]byte, 4*2*dim)
		pos := s.kv.Len() - 1
		p.Attention(a, encode(cpu.F32, q), cpu.F32, []cpu.Segment{{KV: s.kv, N: 1, Pos: pos}}, y)
		equal(t, what, cpu.F32, y, encode(cpu.F32, attendAll(a, s, q, 1, pos, 0)))
	}
	for _, length := range []int{64, 100} {
		one := newSequence(t, "fork", heads, dim, dim, cpu.F32, length)
		fork, err := one.kv.Share(one.kv.Len())
		if err != nil {
			t.Fatal(err)
		}
		two := &sequence{fork, cache{heads, dim, dim, append([]float32(nil), one.k...), append([]float32(nil), one.v...)}}
		r := source("more")
		for i := 0; i < 40; i++ {
			for _, s := range []*sequence{one, two} {
				s.append(t, cpu.F32, encode(cpu.F32, normals(r, heads*dim, 1)), encode(cpu.F32, normals(r, heads*dim, 1)), 1)
			}
			check("the first", one)
			check("its fork", two)
		}
		one.kv.Free()
		check("the fork alone", two)
		two.kv.Truncate(50)
		two.k, two.v = two.k[:50*heads*dim], two.v[:50*heads*dim]
		two.append(t, cpu.F32, encode(cpu.F32, normals(r, heads*dim, 1)), encode(cpu.F32, normals(r, heads*dim, 1)), 1)
		check("truncated and grown", two)
		two.kv.Free()
	}
}

// TestKVDropped: dropping what lies before a window changes nothing for rows that look no further back.
func TestKVDropped(t *testing.T) {
	a := cpu.Attention{Heads: 2, Scale: 0.5, Window: 100}
	q := normals(source("q"), 2*16, 1)
	s := newSequence(t, "dropped", 1, 16, 16, cpu.BF16, 1500)
	defer s.kv.Free()
	want := encode(cpu.BF16, attendAll(a, s, decode(cpu.BF16, encode(cpu.BF16, q)), 1, 1499, 0))
	pools(t, func(t *testing.T, p *cpu.Pool) {
		y := make([]byte, len(want))
		for _, before := range []int{0, 500, 1400} {
			s.kv.DropBefore(before)
			p.Attention(a, encode(cpu.BF16, q), cpu.BF16, []cpu.Segment{{KV: s.kv, N: 1, Pos: 1499}}, y)
			equal(t, fmt.Sprint("before ", before), cpu.BF16, y, want)
		}
	})
}
