package nn

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// SwitchLinear is a linear layer per expert.
type SwitchLinear struct {
	weight *mlx.Experts
	bias   mlx.Array // zero without bias
}

// NewSwitchLinear loads <path>.weight [experts, out, in], plain or packed, and <path>.bias [experts, out]. Checkpoints with
// one tensor per expert load through the family's weights.Names.
func NewSwitchLinear(b *Builder, path string, experts, in, out int, bias bool) *SwitchLinear {
	l := &SwitchLinear{weight: b.Experts(path, experts, out, in)}
	if bias {
		l.bias = b.Tensor(path+".bias", experts, out)
	}
	return l
}

// Forward maps [rows, in] or [rows, k, in] by the experts ids [rows, k] to [rows, k, out].
func (l *SwitchLinear) Forward(p *Pass, x, ids mlx.Array) mlx.Array {
	return p.LinearGather(x, l.weight, l.bias, ids)
}

// SwitchGLU is a gated MLP per expert: down(activation(gate(x), up(x))).
type SwitchGLU struct {
	gate, up, down *SwitchLinear
	activation     Activation
}

// NewSwitchGLU loads gate_proj, up_proj and down_proj under path.
func NewSwitchGLU(b *Builder, path string, experts, width, hidden int, bias bool, activation Activation) *SwitchGLU {
	return &SwitchGLU{
		gate:       NewSwitchLinear(b, path+".gate_proj", experts, width, hidden, bias),
		up:         NewSwitchLinear(b, path+".up_proj", experts, width, hidden, bias),
		down:       NewSwitchLinear(b, path+".down_proj", experts, hidden, width, bias),
		activation: activation,
	}
}

// Forward maps [rows, width] by the experts ids [rows, k] to [rows, k, width].
func (s *SwitchGLU) Forward(p *Pass, x, ids mlx.Array) mlx.Array {
	return s.down.Forward(p, s.activation(p, s.gate.Forward(p, x, ids), s.up.Forward(p, x, ids)), ids)
}

// Router chooses the experts of each row.
type Router struct {
	proj *Linear
	spec mlx.RouteSpec
}

// NewRouter loads <path>.weight [experts, width], plain or packed, and <path>.bias [experts].
func NewRouter(b *Builder, path string, experts, width int, bias bool, spec mlx.RouteSpec) *Router {
	return &Router{proj: NewLinear(b, path, width, experts, bias), spec: spec}
}

// NewCorrectedRouter is the router of DeepSeek V3 and its kin: <path>.weight [experts, width], which no conversion packs,
// and <path>.e_score_correction_bias [experts], which stays float32.
func NewCorrectedRouter(b *Builder, path string, experts, width int, spec mlx.RouteSpec) *Router {
	r := &Router{proj: &Linear{weight: b.DenseMatrix(path, experts, width)}, spec: spec}
	r.spec.Scores = mlx.RouteSigmoid
	r.spec.Bias = b.StoredFloat32(path+".e_score_correction_bias", experts)
	return r
}

// ReadCorrectedRoute reads the keys that name a corrected router in DeepSeek V3 and its kin.
func ReadCorrectedRoute(c *config.Object, experts int) mlx.RouteSpec {
	r := mlx.RouteSpec{
		TopK: c.Size("num_experts_per_tok"), Scores: mlx.RouteSigmoid, Normalize: c.BoolOr("norm_topk_prob", true),
		Scale: float32(c.PositiveOr("routed_scaling_factor", 1)), Groups: c.SizeOr("n_group", 1), TopGroups: c.SizeOr("topk_group", 1),
	}
	c.OneOf("scoring_func", "sigmoid", "sigmoid")
	c.OneOf("topk_method", "noaux_tc", "noaux_tc")
	CheckTopK(c, "num_experts_per_tok", r.TopK, experts)
	CheckGroups(c, "n_group", &r, experts)
	return r
}

// CheckTopK refuses a router that chooses more experts than there are; key says how many it chooses.
func CheckTopK(c *config.Object, key string, topK, experts int) {
	if topK > experts {
		c.Fail(key, "is %d of %d experts", topK, experts)
	}
}

// CheckGroups refuses groups of experts that a corrected router can't choose among; key says how many there are.
func CheckGroups(c *config.Object, key string, r *mlx.RouteSpec, experts int) {
	if experts%r.Groups != 0 || (r.Groups > 1 && experts/r.Groups < 2) {
		c.Fail(key, "is %d, which does not cut %d experts into equal groups of two or more", r.Groups, experts)
	}
	if r.TopGroups > r.Groups {
		c.Fail("topk_group", "is %d of %d groups", r.TopGroups, r.Groups)
	}
}

// Forward maps [rows, width] to the chosen experts, int32 [rows, k], and their weights, float32 [rows, k].
func (r *Router) Forward(p *Pass, x mlx.Array) (ids, weights mlx.Array) {
	return p.Route(r.proj.Forward(p, x), &r.spec)
}

// FeedForward is any layer that maps rows [rows, width] to [rows, width].
type FeedForward interface {
	Forward(p *Pass, x mlx.Array) mlx.Array
}

// MoE is a sparse mixture of experts (Shazeer et al. 2017): the weighted sum of the chosen experts' outputs, plus a shared
// one's if there is any.
type MoE struct {
	Router  *Router
	Experts *SwitchGLU
	Shared  FeedForward // nil for none
}

// Forward maps [rows, width] to [rows, width].
func (m *MoE) Forward(p *Pass, x mlx.Array) mlx.Array {
	ids, weights := m.Router.Forward(p, x)
	y := p.WeightedSum(m.Experts.Forward(p, x, ids), weights)
	if m.Shared == nil {
		return y
	}
	return p.Add(y, m.Shared.Forward(p, x))
}
