package cpu

/*
#include "kernels.h"

static mk_result go_multi_linear(mk_pool *p, mk_format f, mk_dtype t, int bits, int group, int64_t rows, int64_t cols,
                                 const void *data, const void *scales, const void *biases, int heads, const void *x,
                                 mk_dtype xt, void *y, int64_t m) {
  mk_matrix w = {f, t, bits, group, rows, cols, data, scales, biases};
  return mk_multi_linear(p, &w, heads, x, xt, y, m);
}

static mk_result go_sparse_attention(mk_pool *p, const void *q, mk_dtype t, int heads, float scale, const mk_segment *segs,
                                     int64_t nsegs, int index_heads, int index_dim, int64_t top_k, const void *index_q,
                                     const float *weights, const mk_kv *const *keys, void *y) {
  mk_indexer indexer = {index_heads, index_dim, top_k, index_q, weights, keys};
  return mk_sparse_attention(p, q, t, heads, scale, segs, nsegs, &indexer, y);
}
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// NewLatentKV makes an empty KV of one head whose values are the first vDim elements of its keys; Append ignores values.
func NewLatentKV(kDim, vDim int, t DType, held *Held) (*KV, error) {
	kv := C.mk_kv_new_latent(C.int(kDim), C.int(vDim), C.mk_dtype(t), held.pointer())
	if kv == nil {
		return nil, fmt.Errorf("cpu kernels: no latent kv of dims %d and %d", kDim, vDim)
	}
	return &KV{kv: kv, k: kDim, v: vDim, dtype: t, latent: true}, nil
}

// MultiLinear writes y[rows, heads, w.Rows/heads] = x[rows, heads, w.Cols] . w^T, head by head.
func (p *Pool) MultiLinear(w *Matrix, heads int, x []byte, xt DType, y []byte, rows int) error {
	return result(C.go_multi_linear(p.p, C.mk_format(w.Format), C.mk_dtype(w.DType), C.int(w.Bits), C.int(w.Group), C.int64_t(w.Rows),
		C.int64_t(w.Cols), pointer(w.Data), pointer(w.Scales), pointer(w.Biases), C.int(heads), pointer(x), C.mk_dtype(xt),
		pointer(y), C.int64_t(rows)))
}

// Indexer picks the positions that a row attends to.
type Indexer struct {
	Heads, Dim int
	TopK       int
	Q          []byte    // [rows, Heads, Dim] of the attention's type
	Weights    []float32 // [rows, Heads]
	Keys       []*KV     // per segment, latent
}

// SparseAttention writes y[rows, heads, vDim] over latent KVs, each row over the positions that the indexer picks.
func (p *Pool) SparseAttention(heads int, scale float32, q []byte, t DType, segments []Segment, x Indexer, y []byte) error {
	segs := make([]C.mk_segment, len(segments))
	keys := make([]*C.mk_kv, len(segments))
	for i, s := range segments {
		segs[i] = C.mk_segment{kv: s.KV.kv, row0: C.int64_t(s.Row), n: C.int64_t(s.N), pos: C.int64_t(s.Pos)}
		keys[i] = x.Keys[i].kv
	}
	return result(C.go_sparse_attention(p.p, pointer(q), C.mk_dtype(t), C.int(heads), C.float(scale), unsafe.SliceData(segs),
		C.int64_t(len(segs)), C.int(x.Heads), C.int(x.Dim), C.int64_t(x.TopK), pointer(x.Q),
		(*C.float)(unsafe.Pointer(unsafe.SliceData(x.Weights))), unsafe.SliceData(keys), pointer(y)))
}
