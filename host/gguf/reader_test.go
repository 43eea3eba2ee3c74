package gguf

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/gguf/gguftest"
)

func sample() *gguftest.Builder {
	var b gguftest.Builder
	b.Key("general.architecture", kindString, gguftest.Str("llama"))
	b.Key("eps", kindF32, gguftest.U32(math.Float32bits(1e-5)))
	b.Key("u8", kindU8, []byte{200})
	b.Key("i8", kindI8, []byte{200})
	b.Key("i16", kindI16, []byte{255, 255})
	b.Key("i64", kindI64, gguftest.U64(math.MaxUint64))
	b.Key("f64", kindF64, gguftest.U64(math.Float64bits(0.25)))
	b.Key("bool", kindBool, []byte{1})
	b.Key("words", kindArray, slices.Concat(gguftest.U32(kindString), gguftest.U64(2), gguftest.Str("a"), gguftest.Str("b")))
	b.Key("ints", kindArray, slices.Concat(gguftest.U32(kindI32), gguftest.U64(2), gguftest.U32(1), gguftest.U32(math.MaxUint32)))
	b.Tensor("a", uint32(F32), []int64{2, 3}, make([]byte, 24))
	b.Tensor("b", uint32(Q4_1), []int64{1, 64}, make([]byte, 40))
	return &b
}

func TestParse(t *testing.T) {
	data := sample().Bytes()
	f, err := Parse(bytes.NewReader(data), "x", int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]any{
		"general.architecture": "llama", "eps": 1e-5, "u8": uint64(200), "i8": int64(-56), "i16": int64(-1),
		"i64": int64(-1), "f64": 0.25, "bool": true, "words": []string{"a", "b"}, "ints": []int64{1, -1},
	} {
		if got := f.Metadata[key]; fmt.Sprintf("%T %v", got, got) != fmt.Sprintf("%T %v", want, want) {
			t.Errorf("%s is %T %v, want %T %v", key, got, got, want, want)
		}
	}
	a, b := f.Tensors[0], f.Tensors[1]
	if !slices.Equal(a.Shape, []int64{2, 3}) || a.Size != 24 || a.Offset%defaultAlign != 0 || b.Size != 40 || b.Offset != a.Offset+32 {
		t.Fatalf("tensors %+v %+v", a, b)
	}
	// Every proper prefix is an error, never a crash or a file that looks whole.
	for n := range len(data) - (defaultAlign - 8) { // the last tensor's padding is no data
		if _, err := Parse(bytes.NewReader(data[:n]), "x", int64(n)); err == nil {
			t.Fatalf("%d of %d bytes parse", n, len(data))
		}
	}
}

func TestParseRefuses(t *testing.T) {
	with := func(change func(b *gguftest.Builder)) []byte {
		var b gguftest.Builder
		change(&b)
		return b.Bytes()
	}
	for _, tc := range []struct {
		name, want string
		data       []byte
	}{
		{"other file", "not a GGUF", []byte("PK\x03\x04aaaaaaaaaaaaaaaaaaaa")},
		{"version", "version 1", append([]byte("GGUF"), 1, 0, 0, 0)},
		{"tensor count", "exceed the bound", slices.Concat([]byte("GGUF"), gguftest.U32(3), gguftest.U64(1<<40), gguftest.U64(0))},
		{"key count", "exceed the bound", slices.Concat([]byte("GGUF"), gguftest.U32(3), gguftest.U64(0), gguftest.U64(1<<40))},
		{"string length", "exceed the bound", with(func(b *gguftest.Builder) { b.Key("k", kindString, gguftest.U64(1<<40)) })},
		{"array length", "exceed the bound", with(func(b *gguftest.Builder) {
			b.Key("k", kindArray, slices.Concat(gguftest.U32(kindU8), gguftest.U64(1<<40)))
		})},
		{"value type", "unknown value type 99", with(func(b *gguftest.Builder) { b.Key("k", 99, nil) })},
		{"nested array", "not known", with(func(b *gguftest.Builder) {
			b.Key("k", kindArray, slices.Concat(gguftest.U32(kindArray), gguftest.U64(0)))
		})},
		{"tensor type", "unknown type 77", with(func(b *gguftest.Builder) { b.Tensor("t", 77, []int64{32}, nil) })},
		{"partial block", "no multiple", with(func(b *gguftest.Builder) { b.Tensor("t", uint32(Q8_0), []int64{33}, make([]byte, 64)) })},
		{"shape overflow", "overflows", with(func(b *gguftest.Builder) { b.Tensor("t", uint32(F32), []int64{1 << 40, 1 << 40}, nil) })},
		{"data cut", "truncated: tensor t", with(func(b *gguftest.Builder) { b.Tensor("t", uint32(F32), []int64{1 << 20}, make([]byte, 4)) })},
		{"alignment", "general.alignment is 0", with(func(b *gguftest.Builder) { b.Key(alignmentKey, kindU32, gguftest.U32(0)) })},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse(bytes.NewReader(tc.data), "x.gguf", int64(len(tc.data)))
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "x.gguf") {
				t.Fatalf("error %v, want one that names the file and has %q", err, tc.want)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add(sample().Bytes())
	f.Add([]byte("GGUF"))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Parse(bytes.NewReader(data), "x", int64(len(data)))
		if err != nil {
			return
		}
		for _, tensor := range got.Tensors {
			if tensor.Offset < 0 || tensor.Size < 0 || tensor.Offset+tensor.Size > int64(len(data)) {
				t.Fatalf("tensor %+v lies outside of the %d bytes", tensor, len(data))
			}
		}
	})
}
