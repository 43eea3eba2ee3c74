package mlx

import (
	"strings"
	"testing"
)

var cacheSpec = &AttentionSpec{Heads: 2, KVHeads: 1, HeadDim: 16, ValueDim: 16, Scale: 0.25}

// feed appends rows [at, at+n) of fixed random inputs to a cache and returns what they attend to, not evaluated.
func feed(c *Scope, kv *KVCache, at, n int) Array {
	q := c.FromFloat32s(normals(newRand(uint64(1000+at)), n*32), n, 32)
	k := c.FromFloat32s(normals(newRand(uint64(2000+at)), n*16), n, 16)
	v := c.FromFloat32s(normals(newRand(uint64(3000+at)), n*16), n, 16)
	return c.Attention(q, k, v, cacheSpec, []Segment{{kv, 0, n, at}})
}

// The length runs ahead of evaluation, and chunks built together run in their order.
func TestCacheRunsAhead(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		c := scope(t, s)
		step, ahead := newCache(t, s, cacheSpec, Float32), newCache(t, s, cacheSpec, Float32)
		var want, got []Array
		for at := 0; at < 300; at += 30 {
			want = append(want, feed(c, step, at, 30))
			if err := c.Eval(want[len(want)-1]); err != nil {
				t.Fatal(err)
			}
			got = append(got, feed(c, ahead, at, 30))
			if ahead.Len() != at+30 {
				t.Fatalf("length %d after building to %d", ahead.Len(), at+30)
			}
		}
		if err := c.Eval(got[len(got)-1]); err != nil { // the last needs all before it
			t.Fatal(err)
		}
		for i := range got {
			sameBits(t, "chunk", values(t, c, got[i]), values(t, c, want[i]))
		}
	})
}

func TestCacheTruncate(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, keep := range []int{0, 1, 64, 65, 100} {
			c := scope(t, s)
			kv := newCache(t, s, cacheSpec, Float32)
			if err := c.Eval(feed(c, kv, 0, keep+1), feed(c, kv, keep+1, 200)); err != nil {
				t.Fatal(err)
			}
			if err := kv.Truncate(keep + 1); err != nil {
				t.Fatal(err)
			}
			if kv.Len() != keep+1 {
				t.Fatalf("length %d, want %d", kv.Len(), keep+1)
			}
			fresh := newCache(t, s, cacheSpec, Float32)
			want := feed(c, fresh, 0, keep+1)
			want = c.Concat(0, want, feed(c, fresh, keep+1, 5))
			got := feed(c, kv, keep+1, 5)
			if err := c.Eval(want, got); err != nil {
				t.Fatal(err)
			}
			close32(t, "after truncation", values(t, c, got), values(t, c, want)[(keep+1)*32:], 1e-6)
		}
	})
}

// A step that was built and given up leaves a cache that Truncate repairs.
func TestCacheAbandonedStep(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		kv, fresh := newCache(t, s, cacheSpec, Float32), newCache(t, s, cacheSpec, Float32)
		c := scope(t, s)
		if err := c.Eval(feed(c, kv, 0, 10), feed(c, fresh, 0, 10)); err != nil {
			t.Fatal(err)
		}
		lost := s.NewScope()
		feed(lost, kv, 10, 3)
		lost.Close()
		if kv.Len() != 13 {
			t.Fatalf("length %d", kv.Len())
		}
		if err := kv.Truncate(10); err != nil {
			t.Fatal(err)
		}
		got, want := feed(c, kv, 10, 4), feed(c, fresh, 10, 4)
		if err := c.Eval(got, want); err != nil {
			t.Fatal(err)
		}
		sameBits(t, "after the lost step", values(t, c, got), values(t, c, want))
	})
}

func TestCacheShare(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		c := scope(t, s)
		kv, other := newCache(t, s, cacheSpec, Float32), newCache(t, s, cacheSpec, Float32)
		if err := c.Eval(feed(c, kv, 0, 70), feed(c, other, 0, 70)); err != nil {
			t.Fatal(err)
		}
		fork, err := kv.Share(kv.Len())
		if err != nil {
			t.Fatal(err)
		}
		defer fork.Free()
		if fork.Len() != 70 {
			t.Fatalf("fork holds %d", fork.Len())
		}
		// The fork goes another way first; the original must not see it.
		if err := c.Eval(c.Attention(full(c, 1, Float32, 2, 32), full(c, 9, Float32, 2, 16), full(c, 9, Float32, 2, 16), cacheSpec,
			[]Segment{{fork, 0, 2, 70}})); err != nil {
			t.Fatal(err)
		}
		got, want := feed(c, kv, 70, 2), feed(c, other, 70, 2)
		if err := c.Eval(got, want); err != nil {
			t.Fatal(err)
		}
		sameBits(t, "original", values(t, c, got), values(t, c, want))
		if err := fork.Truncate(70); err != nil {
			t.Fatal(err)
		}
		sameBits(t, "fork", values(t, c, feed(c, fork, 70, 2)), values(t, c, want))
	})
}

func TestCacheDropBefore(t *testing.T) {
	window := *cacheSpec
	window.Window = 20
	eachBackend(t, func(t *testing.T, s *Stream) {
		c := scope(t, s)
		kv, whole := newCache(t, s, &window, Float32), newCache(t, s, &window, Float32)
		attend := func(cache *KVCache, at, n int) Array {
			k := c.FromFloat32s(normals(newRand(uint64(at)), n*16), n, 16)
			return c.Attention(full(c, 0.5, Float32, n, 32), k, k, &window, []Segment{{cache, 0, n, at}})
		}
		if err := c.Eval(attend(kv, 0, 600), attend(whole, 0, 600)); err != nil {
			t.Fatal(err)
		}
		before := kv.Bytes()
		if err := kv.DropBefore(580); err != nil {
			t.Fatal(err)
		}
		if kv.Bytes() >= before || kv.Len() != 600 {
			t.Errorf("%d bytes after dropping, %d before, length %d", kv.Bytes(), before, kv.Len())
		}
		got, want := attend(kv, 600, 3), attend(whole, 600, 3)
		if err := c.Eval(got, want); err != nil {
			t.Fatal(err)
		}
		close32(t, "after dropping", values(t, c, got), values(t, c, want), 1e-6)
		if err := kv.Truncate(100); err == nil || !strings.Contains(err.Error(), "were dropped") {
			t.Errorf("truncating into the dropped part: %v", err)
		}
		fork, err := kv.Share(kv.Len())
		if err != nil {
			t.Fatal(err)
		}
		defer fork.Free()
		everything := window
		everything.Window = 0
		k := full(c, 1, Float32, 1, 16)
		c.Attention(full(c, 1, Float32, 1, 32), k, k, &everything, []Segment{{fork, 0, 1, 603}})
		if err := c.Err(); err == nil || !strings.Contains(err.Error(), "sees position 0, its cache dropped") {
			t.Errorf("attending to the dropped part: %v", err)
		}
	})
}

// A layer that shares another's cache attends with its own queries and appends nothing.
func TestCacheShared(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		c := scope(t, s)
		kv := newCache(t, s, cacheSpec, Float32)
		first := feed(c, kv, 0, 8)
		q := c.FromFloat32s(normals(newRand(1000), 8*32), 8, 32) // feed's own
		second := c.Attention(q, Array{}, Array{}, cacheSpec, []Segment{{kv, 0, 8, 0}})
		if err := c.Eval(second); err != nil {
			t.Fatal(err)
		}
		sameBits(t, "shared", values(t, c, second), values(t, c, first))
		if kv.Len() != 8 {
			t.Errorf("length %d", kv.Len())
		}
	})
}

func TestCacheErrors(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		if _, err := s.NewKVCache(0, 4, 4, Float32); err == nil || !strings.Contains(err.Error(), "0 heads") {
			t.Errorf("no heads: %v", err)
		}
		if _, err := s.NewKVCache(1, 4, 4, Int32); err == nil || !strings.Contains(err.Error(), "int32") {
			t.Errorf("int32: %v", err)
		}
		kv := newCache(t, s, cacheSpec, Float32)
		for _, n := range []int{-1, 1} {
			if err := kv.Truncate(n); err == nil || !strings.Contains(err.Error(), "its length 0") {
				t.Errorf("truncate to %d: %v", n, err)
			}
			if err := kv.DropBefore(n); err == nil || !strings.Contains(err.Error(), "its length 0") {
				t.Errorf("drop before %d: %v", n, err)
			}
		}
		kv.Free()
		kv.Free()
		if err := kv.Truncate(0); err == nil {
			t.Error("truncating a freed cache succeeds")
		}
		if _, err := kv.Share(kv.Len()); err == nil {
			t.Error("forking a freed cache succeeds")
		}
		if kv.Len() != 0 || kv.Bytes() != 0 {
			t.Error("a freed cache has a size")
		}
	})
}
