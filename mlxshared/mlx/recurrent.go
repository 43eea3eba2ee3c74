package mlx

// #include "state.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_causal_conv
// #cgo nocallback mx_causal_conv
// #cgo noescape mx_selective_scan
// #cgo nocallback mx_selective_scan
// #cgo noescape mx_ssm
// #cgo nocallback mx_ssm
// #cgo noescape mx_gated_delta
// #cgo nocallback mx_gated_delta
import "C"

// The operations below take rows of several sequences, each with a state of its own, and advance the states. Rows of one
// sequence run in the order of their positions, with one formula for prompt and generated tokens.

// StateSegment is one sequence's share of a micro-batch: the rows [Row0, Row0+Rows) are its positions Pos, Pos+1, …
type StateSegment struct {
	State *State
	Row0  int
	Rows  int
	Pos   int // must equal State.Len()
}

// stateSegments views segments for the C side; the buffer is the caller's.
func stateSegments(segments []StateSegment, buffer *[stackSegments]C.mx_state_segment) (*C.mx_state_segment, C.int) {
	list := buffer[:0]
	for _, g := range segments {
		c := C.mx_state_segment{row0: C.int64_t(g.Row0), rows: C.int64_t(g.Rows), pos: C.int64_t(g.Pos)}
		if g.State != nil {
			c.state = g.State.p
		}
		list = append(list, c)
	}
	if len(list) == 0 {
		return nil, 0
	}
	return &list[0], C.int(len(list))
}

// stackSegments is how many segments a call takes without allocating.
const stackSegments = 16

// CausalConv is a depthwise causal convolution of x [rows, channels]: y[r, c] = bias[c] + Σ weight[k, c] · x[r-width+1+k, c],
// then SiLU if silu. weight [width, channels] and bias [channels] (the zero Array for none) are Float32. The states hold the
// last inputs: [width-1, channels] in x's dtype.
func (s *Scope) CausalConv(x, weight, bias Array, silu bool, segments []StateSegment) Array {
	var buffer [stackSegments]C.mx_state_segment
	list, n := stateSegments(segments, &buffer)
	return s.own(C.mx_causal_conv(s.p, x.p, weight.p, bias.p, C.bool(silu), list, n))
}

// SelectiveScan is Mamba's recurrence (Gu and Dao 2023). With d = softplus(dt), channel by channel and for each state s:
// h[s] = exp(d·a[s]) · h[s] + d·x·b[s], and y = Σ h[s]·c[s] + skip·x. x and dt are [rows, channels], b and c [rows, states], of
// one dtype; a [states, channels], which is negative, and skip [channels] are Float32. The states are [states, channels] in
// x's dtype and rounded to it after every row.
func (s *Scope) SelectiveScan(x, dt, b, c, a, skip Array, segments []StateSegment) Array {
	var buffer [stackSegments]C.mx_state_segment
	list, n := stateSegments(segments, &buffer)
	return s.own(C.mx_selective_scan(s.p, x.p, dt.p, b.p, c.p, a.p, skip.p, list, n))
}

// SSMSpec sizes Mamba-2's recurrence.
type SSMSpec struct {
	Heads, HeadDim int
	Groups         int // of neighbouring heads with common b and c
	States         int
	MinDt, MaxDt   float32 // bounds of the time step
}

// SSM is Mamba-2's recurrence (Dao and Gu 2024). With d = softplus(dt + dtBias) within the bounds, head by head and for each
// state s: h[s] = exp(d·a) · h[s] + d·x·b[s], and y = Σ h[s]·c[s] + skip·x. xbc [rows, Heads·HeadDim + 2·Groups·States] holds
// x, b and c beside each other, dt is [rows, Heads] of the same dtype; a, which is negative, skip and dtBias are Float32
// [Heads]. The states are Float32 [Heads·States, HeadDim].
func (s *Scope) SSM(xbc, dt, a, skip, dtBias Array, spec *SSMSpec, segments []StateSegment) Array {
	var buffer [stackSegments]C.mx_state_segment
	list, n := stateSegments(segments, &buffer)
	c := C.mx_ssm_spec{
		heads: C.int(spec.Heads), head_dim: C.int(spec.HeadDim), groups: C.int(spec.Groups), states: C.int(spec.States),
		dt_min: C.float(spec.MinDt), dt_max: C.float(spec.MaxDt),
	}
	return s.own(C.mx_ssm(s.p, xbc.p, dt.p, a.p, skip.p, dtBias.p, &c, list, n))
}

// GatedDeltaSpec describes a gated delta rule.
type GatedDeltaSpec struct {
	KeyHeads, ValueHeads int // ValueHeads is a multiple: value head h reads key head h / (ValueHeads/KeyHeads)
	KeyDim, ValueDim     int
	ChannelGate          bool    // a gate for each element of a key, not one for each head (Kimi's delta attention)
	LowerBound           float32 // negative: the log of the strongest decay; 0 for none
}

// GatedDelta is the gated delta rule (Yang et al. 2024): with queries and keys of unit length, queries also scaled by
// 1/sqrt(KeyDim), S = decay · S; S = S + k ⊗ (sigmoid(beta) · (v - k·S)); y = q·S. decay is exp(-a · softplus(gate +
// gateBias)), or with a lower bound exp(LowerBound · sigmoid(a · (gate + gateBias))). qkv [rows, 2·KeyHeads·KeyDim +
// ValueHeads·ValueDim], gate [rows, gates] and beta [rows, ValueHeads] have one dtype, gates being ValueHeads, times
// KeyDim with ChannelGate; a [ValueHeads], which is positive, and gateBias [gates] are Float32. The states are Float32
// [ValueHeads·KeyDim, ValueDim].
func (s *Scope) GatedDelta(qkv, gate, beta, a, gateBias Array, spec *GatedDeltaSpec, segments []StateSegment) Array {
	var buffer [stackSegments]C.mx_state_segment
	list, n := stateSegments(segments, &buffer)
	c := C.mx_delta_spec{
		key_heads: C.int(spec.KeyHeads), value_heads: C.int(spec.ValueHeads), key_dim: C.int(spec.KeyDim), value_dim: C.int(spec.ValueDim),
		channel_gate: C.bool(spec.ChannelGate), lower_bound: C.float(spec.LowerBound),
	}
	return s.own(C.mx_gated_delta(s.p, qkv.p, gate.p, beta.p, a.p, gateBias.p, &c, list, n))
}

// SigmoidMul is x [rows, width] · sigmoid(gate), with a gate for each element or, if gate is [rows, 1], for each row.
func (s *Scope) SigmoidMul(x, gate Array) Array { return s.own(C.mx_sigmoid_mul(s.p, x.p, gate.p)) }
