package cpu_test

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

// newLatent is newSequence with values that lie within the keys.
func newLatent(t *testing.T, name string, kDim, vDim int, dt cpu.DType, n int) *sequence {
	t.Helper()
	kv, err := cpu.NewLatentKV(kDim, vDim, dt, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kv.Free)
	s := &sequence{kv: kv, cache: cache{heads: 1, kDim: kDim, vDim: vDim}}
	r := source(name)
	for piece := 1; n > 0; piece = piece*3%197 + 1 {
		piece = min(piece, n)
		s.appendLatent(t, dt, normals(r, piece*kDim, 1))
		n -= piece
	}
	return s
}

func (s *sequence) appendLatent(t *testing.T, dt cpu.DType, keys []float32) {
	t.Helper()
	k := encode(dt, keys)
	if err := s.kv.Append(s.kv.Len(), k, nil, len(keys)/s.kDim); err != nil {
		t.Fatal(err)
	}
	keys = decode(dt, k)
	s.k = append(s.k, keys...)
	for at := 0; at < len(keys); at += s.kDim {
		s.v = append(s.v, keys[at:at+s.vDim]...)
	}
}

func TestLatentAttention(t *testing.T) {
	for _, dt := range dtypes {
		for _, c := range []attentionCase{
			{heads: 1, kDim: 16, vDim: 16, length: 1, rows: 1},
			{heads: 2, kDim: 96, vDim: 64, length: 130, rows: 40},
			{heads: 30, kDim: 40, vDim: 20, length: 70, rows: 3},
			{heads: 50, kDim: 24, vDim: 5, length: 200, rows: 2},
			{heads: 3, kDim: 48, vDim: 32, length: 2100, rows: 1},
		} {
			c.kvHeads = 1
			t.Run(fmt.Sprintf("%v %+v", dt, c), func(t *testing.T) {
				s := newLatent(t, "latent", c.kDim, c.vDim, dt, c.length)
				a := c.attention("")
				q := encode(dt, normals(source("q"), c.rows*c.heads*c.kDim, 1))
				pos := c.length - c.rows
				want := encode(dt, attendAll(a, s, decode(dt, q), c.rows, pos, 0))
				pools(t, func(t *testing.T, p *cpu.Pool) {
					y := make([]byte, len(want))
					p.Attention(a, q, dt, []cpu.Segment{{KV: s.kv, N: c.rows, Pos: pos}}, y)
					equal(t, "latent", dt, y, want)
				})
			})
		}
	}
}

// A latent cache holds keys only; its forks, cuts and growth are those of any cache.
func TestLatentKV(t *testing.T) {
	s := newLatent(t, "kv", 20, 8, cpu.BF16, 100)
	const block = cpu.BlockPositions * 32 * 2 // 20 is padded to 32
	if got := s.kv.Bytes(); got != 2*block {
		t.Errorf("%d bytes, want %d", got, 2*block)
	}
	fork, err := s.kv.Share(s.kv.Len())
	if err != nil {
		t.Fatal(err)
	}
	defer fork.Free()
	s.kv.Truncate(70)
	s.k, s.v = s.k[:70*20], s.v[:70*8]
	s.appendLatent(t, cpu.BF16, normals(source("more"), 5*20, 1))
	a := cpu.Attention{Heads: 2, Scale: 0.3}
	q := encode(cpu.BF16, normals(source("q"), 2*20, 1))
	want := encode(cpu.BF16, attendAll(a, s, decode(cpu.BF16, q), 1, 74, 0))
	pools(t, func(t *testing.T, p *cpu.Pool) {
		y := make([]byte, len(want))
		p.Attention(a, q, cpu.BF16, []cpu.Segment{{KV: s.kv, N: 1, Pos: 74}}, y)
		equal(t, "cut and grown", cpu.BF16, y, want)
	})
	for _, c := range [][2]int{{0, 0}, {8, 0}, {8, 9}, {-1, -1}} {
		if kv, err := cpu.NewLatentKV(c[0], c[1], cpu.F32, nil); err == nil {
			kv.Free()
			t.Errorf("dims %v: no error", c)
		}
	}
}

func TestMultiLinear(t *testing.T) {
	for name, l := range layouts() {
		for _, dt := range dtypes {
			for _, c := range []struct{ heads, out, rows int }{{1, 16, 1}, {3, 20, 5}, {5, 33, 2}, {2, 64, 70}} {
				t.Run(fmt.Sprintf("%s %v %+v", name, dt, c), func(t *testing.T) {
					r := source(name)
					cols := columns(r, l)
					w := matrix(r, l, dt, c.heads*c.out, cols, false)
					x := encode(dt, normals(r, c.rows*c.heads*cols, 1))
					all, values := make([]float32, c.rows*c.heads*c.out), decode(dt, x)
					stacked := linear(w, nil, values, c.rows*c.heads) // every row by every head
					for i := range c.rows {
						for h := range c.heads {
							at := (i*c.heads + h) * c.out
							copy(all[at:at+c.out], stacked[(i*c.heads+h)*w.Rows+h*c.out:])
						}
					}
					want := encode(dt, all)
					pools(t, func(t *testing.T, p *cpu.Pool) {
						y := make([]byte, len(want))
						p.MultiLinear(w, c.heads, x, dt, y, c.rows)
						equal(t, "heads", dt, y, want)
					})
				})
			}
		}
	}
}

// picked is the reference of an indexer's choice for one row: ascending positions.
func picked(x *cpu.Indexer, dt cpu.DType, keys *cache, row, pos int) []int {
	q := decode(dt, x.Q)
	scores := make([]float32, pos+1)
	order := make([]int, pos+1)
	for p := range scores {
		order[p] = p
		for h := range x.Heads {
			at := (row*x.Heads + h) * x.Dim
			s := dot(q[at:at+x.Dim], keys.key(p, 0))
			if !(s > 0) && s == s {
				s = 0
			}
			scores[p] = fma32(s, x.Weights[row*x.Heads+h], scores[p])
		}
		if scores[p] != scores[p] {
			scores[p] = float32(math.Inf(1))
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Or(cmp.Compare(scores[b], scores[a]), b-a) })
	order = order[:min(x.TopK, len(order))]
	slices.Sort(order)
	return order
}

// sparse is the reference of SparseAttention for one row.
func sparse(a cpu.Attention, x *cpu.Indexer, dt cpu.DType, s *sequence, keys *cache, q []float32, row, pos int) []float32 {
	all := picked(x, dt, keys, row, pos)
	chosen := cache{heads: 1, kDim: s.kDim, vDim: s.vDim}
	for _, p := range all {
		chosen.k, chosen.v = append(chosen.k, s.key(p, 0)...), append(chosen.v, s.value(p, 0)...)
	}
	var out []float32
	for h := range a.Heads {
		at := (row*a.Heads + h) * s.kDim
		out = append(out, attend(a, &chosen, h, q[at:at+s.kDim], len(all)-1, 0)...)
	}
	return out
}

func TestSparseAttention(t *testing.T) {
	const kDim, vDim, indexDim = 40, 24, 20
	for _, dt := range dtypes {
		for _, c := range []struct {
			heads, indexHeads, topK int
			lengths, rows           []int
		}{
			{2, 2, 32, []int{100}, []int{100}},
			{30, 5, 64, []int{65, 3, 200}, []int{1, 3, 9}},
			{1, 1, 1, []int{70}, []int{5}},
			{3, 3, 1100, []int{1300}, []int{2}},
		} {
			t.Run(fmt.Sprintf("%v %+v", dt, c), func(t *testing.T) {
				a := cpu.Attention{Heads: c.heads, Scale: 0.2}
				total := 0
				for _, n := range c.rows {
					total += n
				}
				r := source("sparse")
				q := encode(dt, normals(r, total*c.heads*kDim, 1))
				x := cpu.Indexer{
					Heads: c.indexHeads, Dim: indexDim, TopK: c.topK,
					Q: encode(dt, normals(r, total*c.indexHeads*indexDim, 1)), Weights: normals(r, total*c.indexHeads, 1),
				}
				var segments []cpu.Segment
				var want []float32
				for i, length := range c.lengths {
					s, keys := newLatent(t, fmt.Sprint("kv", i), kDim, vDim, dt, length), newLatent(t, fmt.Sprint("index", i), indexDim, indexDim, dt, length)
					segments = append(segments, cpu.Segment{KV: s.kv, Row: len(want) / (c.heads * vDim), N: c.rows[i], Pos: length - c.rows[i]})
					x.Keys = append(x.Keys, keys.kv)
					row0 := segments[i].Row
					for n := range c.rows[i] {
						want = append(want, sparse(a, &x, dt, s, &keys.cache, decode(dt, q), row0+n, length-c.rows[i]+n)...)
					}
				}
				pools(t, func(t *testing.T, p *cpu.Pool) {
					y := make([]byte, len(want)*dt.Size())
					p.SparseAttention(c.heads, a.Scale, q, dt, segments, x, y)
					equal(t, "sparse", dt, y, encode(dt, want))
				})
			})
		}
	}
}

// Of equal scores the later positions are taken, and a NaN comes before everything.
func TestSparseTies(t *testing.T) {
	const dim, length = 16, 150
	for name, c := range map[string]struct {
		score func(pos int) float32
		want  func(pos int) bool // picked, of the last row's choice of 10
	}{
		"all equal":                    {func(int) float32 { return 1 }, func(pos int) bool { return pos >= length-10 }},
		"all below zero count as zero": {func(pos int) float32 { return -float32(pos) }, func(pos int) bool { return pos >= length-10 }},
		"the best, then the last": {
			func(pos int) float32 { return map[bool]float32{true: 2, false: 1}[pos < 4] },
			func(pos int) bool { return pos < 4 || pos >= length-6 },
		},
		"nan": {
			func(pos int) float32 { return map[bool]float32{true: float32(math.NaN()), false: 1}[pos == 7] },
			func(pos int) bool { return pos == 7 || pos >= length-9 },
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newLatent(t, name, dim, dim, cpu.F32, 0)
			keys := newLatent(t, name, dim, dim, cpu.F32, 0)
			for p := range length {
				// Values that tell by their sum which positions were attended to: all scores of the attention are zero.
				row, index := make([]float32, dim), make([]float32, dim)
				if c.want(p) {
					row[0] = 1
				}
				index[0] = c.score(p)
				s.appendLatent(t, cpu.F32, row)
				keys.appendLatent(t, cpu.F32, index)
			}
			one := make([]float32, dim)
			one[0] = 1
			x := cpu.Indexer{Heads: 1, Dim: dim, TopK: 10, Q: encode(cpu.F32, one), Weights: []float32{1}, Keys: []*cpu.KV{keys.kv}}
			pools(t, func(t *testing.T, p *cpu.Pool) {
				y := make([]byte, 4*dim)
				p.SparseAttention(1, 1, make([]byte, 4*dim), cpu.F32, []cpu.Segment{{KV: s.kv, N: 1, Pos: length - 1}}, x, y)
				if got := decode(cpu.F32, y)[0]; got != 1 {
					t.Errorf("%v of the picked positions were the right ones", got)
				}
			})
		})
	}
}
