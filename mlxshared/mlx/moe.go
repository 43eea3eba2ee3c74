package mlx

// #include "moe.h"
//
// // Their pointers do not outlive the call, so that arguments stay on the stack.
// #cgo noescape mx_linear_gather
// #cgo nocallback mx_linear_gather
// #cgo noescape mx_route
// #cgo nocallback mx_route
import "C"

// Experts is a stack of matrices of one shape and format, one per expert: a Matrix whose arrays have a leading dimension
// [experts, output features, input features].
type Experts struct{ Matrix }

// Count is the number of experts.
func (e *Experts) Count() int { return e.W.Dim(0) }

// Rows is the number of output features of each expert.
func (e *Experts) Rows() int { return e.W.Dim(1) }

// LinearGather multiplies each row by the matrices of its chosen experts: y[i, j] = x[i] · w[ids[i, j]]ᵀ + bias[ids[i, j]],
// [rows, k, outputs] in x's dtype. x is [rows, inputs], or [rows, k, inputs] where every choice has an input of its own;
// ids int32 [rows, k]; bias [experts, outputs], or the zero Array for none. A row's result does not depend on the rows
// that share its experts.
func (s *Scope) LinearGather(x Array, w *Experts, bias, ids Array) Array {
	m := w.c()
	return s.own(C.mx_linear_gather(s.p, x.p, &m, bias.p, ids.p))
}

// RouteScores is how a router turns logits into the weights of the chosen experts.
type RouteScores uint8

const (
	// RouteSoftmaxChosen takes the largest logits; weights are the softmax over the chosen ones (Mixtral, gpt-oss, Jamba).
	RouteSoftmaxChosen RouteScores = iota
	// RouteSoftmaxAll takes the largest of the softmax over all experts; weights are those probabilities (Qwen MoE).
	RouteSoftmaxAll
	// RouteSigmoid takes the largest of sigmoid(logit) + Bias, by groups if there are any; weights are sigmoid(logit)
	// without the bias (DeepSeek V3, GLM, Nemotron-H; Llama 4 without bias).
	RouteSigmoid
)

// RouteSpec describes a router. All arithmetic is float32.
type RouteSpec struct {
	TopK      int // experts per row
	Scores    RouteScores
	Normalize bool    // divide the weights by their sum + Epsilon; has no effect on RouteSoftmaxChosen or with TopK 1
	Epsilon   float32 // commonly 0 or 1e-20
	Scale     float32 // multiplies the weights at the end; 0 counts as 1
	Bias      Array   // float32 [experts], of RouteSigmoid: joins the choice, not the weights; zero for none

	// Groups > 1 cuts the experts into equal runs of neighbours. A group's score is the sum of its two largest; all but
	// the TopGroups best groups have their scores set to 0, which a negative biased score loses to (as in mlx-lm).
	Groups    int
	TopGroups int

	// HighTies takes the expert with the higher number among equals, else the lower one.
	HighTies bool
}

// Route chooses the experts of each row of logits [rows, experts]: ids int32 [rows, TopK] in descending order of the score
// that chose them, and their weights float32 [rows, TopK].
func (s *Scope) Route(logits Array, r *RouteSpec) (ids, weights Array) {
	scale := r.Scale
	if scale == 0 {
		scale = 1
	}
	spec := C.mx_route_spec{
		top_k: C.int(r.TopK), scores: C.int(r.Scores), normalize: C.bool(r.Normalize), epsilon: C.float(r.Epsilon),
		scale: C.float(scale), groups: C.int(max(r.Groups, 1)), top_groups: C.int(max(r.TopGroups, 1)),
		high_ties: C.bool(r.HighTies), bias: r.Bias.p,
	}
	var second *C.mx_array
	ids = s.own(C.mx_route(s.p, logits.p, &spec, &second))
	return ids, Array{second}
}

// WeightedSum is the sum over j of weights[i, j] · x[i, j], accumulated in float32 in the order of j and rounded once:
// [rows, width] in x's dtype. x is [rows, k, width], weights float32 [rows, k].
func (s *Scope) WeightedSum(x, weights Array) Array {
	return s.own(C.mx_weighted_sum(s.p, x.p, weights.p))
}

// ClampedSwiGLU is gpt-oss's activation: with g = min(gate, limit) and u = clip(up, -limit, limit), g · sigmoid(alpha · g)
// · (u + 1), in float32 and rounded once. gate and up have one shape and dtype.
func (s *Scope) ClampedSwiGLU(gate, up Array, alpha, limit float32) Array {
	return s.own(C.mx_clamped_swiglu(s.p, gate.p, up.p, C.float(alpha), C.float(limit)))
}
