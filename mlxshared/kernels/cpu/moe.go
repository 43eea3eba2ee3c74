package cpu

/*
#include "moe.h"

static mk_result go_linear_gather(mk_pool *p, mk_format f, mk_dtype t, int bits, int group, int64_t rows, int64_t cols,
                                  const void *data, const void *scales, const void *biases, int64_t experts, const void *bias,
                                  mk_dtype bias_dtype, const void *x, mk_dtype xt, int per_choice, const int32_t *ids, int64_t m,
                                  int k, void *y) {
  mk_matrix w = {f, t, bits, group, rows, cols, data, scales, biases};
  return mk_linear_gather(p, &w, experts, bias, bias_dtype, x, xt, per_choice, ids, m, k, y);
}

static mk_result go_route(mk_pool *p, const void *logits, mk_dtype t, int experts, int top_k, int scores, int normalize,
                          float epsilon, float scale, const float *bias, int groups, int top_groups, int high_ties, int64_t rows,
                          int32_t *ids, float *weights) {
  mk_route_spec s = {experts, top_k, (mk_route_scores)scores, normalize, epsilon, scale, bias, groups, top_groups, high_ties};
  return mk_route(p, logits, t, &s, rows, ids, weights);
}
*/
import "C"

import "unsafe"

// LinearGather writes y[r, j, w.Rows] = x . expert(ids[r, j])^T + bias. w describes one matrix and holds the data of all
// experts; x is [len(ids)/k, w.Cols], or [len(ids)/k, k, w.Cols] if perChoice; bias [experts, w.Rows] may be nil.
func (p *Pool) LinearGather(w *Matrix, experts int, bias []byte, biasType DType, x []byte, xt DType, perChoice bool, ids []int32, k int, y []byte) error {
	return result(C.go_linear_gather(p.p, C.mk_format(w.Format), C.mk_dtype(w.DType), C.int(w.Bits), C.int(w.Group), C.int64_t(w.Rows),
		C.int64_t(w.Cols), pointer(w.Data), pointer(w.Scales), pointer(w.Biases), C.int64_t(experts), pointer(bias),
		C.mk_dtype(biasType), pointer(x), C.mk_dtype(xt), truth(perChoice), (*C.int32_t)(unsafe.Pointer(unsafe.SliceData(ids))),
		C.int64_t(len(ids)/k), C.int(k), pointer(y)))
}

// RouteScores says what a router's weights are.
type RouteScores int

// The ways of mk_route_scores.
const (
	RouteSoftmaxChosen RouteScores = C.MK_ROUTE_SOFTMAX_CHOSEN
	RouteSoftmaxAll    RouteScores = C.MK_ROUTE_SOFTMAX_ALL
	RouteSigmoid       RouteScores = C.MK_ROUTE_SIGMOID
)

// Router describes a router.
type Router struct {
	Experts, TopK     int
	Scores            RouteScores
	Normalize         bool
	Epsilon, Scale    float32
	Bias              []float32 // per expert, or nil
	Groups, TopGroups int
	HighTies          bool
}

// Route writes the chosen experts of each row of logits and their weights, both [rows, TopK].
func (p *Pool) Route(r Router, logits []byte, t DType, rows int, ids []int32, weights []float32) error {
	return result(C.go_route(p.p, pointer(logits), C.mk_dtype(t), C.int(r.Experts), C.int(r.TopK), C.int(r.Scores), truth(r.Normalize),
		C.float(r.Epsilon), C.float(r.Scale), (*C.float)(unsafe.Pointer(unsafe.SliceData(r.Bias))), C.int(r.Groups),
		C.int(r.TopGroups), truth(r.HighTies), C.int64_t(rows), (*C.int32_t)(unsafe.Pointer(unsafe.SliceData(ids))),
		(*C.float)(unsafe.Pointer(unsafe.SliceData(weights)))))
}

// WeightedSum writes y[rows, dim], the sum over k of weights[rows, k] * x[rows, k, dim].
func (p *Pool) WeightedSum(x []byte, t DType, weights []float32, rows, k, dim int, y []byte) {
	C.mk_weighted_sum(p.p, pointer(x), C.mk_dtype(t), (*C.float)(unsafe.Pointer(unsafe.SliceData(weights))),
		C.int64_t(rows), C.int(k), C.int64_t(dim), pointer(y))
}

// ClampedSwiGLU writes y = g * sigmoid(alpha*g) * (u+1) over n elements, with g = min(gate, limit) and u = up within limit.
func (p *Pool) ClampedSwiGLU(gate, up []byte, t DType, alpha, limit float32, n int, y []byte) {
	C.mk_clamped_swiglu(p.p, pointer(gate), pointer(up), C.mk_dtype(t), C.float(alpha), C.float(limit), C.int64_t(n), pointer(y))
}

// ChunkedAttention is Attention over the positions of each row's own chunk.
func (p *Pool) ChunkedAttention(heads int, scale float32, chunk int, q []byte, t DType, segments []Segment, y []byte) {
	segs := make([]C.mk_segment, len(segments))
	for i, s := range segments {
		segs[i] = C.mk_segment{kv: s.KV.kv, row0: C.int64_t(s.Row), n: C.int64_t(s.N), pos: C.int64_t(s.Pos)}
	}
	C.mk_chunked_attention(p.p, pointer(q), C.mk_dtype(t), C.int(heads), C.float(scale), C.int64_t(chunk),
		unsafe.SliceData(segs), C.int64_t(len(segs)), pointer(y))
}

func truth(b bool) C.int {
	if b {
		return 1
	}
	return 0
}
