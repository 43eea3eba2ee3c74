package cpu_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
)

// kvCase is a kind of cache and the rows that go into it.
type kvCase struct {
	name              string
	heads, kDim, vDim int
	dtype             cpu.DType
	latent            bool
}

var kvCases = []kvCase{
	{"float32", 2, 20, 16, cpu.F32, false},
	{"bfloat16", 3, 16, 40, cpu.BF16, false},
	{"one element", 1, 1, 1, cpu.F16, false},
	{"latent", 1, 20, 8, cpu.BF16, true},
}

func eachKV(t *testing.T, f func(t *testing.T, c *kvCase)) {
	for i := range kvCases {
		t.Run(kvCases[i].name, func(t *testing.T) { f(t, &kvCases[i]) })
	}
}

func (c *kvCase) make(t *testing.T, held *cpu.Held) *cpu.KV {
	t.Helper()
	make := func() (*cpu.KV, error) { return cpu.NewKV(c.heads, c.kDim, c.vDim, c.dtype, held) }
	if c.latent {
		make = func() (*cpu.KV, error) { return cpu.NewLatentKV(c.kDim, c.vDim, c.dtype, held) }
	}
	kv, err := make()
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

// rows are the keys and values of n positions, different for each seed.
func (c *kvCase) rows(seed string, n int) (keys, values []byte) {
	r := source(seed)
	keys = encode(c.dtype, normals(r, n*c.heads*c.kDim, 1))
	if !c.latent {
		values = encode(c.dtype, normals(r, n*c.heads*c.vDim, 1))
	}
	return keys, values
}

func (c *kvCase) add(t *testing.T, kv *cpu.KV, seed string, n int) (keys, values []byte) {
	t.Helper()
	keys, values = c.rows(seed, n)
	if err := kv.Append(kv.Len(), keys, values, n); err != nil {
		t.Fatal(err)
	}
	return keys, values
}

func holds(t *testing.T, what string, kv *cpu.KV, pos, n int, keys, values []byte) {
	t.Helper()
	k, v, err := kv.Read(pos, n)
	if err != nil || !bytes.Equal(k, keys) || !bytes.Equal(v, values) {
		t.Errorf("%s: positions [%d, %d) are not what went in (%v)", what, pos, pos+n, err)
	}
}

// What goes into a cache comes out again, whatever the pieces, and a cache made of it is the same.
func TestKVRead(t *testing.T) {
	eachKV(t, func(t *testing.T, c *kvCase) {
		kv := c.make(t, nil)
		defer kv.Free()
		keys, values := c.add(t, kv, "read", 300)
		k, v := len(keys)/300, len(values)/300
		for _, r := range [][2]int{{0, 300}, {0, 0}, {63, 2}, {128, 64}, {299, 1}, {300, 0}} {
			holds(t, "read", kv, r[0], r[1], keys[r[0]*k:(r[0]+r[1])*k], values[r[0]*v:(r[0]+r[1])*v])
		}
		kv.DropBefore(130)
		for _, r := range [][2]int{{127, 1}, {299, 2}, {-1, 1}, {200, -1}, {301, 0}} {
			if _, _, err := kv.Read(r[0], r[1]); !errors.Is(err, cpu.ErrPosition) {
				t.Errorf("reading %d positions from %d of [128, 300): %v", r[1], r[0], err)
			}
		}
		for _, first := range []int{0, 64, 130, 190} {
			other := c.make(t, nil)
			if err := other.Begin(first); err != nil || other.Len() != first || other.First() != first || other.Bytes() != 0 {
				t.Fatalf("begin at %d: %v, [%d, %d) in %d bytes", first, err, other.First(), other.Len(), other.Bytes())
			}
			if err := other.Append(first, keys[first*k:], values[first*v:], 300-first); err != nil {
				t.Fatal(err)
			}
			holds(t, fmt.Sprint("from ", first), other, first, 300-first, keys[first*k:], values[first*v:])
			if err := other.Begin(first); !errors.Is(err, cpu.ErrPosition) {
				t.Errorf("begin in a full cache: %v", err)
			}
			other.DropBefore(256)
			holds(t, "dropped", other, 256, 44, keys[256*k:], values[256*v:])
			other.Free()
		}
	})
}

// A cache that shares the first positions of another, at every kind of position: memory counts once, the last, partial
// block is copied on the first write, and neither sees what the other does.
func TestKVShare(t *testing.T) {
	const length = 200
	eachKV(t, func(t *testing.T, c *kvCase) {
		one := c.make(t, nil)
		c.add(t, one, "size", 1)
		block := one.Bytes()
		one.Free()
		for _, keep := range []int{0, 1, 63, 64, 65, 128, 199, 200} {
			held := cpu.NewHeld()
			kv := c.make(t, held)
			keys, values := c.add(t, kv, "share", length)
			k, v := len(keys)/length, len(values)/length
			expect := func(when string, blocks int) {
				t.Helper()
				if held.Bytes() != blocks*block {
					t.Errorf("keep %d, %s: %d bytes live, want %d blocks of %d", keep, when, held.Bytes(), blocks, block)
				}
			}
			other, err := kv.Share(keep)
			if err != nil {
				t.Fatal(err)
			}
			partial := 0
			if keep%cpu.BlockPositions != 0 {
				partial = 1
			}
			expect("shared", 4)
			if other.Len() != keep || other.Bytes() != (keep+63)/64*block || other.Owed() != partial*block {
				t.Errorf("keep %d: %d positions in %d bytes, owes %d", keep, other.Len(), other.Bytes(), other.Owed())
			}
			holds(t, "shared", other, 0, keep, keys[:keep*k], values[:keep*v])
			more, moreValues := c.add(t, other, "more", 1)
			expect("written", 4+1)
			if other.Owed() != 0 {
				t.Errorf("keep %d: owes %d after a write", keep, other.Owed())
			}
			holds(t, "its own", other, keep, 1, more, moreValues)
			holds(t, "before that", other, 0, keep, keys[:keep*k], values[:keep*v])
			holds(t, "the first", kv, 0, length, keys, values)
			c.add(t, kv, "first goes on", 3)
			expect("both go on", 4+1)
			kv.Truncate(10)
			c.add(t, kv, "first goes back", 1)
			holds(t, "after the first went back", other, 0, keep, keys[:keep*k], values[:keep*v])
			kv.Free()
			expect("the first gone", other.Bytes()/block)
			other.Free()
			expect("both gone", 0)
			held.Free()
		}
		kv := c.make(t, nil)
		defer kv.Free()
		c.add(t, kv, "refused", 5)
		for _, keep := range []int{-1, 6} {
			if other, err := kv.Share(keep); err == nil {
				other.Free()
				t.Errorf("sharing %d of 5 positions: no error", keep)
			}
		}
	})
}

// An append or a share that lacks memory, at every allocation of it, changes nothing.
func TestKVNoMemory(t *testing.T) {
	defer cpu.FailAllocation(0)
	eachKV(t, func(t *testing.T, c *kvCase) {
		held := cpu.NewHeld()
		defer held.Free()
		kv := c.make(t, held)
		defer kv.Free()
		keys, values := c.add(t, kv, "before", 100)
		other, err := kv.Share(100)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Free()
		before := held.Bytes()
		more, moreValues := c.rows("more", 200)
		failed := 0
		for n := 1; ; n++ {
			cpu.FailAllocation(n)
			err := other.Append(100, more, moreValues, 200)
			if cpu.FailAllocation(0) > 0 { // the append was through before
				if err != nil {
					t.Fatal(err)
				}
				break
			}
			var missing cpu.NoMemoryError
			if !errors.As(err, &missing) || missing < 1 {
				t.Fatalf("allocation %d failed: %v", n, err)
			}
			if other.Len() != 100 || held.Bytes() != before {
				t.Errorf("allocation %d failed: %d positions, %d bytes live, %d before", n, other.Len(), held.Bytes(), before)
			}
			holds(t, "after a failure", other, 0, 100, keys, values)
			failed++
		}
		if failed != 4 { // the shared block and three more
			t.Errorf("%d allocations failed, want 4", failed)
		}
		holds(t, "at last", other, 100, 200, more, moreValues)
		cpu.FailAllocation(1)
		if kv, err := kv.Share(100); err == nil {
			kv.Free()
			t.Error("sharing without memory: no error")
		}
	})
}

// An operation that lacks working memory says so, whichever thread it was, and runs once there is some.
func TestScratchNoMemory(t *testing.T) {
	defer cpu.FailAllocation(0)
	const rows, cols, out = 64, 256, 512
	r := source("scratch")
	w := &cpu.Matrix{Format: cpu.Dense, DType: cpu.BF16, Rows: out, Cols: cols, Data: encode(cpu.BF16, normals(r, out*cols, 1))}
	x := encode(cpu.BF16, normals(r, rows*cols, 1))
	for _, threads := range []int{1, 3} {
		p, err := cpu.NewPool(threads, cpu.Auto)
		if err != nil {
			t.Fatal(err)
		}
		want := make([]byte, rows*out*2)
		if err := p.Linear(w, nil, cpu.F32, x, cpu.BF16, want, rows); err != nil {
			t.Fatal(err)
		}
		if p.Scratch() < rows*cols*4 {
			t.Errorf("%d bytes of working memory, less than the widened input", p.Scratch())
		}
		failed := 0
		for n := 1; ; n++ {
			if p.Release(); p.Scratch() != 0 {
				t.Fatalf("%d bytes after release", p.Scratch())
			}
			y := make([]byte, len(want))
			cpu.FailAllocation(n)
			err := p.Linear(w, nil, cpu.F32, x, cpu.BF16, y, rows)
			if cpu.FailAllocation(0) > 0 {
				if err != nil {
					t.Fatal(err)
				}
				equal(t, "at last", cpu.BF16, y, want)
				break
			}
			var missing cpu.NoMemoryError
			if !errors.As(err, &missing) || missing < 1 {
				t.Fatalf("%d threads, allocation %d failed: %v", threads, n, err)
			}
			failed++
		}
		if failed < 1 {
			t.Error("no allocation failed")
		}
		p.Free()
	}
}
