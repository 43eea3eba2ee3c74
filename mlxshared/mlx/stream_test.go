package mlx

import (
	"errors"
	"strings"
	"testing"
)

func TestOpenErrors(t *testing.T) {
	tests := []struct {
		o    Options
		want string
	}{
		{Options{}, "threads is 0"},
		{Options{Threads: 1, Device: "tpu"}, `device "tpu"`},
		{Options{Threads: 1, Backend: "fast"}, `backend "fast"`},
		{Options{Threads: 1, ISA: "sse9"}, `instruction set "sse9"`},
		{Options{Threads: 1, Device: DeviceGPU, Backend: BackendKernels}, "gpu"},
	}
	for _, test := range tests {
		s, err := Open(test.o)
		if err == nil {
			t.Errorf("%+v opens: %v", test.o, s.Close())
		} else if !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %q lacks %q", test.o, err, test.want)
		}
	}
}

func TestVersion(t *testing.T) {
	if !strings.HasPrefix(Version(), "0.32.") {
		t.Errorf("MLX is %s", Version())
	}
}

func TestDeviceInfo(t *testing.T) {
	s := open(t, Options{})
	for _, d := range []Device{s.DeviceInfo(), mustDevice(t, DeviceCPU)} {
		if d.Kind != DeviceCPU || d.Name == "" || d.TotalMemory == 0 || d.FreeMemory == 0 || d.FreeMemory > d.TotalMemory {
			t.Errorf("device is %+v", d)
		}
	}
	if _, err := DeviceInfo("tpu"); err == nil {
		t.Error("tpu is a device")
	}
}

func mustDevice(t *testing.T, kind string) Device {
	t.Helper()
	d, err := DeviceInfo(kind)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestCloseRefusesWhileInUse(t *testing.T) {
	s, err := Open(Options{Device: DeviceCPU, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	c := s.NewScope()
	kv, err := s.NewKVCache(1, 4, 4, Float32)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err == nil || !strings.Contains(err.Error(), "1 scopes and 1 caches") {
		t.Errorf("close with a scope and a cache open: %v", err)
	}
	c.Close()
	kv.Free()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := s.NewKVCache(1, 4, 4, Float32); !errors.Is(err, ErrClosed) {
		t.Errorf("cache of a closed stream: %v", err)
	}
	late := s.NewScope()
	defer late.Close()
	if late.Square(late.FromInt32s([]int32{1}, 1)); !errors.Is(late.Err(), ErrClosed) {
		t.Errorf("scope of a closed stream: %v", late.Err())
	}
}

// A stream moves between goroutines, as long as one at a time uses it, and closed ones are reopened.
func TestStreamsOnManyThreads(t *testing.T) {
	for range 20 {
		s, err := Open(Options{Device: DeviceCPU, Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		work := func() error {
			c := s.NewScope()
			defer c.Close()
			a := full(c, 2, Float32, 4)
			return c.Eval(c.Add(a, a), c.Mul(a, a))
		}
		done := make(chan error)
		for range 2 {
			go func() { done <- work() }()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Steps leave nothing behind.
func TestMemoryStaysFlat(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		weights := scope(t, s)
		m, _ := weight(t, weights, 1, 64, 64, Matrix{Format: Affine, Bits: 4, Group: 32}, Float32)
		norm := full(weights, 1, Float32, 64)
		kv := newCache(t, s, cacheSpec, Float32)
		step := func() {
			c := s.NewScope()
			defer c.Close()
			x := c.Embedding(c.FromInt32s([]int32{1, 2}, 2), m, Float32)
			h := c.Linear(c.RMSNorm(x, norm, 1e-5, 0), m, Array{})
			q, k := c.SliceAxis(h, 1, 0, 32), c.SliceAxis(h, 1, 32, 48)
			y := c.Attention(q, k, k, cacheSpec, []Segment{{kv, 0, 2, kv.Len()}})
			if err := c.Eval(y, c.SiluMul(h, x)); err != nil {
				t.Fatal(err)
			}
			if kv.Len() == 64 {
				if err := kv.Truncate(2); err != nil {
					t.Fatal(err)
				}
			}
		}
		round := func() (uint64, int) {
			for range 31 { // from 2 positions to 64 and back to 2
				step()
			}
			return s.MemoryInUse(), LiveArrays()
		}
		step()
		round()
		memory, arrays := round()
		for range 60 {
			round()
		}
		m2, a2 := round()
		if m2 != memory || a2 != arrays {
			t.Errorf("memory went from %d to %d bytes, arrays from %d to %d", memory, m2, arrays, a2)
		}
		if s.PeakMemory() < memory {
			t.Errorf("peak %d under %d in use", s.PeakMemory(), memory)
		}
		s.ResetPeakMemory()
		s.ClearCache()
		s.Trim()
	})
}

func BenchmarkGraphOverhead(b *testing.B) {
	const ops = 450
	for _, test := range []struct {
		name    string
		backend Backend
		op      func(c *Scope, a, x Array) Array
	}{
		{"add", BackendKernels, func(c *Scope, a, x Array) Array { return c.Add(a, x) }},
		{"norm", BackendKernels, func(c *Scope, a, x Array) Array { return c.RMSNorm(a, x, 1e-5, 0) }},
		{"add-mlx", BackendMLX, func(c *Scope, a, x Array) Array { return c.Add(a, x) }},
	} {
		run := func(b *testing.B, eval bool) {
			s := open(b, Options{Backend: test.backend})
			w := scope(b, s)
			x := full(w, 1, Float32, 16)
			if err := w.Eval(x); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				c := s.NewScope()
				a := x
				for range ops {
					a = test.op(c, a, x)
				}
				if eval {
					if err := c.Eval(a); err != nil {
						b.Fatal(err)
					}
				}
				c.Close()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/ops, "ns/graph-op")
		}
		b.Run(test.name+"/build", func(b *testing.B) { run(b, false) })
		b.Run(test.name+"/eval", func(b *testing.B) { run(b, true) })
	}
}
