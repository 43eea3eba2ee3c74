package leakyrnn

import (
	"encoding/json"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// WriteRandom writes a model folder with random weights, the same ones for the same seed. It says nonsense, but
// exercises everything that a trained model would.
func WriteRandom(dir string, c Config, seed uint64) error {
	c.ModelType = Family
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644); err != nil {
		return err
	}
	random := rand.New(rand.NewPCG(seed, 0))
	var entries []safetensors.Entry
	for _, s := range c.specs(sdk.LayerRange{End: c.Layers}, true, true) {
		raw := make([]byte, s.bytes())
		putFloats(raw, s.random(random, c.HiddenSize))
		entries = append(entries, safetensors.Entry{
			Name:  s.name,
			Dtype: f32,
			Shape: s.shape,
			Write: func(w io.Writer) error { _, err := w.Write(raw); return err },
		})
	}
	return safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), nil, entries)
}

// random draws values of a size that keeps the activations lively.
func (s spec) random(r *rand.Rand, hidden int) []float32 {
	values := make([]float32, s.bytes()/4)
	for i := range values {
		switch {
		case strings.HasSuffix(s.name, "decay"):
			values[i] = 0.5 + 0.45*r.Float32()
		case len(s.shape) == 2:
			values[i] = float32(2 * r.NormFloat64() / math.Sqrt(float64(hidden)))
		default:
			values[i] = float32(0.1 * r.NormFloat64())
		}
	}
	return values
}
