package cpu_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

// stack makes the matrices of several experts, and one Matrix over their joined data.
func stack(r *rand.Rand, l layout, dt cpu.DType, experts, rows, cols int) (*cpu.Matrix, []*cpu.Matrix) {
	joined := &cpu.Matrix{Format: l.format, DType: dt, Bits: l.bits, Group: l.group, Rows: rows, Cols: cols}
	each := make([]*cpu.Matrix, experts)
	for e := range each {
		each[e] = matrix(r, l, dt, rows, cols, false)
		joined.Data = append(joined.Data, each[e].Data...)
		joined.Scales = append(joined.Scales, each[e].Scales...)
		joined.Biases = append(joined.Biases, each[e].Biases...)
	}
	joined.Data, joined.Scales, joined.Biases = unaligned(joined.Data), unaligned(joined.Scales), unaligned(joined.Biases)
	return joined, each
}

// Every choice's result is bit for bit that of its row alone, whatever else the call holds.
func TestLinearGather(t *testing.T) {
	for name, l := range layouts() {
		t.Run(name, func(t *testing.T) {
			pools(t, func(t *testing.T, p *cpu.Pool) {
				r := source("gather" + name)
				for _, xt := range dtypes {
					for _, m := range []int{1, 5, 40} {
						for _, perChoice := range []bool{false, true} {
							gatherCase(t, r, p, l, xt, m, perChoice)
						}
					}
				}
			})
		})
	}
}

func gatherCase(t *testing.T, r *rand.Rand, p *cpu.Pool, l layout, xt cpu.DType, m int, perChoice bool) {
	t.Helper()
	experts, k := 1+r.IntN(9), 1+r.IntN(3)
	cols, rows := columns(r, l), 1+r.IntN(40)
	joined, each := stack(r, l, xt, experts, rows, cols)
	inputs := m
	if perChoice {
		inputs = m * k
	}
	x := unaligned(encode(xt, normals(r, inputs*cols, 1)))
	var bias []byte
	var wide []float32
	if r.IntN(2) == 0 {
		bias = unaligned(encode(xt, normals(r, experts*rows, 1)))
		wide = decode(xt, bias)
	}
	ids := make([]int32, m*k)
	for i := range ids {
		ids[i] = int32(r.IntN(experts))
	}
	y := unaligned(make([]byte, m*k*rows*xt.Size()))
	p.LinearGather(joined, experts, bias, xt, x, xt, perChoice, ids, k, y)
	values, want := decode(xt, x), make([]float32, m*k*rows)
	for e := range experts { // all of an expert's rows at once: the reference takes its weights apart each time
		var in, b []float32
		var of []int
		for i, id := range ids {
			if int(id) != e {
				continue
			}
			row := i
			if !perChoice {
				row = i / k
			}
			of, in = append(of, i), append(in, values[row*cols:(row+1)*cols]...)
		}
		if wide != nil {
			b = wide[e*rows : (e+1)*rows]
		}
		out := linear(each[e], b, in, len(of))
		for n, i := range of {
			copy(want[i*rows:(i+1)*rows], out[n*rows:(n+1)*rows])
		}
	}
	equal(t, fmt.Sprintf("%d experts, %d of them for each of %d rows in %v", experts, k, m, xt), xt, y, encode(xt, want))
}

// TestLinearGatherPieces has more choices than are handled in one go, so that groups are cut.
func TestLinearGatherPieces(t *testing.T) {
	r := source("gather pieces")
	const experts, k, m, rows, cols = 3, 2, 450, 17, 16384
	joined, each := stack(r, layout{cpu.Affine, 4, 64}, cpu.BF16, experts, rows, cols)
	x := encode(cpu.BF16, normals(r, m*cols, 1))
	ids := make([]int32, m*k)
	for i := range ids {
		ids[i] = int32(r.IntN(experts))
	}
	one, err := cpu.NewPool(1, cpu.BestISA())
	if err != nil {
		t.Fatal(err)
	}
	defer one.Free()
	size := rows * cpu.BF16.Size()
	want := make([]byte, m*k*size)
	for i, id := range ids {
		one.Linear(each[id], nil, cpu.F32, x[i/k*cols*2:(i/k+1)*cols*2], cpu.BF16, want[i*size:(i+1)*size], 1)
	}
	three, err := cpu.NewPool(3, cpu.BestISA())
	if err != nil {
		t.Fatal(err)
	}
	defer three.Free()
	got := make([]byte, len(want))
	three.LinearGather(joined, experts, nil, cpu.F32, x, cpu.BF16, false, ids, k, got)
	equal(t, "pieces", cpu.BF16, got, want)
}

// route is the specification in float32, with the exponential of the kernels.
func route(s cpu.Router, logits []float32) (ids []int32, weights []float32) {
	sigmoid := func(x float32) float32 { return div32(1, add32(1, exp32(sub32(0, x)))) }
	own := slices.Clone(logits)
	scores := slices.Clone(logits)
	if s.Scores == cpu.RouteSigmoid {
		for i, x := range logits {
			own[i] = sigmoid(x)
			if s.Bias != nil || s.Groups > 1 {
				scores[i] = own[i]
			}
			if s.Bias != nil {
				scores[i] = add32(own[i], s.Bias[i])
			}
		}
		if s.Groups > 1 {
			zeroGroups(s, scores)
		}
	}
	order := make([]int32, len(scores))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortStableFunc(order, func(a, b int32) int {
		switch x, y := scores[a], scores[b]; {
		case x > y:
			return -1
		case x < y:
			return 1
		case s.HighTies:
			return int(b - a)
		}
		return int(a - b)
	})
	ids = order[:s.TopK]
	for _, id := range ids {
		weights = append(weights, own[id])
	}
	switch s.Scores {
	case cpu.RouteSoftmaxChosen:
		shares(weights, expSum(weights, weights[0]))
	case cpu.RouteSoftmaxAll:
		shares(weights, expSum(logits, weights[0]))
	}
	divisor := float32(1)
	if s.Normalize && s.TopK > 1 && s.Scores != cpu.RouteSoftmaxChosen {
		var total float32
		for _, w := range weights {
			total = add32(total, w)
		}
		divisor = add32(total, s.Epsilon)
	}
	for i := range weights {
		weights[i] = mul32(div32(weights[i], divisor), s.Scale)
	}
	return ids, weights
}

func zeroGroups(s cpu.Router, scores []float32) {
	size := s.Experts / s.Groups
	sums := make([]float32, s.Groups)
	for g := range sums {
		group := slices.Clone(scores[g*size : (g+1)*size])
		slices.Sort(group)
		sums[g] = add32(group[size-1], group[size-2])
	}
	order := make([]int, s.Groups)
	for g := range order {
		order[g] = g
	}
	slices.SortStableFunc(order, func(a, b int) int { // the first are dropped: the least, of equals the lower number
		switch {
		case sums[a] < sums[b]:
			return -1
		case sums[a] > sums[b]:
			return 1
		}
		return a - b
	})
	for _, g := range order[:s.Groups-s.TopGroups] {
		clear(scores[g*size : (g+1)*size])
	}
}

func expSum(x []float32, top float32) float32 {
	var lanes [16]float32
	for i, v := range x {
		lanes[i%16] = add32(lanes[i%16], exp32(sub32(v, top)))
	}
	return tree(lanes)
}

func shares(x []float32, total float32) {
	top := x[0]
	for i, v := range x {
		x[i] = div32(exp32(sub32(v, top)), total)
	}
}

func TestRoute(t *testing.T) {
	cases := []cpu.Router{
		{Experts: 8, TopK: 2, Groups: 1, TopGroups: 1, Scale: 1},
		{Experts: 128, TopK: 8, Groups: 1, TopGroups: 1, Scale: 1, HighTies: true},
		{Experts: 60, TopK: 4, Scores: cpu.RouteSoftmaxAll, Groups: 1, TopGroups: 1, Scale: 1},
		{Experts: 17, TopK: 17, Scores: cpu.RouteSoftmaxAll, Normalize: true, Groups: 1, TopGroups: 1, Scale: 1},
		{Experts: 16, TopK: 1, Scores: cpu.RouteSigmoid, Normalize: true, Groups: 1, TopGroups: 1, Scale: 1},
		{Experts: 12, TopK: 4, Scores: cpu.RouteSigmoid, Normalize: true, Groups: 4, TopGroups: 2, Scale: 1, Epsilon: 1e-20},
		{Experts: 256, TopK: 8, Scores: cpu.RouteSigmoid, Normalize: true, Groups: 8, TopGroups: 4, Scale: 2.5, Bias: []float32{}},
		{Experts: 8, TopK: 3, Scores: cpu.RouteSigmoid, Groups: 1, TopGroups: 1, Scale: 1.5, Bias: []float32{}},
	}
	for i, s := range cases {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			pools(t, func(t *testing.T, p *cpu.Pool) {
				r := source(fmt.Sprint("route", i))
				if s.Bias != nil {
					s.Bias = normals(r, s.Experts, 0.5) // negative ones let dropped groups win
				}
				for _, dt := range dtypes {
					const rows = 33
					values := normals(r, rows*s.Experts, 1)
					for i := range values { // ties
						if r.IntN(3) == 0 {
							values[i] = float32(r.IntN(3))
						}
					}
					logits := unaligned(encode(dt, values))
					ids, weights := make([]int32, rows*s.TopK), make([]float32, rows*s.TopK)
					p.Route(s, logits, dt, rows, ids, weights)
					values = decode(dt, logits)
					for row := range rows {
						wantIDs, wantWeights := route(s, values[row*s.Experts:(row+1)*s.Experts])
						if got := ids[row*s.TopK : (row+1)*s.TopK]; !slices.Equal(got, wantIDs) {
							t.Fatalf("%v row %d: experts %v, want %v", dt, row, got, wantIDs)
						}
						if got := weights[row*s.TopK : (row+1)*s.TopK]; !slices.Equal(got, wantWeights) {
							t.Fatalf("%v row %d: weights %v, want %v", dt, row, got, wantWeights)
						}
					}
				}
			})
		})
	}
}

// A NaN logit is chosen last, and every id stays in range.
func TestRouteNaN(t *testing.T) {
	nan := float32(math.NaN())
	pools(t, func(t *testing.T, p *cpu.Pool) {
		for _, scores := range []cpu.RouteScores{cpu.RouteSoftmaxChosen, cpu.RouteSoftmaxAll, cpu.RouteSigmoid} {
			ids, weights := make([]int32, 6), make([]float32, 6)
			p.Route(cpu.Router{Experts: 4, TopK: 3, Scores: scores, Groups: 1, TopGroups: 1, Scale: 1},
				encode(cpu.F32, []float32{nan, 1, nan, 2, nan, nan, nan, nan}), cpu.F32, 2, ids, weights)
			if want := []int32{3, 1, 0, 0, 1, 2}; !slices.Equal(ids, want) {
				t.Errorf("scores %d: experts %v, want %v", scores, ids, want)
			}
		}
	})
}

func TestWeightedSum(t *testing.T) {
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("weighted sum")
		for _, dt := range dtypes {
			for _, rows := range []int{1, 7} {
				k, dim := 1+r.IntN(6), 1+r.IntN(200)
				x := unaligned(encode(dt, normals(r, rows*k*dim, 1)))
				weights := normals(r, rows*k, 1)
				y := unaligned(make([]byte, rows*dim*dt.Size()))
				p.WeightedSum(x, dt, weights, rows, k, dim, y)
				values, want := decode(dt, x), make([]float32, rows*dim)
				for i := range want {
					row, d := i/dim, i%dim
					for j := range k {
						want[i] = fma32(weights[row*k+j], values[(row*k+j)*dim+d], want[i])
					}
				}
				equal(t, fmt.Sprintf("%d of %d, %v", k, dim, dt), dt, y, encode(dt, want))
			}
		}
	})
}

func TestClampedSwiGLU(t *testing.T) {
	const alpha, limit = 1.702, 7
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	pools(t, func(t *testing.T, p *cpu.Pool) {
		r := source("clamped swiglu")
		for _, dt := range dtypes {
			for _, n := range []int{1, 16, 301} {
				gate, up := normals(r, n, 6), normals(r, n, 6)
				copy(gate, []float32{0, inf, -inf, nan, 1, 8})
				copy(up, []float32{0, 1, inf, -inf, nan, -9})
				g, u := encode(dt, gate), encode(dt, up)
				y := unaligned(make([]byte, n*dt.Size()))
				p.ClampedSwiGLU(unaligned(g), unaligned(u), dt, alpha, limit, n, y)
				gate, up = decode(dt, g), decode(dt, u)
				want := make([]float32, n)
				for i := range want {
					x, y := clamp(gate[i], -inf, limit), clamp(up[i], -limit, limit)
					sigmoid := div32(1, add32(1, exp32(sub32(0, mul32(alpha, x)))))
					want[i] = mul32(mul32(x, sigmoid), add32(y, 1))
				}
				equal(t, fmt.Sprintf("%d in %v", n, dt), dt, y, encode(dt, want))
			}
		}
	})
}

func clamp(x, low, high float32) float32 {
	switch {
	case x < low:
		return low
	case x > high:
		return high
	}
	return x
}

// A row attends to its chunk as to a window that begins with it.
func TestChunkedAttention(t *testing.T) {
	const heads, dim, chunk, length = 4, 16, 24, 150
	pools(t, func(t *testing.T, p *cpu.Pool) {
		for _, dt := range dtypes {
			s := newSequence(t, "chunked", 2, dim, dim, dt, length)
			defer s.kv.Free()
			encoded := encode(dt, normals(source("chunked q"), length*heads*dim, 1))
			q := decode(dt, encoded)
			var want []float32
			for pos := range length {
				a := cpu.Attention{Heads: heads, Scale: 0.25, Window: pos%chunk + 1}
				want = append(want, attendAll(a, s, q[pos*heads*dim:(pos+1)*heads*dim], 1, pos, 0)...)
			}
			y := make([]byte, length*heads*dim*dt.Size())
			p.ChunkedAttention(heads, 0.25, chunk, encoded, dt, []cpu.Segment{{KV: s.kv, N: length}}, y)
			equal(t, fmt.Sprint(dt), dt, y, encode(dt, want))
		}
	})
}
