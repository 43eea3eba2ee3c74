package leakyrnn

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

const (
	embeddingName = "embedding.weight" // [vocab, hidden]
	headName      = "head.weight"      // [vocab, hidden]; a tied model has none
	f32           = "F32"              // the only dtype of this family's files
)

// spec is a tensor that the config calls for.
type spec struct {
	name  string
	shape []int64
}

func (s spec) bytes() int64 {
	n := int64(4)
	for _, dim := range s.shape {
		n *= dim
	}
	return n
}

func (c *Config) matrix(name string) spec {
	return spec{name, []int64{int64(c.VocabSize), int64(c.HiddenSize)}}
}

// layerSpecs lists one layer's tensors.
func (c *Config) layerSpecs(i int) []spec {
	h := int64(c.HiddenSize)
	prefix := fmt.Sprintf("layers.%d.", i)
	return []spec{
		{prefix + "input.weight", []int64{h, h}},
		{prefix + "input.bias", []int64{h}},
		{prefix + "decay", []int64{h}},
		{prefix + "output.weight", []int64{h, h}},
	}
}

// specs lists the tensors of a stage, and nothing that other stages hold.
func (c *Config) specs(layers sdk.LayerRange, embedding, head bool) []spec {
	var list []spec
	if embedding || head && c.Tied {
		list = append(list, c.matrix(embeddingName))
	}
	for i := layers.Start; i < layers.End; i++ {
		list = append(list, c.layerSpecs(i)...)
	}
	if head && !c.Tied {
		list = append(list, c.matrix(headName))
	}
	return list
}

// openWeights reads the headers of the model's files.
func openWeights(dir string) (*safetensors.Checkpoint, error) {
	checkpoint, err := safetensors.Open(dir)
	if err == nil {
		return checkpoint, nil
	}
	typed := &sdk.Error{Code: sdk.CodeCorrupt, Message: err.Error(), File: dir}
	if format, ok := errors.AsType[*safetensors.FormatError](err); ok {
		typed.File, typed.Tensor = format.Path, format.Tensor
	}
	if errors.Is(err, safetensors.ErrNoWeights) || errors.Is(err, fs.ErrNotExist) {
		typed.Code = sdk.CodeNotFound
	}
	return nil, typed
}

// find looks a tensor up and compares it with what the config calls for.
func find(checkpoint *safetensors.Checkpoint, dir string, want spec) (safetensors.Tensor, error) {
	t, ok := checkpoint.Lookup(want.name)
	if !ok {
		return t, &sdk.Error{Code: sdk.CodeNotFound, Message: fmt.Sprintf("tensor %s is missing from %s", want.name, dir), File: dir, Tensor: want.name}
	}
	if t.Dtype != f32 || !slices.Equal(t.Shape, want.shape) {
		return t, &sdk.Error{
			Code:    sdk.CodeCorrupt,
			Message: fmt.Sprintf("tensor %s in %s is %s %v, config.json wants %s %v", t.Name, t.Path, t.Dtype, t.Shape, f32, want.shape),
			File:    t.Path,
			Tensor:  t.Name,
		}
	}
	return t, nil
}

// readWeights reads the tensors of specs into memory.
func readWeights(ctx context.Context, dir string, specs []spec, progress func(sdk.LoadProgress)) (map[string][]float32, error) {
	checkpoint, err := openWeights(dir)
	if err != nil {
		return nil, err
	}
	var at sdk.LoadProgress
	for _, s := range specs {
		at.Total += s.bytes()
	}
	weights := make(map[string][]float32, len(specs))
	for _, s := range specs {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		t, err := find(checkpoint, dir, s)
		if err != nil {
			return nil, err
		}
		if weights[s.name], err = readFloats(t); err != nil {
			return nil, err
		}
		at.Loaded += s.bytes()
		at.Tensor = s.name
		progress(at)
	}
	return weights, nil
}

func readFloats(t safetensors.Tensor) ([]float32, error) {
	f, err := os.Open(t.Path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw := make([]byte, t.Size)
	if _, err := io.ReadFull(io.NewSectionReader(f, t.Offset, t.Size), raw); err != nil {
		return nil, &sdk.Error{Code: sdk.CodeCorrupt, Message: fmt.Sprintf("read tensor %s of %s: %v", t.Name, t.Path, err), File: t.Path, Tensor: t.Name}
	}
	return getFloats(raw), nil
}

// getFloats reads little-endian float32 values.
func getFloats(raw []byte) []float32 {
	out := make([]float32, len(raw)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return out
}

// putFloats writes values as little-endian float32.
func putFloats(raw []byte, values []float32) {
	for i, v := range values {
		binary.LittleEndian.PutUint32(raw[4*i:], math.Float32bits(v))
	}
}
