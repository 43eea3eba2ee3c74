package mlx

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// open makes a CPU stream that the test's end closes, and checks that the test freed its arrays.
func open(t testing.TB, o Options) *Stream {
	t.Helper()
	if o.Threads == 0 {
		o.Threads = 1
	}
	o.Device = DeviceCPU
	before := LiveArrays()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if n := LiveArrays(); n != before {
			t.Errorf("%d arrays were not freed", n-before)
		}
	})
	return s
}

// eachBackend runs f on both back ends.
func eachBackend(t *testing.T, f func(t *testing.T, s *Stream)) {
	for _, b := range []Backend{BackendKernels, BackendMLX} {
		t.Run(string(b), func(t *testing.T) { f(t, open(t, Options{Backend: b, Threads: 2})) })
	}
}

// scope makes a scope that the test's end closes.
func scope(t testing.TB, s *Stream) *Scope {
	t.Helper()
	c := s.NewScope()
	t.Cleanup(c.Close)
	return c
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }

func normals(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}

// full makes an array of one value.
func full(c *Scope, v float32, dtype Dtype, shape ...int) Array {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return c.AsType(c.FromFloat32s(slices.Repeat([]float32{v}, n), shape...), dtype)
}

// values evaluates a as float32.
func values(t testing.TB, c *Scope, a Array) []float32 {
	t.Helper()
	v, err := c.Float32s(a)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// close32 compares within tol, absolute and relative to want.
func close32(t testing.TB, what string, got, want []float32, tol float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, want %d", what, len(got), len(want))
	}
	for i := range got {
		g, w := float64(got[i]), float64(want[i])
		if g == w {
			continue
		}
		if d := math.Abs(g - w); !(d <= tol*(1+math.Abs(w))) {
			t.Fatalf("%s: value %d is %g, want %g", what, i, g, w)
		}
	}
}

func sameBits(t testing.TB, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, want %d", what, len(got), len(want))
	}
	for i := range got {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%s: value %d is %g, want the same bits as %g", what, i, got[i], want[i])
		}
	}
}

func equalInts(a, b []int) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// tolerance is what one rounding to dtype may cost, some times over.
func tolerance(d Dtype) float64 {
	switch d {
	case Float16:
		return 3e-3
	case BFloat16:
		return 2.5e-2
	}
	return 2e-5
}

// cast makes an array of v rounded to dtype, and the rounded values.
func cast(t testing.TB, c *Scope, v []float32, dtype Dtype, shape ...int) (Array, []float32) {
	t.Helper()
	a := c.AsType(c.FromFloat32s(v, shape...), dtype)
	return a, values(t, c, a)
}
