package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// tensor is a tensor in memory.
type tensor struct {
	dtype string
	shape []int64
	data  []byte
}

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
			tensors := readTensors(t, src)
			for name, x := range tensors {
				switch {
				case strings.HasSuffix(name, "conv1d.weight"):
					x.shape = []int64{x.shape[0], 1, x.shape[1]} // [channels, 1, width] lies like [channels, width, 1]
				case c.minusOne && isOffsetNorm(name):
					x = minusOne(x)
				}
				tensors[name] = x
			}
			if c.experts != nil {
				c.experts(tensors)
			}
			if c.extra != "" {
				tensors[c.extra] = tensor{"F32", []int64{1}, make([]byte, 4)}
			}
			dir := t.TempDir()
			writeTensors(t, dir, tensors, c.rename)
			writeConfig(t, dir, readConfig(t, c.checkpoint, nil))
			golden := stagetest.ReadGolden(t, src, "golden_f32.json").Runs[0]
			p := stagetest.Open(t, families(), dir, stagetest.Options{Stages: 2, Dtype: sdk.DtypeFloat32})
			p.Reserve(sdk.Reservation{Seq: 1, Prompt: golden.IDs})
			if got := p.Generate(1, golden.IDs, len(golden.Tokens), 512); !slices.Equal(got, golden.Tokens) {
				t.Errorf("tokens %v, want %v", got, golden.Tokens)
			}
		})
	}
}

func readTensors(t *testing.T, dir string) map[string]tensor {
	t.Helper()
	c, err := safetensors.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]tensor{}
	for _, name := range c.Names() {
		h, _ := c.Lookup(name)
		f, err := os.Open(h.Path)
		if err != nil {
			t.Fatal(err)
		}
		raw := make([]byte, h.Size)
		_, err = f.ReadAt(raw, h.Offset)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		all[name] = tensor{h.Dtype, h.Shape, raw}
	}
	return all
}

func writeTensors(t *testing.T, dir string, tensors map[string]tensor, rename func(string) string) {
	t.Helper()
	var entries []safetensors.Entry
	for name, x := range tensors {
		entries = append(entries, safetensors.Entry{Name: rename(name), Dtype: x.dtype, Shape: x.shape, Write: func(w io.Writer) error {
			_, err := w.Write(x.data)
			return err
		}})
	}
	if err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), nil, entries); err != nil {
		t.Fatal(err)
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
	return tensor{"F32", shape, raw}
}

// minusOne is exact: weights near 1 in bfloat16 have few bits.
func minusOne(x tensor) tensor {
	values := bfloats(x.data)
	for i := range values {
		values[i]--
	}
	return float32Tensor(values, x.shape...)
}

// expertsApart replaces stacks by a tensor for each expert.
func expertsApart(tensors map[string]tensor) {
	for name, x := range tensors {
		before, after, ok := strings.Cut(name, ".switch_mlp.")
		if !ok {
			continue
		}
		size := len(x.data) / int(x.shape[0])
		for e := range int(x.shape[0]) {
			tensors[fmt.Sprintf("%s.experts.%d.%s", before, e, after)] = tensor{x.dtype, x.shape[1:], x.data[e*size : (e+1)*size]}
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
		experts := gate.shape[0]
		size := len(gate.data) / int(experts)
		fused := tensor{"F32", []int64{experts, 2 * gate.shape[1], gate.shape[2]}, nil}
		for e := range int(experts) {
			fused.data = append(append(fused.data, gate.data[e*size:(e+1)*size]...), up.data[e*size:(e+1)*size]...)
		}
		tensors[before+".experts.gate_up_proj"] = fused
		tensors[before+".experts.down_proj"] = unpacked["down_proj"]
	}
}

// unpack is the float32 values of a 4-bit affine stack.
func unpack(weight, scales, biases tensor) tensor {
	s, b := bfloats(scales.data), bfloats(biases.data)
	values := make([]float32, 2*len(weight.data))
	group := len(values) / len(s)
	for i := range values {
		q := weight.data[i/2] >> (4 * (i % 2)) & 15
		values[i] = float32(float64(q)*float64(s[i/group]) + float64(b[i/group]))
	}
	shape := slices.Clone(weight.shape)
	shape[2] *= 8
	return float32Tensor(values, shape...)
}
