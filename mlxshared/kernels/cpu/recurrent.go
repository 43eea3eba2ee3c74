package cpu

/*
#include <stdlib.h>
#include "recurrent.h"

static void go_causal_conv(mk_pool *p, int channels, int width, int silu, const float *weight, const float *bias,
                           const void *x, mk_dtype t, const mk_recurrent_segment *segs, int64_t n, void *y) {
  mk_conv s = {channels, width, silu};
  mk_causal_conv(p, &s, weight, bias, x, t, segs, n, y);
}

static mk_result go_selective_scan(mk_pool *p, int channels, int states, const float *a, const float *skip, const void *x,
                                   const void *dt, const void *b, const void *c, mk_dtype t, const mk_recurrent_segment *segs,
                                   int64_t n, void *y) {
  mk_scan s = {channels, states};
  return mk_selective_scan(p, &s, a, skip, x, dt, b, c, t, segs, n, y);
}

static mk_result go_ssm(mk_pool *p, int heads, int head_dim, int groups, int states, float dt_min, float dt_max, const float *a,
                        const float *skip, const float *dt_bias, const void *xbc, const void *dt, mk_dtype t,
                        const mk_recurrent_segment *segs, int64_t n, void *y) {
  mk_ssm s = {heads, head_dim, groups, states, dt_min, dt_max};
  return mk_ssm_step(p, &s, a, skip, dt_bias, xbc, dt, t, segs, n, y);
}

static mk_result go_gated_delta(mk_pool *p, int key_heads, int value_heads, int key_dim, int value_dim, int channel_gate,
                                float lower_bound, const float *a, const float *gate_bias, const void *qkv, const void *gate,
                                const void *beta, mk_dtype t, const mk_recurrent_segment *segs, int64_t n, void *y) {
  mk_delta s = {key_heads, value_heads, key_dim, value_dim, channel_gate, lower_bound};
  return mk_gated_delta(p, &s, a, gate_bias, qkv, gate, beta, t, segs, n, y);
}
*/
import "C"

import "unsafe"

// State is a layer's state of fixed size: [rows, cols], zero at first, each row padded to sixteen elements.
type State struct{ p unsafe.Pointer }

// NewState makes a state; Free releases it.
func NewState(rows, cols int, t DType) *State {
	return &State{C.calloc(C.mk_state_bytes(C.int64_t(rows), C.int64_t(cols), C.mk_dtype(t)), 1)}
}

// Free releases the state.
func (s *State) Free() { C.free(s.p) }

// StateSegment is one sequence's share of a call: N rows from Row on, which follow on what State holds.
type StateSegment struct {
	State  *State
	Row, N int
}

func stateSegments(segments []StateSegment) (*C.mk_recurrent_segment, C.int64_t) {
	list := make([]C.mk_recurrent_segment, len(segments))
	for i, s := range segments {
		list[i] = C.mk_recurrent_segment{state: s.State.p, row0: C.int64_t(s.Row), n: C.int64_t(s.N)}
	}
	return unsafe.SliceData(list), C.int64_t(len(list))
}

func floats(f []float32) *C.float { return (*C.float)(unsafe.Pointer(unsafe.SliceData(f))) }

// Conv is a depthwise causal convolution.
type Conv struct {
	Channels, Width int
	SiLU            bool
	Weight, Bias    []float32 // [Width, Channels]; [Channels] or nil
}

// CausalConv writes y[rows, Channels]; states are [Width-1, Channels] of type t.
func (p *Pool) CausalConv(c Conv, x []byte, t DType, segments []StateSegment, y []byte) {
	list, n := stateSegments(segments)
	C.go_causal_conv(p.p, C.int(c.Channels), C.int(c.Width), truth(c.SiLU), floats(c.Weight), floats(c.Bias), pointer(x), C.mk_dtype(t), list, n, pointer(y))
}

// Scan is Mamba's selective scan.
type Scan struct {
	Channels, States int
	A, Skip          []float32 // [States, Channels], [Channels]
}

// SelectiveScan writes y[rows, Channels]; states are [States, Channels] of type t.
func (p *Pool) SelectiveScan(s Scan, x, dt, b, c []byte, t DType, segments []StateSegment, y []byte) error {
	list, n := stateSegments(segments)
	return result(C.go_selective_scan(p.p, C.int(s.Channels), C.int(s.States), floats(s.A), floats(s.Skip), pointer(x), pointer(dt), pointer(b), pointer(c), C.mk_dtype(t), list, n, pointer(y)))
}

// SSM is Mamba-2's recurrence.
type SSM struct {
	Heads, HeadDim, Groups, States int
	MinDt, MaxDt                   float32
	A, Skip, DtBias                []float32 // [Heads]
}

// SSM writes y[rows, Heads*HeadDim]; states are [Heads*States, HeadDim] of F32.
func (p *Pool) SSM(s SSM, xbc, dt []byte, t DType, segments []StateSegment, y []byte) error {
	list, n := stateSegments(segments)
	return result(C.go_ssm(p.p, C.int(s.Heads), C.int(s.HeadDim), C.int(s.Groups), C.int(s.States), C.float(s.MinDt), C.float(s.MaxDt),
		floats(s.A), floats(s.Skip), floats(s.DtBias), pointer(xbc), pointer(dt), C.mk_dtype(t), list, n, pointer(y)))
}

// Delta is the gated delta rule.
type Delta struct {
	KeyHeads, ValueHeads, KeyDim, ValueDim int
	ChannelGate                            bool
	LowerBound                             float32
	A, GateBias                            []float32 // [ValueHeads]; as a row of the gate
}

// GatedDelta writes y[rows, ValueHeads*ValueDim]; states are [ValueHeads*KeyDim, ValueDim] of F32.
func (p *Pool) GatedDelta(d Delta, qkv, gate, beta []byte, t DType, segments []StateSegment, y []byte) error {
	list, n := stateSegments(segments)
	return result(C.go_gated_delta(p.p, C.int(d.KeyHeads), C.int(d.ValueHeads), C.int(d.KeyDim), C.int(d.ValueDim), truth(d.ChannelGate), C.float(d.LowerBound),
		floats(d.A), floats(d.GateBias), pointer(qkv), pointer(gate), pointer(beta), C.mk_dtype(t), list, n, pointer(y)))
}

// SigmoidMul writes y = x * sigmoid(gate) over rows of dim elements with gates gates each, dim or 1.
func (p *Pool) SigmoidMul(x, gate []byte, t DType, rows, dim, gates int, y []byte) {
	C.mk_sigmoid_mul(p.p, pointer(x), pointer(gate), C.mk_dtype(t), C.int64_t(rows), C.int64_t(dim), C.int64_t(gates), pointer(y))
}
