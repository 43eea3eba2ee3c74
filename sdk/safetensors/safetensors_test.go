package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func file(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, data)...)
}

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		name, want string // want is a part of the error, "" for none
		data       []byte
	}{
		{"good", "", file(`{"__metadata__":{"format":"mlx"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}`, 24)},
		{"scalar", "", file(`{"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}`, 2)},
		{"empty tensor", "", file(`{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}`, 0)},
		{"no bytes", "truncated", nil},
		{"huge header", "not a safetensors file", binary.LittleEndian.AppendUint64(nil, 1<<60)},
		{"header cut", "truncated", file(`{}`, 0)[:9]},
		{"not json", "not JSON", file(`{`, 0)},
		{"data cut", "truncated: its data ends at byte", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 7)},
		{"wrong size", "does not fill", file(`{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}`, 8)},
		{"overflow", "overflows", file(`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,8]}}`, 8)},
		{"negative", "negative", file(`{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,8]}}`, 8)},
		{"reversed", "make no range", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[8,0]}}`, 8)},
		{"no offsets", "no data_offsets", file(`{"a":{"dtype":"U8","shape":[1]}}`, 8)},
		{"dtype", `unknown dtype "Q9"`, file(`{"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,1]}}`, 8)},
		{"overlap", "overlaps", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}`, 8)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse(bytes.NewReader(tc.data), "f", int64(len(tc.data)))
			if tc.want == "" && err != nil {
				t.Fatal(err)
			}
			if tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Fatalf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

// put writes a file of one-byte tensors.
func put(t *testing.T, dir, name string, tensors ...string) {
	t.Helper()
	var entries []Entry
	for _, n := range tensors {
		entries = append(entries, Entry{Name: n, Dtype: "U8", Shape: []int64{1}, Write: func(w io.Writer) error {
			_, err := w.Write([]byte(n[:1]))
			return err
		}})
	}
	if err := WriteFile(filepath.Join(dir, name), map[string]string{"format": "mlx"}, entries); err != nil {
		t.Fatal(err)
	}
}

func TestOpen(t *testing.T) {
	const one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
	index := `{"weight_map":{"a":"` + one + `","b":"` + two + `"}}`
	for _, tc := range []struct {
		name, want string
		make       func(t *testing.T, dir string)
	}{
		{"single file without index", "", func(t *testing.T, d string) { put(t, d, "model.safetensors", "a", "b") }},
		{"shards with index", "", func(t *testing.T, d string) {
			put(t, d, one, "a")
			put(t, d, two, "b")
			os.WriteFile(filepath.Join(d, IndexFile), []byte(index), 0o644)
		}},
		{"shards without index", "", func(t *testing.T, d string) { put(t, d, one, "a"); put(t, d, two, "b") }},
		{"no weights", ErrNoWeights.Error(), func(t *testing.T, d string) {}},
		{"missing shard without index", two + ": missing shard", func(t *testing.T, d string) { put(t, d, one, "a") }},
		{"missing shard", two + ": missing shard", func(t *testing.T, d string) {
			put(t, d, one, "a")
			os.WriteFile(filepath.Join(d, IndexFile), []byte(index), 0o644)
		}},
		{"extra shard", "model-extra.safetensors: extra shard", func(t *testing.T, d string) {
			put(t, d, one, "a")
			put(t, d, two, "b")
			put(t, d, "model-extra.safetensors", "c")
			os.WriteFile(filepath.Join(d, IndexFile), []byte(index), 0o644)
		}},
		{"tensor in another shard than the index says", "lacks tensor b", func(t *testing.T, d string) {
			put(t, d, one, "a", "b")
			put(t, d, two, "c")
			os.WriteFile(filepath.Join(d, IndexFile), []byte(index), 0o644)
		}},
		{"tensor twice", "also in", func(t *testing.T, d string) { put(t, d, one, "a"); put(t, d, two, "a") }},
		{"index leaves the folder", "is not a file name", func(t *testing.T, d string) {
			os.WriteFile(filepath.Join(d, IndexFile), []byte(`{"weight_map":{"a":"../x"}}`), 0o644)
		}},
		{"index is no JSON", "not a shard index", func(t *testing.T, d string) {
			put(t, d, "model.safetensors", "a")
			os.WriteFile(filepath.Join(d, IndexFile), []byte("x"), 0o644)
		}},
		{"truncated shard", "truncated", func(t *testing.T, d string) {
			put(t, d, "model.safetensors", "a")
			st, _ := os.Stat(filepath.Join(d, "model.safetensors"))
			os.Truncate(filepath.Join(d, "model.safetensors"), st.Size()-1)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "a [b] *") // characters that a glob would expand
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			tc.make(t, dir)
			c, err := Open(dir)
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Fatalf("error %v, want one with %q", err, tc.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			b, ok := c.Lookup("b")
			if !ok || c.Bytes() != 2 {
				t.Fatalf("lookup b: %v, %d bytes", ok, c.Bytes())
			}
			raw, err := os.ReadFile(b.Path)
			if err != nil || raw[b.Offset] != 'b' || b.Size != 1 {
				t.Fatalf("tensor b at %+v holds %q (%v)", b, raw[b.Offset:b.Offset+b.Size], err)
			}
		})
	}
}

func TestWriteFileKeepsNothingOnFailure(t *testing.T) {
	dir := t.TempDir()
	short := []Entry{{Name: "a", Dtype: "F32", Shape: []int64{2}, Write: func(w io.Writer) error { _, err := w.Write([]byte{1}); return err }}}
	if err := WriteFile(filepath.Join(dir, "model.safetensors"), nil, short); err == nil || !strings.Contains(err.Error(), "wants 8") {
		t.Fatalf("error %v, want the byte count", err)
	}
	boom := errors.New("boom")
	failing := []Entry{{Name: "a", Dtype: "F32", Shape: []int64{2}, Write: func(io.Writer) error { return boom }}}
	if err := WriteFile(filepath.Join(dir, "model.safetensors"), nil, failing); !errors.Is(err, boom) {
		t.Fatalf("error %v, want %v", err, boom)
	}
	left, _ := os.ReadDir(dir)
	if len(left) != 0 {
		t.Fatalf("left behind: %v", left)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(file(`{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}`, 24))
	f.Add(file(`{"__metadata__":{"x":"y"}}`, 0))
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Parse(bytes.NewReader(data), "f", int64(len(data)))
		if err != nil {
			return
		}
		for _, tensor := range got.Tensors {
			if tensor.Offset < 8 || tensor.Size < 0 || tensor.Offset+tensor.Size > int64(len(data)) {
				t.Fatalf("tensor %+v lies outside of the %d bytes", tensor, len(data))
			}
		}
	})
}
