package mlx

import (
	"bytes"
	"errors"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

// What a cache holds can be read and makes the same cache, also on the other back end; what two share is held once.
func TestCacheRead(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		c := scope(t, s)
		kv := newCache(t, s, cacheSpec, Float32)
		if err := c.Eval(feed(c, kv, 0, 300)); err != nil {
			t.Fatal(err)
		}
		k, v := kv.RowBytes()
		keys, values := make([]byte, 200*k), make([]byte, 200*v)
		if err := kv.Read(100, 200, keys, values); err != nil {
			t.Fatal(err)
		}
		only := make([]byte, len(values))
		if err := kv.Read(100, 200, nil, only); err != nil || !bytes.Equal(only, values) {
			t.Errorf("values alone: %v", err)
		}
		copied := newCache(t, s, cacheSpec, Float32)
		if err := copied.Begin(100); err != nil {
			t.Fatal(err)
		}
		if err := copied.Append(200, keys, values); err != nil {
			t.Fatal(err)
		}
		again := make([]byte, len(keys))
		if err := copied.Read(100, 200, again, nil); err != nil || !bytes.Equal(again, keys) || copied.Len() != 300 || copied.First() != 100 {
			t.Errorf("the copy holds [%d, %d), other keys (%v)", copied.First(), copied.Len(), err)
		}
		for _, r := range [][2]int{{99, 1}, {300, 1}, {100, -1}} {
			if err := copied.Read(r[0], r[1], make([]byte, k*max(r[1], 0)), nil); err == nil {
				t.Errorf("reading %d positions from %d: no error", r[1], r[0])
			}
		}
		if err := copied.Append(1, keys[:k-1], values[:v]); err == nil {
			t.Error("a byte too few is appended")
		}

		before := s.HeldMemory()
		shared, err := kv.Share(130)
		if err != nil {
			t.Fatal(err)
		}
		defer shared.Free()
		if shared.Len() != 130 || s.HeldMemory() != before || shared.Owed() == 0 {
			t.Errorf("%d positions shared; %d bytes held became %d; it owes %d", shared.Len(), before, s.HeldMemory(), shared.Owed())
		}
		if err := c.Eval(feed(c, shared, 130, 1)); err != nil {
			t.Fatal(err)
		}
		if shared.Owed() != 0 || s.HeldMemory() <= before {
			t.Errorf("after a write it owes %d; %d bytes held became %d", shared.Owed(), before, s.HeldMemory())
		}
	})
}

// Whatever lacks memory says so by its kind.
func TestNoMemory(t *testing.T) {
	defer cpu.FailAllocation(0)
	s := open(t, Options{Backend: BackendKernels})
	c := scope(t, s)
	kv := newCache(t, s, cacheSpec, Float32)
	if err := c.Eval(feed(c, kv, 0, 10)); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func() error{
		"scope": func() error { c := s.NewScope(); defer c.Close(); return c.Err() },
		"array": func() error {
			c := s.NewScope()
			defer c.Close()
			cpu.FailAllocation(1)
			c.FromInt32s([]int32{1}, 1)
			return c.Err()
		},
		"cache":   func() error { kv, err := s.NewKVCache(1, 16, 16, Float32); kv.orNothing(); return err },
		"sharing": func() error { kv, err := kv.Share(5); kv.orNothing(); return err },
		"state":   func() error { _, err := s.NewState(2, 2, Float32); return err },
	} {
		cpu.FailAllocation(1)
		err := f()
		var op *OpError
		if !IsNoMemory(err) {
			t.Errorf("%s: %v", name, err)
		} else if errors.As(err, &op) && op.Kind != KindNoMemory {
			t.Errorf("%s: kind %v", name, op.Kind)
		}
		cpu.FailAllocation(0)
	}
	if err := c.Eval(feed(c, kv, 10, 1)); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

func (c *KVCache) orNothing() {
	if c != nil {
		c.Free()
	}
}
