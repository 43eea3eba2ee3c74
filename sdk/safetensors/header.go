// Package safetensors owns the safetensors container: headers, shard sets with their index, and writing.
//
// Format: 8 bytes little-endian header length, a JSON header that maps tensor names to dtype, shape and
// byte range, then the data (https://huggingface.co/docs/safetensors, "Format").
package safetensors

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
)

// MaxHeaderBytes bounds the JSON header, as the reference implementation does: a corrupt length must not
// become an allocation.
const MaxHeaderBytes = 100_000_000

// Tensor is one tensor's place in a file.
type Tensor struct {
	Name   string
	Dtype  string // as the file spells it: "F32", "BF16", "U32", "F8_E4M3", …
	Shape  []int64
	Path   string // of the file
	Offset int64  // of the first byte, from the start of the file
	Size   int64  // bytes
}

// File is a parsed header whose byte ranges have been checked against the file's length.
type File struct {
	Path     string
	Metadata map[string]string
	Tensors  []Tensor // by offset
	Size     int64    // of the file in bytes
}

// FormatError reports a file that is not what its header says. Tensor is empty where the whole file is at fault.
type FormatError struct {
	Path   string
	Tensor string
	Reason string
}

func (e *FormatError) Error() string {
	if e.Tensor != "" {
		return fmt.Sprintf("%s: tensor %s: %s", e.Path, e.Tensor, e.Reason)
	}
	return fmt.Sprintf("%s: %s", e.Path, e.Reason)
}

// dtypeBits holds the width of one element in bits.
var dtypeBits = map[string]int64{
	"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
	"U16": 16, "I16": 16, "F16": 16, "BF16": 16,
	"U32": 32, "I32": 32, "F32": 32,
	"U64": 64, "I64": 64, "F64": 64, "C64": 64,
}

// ReadFile parses the header of the file at path and checks every byte range against the file's length.
func ReadFile(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return Parse(f, path, st.Size())
}

// Parse reads a header from the start of r, a file of size bytes. path is for errors and for Tensor.Path.
func Parse(r io.Reader, path string, size int64) (*File, error) {
	fail := func(tensor, format string, args ...any) error {
		return &FormatError{Path: path, Tensor: tensor, Reason: fmt.Sprintf(format, args...)}
	}
	var lead [8]byte
	if _, err := io.ReadFull(r, lead[:]); err != nil {
		return nil, fail("", "truncated: %d bytes, want at least the 8 of the header length", size)
	}
	n := binary.LittleEndian.Uint64(lead[:])
	if n > MaxHeaderBytes {
		return nil, fail("", "header length %d exceeds %d: not a safetensors file", n, MaxHeaderBytes)
	}
	if int64(n)+8 > size {
		return nil, fail("", "truncated: the header ends at byte %d, the file at %d", n+8, size)
	}
	raw := make([]byte, n)
	if _, err := io.ReadFull(r, raw); err != nil {
		return nil, fail("", "reading the header: %v", err)
	}
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(raw, &entries); err != nil {
		return nil, fail("", "header is not JSON: %v", err)
	}
	out := &File{Path: path, Size: size}
	if m, ok := entries["__metadata__"]; ok {
		if err := json.Unmarshal(m, &out.Metadata); err != nil {
			return nil, fail("", "__metadata__: %v", err)
		}
		delete(entries, "__metadata__")
	}
	base := int64(n) + 8
	for name, m := range entries {
		t, reason := parseTensor(m, base, size)
		if reason != "" {
			return nil, fail(name, "%s", reason)
		}
		t.Name, t.Path = name, path
		out.Tensors = append(out.Tensors, t)
	}
	sort.Slice(out.Tensors, func(i, j int) bool {
		a, b := &out.Tensors[i], &out.Tensors[j]
		return a.Offset < b.Offset || a.Offset == b.Offset && a.Name < b.Name
	})
	for i := 1; i < len(out.Tensors); i++ {
		if prev := out.Tensors[i-1]; out.Tensors[i].Offset < prev.Offset+prev.Size {
			return nil, fail(out.Tensors[i].Name, "overlaps tensor %s", prev.Name)
		}
	}
	return out, nil
}

func parseTensor(m json.RawMessage, base, size int64) (t Tensor, reason string) {
	var e struct {
		Dtype   string    `json:"dtype"`
		Shape   []int64   `json:"shape"`
		Offsets *[2]int64 `json:"data_offsets"`
	}
	if err := json.Unmarshal(m, &e); err != nil {
		return t, fmt.Sprintf("header entry: %v", err)
	}
	bits, ok := dtypeBits[e.Dtype]
	if !ok {
		return t, fmt.Sprintf("unknown dtype %q", e.Dtype)
	}
	if e.Offsets == nil {
		return t, "header entry has no data_offsets"
	}
	begin, end := e.Offsets[0], e.Offsets[1]
	if begin < 0 || end < begin || end > math.MaxInt64-base {
		return t, fmt.Sprintf("data_offsets [%d, %d] make no range", begin, end)
	}
	elems, err := elements(e.Shape)
	if err != nil {
		return t, err.Error()
	}
	if elems > math.MaxInt64/bits || elems*bits%8 != 0 || elems*bits/8 != end-begin {
		return t, fmt.Sprintf("shape %v of %s does not fill its %d bytes", e.Shape, e.Dtype, end-begin)
	}
	if base+end > size {
		return t, fmt.Sprintf("truncated: its data ends at byte %d, the file at %d; fetch the file again", base+end, size)
	}
	return Tensor{Dtype: e.Dtype, Shape: e.Shape, Offset: base + begin, Size: end - begin}, ""
}

// elements multiplies a shape out with overflow checks.
func elements(shape []int64) (int64, error) {
	n := int64(1)
	for _, d := range shape {
		if d < 0 {
			return 0, fmt.Errorf("shape %v has a negative dimension", shape)
		}
		if d != 0 && n > math.MaxInt64/d {
			return 0, errors.New("shape overflows")
		}
		n *= d
	}
	return n, nil
}
