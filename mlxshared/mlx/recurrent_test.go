package mlx

import (
	"math"
	"strings"
	"testing"
)

// recurrentCase is an operation on states with fixed weights: run builds it over n rows of random inputs from row `at` on.
type recurrentCase struct {
	name       string
	rows, cols int  // of the state
	wide       bool // the state is float32 whatever the inputs are
	run        func(c *Scope, at, n int, dtype Dtype, segments []StateSegment) Array
}

// input is rows [at, at+n) of a fixed random matrix of the given width.
func input(c *Scope, seed uint64, at, n, width int, dtype Dtype) Array {
	all := normals(newRand(seed), (at+n)*width)
	return c.AsType(c.FromFloat32s(all[at*width:], n, width), dtype)
}

// fixed is a float32 weight.
func fixed(c *Scope, seed uint64, shape ...int) Array {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return c.FromFloat32s(normals(newRand(seed), n), shape...)
}

func recurrentCases() []recurrentCase {
	ssm := SSMSpec{Heads: 4, HeadDim: 24, Groups: 2, States: 16, MinDt: 0.1, MaxDt: 2}
	delta := GatedDeltaSpec{KeyHeads: 2, ValueHeads: 4, KeyDim: 16, ValueDim: 24}
	kimi := GatedDeltaSpec{KeyHeads: 2, ValueHeads: 2, KeyDim: 16, ValueDim: 16, ChannelGate: true, LowerBound: -5}
	return []recurrentCase{
		{"conv", 3, 40, false, func(c *Scope, at, n int, dtype Dtype, segments []StateSegment) Array {
			return c.CausalConv(input(c, 1, at, n, 40, dtype), fixed(c, 2, 4, 40), fixed(c, 3, 40), true, segments)
		}},
		{"plain conv", 1, 5, false, func(c *Scope, at, n int, dtype Dtype, segments []StateSegment) Array {
			return c.CausalConv(input(c, 1, at, n, 5, dtype), fixed(c, 2, 2, 5), Array{}, false, segments)
		}},
		{"scan", 6, 40, false, func(c *Scope, at, n int, dtype Dtype, segments []StateSegment) Array {
			return c.SelectiveScan(input(c, 1, at, n, 40, dtype), input(c, 2, at, n, 40, dtype), input(c, 3, at, n, 6, dtype), input(c, 4, at, n, 6, dtype),
				c.Neg(c.Exp(fixed(c, 5, 6, 40))), fixed(c, 6, 40), segments)
		}},
		{"ssm", 64, 24, true, func(c *Scope, at, n int, dtype Dtype, segments []StateSegment) Array {
			return c.SSM(input(c, 1, at, n, 160, dtype), input(c, 2, at, n, 4, dtype), c.Neg(c.Exp(fixed(c, 3, 4))), fixed(c, 4, 4), fixed(c, 5, 4), &ssm, segments)
		}},
		{"delta", 64, 24, true, func(c *Scope, at, n int, dtype Dtype, segments []StateSegment) Array {
			return c.GatedDelta(input(c, 1, at, n, 160, dtype), input(c, 2, at, n, 4, dtype), input(c, 3, at, n, 4, dtype), c.Exp(fixed(c, 4, 4)), fixed(c, 5, 4), &delta, segments)
		}},
		{"channel delta", 32, 16, true, func(c *Scope, at, n int, dtype Dtype, segments []StateSegment) Array {
			return c.GatedDelta(input(c, 1, at, n, 96, dtype), input(c, 2, at, n, 32, dtype), input(c, 3, at, n, 2, dtype), c.Exp(fixed(c, 4, 2)), fixed(c, 5, 32), &kimi, segments)
		}},
	}
}

func (r *recurrentCase) state(t *testing.T, s *Stream, dtype Dtype) *State {
	t.Helper()
	if r.wide {
		dtype = Float32
	}
	state, err := s.NewState(r.rows, r.cols, dtype)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(state.Free)
	return state
}

func eachRecurrence(t *testing.T, f func(t *testing.T, r *recurrentCase)) {
	for _, r := range recurrentCases() {
		t.Run(r.name, func(t *testing.T) { f(t, &r) })
	}
}

// Both back ends compute the same.
func TestRecurrencesAgree(t *testing.T) {
	eachRecurrence(t, func(t *testing.T, r *recurrentCase) {
		for _, dtype := range []Dtype{Float32, BFloat16, Float16} {
			var results [][]float32
			for _, b := range []Backend{BackendKernels, BackendMLX} {
				s := open(t, Options{Backend: b})
				c := scope(t, s)
				one, two := r.state(t, s, dtype), r.state(t, s, dtype)
				y := r.run(c, 0, 7, dtype, []StateSegment{{one, 0, 4, 0}, {two, 4, 3, 0}})
				if y.Dtype() != dtype {
					t.Fatalf("result is %v, want %v", y.Dtype(), dtype)
				}
				results = append(results, values(t, c, y))
			}
			close32(t, dtype.String(), results[1], results[0], 2*tolerance(dtype))
		}
	})
}

// Chunks that were built together run in their order and give the bits of one chunk; the length runs ahead.
func TestRecurrencesRunAhead(t *testing.T) {
	eachRecurrence(t, func(t *testing.T, r *recurrentCase) {
		eachBackend(t, func(t *testing.T, s *Stream) {
			c := scope(t, s)
			whole, cut := r.state(t, s, Float32), r.state(t, s, Float32)
			want := values(t, c, r.run(c, 0, 9, Float32, []StateSegment{{whole, 0, 9, 0}}))
			var parts []Array
			for at := 0; at < 9; at += 3 {
				parts = append(parts, r.run(c, at, 3, Float32, []StateSegment{{cut, 0, 3, at}}))
			}
			if cut.Len() != 9 {
				t.Fatalf("length %d after building to 9", cut.Len())
			}
			if err := c.Eval(parts[2]); err != nil { // the last needs all before it
				t.Fatal(err)
			}
			sameBits(t, "chunks", values(t, c, c.Concat(0, parts...)), want)
		})
	})
}

func TestStateCopy(t *testing.T) {
	eachRecurrence(t, func(t *testing.T, r *recurrentCase) {
		eachBackend(t, func(t *testing.T, s *Stream) {
			c := scope(t, s)
			state, other := r.state(t, s, Float32), r.state(t, s, Float32)
			first := func(x *State) Array { return r.run(c, 0, 3, Float32, []StateSegment{{x, 0, 3, 0}}) }
			next := func(x *State) Array { return r.run(c, 3, 2, Float32, []StateSegment{{x, 0, 2, 3}}) }
			if err := c.Eval(first(state), first(other)); err != nil {
				t.Fatal(err)
			}
			fork, err := state.Copy()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(fork.Free)
			if fork.Len() != 3 || fork.Bytes() != state.Bytes() {
				t.Errorf("fork holds %d positions in %d bytes, want 3 in %d", fork.Len(), fork.Bytes(), state.Bytes())
			}
			if err := c.Eval(r.run(c, 7, 2, Float32, []StateSegment{{fork, 0, 2, 3}})); err != nil { // another way
				t.Fatal(err)
			}
			got, want := next(state), next(other)
			sameBits(t, "the original after its fork", values(t, c, got), values(t, c, want))
		})
	})
}

func TestSigmoidMul(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		c := scope(t, s)
		x := input(c, 1, 0, 3, 20, Float32)
		for _, gates := range []int{1, 20} {
			gate := input(c, 2, 0, 3, gates, Float32)
			want, factors := values(t, c, x), values(t, c, gate)
			for i := range want {
				want[i] *= float32(1 / (1 + math.Exp(-float64(factors[i*len(factors)/len(want)]))))
			}
			close32(t, "product", values(t, c, c.SigmoidMul(x, gate)), want, 1e-6)
		}
	})
}

func TestRecurrenceErrors(t *testing.T) {
	s := open(t, Options{})
	state := func(rows, cols int, dtype Dtype) *State {
		x, err := s.NewState(rows, cols, dtype)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(x.Free)
		return x
	}
	if _, err := s.NewState(0, 4, Float32); err == nil {
		t.Error("a state without rows was made")
	}
	if _, err := s.NewState(2, 4, Int32); err == nil {
		t.Error("a state of int32 was made")
	}
	held := state(3, 8, Float32)
	conv := func(c *Scope, width int, segments ...StateSegment) Array {
		return c.CausalConv(full(c, 1, Float32, 4, 8), full(c, 1, Float32, width, 8), Array{}, false, segments)
	}
	cases := map[string]struct {
		build func(c *Scope) Array
		want  string
	}{
		"no segments":   {func(c *Scope) Array { return conv(c, 4) }, "no segments"},
		"no state":      {func(c *Scope) Array { return conv(c, 4, StateSegment{nil, 0, 4, 0}) }, "segment 0 has no state"},
		"position":      {func(c *Scope) Array { return conv(c, 4, StateSegment{held, 0, 4, 1}) }, "is at position 1, its state at 0"},
		"rows missing":  {func(c *Scope) Array { return conv(c, 4, StateSegment{held, 0, 3, 0}) }, "segments end at row 3 of 4"},
		"state's shape": {func(c *Scope) Array { return conv(c, 3, StateSegment{held, 0, 4, 0}) }, "want [2,8]"},
		"width":         {func(c *Scope) Array { return conv(c, 1, StateSegment{held, 0, 4, 0}) }, "width 2 or more"},
		"a state twice": {func(c *Scope) Array { return conv(c, 4, StateSegment{held, 0, 2, 0}, StateSegment{held, 2, 2, 0}) }, "share a state"},
		"weight's shape": {func(c *Scope) Array {
			return c.CausalConv(full(c, 1, Float32, 4, 8), full(c, 1, Float32, 4, 7), Array{}, false, nil)
		}, "want float32[4,8]"},
		"dtypes": {func(c *Scope) Array { return c.SigmoidMul(full(c, 1, Float32, 4, 8), full(c, 1, BFloat16, 4, 8)) }, "want one dtype"},
		"gate":   {func(c *Scope) Array { return c.SigmoidMul(full(c, 1, Float32, 4, 8), full(c, 1, Float32, 4, 2)) }, "the gate is float32[4,2]"},
		"groups": {func(c *Scope) Array {
			return c.SSM(full(c, 1, Float32, 1, 8), full(c, 1, Float32, 1, 3), Array{}, Array{}, Array{}, &SSMSpec{Heads: 3, HeadDim: 2, Groups: 2, States: 2, MaxDt: 1}, nil)
		}, "3 heads in 2 groups"},
		"heads": {func(c *Scope) Array {
			return c.GatedDelta(Array{}, Array{}, Array{}, Array{}, Array{}, &GatedDeltaSpec{KeyHeads: 2, ValueHeads: 3, KeyDim: 2, ValueDim: 2}, nil)
		}, "3 value heads over 2 key heads"},
	}
	for name, x := range cases {
		c := s.NewScope()
		x.build(c)
		if err := c.Err(); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", name, err, x.want)
		}
		c.Close()
	}
	if held.Len() != 0 {
		t.Errorf("refused operations moved the state to %d", held.Len())
	}
}

// States count as memory in use.
func TestStateMemory(t *testing.T) {
	s := open(t, Options{})
	before := s.MemoryInUse()
	x, err := s.NewState(10, 20, Float32)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.MemoryInUse() - before; got != x.Bytes() || got != 10*32*4 {
		t.Errorf("%d bytes in use for a state of %d, want 1280", got, x.Bytes())
	}
	if err := s.Close(); err == nil {
		t.Error("the stream closed under an open state")
	}
	x.Free()
}
