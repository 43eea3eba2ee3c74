package leakyrnn

import (
	"fmt"

	"github.com/mlxcel/mlxcel/sdk"
)

// profile prices a model from its config. Where weights are there, their headers are checked against it, which
// makes the profile exact.
func profile(dir string) (*sdk.ModelProfile, error) {
	c, err := readConfig(dir)
	if err != nil {
		return nil, err
	}
	exact, err := checkWeights(c, dir)
	if err != nil {
		return nil, err
	}
	matrix := c.matrix(embeddingName).bytes()
	p := &sdk.ModelProfile{
		Family:        Family,
		ModelType:     c.ModelType,
		Embedding:     matrix,
		Head:          matrix, // tied or not, a stage with the head alone holds it
		Tied:          c.Tied,
		Boundary:      c.boundary(),
		ContextLength: c.ContextLength,
		VocabSize:     c.VocabSize,
		HiddenSize:    c.HiddenSize,
		Quantization:  "none",
		Exact:         exact,
	}
	if c.Tied {
		p.TiedBytes = matrix
	}
	for i := range c.Layers {
		layer := sdk.LayerProfile{Kind: "leaky-integrator", States: []sdk.StateProfile{
			recurrentIndex: {Kind: sdk.StateRecurrent, Fixed: c.recurrentBytes()},
			cacheIndex:     {Kind: sdk.StateKV, BytesPerPosition: c.cacheBytes(), Block: 1},
		}}
		for _, s := range c.layerSpecs(i) {
			layer.Weights += s.bytes()
		}
		p.Layers = append(p.Layers, layer)
	}
	return p, nil
}

// boundary is what crosses from stage to stage.
func (c *Config) boundary() sdk.Boundary {
	return sdk.Boundary{Width: c.HiddenSize, Dtype: sdk.DtypeFloat32}
}

// recurrentBytes is one layer's recurrent state.
func (c *Config) recurrentBytes() int64 { return 4 * int64(c.HiddenSize) }

// cacheBytes is what one layer's cache keeps of one position: a key and a value.
func (c *Config) cacheBytes() int64 { return 2 * 4 * int64(c.HiddenSize) }

// checkWeights compares the headers of the weights with the config; false when there are no weights.
func checkWeights(c *Config, dir string) (bool, error) {
	checkpoint, err := openWeights(dir)
	if err != nil && sdk.CodeOf(err) == sdk.CodeNotFound {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	specs := c.specs(sdk.LayerRange{End: c.Layers}, true, true)
	for _, s := range specs {
		if _, err := find(checkpoint, dir, s); err != nil {
			return false, fmt.Errorf("inspect: %w", err)
		}
	}
	return true, nil
}
