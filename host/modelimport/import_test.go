package modelimport

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/gguf"
	"github.com/mlxcel/mlxcel/host/gguf/gguftest"
	"github.com/mlxcel/mlxcel/host/tokenize"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// planner is an executor that knows one tiny layout.
type planner struct {
	got sdk.ImportRequest
	err error
}

func (p *planner) Import(_ context.Context, req sdk.ImportRequest) (*sdk.ImportPlan, error) {
	p.got = req
	return &sdk.ImportPlan{
		Family: "tiny",
		Config: []byte(`{"model_type":"tiny","rope_theta":100000.0}`),
		Tensors: []sdk.ImportTarget{
			{Source: "token_embd.weight", Target: "model.embed", Suffix: ".weight"},
			{Source: "q.weight", Target: "model.q", Suffix: ".weight", RowShape: []int{1, 2, 2}, RowPerm: []int{0, 2, 1}},
			{Source: "k.weight", Target: "model.k", Suffix: ".weight"},
			{Source: "plain.weight", Target: "model.plain", Suffix: ".weight", RowShape: []int{2, 2}, RowPerm: []int{1, 0}},
			{Source: "norm.weight", Target: "model.norm", Suffix: ".weight"},
		},
		Skipped: []string{"extra.weight: not needed"},
	}, p.err
}

func vocabularyKeys(b *gguftest.Builder) {
	b.String("general.architecture", "tiny")
	b.Uint("tiny.context_length", 64)
	b.String(keyModel, "gpt2")
	b.String(keyPre, "smollm")
	b.Strings(keyTokens, "<s>", "</s>", "<eot>", "a", "b", "ab", "Ġ", "1")
	b.Int32s(keyTypes, tokenControl, tokenControl, tokenControl, tokenNormal, tokenNormal, tokenNormal, tokenNormal, tokenNormal)
	b.Strings("tokenizer.ggml.merges", "a b")
	b.Uint("tokenizer.ggml.bos_token_id", 0)
	b.Uint("tokenizer.ggml.eos_token_id", 1)
	b.Uint("tokenizer.ggml.eot_token_id", 2)
	b.Bool("tokenizer.ggml.add_bos_token", true)
	b.String("tokenizer.chat_template", "{{ messages[0].content }}")
}

// q8rows makes Q8_0 rows of one block each, row i filled with the value i.
func q8rows(rows int) []byte {
	var out []byte
	for i := range rows {
		out = binary.LittleEndian.AppendUint16(out, 0x3c00) // scale 1
		for range 32 {
			out = append(out, byte(i))
		}
	}
	return out
}

func tensors(b *gguftest.Builder) {
	b.Tensor("token_embd.weight", uint32(gguf.Q8_0), []int64{8, 32}, q8rows(8))
	b.Tensor("q.weight", uint32(gguf.Q4_0), []int64{4, 32}, q4rows(4))
	b.Tensor("k.weight", uint32(gguf.Q4_0), []int64{4, 32}, q4rows(4))
	b.Tensor("plain.weight", uint32(gguf.F16), []int64{4, 1}, []byte{0, 1, 2, 3, 4, 5, 6, 7})
	b.Tensor("norm.weight", uint32(gguf.F32), []int64{1}, []byte{0, 0, 128, 63})
	b.Tensor("extra.weight", 12, []int64{256}, make([]byte, 144))
}

// q4rows makes Q4_0 rows of one block each; row i has scale 2^i.
func q4rows(rows int) []byte {
	var out []byte
	for i := range rows {
		out = binary.LittleEndian.AppendUint16(out, uint16(15+i)<<10)
		out = append(out, make([]byte, 16)...)
	}
	return out
}

func open(t *testing.T, build func(*gguftest.Builder)) *gguf.File {
	t.Helper()
	var b gguftest.Builder
	build(&b)
	path := filepath.Join(t.TempDir(), "m.gguf")
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := gguf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func whole(b *gguftest.Builder) { vocabularyKeys(b); tensors(b) }

func TestGGUF(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "models", "tiny")
	p := &planner{}
	report, err := GGUF(context.Background(), open(t, whole), dir, p)
	if err != nil {
		t.Fatal(err)
	}
	if report.Family != "tiny" || report.Tensors != 11 || len(report.Skipped) != 1 {
		t.Errorf("report %+v", report)
	}
	if p.got.Format != "gguf" || p.got.Architecture != "tiny" || len(p.got.Tensors) != 6 || p.got.Metadata["tiny.context_length"] != uint64(64) {
		t.Errorf("request %+v", p.got)
	}
	var config struct {
		ModelType    string                     `json:"model_type"`
		Theta        json.Number                `json:"rope_theta"`
		Dtype        string                     `json:"torch_dtype"`
		EOS          []int                      `json:"eos_token_id"`
		Quantization map[string]json.RawMessage `json:"quantization"`
	}
	readJSON(t, filepath.Join(dir, "config.json"), &config)
	if config.ModelType != "tiny" || config.Theta != "100000.0" || config.Dtype != "float16" || !slices.Equal(config.EOS, []int{1, 2}) {
		t.Errorf("config %+v", config)
	}
	for key, want := range map[string]string{"bits": "4", "group_size": "32", "model.plain": "false", "mode": `"affine"`} {
		if got := string(config.Quantization[key]); got != want {
			t.Errorf("quantization.%s is %s, want %s", key, got, want)
		}
	}
	if e := string(config.Quantization["model.embed"]); !strings.Contains(e, `"bits": 8`) {
		t.Errorf("the embedding's override is %s", e)
	}
	c, err := safetensors.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	// Rows 0..3 of q are viewed as [1,2,2] and transposed: 0 2 1 3. Their scales are powers of two.
	if got := data(t, c, "model.q.scales"); !slices.Equal(got, []byte{0, 0x3c, 0, 0x44, 0, 0x40, 0, 0x48}) {
		t.Errorf("permuted scales % x", got)
	}
	if got := data(t, c, "model.k.scales"); !slices.Equal(got, []byte{0, 0x3c, 0, 0x40, 0, 0x44, 0, 0x48}) {
		t.Errorf("scales % x", got)
	}
	if got := data(t, c, "model.plain.weight"); !slices.Equal(got, []byte{0, 1, 4, 5, 2, 3, 6, 7}) {
		t.Errorf("permuted plain rows % x", got)
	}
	if got := data(t, c, "model.embed.weight")[32:34]; !slices.Equal(got, []byte{129, 129}) {
		t.Errorf("8-bit data % x", got)
	}
	tok, err := tokenize.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := tok.Encode("ab1<eot>", true)
	if err != nil || !slices.Equal(ids, []int32{0, 5, 7, 2}) {
		t.Errorf("ids %v (%v)", ids, err)
	}
	if raw, err := os.ReadFile(filepath.Join(dir, "chat_template.jinja")); err != nil || string(raw) != "{{ messages[0].content }}" {
		t.Errorf("template %q (%v)", raw, err)
	}
}

func readJSON(t *testing.T, path string, to any) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(raw, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func data(t *testing.T, c *safetensors.Checkpoint, name string) []byte {
	t.Helper()
	x, ok := c.Lookup(name)
	if !ok {
		t.Fatalf("no tensor %s in %v", name, c.Names())
	}
	raw, err := os.ReadFile(x.Path)
	if err != nil {
		t.Fatal(err)
	}
	return raw[x.Offset : x.Offset+x.Size]
}

func TestGGUFRefusesAndLeavesNothing(t *testing.T) {
	boom := errors.New("boom")
	for _, tc := range []struct {
		name, want string
		p          planner
		build      func(*gguftest.Builder)
	}{
		{"the executor refuses", "boom", planner{err: boom}, whole},
		{"no vocabulary", "carries no vocabulary", planner{}, tensors},
		{"a tensor is missing", "has no tensor token_embd.weight", planner{}, vocabularyKeys},
		{"type without a form here", "tensor k.weight has type Q4_K", planner{}, func(b *gguftest.Builder) {
			vocabularyKeys(b)
			b.Tensor("token_embd.weight", uint32(gguf.Q8_0), []int64{8, 32}, q8rows(8))
			b.Tensor("q.weight", uint32(gguf.Q4_0), []int64{4, 32}, q4rows(4))
			b.Tensor("k.weight", 12, []int64{1, 256}, make([]byte, 144))
		}},
		{"unknown pre-tokenizer", `tokenizer.ggml.pre is "mystery"`, planner{}, func(b *gguftest.Builder) {
			whole(b)
			b.String(keyPre, "mystery")
		}},
		{"id outside of the vocabulary", "outside of the vocabulary of 8", planner{}, func(b *gguftest.Builder) {
			whole(b)
			b.Uint("tokenizer.ggml.bos_token_id", 8)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			parent := t.TempDir()
			_, err := GGUF(context.Background(), open(t, tc.build), filepath.Join(parent, "out"), &tc.p)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %v, want one with %q", err, tc.want)
			}
			if left, _ := os.ReadDir(parent); len(left) != 0 {
				t.Fatalf("left behind: %v", left)
			}
		})
	}
}

func TestGGUFKeepsWhatIsThere(t *testing.T) {
	dir := t.TempDir()
	kept := filepath.Join(dir, "notes.txt")
	if err := os.WriteFile(kept, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := GGUF(context.Background(), open(t, whole), dir, &planner{})
	if _, ok := errors.AsType[*ExistsError](err); !ok {
		t.Fatalf("error %v, want an ExistsError", err)
	}
	if raw, err := os.ReadFile(kept); err != nil || string(raw) != "mine" {
		t.Fatalf("%q (%v)", raw, err)
	}
}

// TestSentencePiece: "▁ab" is reached by the merges that the scores imply, and bytes stand in for what is not there.
func TestSentencePiece(t *testing.T) {
	v := &vocabulary{
		model: "llama", bos: 1, eos: 2, eot: -1, unk: 0, addBOS: true, addSpacePrefix: true,
		tokens: []string{"<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "▁a", "ab", "▁ab"},
		types:  []int64{tokenUnknown, tokenControl, tokenControl, tokenByte, tokenByte, 1, 1, 1, 1, 1, 1},
		scores: []float64{0, 0, 0, 0, 0, -4, -5, -6, -1, -3, -2},
	}
	raw, err := v.tokenizerJSON()
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenize.New(raw)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		text string
		want []int32
	}{{"ab", []int32{1, 10}}, {"a ab", []int32{1, 8, 10}}, {"é", []int32{1, 5, 3, 4}}} {
		ids, err := tok.Encode(tc.text, true)
		if err != nil || !slices.Equal(ids, tc.want) {
			t.Errorf("%q: %v (%v), want %v", tc.text, ids, err, tc.want)
		}
		if got := tok.Decode(ids, true); got != tc.text {
			t.Errorf("%q decodes to %q", tc.text, got)
		}
	}
}
