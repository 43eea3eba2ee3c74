package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

type tensor = stagetest.Tensor

// Checkpoints in their makers' names and layouts give the same tokens as the converted ones.
func TestOriginalLayouts(t *testing.T) {
	prefixed := func(name string) string {
		name = strings.Replace(name, "language_model.model.", "model.language_model.", 1)
		return strings.TrimPrefix(name, "language_model.")
	}
	same := func(name string) string { return name }
	cases := []struct {
		checkpoint string
		minusOne   bool // norms are stored minus 1
		rename     func(string) string
		experts    func(map[string]tensor)
		extra      string // a tensor that is left aside
	}{
		{"jamba-base-q4", false, same, expertsApart, ""},
		{"nemotron_h-moe-q4", false, func(name string) string {
			return strings.NewReplacer(".fc1.", ".up_proj.", ".fc2.", ".down_proj.").Replace(name)
		}, expertsApart, "mtp.layers.0.norm.weight"},
		{"qwen3_next-base-q4", true, same, expertsApart, "mtp.fc.weight"},
		{"qwen3_5-base-q4", true, prefixed, nil, "model.visual.blocks.0.attn.qkv.weight"},
		{"qwen3_5_moe-base-q4", true, prefixed, expertsFused, "mtp.fc.weight"},
	}
	for _, c := range cases {
		t.Run(c.checkpoint, func(t *testing.T) {
			src := filepath.Join(parityRoot, c.checkpoint)
			tensors := stagetest.ReadTensors(t, src)
			for name, x := range tensors {
				switch {
				case strings.HasSuffix(name, "conv1d.weight"):
					x.Shape = []int64{x.Shape[0], 1, x.Shape[1]} // [channels, 1, width] lies like [channels, width, 1]
				case c.minusOne && isOffsetNorm(name):
					x = minusOne(x)
				}
				tensors[name] = x
			}
			if c.experts != nil {
				c.experts(tensors)
			}
			if c.extra != "" {
				tensors[c.extra] = tensor{Dtype: "F32", Shape: []int64{1}, Data: make([]byte, 4)}
			}
			dir := t.TempDir()
			renamed := map[string]tensor{}
			for name, x := range tensors {
				renamed[c.rename(name)] = x
			}
			stagetest.WriteTensors(t, dir, renamed)
			stagetest.WriteConfig(t, dir, stagetest.ReadConfig(t, src, nil))
			golden := stagetest.ReadGolden(t, src, "golden_f32.json").Runs[0]
			p := stagetest.Open(t, families(), dir, stagetest.Options{Stages: 2, Dtype: sdk.DtypeFloat32})
			p.Reserve(sdk.Reservation{Seq: 1, Prompt: golden.IDs})
			if got := p.Generate(1, golden.IDs, len(golden.Tokens), 512); !slices.Equal(got, golden.Tokens) {
				t.Errorf("tokens %v, want %v", got, golden.Tokens)
			}
		})
	}
}

func isOffsetNorm(name string) bool {
	for _, end := range []string{".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight"} {
		if strings.HasSuffix(name, end) {
			return true
		}
	}
	return false
}

func bfloats(raw []byte) []float32 {
	out := make([]float32, len(raw)/2)
	for i := range out {
		out[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw[2*i:])) << 16)
	}
	return out
}

func float32Tensor(values []float32, shape ...int64) tensor {
	raw := make([]byte, 0, 4*len(values))
	for _, v := range values {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
	}
	return tensor{Dtype: "F32", Shape: shape, Data: raw}
}

// minusOne is exact: weights near 1 in bfloat16 have few bits.
func minusOne(x tensor) tensor {
	values := bfloats(x.Data)
	for i := range values {
		values[i]--
	}
	return float32Tensor(values, x.Shape...)
}

// expertsApart replaces stacks by a tensor for each expert.
func expertsApart(tensors map[string]tensor) {
	for name, x := range tensors {
		before, after, ok := strings.Cut(name, ".switch_mlp.")
		if !ok {
			continue
		}
		size := len(x.Data) / int(x.Shape[0])
		for e := range int(x.Shape[0]) {
			tensors[fmt.Sprintf("%s.experts.%d.%s", before, e, after)] = tensor{Dtype: x.Dtype, Shape: x.Shape[1:], Data: x.Data[e*size : (e+1)*size]}
		}
		delete(tensors, name)
	}
}

// expertsFused unpacks stacks, and joins gate and up projections in one: experts are never packed in that form.
func expertsFused(tensors map[string]tensor) {
	for name := range tensors {
		before, ok := strings.CutSuffix(name, ".switch_mlp.gate_proj.weight")
		if !ok {
			continue
		}
		unpacked := map[string]tensor{}
		for _, proj := range []string{"gate_proj", "up_proj", "down_proj"} {
			path := before + ".switch_mlp." + proj
			unpacked[proj] = unpack(tensors[path+".weight"], tensors[path+".scales"], tensors[path+".biases"])
			for _, part := range []string{".weight", ".scales", ".biases"} {
				delete(tensors, path+part)
			}
		}
		gate, up := unpacked["gate_proj"], unpacked["up_proj"]
		experts := gate.Shape[0]
		size := len(gate.Data) / int(experts)
		fused := tensor{Dtype: "F32", Shape: []int64{experts, 2 * gate.Shape[1], gate.Shape[2]}}
		for e := range int(experts) {
			fused.Data = append(append(fused.Data, gate.Data[e*size:(e+1)*size]...), up.Data[e*size:(e+1)*size]...)
		}
		tensors[before+".experts.gate_up_proj"] = fused
		tensors[before+".experts.down_proj"] = unpacked["down_proj"]
	}
}

// unpack is the float32 values of a 4-bit affine stack.
func unpack(weight, scales, biases tensor) tensor {
	s, b := bfloats(scales.Data), bfloats(biases.Data)
	values := make([]float32, 2*len(weight.Data))
	group := len(values) / len(s)
	for i := range values {
		q := weight.Data[i/2] >> (4 * (i % 2)) & 15
		values[i] = float32(float64(q)*float64(s[i/group]) + float64(b[i/group]))
	}
	shape := slices.Clone(weight.Shape)
	shape[2] *= 8
	return float32Tensor(values, shape...)
}
