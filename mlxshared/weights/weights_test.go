package weights

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// entry is a tensor whose bytes count up from its seed.
func entry(name, dtype string, seed byte, shape ...int64) safetensors.Entry {
	size := map[string]int{"F32": 4, "U32": 4, "F16": 2, "BF16": 2, "U8": 1, "F64": 8}[dtype]
	for _, d := range shape {
		size *= int(d)
	}
	return safetensors.Entry{Name: name, Dtype: dtype, Shape: shape, Write: func(w io.Writer) error {
		_, err := w.Write(pattern(size, seed))
		return err
	}}
}

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = seed + byte(i)
	}
	return b
}

// model is a checkpoint in two shards: a 4-bit and an 8-bit matrix, mxfp4 and plain ones, a vector, a bias.
func model(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write := func(file string, entries ...safetensors.Entry) {
		if err := safetensors.WriteFile(filepath.Join(dir, file), nil, entries); err != nil {
			t.Fatal(err)
		}
	}
	write("model-00001-of-00002.safetensors",
		entry("four.weight", "U32", 1, 8, 16), entry("four.scales", "BF16", 2, 8, 2), entry("four.biases", "BF16", 3, 8, 2), entry("four.bias", "BF16", 9, 8),
		entry("plain.weight", "F16", 4, 8, 3))
	write("model-00002-of-00002.safetensors",
		entry("eight.weight", "U32", 5, 4, 16), entry("eight.scales", "F16", 6, 4, 2), entry("eight.biases", "F16", 7, 4, 2),
		entry("mx.weight", "U32", 8, 4, 8), entry("mx.scales", "U8", 120, 4, 2),
		entry("norm.weight", "F32", 10, 6), entry("rope.inv_freq", "F32", 11, 2), entry("double.weight", "F64", 1, 2, 2))
	return dir
}

func openModel(t *testing.T) *Store {
	t.Helper()
	s, err := Open(model(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func newScope(t *testing.T) *mlx.Scope {
	t.Helper()
	s, err := mlx.Open(mlx.Options{Device: mlx.DeviceCPU, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	scope := s.NewScope()
	t.Cleanup(func() {
		scope.Close()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return scope
}

func TestLoadedBytesAreTheFiles(t *testing.T) {
	scope := newScope(t)
	l := NewLoader(Options{Store: openModel(t), Scope: scope})
	t.Cleanup(l.Free)
	eight := l.Matrix("eight", 4, 64)
	four := l.Matrix("four", 8, 128)
	bias := l.Vector("four.bias", 8)
	mx := l.Matrix("mx", 4, 64)
	plain := l.Matrix("plain", 8, 3)
	norm := l.Vector("norm.weight", 6)
	if again := l.Matrix("four", 8, 128); again != four {
		t.Error("a matrix asked for twice is two")
	}
	if l.Err() != nil {
		t.Fatal(l.Err())
	}
	for name, c := range map[string]struct {
		a    mlx.Array
		size int
		seed byte
	}{
		"four.weight": {four.W, 512, 1}, "four.scales": {four.Scales, 32, 2}, "four.biases": {four.Biases, 32, 3}, "four.bias": {bias, 16, 9},
		"eight.weight": {eight.W, 256, 5}, "mx.weight": {mx.W, 128, 8}, "mx.scales": {mx.Scales, 8, 120}, "plain.weight": {plain.W, 48, 4}, "norm.weight": {norm, 24, 10},
	} {
		got, err := scope.Bytes(c.a)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, pattern(c.size, c.seed)) {
			t.Errorf("%s: other bytes than the file's", name)
		}
	}
	type packing struct {
		format      mlx.Format
		bits, group int
	}
	for name, c := range map[string]struct {
		m    *mlx.Matrix
		want packing
	}{"four": {four, packing{mlx.Affine, 4, 64}}, "eight": {eight, packing{mlx.Affine, 8, 32}}, "mx": {mx, packing{mlx.MXFP4, 4, 32}}, "plain": {plain, packing{}}} {
		if got := (packing{c.m.Format, c.m.Bits, c.m.Group}); got != c.want {
			t.Errorf("%s is packed as %+v, want %+v", name, got, c.want)
		}
	}
	for path, want := range map[string]mlx.Dtype{"four": mlx.BFloat16, "eight": mlx.Float16, "mx": mlx.BFloat16, "plain": mlx.Float16} {
		if got := l.MatrixDtype(path); got != want {
			t.Errorf("%s is of %v, want %v", path, got, want)
		}
	}
	if got, want := l.Quantization(), "affine 4-bit group 64, affine 8-bit group 32, mxfp4 group 32"; got != want {
		t.Errorf("quantization %q, want %q", got, want)
	}
	if want := int64(512 + 32 + 32 + 16 + 256 + 16 + 16 + 128 + 8 + 48 + 24); l.Bytes() != want || l.Tensors() != 11 {
		t.Errorf("%d bytes in %d tensors, want %d in 11", l.Bytes(), l.Tensors(), want)
	}
}

// Planning asks and adds up as loading does, without a scope.
func TestPlanningCountsTheSame(t *testing.T) {
	l := NewLoader(Options{Store: openModel(t)})
	m := l.Matrix("four", 8, 128)
	l.Vector("norm.weight", 6)
	if l.Err() != nil || l.Bytes() != 512+32+32+24 || !m.W.IsZero() || !l.Planning() || !l.Exact() {
		t.Errorf("%v, %d bytes", l.Err(), l.Bytes())
	}
}

func TestLoaderFaults(t *testing.T) {
	cases := []struct {
		name   string
		rules  string // config.json
		ask    func(*Loader)
		code   sdk.Code
		tensor string
		want   string
	}{
		{"missing", `{}`, func(l *Loader) { l.Vector("absent.weight", 1) }, sdk.CodeNotFound, "absent.weight", "no tensor absent.weight"},
		{"missing matrix", `{}`, func(l *Loader) { l.Matrix("absent", 1, 1) }, sdk.CodeNotFound, "absent.weight", "no tensor absent.weight"},
		{"shape", `{}`, func(l *Loader) { l.Vector("norm.weight", 7) }, sdk.CodeCorrupt, "norm.weight", "has shape [6], config.json asks for [7]"},
		{"rank", `{}`, func(l *Loader) { l.Matrix("norm", 6, 1) }, sdk.CodeCorrupt, "norm.weight", "has shape [6]"},
		{"packed rows", `{}`, func(l *Loader) { l.Matrix("four", 9, 128) }, sdk.CodeCorrupt, "four.weight", "asks for 9 packed rows"},
		{"bits that are none", `{}`, func(l *Loader) { l.Matrix("four", 8, 73) }, sdk.CodeCorrupt, "four.weight", "in 7 bits"},
		{"groups that are none", `{}`, func(l *Loader) { l.Matrix("eight", 4, 80) }, sdk.CodeCorrupt, "eight.scales", "by 40"},
		{"override against the file", `{"quantization": {"group_size": 64, "bits": 4, "four": {"group_size": 64, "bits": 8}}}`,
			func(l *Loader) { l.Matrix("four", 8, 128) }, sdk.CodeCorrupt, "four.weight", "has shape [8 16], config.json asks for [8 32]"},
		{"override without scales", `{"quantization": {"group_size": 64, "bits": 4, "plain": {"group_size": 32, "bits": 8}}}`,
			func(l *Loader) { l.Matrix("plain", 8, 32) }, sdk.CodeCorrupt, "plain.weight", "is F16, want U32"},
		{"named as not quantized", `{"quantization": {"group_size": 64, "bits": 4, "four": false}}`,
			func(l *Loader) { l.Matrix("four", 8, 128) }, sdk.CodeCorrupt, "four.weight", "is U32, want F32 or F16 or BF16"},
		{"dtype", `{}`, func(l *Loader) { l.Matrix("double", 2, 2) }, sdk.CodeCorrupt, "double.weight", "is F64"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			o, err := config.Parse([]byte(c.rules), config.FileName)
			if err != nil {
				t.Fatal(err)
			}
			l := NewLoader(Options{Store: openModel(t), Rules: ReadRules(o)})
			if o.Err() != nil {
				t.Fatal(o.Err())
			}
			c.ask(l)
			var got *sdk.Error
			if !errors.As(l.Err(), &got) || got.Code != c.code || got.Tensor != c.tensor || got.File == "" || !strings.Contains(got.Message, c.want) {
				t.Fatalf("%+v, want %v of tensor %s with %q", l.Err(), c.code, c.tensor, c.want)
			}
			l.Vector("norm.weight", 6)
			if !errors.Is(l.Err(), got) {
				t.Error("a later call replaced the first failure")
			}
		})
	}
}

func TestOverrideWithoutModeIsAffine(t *testing.T) {
	o, err := config.Parse([]byte(`{"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4", "eight": {"group_size": 32, "bits": 8}, "other": false}}`), config.FileName)
	if err != nil {
		t.Fatal(err)
	}
	r := ReadRules(o)
	if err := o.Err(); err != nil {
		t.Fatal(err)
	}
	if *r.Default != (Quantization{mlx.MXFP4, 4, 32}) || *r.Overrides["eight"] != (Quantization{mlx.Affine, 8, 32}) {
		t.Errorf("rules %+v", r)
	}
	if q, named := r.Overrides["other"]; q != nil || !named {
		t.Error("false does not mean: not quantized")
	}
}

func TestRulesRefuseWhatIsNotBuilt(t *testing.T) {
	for text, want := range map[string]string{
		`{"quantization_config": {"quant_method": "gptq"}}`:                          `quantization_config.quant_method: "gptq"`,
		`{"quantization": {"mode": "q4_k"}}`:                                         `quantization.mode: "q4_k"`,
		`{"quantization": {"bits": 7}}`:                                              "quantization.bits: 7",
		`{"quantization": {"group_size": 48}}`:                                       "quantization.group_size: 48",
		`{"quantization": {"mode": "mxfp4", "bits": 8}}`:                             "quantization.mode: mxfp4 has 4 bits",
		`{"quantization": {"group_size": 64, "bits": 4, "a.b": {"bits": 1}}}`:        "quantization.a.b.bits: 1",
		`{"quantization": 4}`:                                                        "quantization: is 4, want an object",
		`{"quantization_config": {"quant_method": "fp8", "weight_block_size": [1]}}`: "quantization_config.weight_block_size",
	} {
		o, err := config.Parse([]byte(text), config.FileName)
		if err != nil {
			t.Fatal(err)
		}
		ReadRules(o)
		if err := o.Err(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestCheckUnused(t *testing.T) {
	l := NewLoader(Options{Store: openModel(t)})
	l.Matrix("four", 8, 128)
	l.Vector("four.bias", 8)
	l.Matrix("eight", 4, 64)
	l.Matrix("mx", 4, 64)
	l.Matrix("plain", 8, 3)
	l.Vector("norm.weight", 6)
	err := l.CheckUnused(&Names{DropContains: []string{"inv_freq"}})
	var got *sdk.Error
	if !errors.As(err, &got) || got.Tensor != "double.weight" || got.Code != sdk.CodeUnsupported {
		t.Errorf("%v, want one about double.weight", err)
	}
	if err := l.CheckUnused(&Names{Drop: []string{"double.weight"}, DropContains: []string{"inv_freq"}}); err != nil {
		t.Error(err)
	}
}

func TestEstimateFollowsTheConfig(t *testing.T) {
	o, err := config.Parse([]byte(`{"quantization": {"group_size": 64, "bits": 4, "head": {"group_size": 32, "bits": 8}, "left": false}}`), config.FileName)
	if err != nil {
		t.Fatal(err)
	}
	l := NewLoader(Options{Rules: ReadRules(o), Plain: mlx.BFloat16})
	for path, want := range map[string]int64{
		"body": 10*128/2 + 2*2*10*2, "head": 10*128 + 2*2*10*4, "left": 10 * 128 * 2,
	} {
		before := l.Bytes()
		if l.Matrix(path, 10, 128); l.Bytes()-before != want {
			t.Errorf("%s: %d bytes, want %d", path, l.Bytes()-before, want)
		}
	}
	before := l.Bytes()
	if l.Matrix("odd", 10, 96); l.Bytes()-before != 10*96*2 {
		t.Error("a dimension that does not divide by the group is not left as it is")
	}
	if l.Exact() {
		t.Error("an estimate claims to be exact")
	}
}

func TestSizesBeyondBelief(t *testing.T) {
	for name, ask := range map[string]func(*Loader){
		"one matrix":      func(l *Loader) { l.Matrix("a", 1<<25, 8) },
		"experts":         func(l *Loader) { l.Experts("a", 1<<24, 1<<24, 1<<24) },
		"a negative size": func(l *Loader) { l.Tensor("a", 2, -1) },
		"the sum": func(l *Loader) {
			for i := range 1 << 13 {
				l.Matrix(strings.Repeat("a", i), 1<<24, 1<<24)
			}
		},
	} {
		l := NewLoader(Options{Plain: mlx.Float32})
		if ask(l); sdk.CodeOf(l.Err()) != sdk.CodeInvalid || l.Bytes() < 0 {
			t.Errorf("%s: %v, %d bytes", name, l.Err(), l.Bytes())
		}
	}
}

func TestCanceledLoad(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	l := NewLoader(Options{Store: openModel(t), Scope: newScope(t)})
	t.Cleanup(l.Free)
	l.Context = ctx
	l.Loaded = func(string, int64) { cancel() }
	l.Matrix("four", 8, 128)
	if sdk.CodeOf(l.Err()) != sdk.CodeCanceled || l.Tensors() != 1 {
		t.Errorf("%v after %d tensors", l.Err(), l.Tensors())
	}
}

func TestOpenFaults(t *testing.T) {
	if _, err := Open(t.TempDir()); !errors.Is(err, safetensors.ErrNoWeights) {
		t.Errorf("an empty folder: %v", err)
	}
	dir := model(t)
	path := filepath.Join(dir, "model-00002-of-00002.safetensors")
	if err := os.Truncate(path, 700); err != nil {
		t.Fatal(err)
	}
	var got *sdk.Error
	if _, err := Open(dir); !errors.As(err, &got) || got.Code != sdk.CodeCorrupt || got.File == "" {
		t.Errorf("a truncated shard: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.As(err, &got) || got.Code != sdk.CodeCorrupt || !strings.Contains(got.Message, "model-00002-of-00002") {
		t.Errorf("a missing shard: %v", err)
	}
}

// A file that shrinks between the headers and the data is an error, not a fault of the process.
func TestFileShrinksBeforeItIsMapped(t *testing.T) {
	dir := model(t)
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := os.Truncate(filepath.Join(dir, "model-00001-of-00002.safetensors"), 600); err != nil {
		t.Fatal(err)
	}
	l := NewLoader(Options{Store: s, Scope: newScope(t)})
	t.Cleanup(l.Free)
	l.Matrix("plain", 8, 3)
	if sdk.CodeOf(l.Err()) != sdk.CodeCorrupt {
		t.Errorf("%v, want a corrupt file", l.Err())
	}
}

func FuzzReadRules(f *testing.F) {
	f.Add([]byte(`{"quantization": {"group_size": 64, "bits": 4, "mode": "affine", "lm_head": {"bits": 8, "group_size": 32}, "norm": false}}`))
	f.Add([]byte(`{"quantization_config": {"quant_method": "mxfp4"}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		o, err := config.Parse(raw, config.FileName)
		if err != nil {
			return
		}
		r := ReadRules(o)
		if o.Err() != nil {
			return
		}
		all := []*Quantization{r.Default}
		for _, q := range r.Overrides {
			all = append(all, q)
		}
		for _, q := range all {
			if q == nil {
				continue
			}
			if q.Format == mlx.Affine && (!slices.Contains(affineBits, q.Bits) || !slices.Contains(affineGroups, q.Group)) {
				t.Fatalf("rules let %+v through", q)
			}
			r.estimate(&Names{}, "x", 256)
		}
	})
}
