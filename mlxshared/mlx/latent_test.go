package mlx

import (
	"fmt"
	"math"
	"strings"
	"testing"
)

// stack is a random matrix per head, and its values.
func stack(t testing.TB, c *Scope, seed uint64, heads, rows, cols int, m Matrix, dtype Dtype) (*Experts, []float32) {
	t.Helper()
	w, v := weight(t, c, seed, heads*rows, cols, m, dtype)
	shaped := func(a Array) Array {
		if a.IsZero() {
			return a
		}
		return c.Reshape(a, heads, rows, a.Dim(1))
	}
	return &Experts{Matrix{Format: w.Format, Bits: w.Bits, Group: w.Group, W: shaped(w.W), Scales: shaped(w.Scales), Biases: shaped(w.Biases)}}, v
}

func TestMultiLinear(t *testing.T) {
	const heads, out, in, rows = 3, 20, 128, 5
	eachBackend(t, func(t *testing.T, s *Stream) {
		for _, f := range formats {
			for _, dtype := range []Dtype{Float32, BFloat16} {
				t.Run(fmt.Sprint(f.name, " ", dtype), func(t *testing.T) {
					c := scope(t, s)
					w, v := stack(t, c, 1, heads, out, in, f.m, dtype)
					x, values32 := cast(t, c, normals(newRand(2), rows*heads*in), dtype, rows, heads*in)
					var want []float32
					for r := range rows {
						for h := range heads {
							at := (r*heads + h) * in
							want = append(want, naiveLinear(values32[at:at+in], v[h*out*in:(h+1)*out*in], nil, in)...)
						}
					}
					close32(t, "y", values(t, c, c.MultiLinear(x, w)), want, 20*tolerance(dtype))
				})
			}
		}
	})
}

const (
	latentDim, latentValue, indexDim = 24, 16, 12
	latentHeads, indexHeads          = 4, 3
)

var latentSpec = &AttentionSpec{Heads: latentHeads, KVHeads: 1, HeadDim: latentDim, ValueDim: latentValue, Scale: 0.3}

func newLatent(t testing.TB, s *Stream, key, value int, dtype Dtype) *KVCache {
	t.Helper()
	kv, err := s.NewLatentCache(key, value, dtype)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kv.Free)
	return kv
}

// latentRows are the inputs at positions [at, at+n): the same whatever the chunk.
type latentRows struct{ q, k, indexQ, indexK, weights Array }

func rowsAt(c *Scope, at, n int) latentRows {
	part := func(seed uint64, width int) Array {
		all := normals(newRand(seed), 400*width)
		return c.FromFloat32s(all[at*width:(at+n)*width], n, width)
	}
	return latentRows{
		q: part(1, latentHeads*latentDim), k: part(2, latentDim),
		indexQ: part(3, indexHeads*indexDim), indexK: part(4, indexDim), weights: part(5, indexHeads),
	}
}

// A latent cache attends as one that holds its values by themselves.
func TestLatentCacheIsTheKeys(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		c := scope(t, s)
		latent := newLatent(t, s, latentDim, latentValue, Float32)
		both := newCache(t, s, latentSpec, Float32)
		for _, chunk := range [][2]int{{0, 70}, {70, 1}, {71, 200}} {
			at, n := chunk[0], chunk[1]
			r := rowsAt(c, at, n)
			got := values(t, c, c.Attention(r.q, r.k, Array{}, latentSpec, []Segment{{latent, 0, n, at}}))
			want := values(t, c, c.Attention(r.q, r.k, c.SliceAxis(r.k, 1, 0, latentValue), latentSpec, []Segment{{both, 0, n, at}}))
			close32(t, fmt.Sprint("rows from ", at), got, want, 1e-5)
		}
		if latent.Bytes() >= both.Bytes() {
			t.Errorf("%d bytes, no less than the %d of keys and values", latent.Bytes(), both.Bytes())
		}
		copied, err := latent.Share(latent.Len())
		if err != nil {
			t.Fatal(err)
		}
		defer copied.Free()
		if err := copied.Truncate(100); err != nil || copied.Len() != 100 || latent.Len() != 271 {
			t.Errorf("%d and %d positions after a cut of the copy: %v", copied.Len(), latent.Len(), err)
		}
	})
}

// sparseRun feeds length positions in chunks and returns what all rows attend to.
func sparseRun(t *testing.T, s *Stream, length, chunk, topK int) []float32 {
	t.Helper()
	c := scope(t, s)
	kv, keys := newLatent(t, s, latentDim, latentValue, Float32), newLatent(t, s, indexDim, indexDim, Float32)
	var out []float32
	for at := 0; at < length; at += chunk {
		n := min(chunk, length-at)
		r := rowsAt(c, at, n)
		x := &Index{Heads: indexHeads, Dim: indexDim, TopK: topK, Q: r.indexQ, K: r.indexK, Weights: r.weights, Caches: []*KVCache{keys}}
		out = append(out, values(t, c, c.SparseAttention(r.q, r.k, latentSpec, x, []Segment{{kv, 0, n, at}}))...)
	}
	return out
}

// The two back ends pick the same positions, and the kernels' bits do not depend on the chunk.
func TestSparseAttention(t *testing.T) {
	const length, topK = 150, 40
	kernels := open(t, Options{Backend: BackendKernels, Threads: 2})
	whole := sparseRun(t, kernels, length, length, topK)
	for _, chunk := range []int{1, 7, 64} {
		sameBits(t, fmt.Sprint("chunks of ", chunk), sparseRun(t, kernels, length, chunk, topK), whole)
	}
	close32(t, "mlx", sparseRun(t, open(t, Options{Backend: BackendMLX}), length, 50, topK), whole, 1e-4)
	dense := sparseRun(t, kernels, length, length, length)
	sameBits(t, "rows that see no more than they may", whole[:topK*latentHeads*latentValue], dense[:topK*latentHeads*latentValue])
	if d := math.Abs(float64(whole[len(whole)-1] - dense[len(dense)-1])); d < 1e-6 {
		t.Error("the last row attends to everything")
	}
}

func TestLatentFaults(t *testing.T) {
	eachBackend(t, func(t *testing.T, s *Stream) {
		kv, keys := newLatent(t, s, latentDim, latentValue, Float32), newLatent(t, s, indexDim, indexDim, Float32)
		plain := newCache(t, s, latentSpec, Float32)
		for want, f := range map[string]func(c *Scope, r latentRows, x *Index) Array{
			"latent caches take no v": func(c *Scope, r latentRows, _ *Index) Array {
				return c.Attention(r.q, r.k, r.k, latentSpec, []Segment{{kv, 0, 2, 0}})
			},
			"only one of k and v": func(c *Scope, r latentRows, _ *Index) Array {
				return c.Attention(r.q, r.k, Array{}, latentSpec, []Segment{{plain, 0, 2, 0}})
			},
			"wants latent caches": func(c *Scope, r latentRows, x *Index) Array {
				return c.SparseAttention(r.q, r.k, latentSpec, x, []Segment{{plain, 0, 2, 0}})
			},
			"0 caches of the indexer": func(c *Scope, r latentRows, x *Index) Array {
				x.Caches = nil
				return c.SparseAttention(r.q, r.k, latentSpec, x, []Segment{{kv, 0, 2, 0}})
			},
			"takes 0 positions": func(c *Scope, r latentRows, x *Index) Array {
				x.TopK = 0
				return c.SparseAttention(r.q, r.k, latentSpec, x, []Segment{{kv, 0, 2, 0}})
			},
			"the indexer's weights are": func(c *Scope, r latentRows, x *Index) Array {
				x.Weights = r.q
				return c.SparseAttention(r.q, r.k, latentSpec, x, []Segment{{kv, 0, 2, 0}})
			},
			"want rows of 2 heads of 8": func(c *Scope, r latentRows, _ *Index) Array {
				return c.MultiLinear(r.q, &Experts{Matrix{Format: Dense, W: full(c, 1, Float32, 2, 3, 8)}})
			},
		} {
			t.Run(want, func(t *testing.T) {
				c := scope(t, s)
				r := rowsAt(c, 0, 2)
				x := &Index{Heads: indexHeads, Dim: indexDim, TopK: 4, Q: r.indexQ, K: r.indexK, Weights: r.weights, Caches: []*KVCache{keys}}
				f(c, r, x)
				if err := c.Err(); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			})
		}
		if _, err := s.NewLatentCache(8, 9, Float32); err == nil {
			t.Error("values beyond the keys: no error")
		}
	})
}
