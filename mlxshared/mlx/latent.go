package mlx

// #include "latent.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_kv_new_latent
// #cgo nocallback mx_kv_new_latent
// #cgo noescape mx_multi_linear
// #cgo nocallback mx_multi_linear
// #cgo noescape mx_sparse_attention
// #cgo nocallback mx_sparse_attention
import "C"

import "fmt"

// NewLatentCache makes an empty cache of one head with keys of kDim elements of dtype whose values are the first vDim
// elements of the keys and take no memory: the compressed keys and values of multi-head latent attention (DeepSeek-V2,
// 2024). Attention takes no v with it.
func (s *Stream) NewLatentCache(kDim, vDim int, dtype Dtype) (*KVCache, error) {
	var failure C.mx_failure
	p := C.mx_kv_new_latent(s.p, C.int(kDim), C.int(vDim), C.int(dtype), &failure)
	if p == nil {
		return nil, fmt.Errorf("mlx: new latent cache of key %d, value %d, %s: %w", kDim, vDim, dtype, failed(&failure))
	}
	return &KVCache{p: p, stream: s, keys: kDim * dtype.Size()}, nil
}

// MultiLinear multiplies each head of x [rows, heads*cols] by its own matrix of w [heads, outputs, cols], transposed:
// [rows, heads*outputs] in x's dtype.
func (s *Scope) MultiLinear(x Array, w *Experts) Array {
	m := w.c()
	return s.own(C.mx_multi_linear(s.p, x.p, &m))
}

// Index picks the positions that a row attends to (DeepSeek-V3.2's lightning indexer, 2025). Position p scores
// Σ_h Weights[h] · max(0, Q[h] · key[p]), in float32; the TopK largest are taken, of equals the later positions. A row that
// sees no more than TopK positions takes them all.
type Index struct {
	Heads, Dim int
	TopK       int
	Q          Array      // [rows, Heads*Dim] in the attention's dtype
	K          Array      // [rows, Dim]: appended to Caches
	Weights    Array      // float32 [rows, Heads]
	Caches     []*KVCache // per segment: latent, of key and value Dim
}

// SparseAttention is Attention over latent caches, with each row over the positions that the index picks. It appends
// k [rows, HeadDim] to the segments' caches and x.K to the index's.
func (s *Scope) SparseAttention(q, k Array, spec *AttentionSpec, x *Index, segments []Segment) Array {
	first, n := s.segments(segments)
	kvs := make([]*C.mx_kv, len(segments))
	for i, c := range x.Caches {
		kvs[i] = c.p
	}
	if n == 0 || len(x.Caches) != len(segments) {
		return s.fail("sparse_attention", "", "%d caches of the indexer for %d segments", len(x.Caches), len(segments))
	}
	c, index := spec.c(), C.mx_index{heads: C.int(x.Heads), dim: C.int(x.Dim), top_k: C.int64_t(x.TopK), q: x.Q.p, k: x.K.p, weights: x.Weights.p}
	return s.own(C.mx_sparse_attention(s.p, q.p, k.p, &c, &index, first, &kvs[0], n))
}
