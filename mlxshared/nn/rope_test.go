package nn

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

func readRoPE(t *testing.T, text string) (RoPEConfig, error) {
	t.Helper()
	o, err := config.Parse([]byte(text), config.FileName)
	if err != nil {
		t.Fatal(err)
	}
	c := ReadRoPE(o)
	return c, o.Err()
}

func TestRotaryDim(t *testing.T) {
	cases := []struct {
		headDim int
		share   float64
		want    int
		fault   string
	}{
		{64, 1, 64, ""}, {64, 0.5, 32, ""}, {128, 0.25, 32, ""},
		{64, 1.5, 2, "partial_rotary_factor: is 1.5: of a head's 64 elements 96 would rotate"},
		{64, 0.01, 2, "partial_rotary_factor: is 0.01"}, {10, 0.5, 2, "5 would rotate, want an even number from 2 to 10"},
	}
	for _, c := range cases {
		o, err := config.Parse([]byte("{}"), config.FileName)
		if err != nil {
			t.Fatal(err)
		}
		got := RotaryDim(o, c.headDim, c.share)
		if err := o.Err(); got != c.want || (err == nil) != (c.fault == "") || err != nil && !strings.Contains(err.Error(), c.fault) {
			t.Errorf("%v of %d: %d (%v), want %d (%s)", c.share, c.headDim, got, err, c.want, c.fault)
		}
	}
}

// The expected values are worked out by hand from the formulas of mlx_lm/models/rope_utils.py.
func TestInverseFrequencies(t *testing.T) {
	cases := []struct {
		name, config string
		dims         int
		want         []float64 // radians per position
		scale        float64
	}{
		// 10000^0, 10000^-0.5
		{"default", `{}`, 4, []float64{1, 0.01}, 1},
		{"theta", `{"rope_theta": 256}`, 8, []float64{1, 1. / 4, 1. / 16, 1. / 64}, 1},
		{"linear", `{"rope_theta": 256, "rope_scaling": {"type": "linear", "factor": 4}}`, 8, []float64{1. / 4, 1. / 16, 1. / 64, 1. / 256}, 1},
		{"newer spelling", `{"rope_parameters": {"rope_theta": 256, "rope_type": "linear", "factor": 2}}`, 4, []float64{1. / 2, 1. / 32}, 1},
		{"scaling of default", `{"rope_scaling": {"rope_type": "default"}}`, 4, []float64{1, 0.01}, 1},
		// Wavelengths 2π·{1, 4, 16, 64} = {6.28, 25.1, 100.5, 402}; original context 64: above 64/1 all is stretched by 8, under
		// 64/4 = 16 nothing, and 25.1 lies between: smooth = (64/25.133 - 1) / 3 = 0.515493, frequency (1/4)·((1-s)/8 + s).
		{"llama3", `{"rope_theta": 256, "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}}`,
			8, []float64{1, 0.14401410, 1. / 16 / 8, 1. / 64 / 8}, 1},
		// Turns: 8·ln(64/(β·2π)) / (2·ln 256): β=32 → floor(-0.826) = -1 → 0; β=1 → ceil(1.674) = 2. Ramp {0, 1/2, 1, 1}: the second
		// is the mean of stretched and original.
		{"yarn", `{"rope_theta": 256, "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}}`,
			8, []float64{1, (1./16 + 1./4) / 2, 1. / 64, 1. / 256}, 0.1*math.Log(4) + 1},
		{"yarn with mscale_all_dim", `{"rope_theta": 256, "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "mscale": 2, "mscale_all_dim": 3}}`,
			8, []float64{1, (1./16 + 1./4) / 2, 1. / 64, 1. / 256}, (0.2*math.Log(4) + 1) / (0.3*math.Log(4) + 1)},
		// Both turns beyond the last pair: low = high, which must not divide by zero. Everything below low keeps its frequency.
		{"yarn with an empty ramp", `{"rope_theta": 256, "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 1.25, "beta_slow": 1.25, "mscale": 0}}`,
			8, []float64{1, 1. / 4, 1. / 64, 1. / 256}, 1},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			rope, err := readRoPE(t, c.config)
			if err != nil {
				t.Fatal(err)
			}
			got := rope.InverseFrequencies(c.dims)
			if !slices.EqualFunc(got, c.want, func(a, b float64) bool { return math.Abs(a-b) <= 1e-7*b }) {
				t.Errorf("frequencies %v, want %v", got, c.want)
			}
			if s := rope.InputScale(); math.Abs(s-c.scale) > 1e-12 {
				t.Errorf("input scale %v, want %v", s, c.scale)
			}
		})
	}
}

func TestRoPEFaults(t *testing.T) {
	cases := []struct {
		config string
		code   sdk.Code
		want   string
	}{
		{`{"rope_scaling": {"rope_type": "dynamic", "factor": 2}}`, sdk.CodeUnsupported, `rope_scaling.rope_type: "dynamic" is not built`},
		{`{"rope_scaling": {"type": "longrope"}}`, sdk.CodeUnsupported, `rope_scaling.type: "longrope"`},
		{`{"rope_scaling": {"type": "linear"}}`, sdk.CodeInvalid, "rope_scaling.factor: is missing"},
		{`{"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}`, sdk.CodeInvalid, "rope_scaling.high_freq_factor"},
		{`{"rope_scaling": {"type": "yarn", "factor": -1}}`, sdk.CodeInvalid, "rope_scaling.factor: is -1"},
		{`{"rope_theta": 0.5}`, sdk.CodeInvalid, "rope_theta: is 0.5"},
	}
	for _, c := range cases {
		_, err := readRoPE(t, c.config)
		if err == nil || sdk.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %v with %q", c.config, err, c.code, c.want)
		}
	}
}
