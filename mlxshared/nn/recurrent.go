package nn

import (
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// RecurrentSpec is a state of fixed size: a convolution's last inputs, or the state of a recurrence.
type RecurrentSpec struct {
	Rows, Cols int
	Dtype      mlx.Dtype
}

// New makes a state of zeros.
func (r RecurrentSpec) New(s *mlx.Stream) (State, error) {
	state, err := s.NewState(r.Rows, r.Cols, r.Dtype)
	if err != nil {
		return nil, err
	}
	return &recurrentState{spec: r, stream: s, state: state}, nil
}

// Profile prices a state that does not grow.
func (r RecurrentSpec) Profile(on mlx.Backend) sdk.StateProfile {
	return sdk.StateProfile{Kind: sdk.StateRecurrent, Fixed: int64(r.Rows) * on.RowBytes(r.Cols, r.Dtype)}
}

// recurrentState keeps no earlier positions than those that it has snapshots of.
type recurrentState struct {
	spec      RecurrentSpec
	stream    *mlx.Stream
	state     *mlx.State
	snapshots []*mlx.State // oldest first; each knows its length
}

func (s *recurrentState) Len() int         { return s.state.Len() }
func (s *recurrentState) Owed() int64      { return 0 }
func (s *recurrentState) Settle(int) error { return nil }

func (s *recurrentState) Bytes() int64 {
	return int64(s.state.Bytes()) * int64(1+len(s.snapshots))
}

// Nearest allows the length, the snapshots and 0, at which every state is the same.
func (s *recurrentState) Nearest(length int) (before, after int) {
	after = s.Len()
	note := func(at int) {
		if at <= length {
			before = max(before, at)
		}
		if at >= length {
			after = min(after, at)
		}
	}
	note(0)
	note(s.Len())
	for _, old := range s.snapshots {
		note(old.Len())
	}
	return before, after
}

// at makes a copy of the state as it was at a position.
func (s *recurrentState) at(length int) (*mlx.State, error) {
	if length == 0 {
		return s.stream.NewState(s.spec.Rows, s.spec.Cols, s.spec.Dtype)
	}
	for _, old := range slices.Concat(s.snapshots, []*mlx.State{s.state}) {
		if old.Len() == length {
			return old.Copy()
		}
	}
	return nil, sdk.Errorf(sdk.CodeInternal, "a recurrent state of %d positions has no snapshot at %d", s.Len(), length)
}

func (s *recurrentState) Rewind(length int) error {
	if length == s.Len() {
		return nil
	}
	old, err := s.at(length)
	if err != nil {
		return err
	}
	s.state.Free()
	s.state = old
	s.snapshots = slices.DeleteFunc(s.snapshots, func(o *mlx.State) bool {
		past := o.Len() > length
		if past {
			o.Free()
		}
		return past
	})
	return nil
}

func (s *recurrentState) Share(keep int) (State, error) {
	copied, err := s.at(keep)
	if err != nil {
		return nil, fmt.Errorf("copying a state: %w", err)
	}
	return &recurrentState{spec: s.spec, stream: s.stream, state: copied}, nil
}

func (s *recurrentState) Snapshot(limit int) error {
	if limit < 1 || slices.ContainsFunc(s.snapshots, func(o *mlx.State) bool { return o.Len() == s.Len() }) {
		return nil
	}
	for len(s.snapshots) >= limit {
		s.snapshots[0].Free()
		s.snapshots = slices.Delete(s.snapshots, 0, 1)
	}
	copied, err := s.state.Copy()
	if err != nil {
		return fmt.Errorf("keeping a snapshot: %w", err)
	}
	s.snapshots = append(s.snapshots, copied)
	return nil
}

func (s *recurrentState) Free() {
	s.state.Free()
	for _, old := range s.snapshots {
		old.Free()
	}
	s.snapshots = nil
}

// stateSegments views the segments as a recurrence's, each with the state in the given slot.
func (p *Pass) stateSegments(slot int) []mlx.StateSegment {
	p.states = p.states[:0]
	for i := range p.Segments {
		s := &p.Segments[i]
		p.states = append(p.states, mlx.StateSegment{State: s.States[slot].(*recurrentState).state, Row0: s.Row0, Rows: s.Rows, Pos: s.Pos})
	}
	return p.states
}

// CausalConv is a depthwise causal convolution over a sequence's rows, then SiLU.
type CausalConv struct {
	weight, bias mlx.Array // float32 [width, channels], [channels]
	slot         int
}

// NewCausalConv loads <path>.weight, [channels, width, 1] or PyTorch's [channels, 1, width], which lie alike in memory, and
// <path>.bias [channels].
func NewCausalConv(b *Builder, path string, channels, width int, bias bool) *CausalConv {
	shape := []int{channels, width, 1}
	if OriginalConv(b, path) {
		shape = []int{channels, 1, width}
	}
	weight := b.Tensor(path+".weight", shape...)
	c := &CausalConv{
		weight: b.Derive(func(s *mlx.Scope) mlx.Array {
			return s.Contiguous(s.Transpose(s.Reshape(s.AsType(weight, mlx.Float32), channels, width)))
		}),
		slot: b.AddState(RecurrentSpec{Rows: width - 1, Cols: channels, Dtype: b.Dtype}),
	}
	if bias {
		c.bias = b.Float32Tensor(path+".bias", channels)
	}
	return c
}

// OriginalConv reports whether the convolution at path has PyTorch's layout [channels, 1, width], and so the checkpoint
// its original form.
func OriginalConv(b *Builder, path string) bool {
	shape := b.Shape(path + ".weight")
	return len(shape) == 3 && shape[2] != 1
}

// Forward maps [rows, channels] to [rows, channels] and advances the sequences' states.
func (c *CausalConv) Forward(p *Pass, x mlx.Array) mlx.Array {
	return p.CausalConv(x, c.weight, c.bias, true, p.stateSegments(c.slot))
}

// decayRates loads -exp(<name>) as float32, last dimension first: the rates that a recurrence's state decays by.
func decayRates(b *Builder, name string, shape ...int) mlx.Array {
	logs := b.Tensor(name, shape...)
	return b.Derive(func(s *mlx.Scope) mlx.Array {
		return s.Contiguous(s.Transpose(s.Neg(s.Exp(s.AsType(logs, mlx.Float32)))))
	})
}

// MambaConfig sizes a Mamba.
type MambaConfig struct {
	Width    int // of the residual stream
	Channels int // of the recurrence
	States   int // of each channel
	Conv     int // width of the convolution
	DtRank   int // of the time step's projection
	ProjBias bool
	ConvBias bool
	NormEps  float64
}

// Mamba is the selective state space layer (Gu and Dao 2023) with Jamba's norms over dt, b and c.
type Mamba struct {
	in, x, dt, out       *Linear
	conv                 *CausalConv
	dtNorm, bNorm, cNorm *RMSNorm
	rates, skip          mlx.Array // float32 [states, channels], [channels]
	c                    MambaConfig
	slot                 int
}

// NewMamba loads the tensors under path by their names in Jamba.
func NewMamba(b *Builder, path string, c MambaConfig) *Mamba {
	return &Mamba{
		in:     NewLinear(b, path+".in_proj", c.Width, 2*c.Channels, c.ProjBias),
		conv:   NewCausalConv(b, path+".conv1d", c.Channels, c.Conv, c.ConvBias),
		x:      NewLinear(b, path+".x_proj", c.Channels, c.DtRank+2*c.States, false),
		dt:     NewLinear(b, path+".dt_proj", c.DtRank, c.Channels, true),
		dtNorm: NewRMSNorm(b, path+".dt_layernorm", c.DtRank, c.NormEps),
		bNorm:  NewRMSNorm(b, path+".b_layernorm", c.States, c.NormEps),
		cNorm:  NewRMSNorm(b, path+".c_layernorm", c.States, c.NormEps),
		rates:  decayRates(b, path+".A_log", c.Channels, c.States),
		skip:   b.Float32Tensor(path+".D", c.Channels),
		out:    NewLinear(b, path+".out_proj", c.Channels, c.Width, c.ProjBias),
		c:      c,
		slot:   b.AddState(RecurrentSpec{Rows: c.States, Cols: c.Channels, Dtype: b.Dtype}), // the reference too keeps it in the model's dtype
	}
}

// Kind is "mamba".
func (m *Mamba) Kind() string { return "mamba" }

// Forward maps [rows, width] to [rows, width] and advances the sequences' states.
func (m *Mamba) Forward(p *Pass, x mlx.Array) mlx.Array {
	both := p.SplitAxis(m.in.Forward(p, x), 1, 2)
	h := m.conv.Forward(p, both[0])
	projected, r, n := m.x.Forward(p, h), m.c.DtRank, m.c.States
	dt := m.dt.Forward(p, m.dtNorm.Forward(p, p.SliceAxis(projected, 1, 0, r)))
	b := m.bNorm.Forward(p, p.SliceAxis(projected, 1, r, r+n))
	c := m.cNorm.Forward(p, p.SliceAxis(projected, 1, r+n, r+2*n))
	y := p.SelectiveScan(h, dt, b, c, m.rates, m.skip, p.stateSegments(m.slot))
	return m.out.Forward(p, p.SiluMul(both[1], y))
}

// Mamba2Config sizes a Mamba2.
type Mamba2Config struct {
	Width          int // of the residual stream
	Heads, HeadDim int
	Groups         int // of neighbouring heads with common b and c, each normalized by itself
	States         int
	Conv           int // width of the convolution
	ProjBias       bool
	ConvBias       bool
	MinDt, MaxDt   float64
	NormEps        float64
}

// Mamba2 is the state space layer of Dao and Gu (2024) with a norm by groups after the gate.
type Mamba2 struct {
	in, out             *Linear
	conv                *CausalConv
	norm                mlx.Array // weight [heads·headDim]
	rates, skip, dtBias mlx.Array // float32 [heads]
	c                   Mamba2Config
	spec                mlx.SSMSpec
	slot                int
}

// NewMamba2 loads the tensors under path by their names in Nemotron-H.
func NewMamba2(b *Builder, path string, c Mamba2Config) *Mamba2 {
	inner := c.Heads * c.HeadDim
	channels := inner + 2*c.Groups*c.States
	return &Mamba2{
		in:     NewLinear(b, path+".in_proj", c.Width, inner+channels+c.Heads, c.ProjBias),
		conv:   NewCausalConv(b, path+".conv1d", channels, c.Conv, c.ConvBias),
		norm:   b.Vector(path+".norm.weight", inner),
		rates:  decayRates(b, path+".A_log", c.Heads),
		skip:   b.Float32Tensor(path+".D", c.Heads),
		dtBias: b.Float32Tensor(path+".dt_bias", c.Heads),
		out:    NewLinear(b, path+".out_proj", inner, c.Width, c.ProjBias),
		c:      c,
		spec: mlx.SSMSpec{
			Heads: c.Heads, HeadDim: c.HeadDim, Groups: c.Groups, States: c.States, MinDt: float32(c.MinDt), MaxDt: float32(c.MaxDt),
		},
		slot: b.AddState(RecurrentSpec{Rows: c.Heads * c.States, Cols: c.HeadDim, Dtype: mlx.Float32}),
	}
}

// Kind is "mamba2".
func (m *Mamba2) Kind() string { return "mamba2" }

// Forward maps [rows, width] to [rows, width] and advances the sequences' states.
func (m *Mamba2) Forward(p *Pass, x mlx.Array) mlx.Array {
	inner := m.c.Heads * m.c.HeadDim
	projected := m.in.Forward(p, x)
	width := projected.Dim(1)
	gate := p.SliceAxis(projected, 1, 0, inner)
	xbc := m.conv.Forward(p, p.SliceAxis(projected, 1, inner, width-m.c.Heads))
	dt := p.SliceAxis(projected, 1, width-m.c.Heads, width)
	y := p.SSM(xbc, dt, m.rates, m.skip, m.dtBias, &m.spec, p.stateSegments(m.slot))
	return m.out.Forward(p, m.gatedNorm(p, y, gate))
}

// gatedNorm is weight · norm(silu(gate) · y), group by group.
func (m *Mamba2) gatedNorm(p *Pass, y, gate mlx.Array) mlx.Array {
	rows, inner := y.Dim(0), y.Dim(1)
	y = p.Reshape(p.SiluMul(gate, y), rows, m.c.Groups, inner/m.c.Groups)
	y = p.Reshape(p.RMSNorm(y, mlx.Array{}, float32(m.c.NormEps), 0), rows, inner)
	y = p.Mul(y, m.norm)
	if y.Dtype() != p.Dtype { // the weight's dtype is another
		y = p.AsType(y, p.Dtype)
	}
	return y
}
