package weights

import (
	"bytes"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// sourced opens a checkpoint of the given tensors with sources.
func sourced(t *testing.T, sources []Source, entries ...safetensors.Entry) (*Loader, *mlx.Scope) {
	t.Helper()
	dir := t.TempDir()
	if err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), nil, entries); err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	scope := newScope(t)
	l := NewLoader(Options{Store: s, Scope: scope, Names: Names{Sources: sources}})
	t.Cleanup(func() {
		l.Free()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return l, scope
}

// Tensors of half precision whose elements are two bytes of a counting pattern: element i of a tensor with seed s is the
// bytes s+2i, s+2i+1. The tables give the elements' numbers in the order wanted.
func TestSources(t *testing.T) {
	fused := entry("l.gate_up", "F16", 0, 2, 3, 4) // [experts, inputs, gate and up outputs]
	pairs := entry("l.pairs", "F16", 0, 2, 4, 3)   // [experts, gate and up rows in turns, inputs]
	cases := []struct {
		name    string
		source  Source
		entries []safetensors.Entry
		shape   []int
		want    []byte // elements
	}{
		{"another name", Source{Of: "w.weight", From: "other"}, []safetensors.Entry{entry("l.other", "F16", 0, 2, 2)},
			[]int{2, 2}, []byte{0, 1, 2, 3}},
		{"a tensor per expert", Source{Of: "w.", From: "e.{}.w."}, []safetensors.Entry{entry("l.e.0.w.weight", "F16", 0, 1, 2), entry("l.e.1.w.weight", "F16", 100, 1, 2)},
			[]int{2, 1, 2}, []byte{0, 1, 50, 51}},
		{"transposed", Source{Of: "w.weight", From: "gate_up", Transposed: true}, []safetensors.Entry{fused},
			[]int{2, 4, 3}, []byte{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11, 12, 16, 20, 13, 17, 21, 14, 18, 22, 15, 19, 23}},
		{"second half, transposed", Source{Of: "w.weight", From: "gate_up", Transposed: true, Parts: 2, Part: 1, Axis: 1}, []safetensors.Entry{fused},
			[]int{2, 2, 3}, []byte{2, 6, 10, 3, 7, 11, 14, 18, 22, 15, 19, 23}},
		{"every second row", Source{Of: "w.weight", From: "pairs", Parts: 2, Part: 1, Axis: 1, Interleaved: true}, []safetensors.Entry{pairs},
			[]int{2, 2, 3}, []byte{3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23}},
		{"first half", Source{Of: "w.", From: "both.", Parts: 2}, []safetensors.Entry{entry("l.both.weight", "F16", 0, 4, 1)},
			[]int{2, 1}, []byte{0, 1}},
		{"second half of each expert", Source{Of: "w.", From: "e.{}.both.", Parts: 2, Part: 1, Axis: 1}, []safetensors.Entry{entry("l.e.0.both.weight", "F16", 0, 2, 2), entry("l.e.1.both.weight", "F16", 100, 2, 2)},
			[]int{2, 1, 2}, []byte{2, 3, 52, 53}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			l, scope := sourced(t, []Source{{Of: "absent", From: "x"}, c.source}, c.entries...)
			a := l.Tensor("l.w.weight", c.shape...)
			if err := l.CheckUnused(&Names{}); err != nil {
				t.Fatal(err)
			}
			got, err := scope.Bytes(a)
			if err != nil {
				t.Fatal(err)
			}
			var want []byte
			for _, e := range c.want {
				want = append(want, 2*e, 2*e+1)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
			if l.Bytes() != int64(len(want)) {
				t.Errorf("%d bytes counted, want %d", l.Bytes(), len(want))
			}
		})
	}
}

// A prefix and a layout may both differ.
func TestSourcesAddUp(t *testing.T) {
	l, scope := sourced(t, []Source{{Of: "model.", From: "text.model."}, {Of: "experts.w.", From: "experts.{}.w1."}},
		entry("text.model.experts.0.w1.weight", "F16", 0, 1, 1), entry("text.model.experts.1.w1.weight", "F16", 8, 1, 1))
	got, err := scope.Bytes(l.Tensor("model.experts.w.weight", 2, 1, 1))
	if err != nil || l.Err() != nil {
		t.Fatal(err, l.Err())
	}
	if want := []byte{0, 1, 8, 9}; !bytes.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// gpt-oss holds 32 packed weights as 16 bytes along a dimension of their own.
func TestBytesOfWords(t *testing.T) {
	l, scope := sourced(t, []Source{
		{Of: "w.weight", From: "w_blocks", Bytes: true, Parts: 2, Part: 1, Axis: 1, Interleaved: true},
		{Of: "w.scales", From: "w_scales", Parts: 2, Part: 1, Axis: 1, Interleaved: true},
	}, entry("w_blocks", "U8", 0, 1, 4, 1, 16), entry("w_scales", "U8", 100, 1, 4, 1))
	m := l.Experts("w", 1, 2, 32)
	if l.Err() != nil {
		t.Fatal(l.Err())
	}
	if m.Format != mlx.MXFP4 {
		t.Errorf("format %v", m.Format)
	}
	for a, want := range map[mlx.Array][]byte{m.W: append(pattern(16, 16), pattern(16, 48)...), m.Scales: {101, 103}} {
		got, err := scope.Bytes(a)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
}

func TestSourceFaults(t *testing.T) {
	perExpert := Source{Of: "w.", From: "e.{}.w."}
	cases := []struct {
		name    string
		entries []safetensors.Entry
		code    sdk.Code
		tensor  string
		want    string
	}{
		{"an expert is missing", []safetensors.Entry{entry("e.0.w.weight", "F16", 0, 1, 2)}, sdk.CodeNotFound, "e.1.w.weight", "no tensor"},
		{"an expert has another shape", []safetensors.Entry{entry("e.0.w.weight", "F16", 0, 1, 2), entry("e.1.w.weight", "F16", 0, 1, 3)}, sdk.CodeCorrupt, "e.1.w.weight", "has shape [1 3]"},
		{"an expert has another type", []safetensors.Entry{entry("e.0.w.weight", "F16", 0, 1, 2), entry("e.1.w.weight", "F32", 0, 1, 2)}, sdk.CodeCorrupt, "e.1.w.weight", "is F32, expert 0 has F16"},
		{"no expert", nil, sdk.CodeNotFound, "w.weight", "no tensor"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			l, _ := sourced(t, []Source{perExpert}, append(c.entries, entry("spare", "F16", 0, 1))...)
			l.Experts("w", 2, 1, 2)
			if err := l.Err(); !isError(err, c.code, c.tensor, c.want) {
				t.Errorf("%v, want %v of %s with %q", err, c.code, c.tensor, c.want)
			}
		})
	}
}

// A tensor of one expert too many has no place.
func TestExpertTooMany(t *testing.T) {
	l, _ := sourced(t, []Source{{Of: "w.", From: "e.{}.w."}}, entry("e.0.w.weight", "F16", 0, 1, 2), entry("e.1.w.weight", "F16", 0, 1, 2))
	l.Experts("w", 1, 1, 2)
	if err := l.CheckUnused(&Names{}); !isError(err, sdk.CodeUnsupported, "e.1.w.weight", "has no place") {
		t.Error(err)
	}
}

// Where there is no checkpoint, an entry under any name decides, and the default speaks of the packed modules only.
func TestEstimateNames(t *testing.T) {
	four, eight := &Quantization{mlx.MXFP4, 4, 32}, &Quantization{mlx.Affine, 8, 64}
	r := Rules{Default: four, Overrides: map[string]*Quantization{"l.fused": eight}}
	n := Names{Packed: []string{".experts."}, Sources: []Source{{Of: "gate.", From: "fused.", Parts: 2}}}
	for path, want := range map[string]*Quantization{"l.experts.up": four, "l.gate": eight, "l.q_proj": nil} {
		if got := r.estimate(&n, path, 64); got != want {
			t.Errorf("%s: %v, want %v", path, got, want)
		}
	}
	if got := r.estimate(&n, "l.experts.up", 40); got != nil {
		t.Errorf("40 columns are packed as %v", got)
	}
}

func FuzzArrange(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, uint8(2), uint8(3), uint8(2), true, uint8(1), false)
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7}, uint8(1), uint8(2), uint8(4), false, uint8(0), true)
	f.Fuzz(func(t *testing.T, data []byte, a, b, c uint8, transposed bool, part uint8, interleaved bool) {
		shape := []int64{int64(a % 4), int64(b % 8), int64(c % 8)}
		n := int(shape[0] * shape[1] * shape[2])
		if n == 0 || len(data) < n {
			return
		}
		l := layout{transposed: transposed, parts: 2, part: int(part % 2), axis: 1, interleaved: interleaved}
		want := l.seen(shape)
		if want == nil {
			return
		}
		dst := make([]byte, n/2)
		l.arrange(dst, data[:n], shape, 1)
		rows, cols := want[1], want[2]
		for i := range dst {
			e, r, k := int64(i)/(rows*cols), int64(i)/cols%rows, int64(i)%cols
			if r = r + rows*int64(l.part); interleaved {
				r = int64(i)/cols%rows*2 + int64(l.part)
			}
			at := (e*shape[1]+r)*shape[2] + k
			if transposed {
				at = (e*shape[1]+k)*shape[2] + r
			}
			if dst[i] != data[at] {
				t.Fatalf("%+v of %v: byte %d is %d, want %d", l, shape, i, dst[i], data[at])
			}
		}
	})
}

func TestAliases(t *testing.T) {
	n := Names{Sources: []Source{{Of: "mlp.gate_proj.", From: "mlp.gate_up_proj."}, {Of: "absent", From: "x"}}}
	if got := strings.Join(n.aliases("a.mlp.gate_proj"), " "); got != "a.mlp.gate_proj a.mlp.gate_up_proj" {
		t.Error(got)
	}
}

func isError(err error, code sdk.Code, tensor, want string) bool {
	e, ok := errors.AsType[*sdk.Error](err)
	return ok && e.Code == code && e.Tensor == tensor && strings.Contains(e.Message, want)
}
