package main

import (
	"fmt"
	"math"
	"strings"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// nemotronH is Nemotron-H and Nemotron 3 (NVIDIA 2025; reference: mlx_lm/models/nemotron_h.py): blocks of one kind each,
// Mamba-2, attention without rotary positions, an MLP with squared ReLU, or experts.
type nemotronH struct{}

func (nemotronH) Info() sdk.Family { return stage.Info("nemotron_h", "nemotron_h") }

// The letters of hybrid_override_pattern.
const (
	letterMamba     = 'M'
	letterAttention = '*'
	letterMLP       = '-'
	letterMoE       = 'E'
)

// blockLetters are the names of the same in layers_block_type and layer_types.
var blockLetters = map[string]rune{
	"linear_attention": letterMamba, "mamba": letterMamba, "conv": letterMamba,
	"full_attention": letterAttention, "attention": letterAttention,
	"mlp": letterMLP, "moe": letterMoE,
}

type nemotronHConfig struct {
	hybrid
	Pattern          []rune // a letter per block; it decides the number of layers
	IntermediateSize int
	AttentionBias    bool
	MLPBias          bool
	Mamba            nn.Mamba2Config

	// Of the blocks with experts.
	NRoutedExperts         int
	MoEIntermediateSize    int
	SharedIntermediateSize int // 0 for no shared expert
	MoELatentSize          int // 0: experts work on the residual stream's width
	Route                  mlx.RouteSpec
}

func (nemotronH) Model(c *config.Object) stage.Model {
	a := &nemotronHConfig{
		hybrid:           readHybrid(c, "layer_norm_epsilon", false),
		Pattern:          readPattern(c),
		IntermediateSize: c.Size("intermediate_size"),
		AttentionBias:    c.BoolOr("attention_bias", false),
		MLPBias:          c.BoolOr("mlp_bias", false),
	}
	a.NumHiddenLayers = len(a.Pattern)
	a.embedPath, a.layersPath, a.normPath = "backbone.embeddings", "backbone.layers", "backbone.norm_f"
	a.names = weights.Names{
		DropContains: []string{"mtp."}, // layers for multi-token prediction
		Sources: []weights.Source{
			{Of: "mixer.switch_mlp.fc1.", From: "mixer.experts.{}.up_proj."},
			{Of: "mixer.switch_mlp.fc2.", From: "mixer.experts.{}.down_proj."},
		},
	}
	lo, hi := timeStepLimit(c)
	a.Mamba = nn.Mamba2Config{
		Width: a.HiddenSize, Heads: c.Size("mamba_num_heads"), HeadDim: c.Size("mamba_head_dim"), Groups: c.Size("n_groups"),
		States: c.Size("ssm_state_size"), Conv: c.Size("conv_kernel"), ProjBias: c.BoolOr("mamba_proj_bias", false),
		ConvBias: c.BoolOr("use_conv_bias", true), MinDt: lo, MaxDt: hi, NormEps: a.Eps,
	}
	if strings.ContainsRune(string(a.Pattern), letterMoE) {
		a.readExperts(c)
	}
	a.check(c)
	return a
}

// readPattern reads hybrid_override_pattern, a string or a list of letters, or layers_block_type or layer_types in its place.
func readPattern(c *config.Object) []rune {
	const key = "hybrid_override_pattern"
	pattern := ""
	switch v := c.Value(key).(type) {
	case string:
		pattern = v
	case []any:
		pattern = strings.Join(c.Strings(key), "")
	case nil:
		return readBlockTypes(c)
	default:
		c.Fail(key, "is neither a string nor a list of letters")
		return nil
	}
	for i, letter := range []rune(pattern) {
		if !strings.ContainsRune("M*-E", letter) {
			c.Unsupported(key, "letter %d is %q, which is not built; built are M, *, - and E", i, letter)
			return nil
		}
	}
	if pattern == "" {
		c.Fail(key, "is empty")
	}
	return []rune(pattern)
}

func readBlockTypes(c *config.Object) []rune {
	key := "layers_block_type"
	if !c.Has(key) {
		key = "layer_types"
	}
	var pattern []rune
	for i, kind := range c.Strings(key) {
		letter, ok := blockLetters[kind]
		if !ok {
			c.Unsupported(fmt.Sprintf("%s[%d]", key, i), "%q is not built", kind)
			return nil
		}
		pattern = append(pattern, letter)
	}
	if pattern == nil {
		c.Fail("hybrid_override_pattern", "is missing, and so are layers_block_type and layer_types")
	}
	return pattern
}

// timeStepLimit reads the bounds of Mamba-2's time step, of which the upper one is commonly infinite.
func timeStepLimit(c *config.Object) (lo, hi float64) {
	const key = "time_step_limit"
	lo, hi = 0, math.Inf(1)
	if !c.Has(key) {
		return lo, hi
	}
	list, _ := c.Value(key).([]any)
	if len(list) != 2 {
		c.Fail(key, "is no list of two numbers")
		return lo, hi
	}
	var ok [2]bool
	lo, ok[0] = config.Number(list[0])
	hi, ok[1] = config.Number(list[1])
	if !ok[0] || !ok[1] || !(lo <= hi) {
		c.Fail(key, "is %v, want two numbers, the lower one first", list)
		return 0, math.Inf(1)
	}
	return lo, hi
}

func (a *nemotronHConfig) readExperts(c *config.Object) {
	a.NRoutedExperts = c.Size("n_routed_experts")
	a.Route = mlx.RouteSpec{
		TopK: c.Size("num_experts_per_tok"), Normalize: c.BoolOr("norm_topk_prob", false), Epsilon: 1e-20,
		Scale: float32(c.PositiveOr("routed_scaling_factor", 1)), Groups: c.SizeOr("n_group", 1), TopGroups: c.SizeOr("topk_group", 1),
	}
	a.MoEIntermediateSize = c.Size("moe_intermediate_size")
	if c.CountOr("n_shared_experts", 0) > 0 {
		a.SharedIntermediateSize = c.Size("moe_shared_expert_intermediate_size")
	}
	a.MoELatentSize = c.SizeOr("moe_latent_size", 0)
	nn.CheckTopK(c, "num_experts_per_tok", a.Route.TopK, a.NRoutedExperts)
	nn.CheckGroups(c, "n_group", &a.Route, a.NRoutedExperts)
}

func (a *nemotronHConfig) check(c *config.Object) {
	c.OneOf("mlp_hidden_act", "relu2", "relu2")
	c.OneOf("mamba_hidden_act", "silu", "silu", "swish")
	if c.Has("sliding_window") {
		c.Unsupported("sliding_window", "is not built for nemotron_h; built is null")
	}
	if a.TieWordEmbeddings {
		c.Unsupported("tie_word_embeddings", "true is not built for nemotron_h")
	}
	checkConv(c, "conv_kernel", a.Mamba.Conv)
	checkWidth(c, "mamba_head_dim", a.Mamba.Heads*a.Mamba.HeadDim)
	checkWidth(c, "ssm_state_size", a.Mamba.Groups*a.Mamba.States)
	c.Divides("n_groups", a.Mamba.Groups, "mamba_num_heads", a.Mamba.Heads)
}

func (a *nemotronHConfig) Head(b *nn.Builder) nn.Head { return a.head(b, 0) }

// nemotronBlock is one layer behind a norm and within a residual connection.
type nemotronBlock struct {
	kind  string
	norm  *nn.RMSNorm
	mixer nn.FeedForward
}

func (l *nemotronBlock) Kind() string { return l.kind }

func (l *nemotronBlock) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	return p.Add(x, l.mixer.Forward(p, l.norm.Forward(p, x)))
}

func (a *nemotronHConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	l := &nemotronBlock{norm: nn.NewRMSNorm(b, path+".norm", a.HiddenSize, a.Eps)}
	path += ".mixer"
	switch a.Pattern[i] {
	case letterMamba:
		l.kind, l.mixer = "mamba2", nn.NewMamba2(b, path, a.Mamba)
	case letterAttention:
		c := a.attention()
		c.Bias, c.OutputBias = a.AttentionBias, a.AttentionBias
		l.kind, l.mixer = "attention", nn.NewAttention(b, path, c)
	case letterMLP:
		l.kind, l.mixer = "mlp", newReLU2MLP(b, path, a.HiddenSize, a.IntermediateSize, a.MLPBias)
	default:
		l.kind, l.mixer = "moe", a.newExperts(b, path)
	}
	return l
}

// relu2 is the squared ReLU (So et al. 2021).
func relu2(p *nn.Pass, x mlx.Array) mlx.Array {
	return p.Square(p.Maximum(x, p.Scalar(0, x.Dtype())))
}

// relu2MLP is down(relu2(up(x))).
type relu2MLP struct{ up, down *nn.Linear }

func newReLU2MLP(b *nn.Builder, path string, width, hidden int, bias bool) *relu2MLP {
	return &relu2MLP{
		up:   nn.NewLinear(b, path+".up_proj", width, hidden, bias),
		down: nn.NewLinear(b, path+".down_proj", hidden, width, bias),
	}
}

func (m *relu2MLP) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	return m.down.Forward(p, relu2(p, m.up.Forward(p, x)))
}

// nemotronExperts is a mixture of MLPs with squared ReLU, which may work within a narrower latent space, beside a shared
// one.
type nemotronExperts struct {
	router       *nn.Router
	enter, leave *nn.Linear // nil without a latent space
	up, down     *nn.SwitchLinear
	shared       *relu2MLP // nil for none
}

func (a *nemotronHConfig) newExperts(b *nn.Builder, path string) *nemotronExperts {
	e := &nemotronExperts{router: nn.NewCorrectedRouter(b, path+".gate", a.NRoutedExperts, a.HiddenSize, a.Route)}
	width := a.HiddenSize
	if a.MoELatentSize > 0 {
		width = a.MoELatentSize
		e.enter = nn.NewLinear(b, path+".fc1_latent_proj", a.HiddenSize, width, a.MLPBias)
		e.leave = nn.NewLinear(b, path+".fc2_latent_proj", width, a.HiddenSize, a.MLPBias)
	}
	e.up = nn.NewSwitchLinear(b, path+".switch_mlp.fc1", a.NRoutedExperts, width, a.MoEIntermediateSize, false)
	e.down = nn.NewSwitchLinear(b, path+".switch_mlp.fc2", a.NRoutedExperts, a.MoEIntermediateSize, width, false)
	if a.SharedIntermediateSize > 0 {
		e.shared = newReLU2MLP(b, path+".shared_experts", a.HiddenSize, a.SharedIntermediateSize, a.MLPBias)
	}
	return e
}

func (e *nemotronExperts) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	ids, scores := e.router.Forward(p, x)
	y := x
	if e.enter != nil {
		y = e.enter.Forward(p, y)
	}
	y = e.down.Forward(p, relu2(p, e.up.Forward(p, y, ids)), ids)
	y = p.WeightedSum(y, scores)
	if e.leave != nil {
		y = e.leave.Forward(p, y)
	}
	if e.shared != nil {
		y = p.Add(y, e.shared.Forward(p, x))
	}
	return y
}
