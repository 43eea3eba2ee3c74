package nn

import (
	"math"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// RoPEConfig describes rotary positions (Su et al. 2021). The formulas are those of mlx_lm/models/rope_utils.py.
type RoPEConfig struct {
	Base        float64 // rope_theta
	Traditional bool    // rotate neighbours (2i, 2i+1), else halves
	Type        string  // "default", "linear", "llama3", "yarn" or "proportional"

	Factor          float64 // of linear, llama3, yarn and proportional: how far the context is stretched
	OriginalContext float64 // of llama3 and yarn: positions in pre-training
	LowFreqFactor   float64 // of llama3
	HighFreqFactor  float64 // of llama3
	BetaFast        float64 // of yarn
	BetaSlow        float64 // of yarn
	MScale          float64 // of yarn
	MScaleAllDim    float64 // of yarn
	RotatedPairs    int     // of proportional: leading pairs that rotate
}

// ReadRoPE reads rope_theta, rope_traditional and rope_scaling, or newer transformers' rope_parameters in place of the
// first and the last. Faults are recorded in o.
func ReadRoPE(o *config.Object) RoPEConfig {
	scaling := o.Object("rope_scaling")
	base := 10000.0
	if params := o.Object("rope_parameters"); params != nil {
		base = params.PositiveOr("rope_theta", base)
		if scaling == nil {
			scaling = params
		}
	}
	c := RoPEConfig{Base: o.PositiveOr("rope_theta", base), Traditional: o.BoolOr("rope_traditional", false), Type: "default"}
	if c.Base <= 1 {
		o.Fail("rope_theta", "is %v, want above 1", c.Base)
	}
	if scaling == nil {
		return c
	}
	key := "rope_type"
	if scaling.Has("type") { // the older spelling comes first in mlx-lm too
		key = "type"
	}
	c.Type = scaling.OneOf(key, "default", "default", "linear", "llama3", "yarn")
	c.readScaling(scaling)
	return c
}

func (c *RoPEConfig) readScaling(s *config.Object) {
	switch c.Type {
	case "linear":
		c.Factor = s.Positive("factor")
	case "llama3":
		c.Factor = s.Positive("factor")
		c.LowFreqFactor = s.PositiveOr("low_freq_factor", 1)
		c.HighFreqFactor = s.PositiveOr("high_freq_factor", 4)
		c.OriginalContext = s.PositiveOr("original_max_position_embeddings", 8192)
		if c.HighFreqFactor <= c.LowFreqFactor {
			s.Fail("high_freq_factor", "is %v, want above low_freq_factor %v", c.HighFreqFactor, c.LowFreqFactor)
		}
	case "yarn":
		c.Factor = s.Positive("factor")
		c.OriginalContext = s.PositiveOr("original_max_position_embeddings", 4096)
		c.BetaFast = s.PositiveOr("beta_fast", 32)
		c.BetaSlow = s.PositiveOr("beta_slow", 1)
		c.MScale = s.FloatOr("mscale", 1)
		c.MScaleAllDim = s.FloatOr("mscale_all_dim", 0)
	}
}

// RotaryDim is the number of leading elements of a head that rotate where partial_rotary_factor is share. Faults are recorded
// in o.
func RotaryDim(o *config.Object, headDim int, share float64) int {
	dim := int(float64(headDim) * share)
	if share > 1 || dim < 2 || dim%2 != 0 {
		o.Fail("partial_rotary_factor", "is %v: of a head's %d elements %d would rotate, want an even number from 2 to %d",
			share, headDim, dim, headDim)
		return 2
	}
	return dim
}

// InverseFrequencies returns the angle per position, in radians, of each of the dims/2 rotated pairs.
func (c *RoPEConfig) InverseFrequencies(dims int) []float64 {
	inverse := make([]float64, dims/2)
	for i := range inverse {
		inverse[i] = math.Pow(c.Base, -2*float64(i)/float64(dims))
	}
	switch c.Type {
	case "linear": // S. Chen et al. 2023, "Extending context window ... via positional interpolation"
		for i := range inverse {
			inverse[i] /= c.Factor
		}
	case "llama3":
		c.llama3(inverse)
	case "yarn":
		c.yarn(inverse, dims)
	case "proportional": // Gemma 4: frequencies of the whole head, of which the later pairs stay as they are
		for i := range inverse {
			inverse[i] /= c.Factor
			if i >= c.RotatedPairs {
				inverse[i] = 0
			}
		}
	}
	return inverse
}

// llama3 stretches long wavelengths, leaves short ones, and blends between (Llama 3.1's release code).
func (c *RoPEConfig) llama3(inverse []float64) {
	longest, shortest := c.OriginalContext/c.LowFreqFactor, c.OriginalContext/c.HighFreqFactor
	for i, f := range inverse {
		wavelength := 2 * math.Pi / f
		switch {
		case wavelength > longest:
			inverse[i] = f / c.Factor
		case wavelength > shortest && wavelength < longest:
			smooth := (c.OriginalContext/wavelength - c.LowFreqFactor) / (c.HighFreqFactor - c.LowFreqFactor)
			inverse[i] = f * ((1-smooth)/c.Factor + smooth)
		}
	}
}

// yarn blends between stretched and original frequencies by how often a pair turns within the original context (Peng
// et al. 2023, "YaRN").
func (c *RoPEConfig) yarn(inverse []float64, dims int) {
	turns := func(rotations float64) float64 {
		return float64(dims) * math.Log(c.OriginalContext/(rotations*2*math.Pi)) / (2 * math.Log(c.Base))
	}
	low := max(math.Floor(turns(c.BetaFast)), 0)
	high := min(math.Ceil(turns(c.BetaSlow)), float64(dims-1))
	if low == high {
		high += 0.001 // as the reference does against a division by zero
	}
	for i, f := range inverse {
		stretch := min(max((float64(i)-low)/(high-low), 0), 1)
		inverse[i] = f/c.Factor*stretch + f*(1-stretch)
	}
}

// InputScale multiplies the rotated elements: yarn's mscale / mscale_all_dim, else 1.
func (c *RoPEConfig) InputScale() float64 {
	if c.Type != "yarn" {
		return 1
	}
	return yarnMScale(c.Factor, c.MScale) / yarnMScale(c.Factor, c.MScaleAllDim)
}

func yarnMScale(factor, mscale float64) float64 {
	if factor <= 1 {
		return 1
	}
	return 0.1*mscale*math.Log(factor) + 1
}

// Spec makes the rotation of heads of headDim elements, of which the leading rotaryDim rotate; 0 stands for all.
func (c *RoPEConfig) Spec(b *Builder, headDim, rotaryDim int) mlx.RopeSpec {
	if b.Err() != nil || b.Planning() {
		return mlx.RopeSpec{}
	}
	if rotaryDim == 0 {
		rotaryDim = headDim
	}
	inverse := c.InverseFrequencies(rotaryDim)
	values := make([]float32, len(inverse))
	for i, f := range inverse {
		values[i] = float32(f)
	}
	return mlx.RopeSpec{
		HeadDim: headDim, RotDim: rotaryDim, InvFreq: b.Constant(values),
		Scale: float32(c.InputScale()), Traditional: c.Traditional,
	}
}

func inverseSqrt(n int) float64 { return 1 / math.Sqrt(float64(n)) }
