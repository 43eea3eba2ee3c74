package main

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// smolMetadata is that of SmolLM2-135M-Instruct's container, with a single block.
func smolMetadata() map[string]any {
	return map[string]any{
		"general.architecture": "llama", "llama.block_count": uint64(1), "llama.context_length": uint64(8192),
		"llama.embedding_length": uint64(576), "llama.feed_forward_length": uint64(1536), "llama.attention.head_count": uint64(9),
		"llama.attention.head_count_kv": uint64(3), "llama.rope.freq_base": 100000.0,
		"llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06, "llama.vocab_size": uint64(49152),
		"llama.rope.dimension_count": uint64(64), "tokenizer.ggml.bos_token_id": uint64(1), "tokenizer.ggml.eos_token_id": uint64(2),
		"tokenizer.ggml.padding_token_id": uint64(2),
	}
}

func smolTensors() []sdk.ImportTensor {
	return []sdk.ImportTensor{
		{Name: "token_embd.weight", Type: "Q8_0", Shape: []int64{49152, 576}},
		{Name: "blk.0.attn_norm.weight", Type: "F32", Shape: []int64{576}},
		{Name: "blk.0.ffn_down.weight", Type: "Q4_1", Shape: []int64{576, 1536}},
		{Name: "blk.0.ffn_gate.weight", Type: "Q4_1", Shape: []int64{1536, 576}},
		{Name: "blk.0.ffn_up.weight", Type: "Q4_1", Shape: []int64{1536, 576}},
		{Name: "blk.0.ffn_norm.weight", Type: "F32", Shape: []int64{576}},
		{Name: "blk.0.attn_k.weight", Type: "Q4_1", Shape: []int64{192, 576}},
		{Name: "blk.0.attn_output.weight", Type: "Q4_1", Shape: []int64{576, 576}},
		{Name: "blk.0.attn_q.weight", Type: "Q4_1", Shape: []int64{576, 576}},
		{Name: "blk.0.attn_v.weight", Type: "Q4_1", Shape: []int64{192, 576}},
		{Name: "output_norm.weight", Type: "F32", Shape: []int64{576}},
	}
}

func importOf(metadata map[string]any, tensors []sdk.ImportTensor) (*sdk.ImportPlan, error) {
	return importLlama(&sdk.ImportRequest{Format: "gguf", Architecture: "llama", Metadata: metadata, Tensors: tensors})
}

func TestImportSmolLM2(t *testing.T) {
	plan, err := importOf(smolMetadata(), smolTensors())
	if err != nil {
		t.Fatal(err)
	}
	if plan.Family != "llama" || len(plan.Skipped) != 0 {
		t.Errorf("%+v", plan)
	}
	if !strings.Contains(string(plan.Config), `"rms_norm_eps": 0.00001,`) || !strings.Contains(string(plan.Config), `"eos_token_id": 2`) {
		t.Errorf("config:\n%s", plan.Config)
	}
	o, err := config.Parse(plan.Config, config.FileName)
	if err != nil {
		t.Fatal(err)
	}
	a := readLlama(o)
	if err := o.Err(); err != nil {
		t.Fatal(err)
	}
	if a.HiddenSize != 576 || a.NumHiddenLayers != 1 || a.HeadDim != 64 || a.NumKeyValueHeads != 3 || a.VocabSize != 49152 || !a.TieWordEmbeddings ||
		a.MaxPositionEmbeddings != 8192 || a.Rope.Base != 100000 || a.RMSNormEps != 1e-5 || a.AttentionBias {
		t.Errorf("%+v", a)
	}
	// The folder holds exactly what the family loads.
	want := map[string]string{
		"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
		"blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight", "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
		"blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight", "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
		"blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight", "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
		"blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
		"blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
	}
	got := map[string]string{}
	for _, target := range plan.Tensors {
		got[target.Source] = target.Target + target.Suffix
	}
	if !maps.Equal(got, want) {
		t.Errorf("targets %v, want %v", got, want)
	}
}

// convert does what llama.cpp's converter did to the rows of q and k: reshape(heads, 2, dim/2).swapaxes(1, 2).
func convert(rows []string, heads int) []string {
	half := len(rows) / heads / 2
	out := make([]string, 0, len(rows))
	for h := range heads {
		for i := range half {
			for part := range 2 {
				out = append(out, rows[(h*2+part)*half+i])
			}
		}
	}
	return out
}

// apply moves rows as the host does: viewed as shape, transposed by perm.
func apply(rows []string, shape, perm []int) []string {
	out := make([]string, 0, len(rows))
	size := []int{shape[perm[0]], shape[perm[1]], shape[perm[2]]}
	for a := range size[0] {
		for b := range size[1] {
			for c := range size[2] {
				index := make([]int, 3)
				index[perm[0]], index[perm[1]], index[perm[2]] = a, b, c
				out = append(out, rows[(index[0]*shape[1]+index[1])*shape[2]+index[2]])
			}
		}
	}
	return out
}

func TestImportUndoesTheRowOrder(t *testing.T) {
	plan, err := importOf(smolMetadata(), append(smolTensors(),
		sdk.ImportTensor{Name: "blk.0.attn_q.bias", Type: "F32", Shape: []int64{576}}, sdk.ImportTensor{Name: "blk.0.attn_v.bias", Type: "F32", Shape: []int64{192}}))
	if err != nil {
		t.Fatal(err)
	}
	heads := map[string]int{"blk.0.attn_q.weight": 9, "blk.0.attn_k.weight": 3, "blk.0.attn_q.bias": 9}
	for _, target := range plan.Tensors {
		n, permuted := heads[target.Source]
		if !permuted {
			if target.RowShape != nil || target.RowPerm != nil {
				t.Errorf("%s: its rows would move", target.Source)
			}
			continue
		}
		rows := make([]string, n*64)
		for i := range rows {
			rows[i] = fmt.Sprint(i)
		}
		if got := apply(convert(rows, n), target.RowShape, target.RowPerm); !slices.Equal(got, rows) {
			t.Errorf("%s: the original order does not come back: %v", target.Source, got[:8])
		}
	}
}

func TestImportRoPEScaling(t *testing.T) {
	cases := []struct {
		more map[string]any
		want *ggufRoPE
	}{
		{map[string]any{"llama.rope.scaling.type": "none"}, nil},
		{map[string]any{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, &ggufRoPE{Type: "linear", Factor: 4}},
		{map[string]any{"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 8.0, "llama.rope.scaling.original_context_length": uint64(4096), "llama.rope.scaling.finetuned": true},
			&ggufRoPE{Type: "yarn", Factor: 8, OriginalContext: 4096}},
	}
	for _, c := range cases {
		values := smolMetadata()
		maps.Copy(values, c.more)
		m := &metadata{values: values, prefix: "llama."}
		got := readGGUF(m, smolTensors())
		if err := m.err(); err != nil || !reflect.DeepEqual(got.RopeScaling, c.want) {
			t.Errorf("%v: %+v (%v), want %+v", c.more, got.RopeScaling, err, c.want)
		}
	}
}

func TestImportFaults(t *testing.T) {
	cases := []struct {
		name    string
		more    map[string]any // nil values remove keys
		tensors []sdk.ImportTensor
		want    string
	}{
		{"experts", map[string]any{"llama.expert_count": uint64(8)}, nil, "llama.expert_count is 8: experts is not built"},
		{"partial rotation", map[string]any{"llama.rope.dimension_count": uint64(32)}, nil, "llama.rope.dimension_count is 32"},
		{"missing width", map[string]any{"llama.embedding_length": nil}, nil, "llama.embedding_length is missing"},
		{"missing epsilon", map[string]any{"llama.attention.layer_norm_rms_epsilon": nil}, nil, "layer_norm_rms_epsilon is missing"},
		{"heads by layer", map[string]any{"llama.attention.head_count": []any{int64(9), int64(8)}}, nil, "llama.attention.head_count"},
		{"yarn without context", map[string]any{"llama.rope.scaling.type": "yarn"}, nil, "original context of 0"},
		{"unknown scaling", map[string]any{"llama.rope.scaling.type": "longrope"}, nil, `"longrope"`},
		{"attention factor", map[string]any{"llama.rope.scaling.attn_factor": 1.5}, nil, "attn_factor is 1.5"},
		{"unknown key", map[string]any{"llama.logit_scale": 0.5}, nil, "keys that are not built: llama.logit_scale"},
		{"llama3 frequencies", nil, []sdk.ImportTensor{{Name: "rope_freqs.weight", Type: "F32", Shape: []int64{32}}}, "rope_freqs.weight"},
		{"unknown tensor", nil, []sdk.ImportTensor{{Name: "blk.0.ffn_gate_inp.weight", Type: "F32", Shape: []int64{8, 576}}}, "blk.0.ffn_gate_inp.weight (F32, [8 576]) has no place"},
		{"unknown outer tensor", nil, []sdk.ImportTensor{{Name: "position_embd.weight", Type: "F32", Shape: []int64{8, 576}}}, "position_embd.weight"},
		{"rows", nil, []sdk.ImportTensor{{Name: "blk.1.attn_q.weight", Type: "F32", Shape: []int64{500, 576}}}, "has 500 rows, 9 heads of 64 ask for 576"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			values := smolMetadata()
			maps.Copy(values, c.more)
			maps.DeleteFunc(values, func(_ string, v any) bool { return v == nil })
			_, err := importOf(values, append(smolTensors(), c.tensors...))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	if _, err := importOf(smolMetadata(), smolTensors()[1:]); err == nil || !strings.Contains(err.Error(), "token_embd.weight is missing") {
		t.Errorf("no embedding: %v", err)
	}
}
