// Package gguf owns the GGUF container: reading its metadata and tensor table, and moving its blocks into
// MLX's layouts without loss.
//
// Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
package gguf

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
)

const (
	magic = 0x46554747 // "GGUF" read as a little-endian uint32

	// Bounds on what a header may claim, so that a corrupt count never becomes an allocation. Real files have
	// a few hundred keys, a few thousand tensors and vocabularies below a million.
	maxKeys         = 1 << 16
	maxTensors      = 1 << 20
	maxArray        = 1 << 24
	maxString       = 1 << 24
	maxDims         = 8
	maxMetadata     = 1 << 30 // bytes of all strings and arrays together
	defaultAlign    = 32
	alignmentKey    = "general.alignment"
	architectureKey = "general.architecture"
)

// FormatError reports a file that is no GGUF, or is damaged.
type FormatError struct {
	Path   string
	Reason string
}

func (e *FormatError) Error() string { return fmt.Sprintf("%s: %s", e.Path, e.Reason) }

// File is an opened container. Close it when its tensors have been read.
type File struct {
	Path     string
	Version  uint32
	Metadata map[string]any // string, bool, int64, uint64, float64, or a slice of one of them
	Tensors  []Tensor
	f        *os.File
}

// Tensor is one entry of the tensor table.
type Tensor struct {
	Name   string
	Type   Type
	Shape  []int64 // row-major, outermost first (the file stores it innermost first)
	Offset int64   // of the first byte, from the start of the file
	Size   int64   // bytes
}

// Open reads the header of the file at path and checks every tensor's range against the file's length.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	out, err := Parse(f, path, st.Size())
	if err != nil {
		f.Close()
		return nil, err
	}
	out.f = f
	return out, nil
}

// Close closes the file.
func (f *File) Close() error {
	if f.f == nil {
		return nil
	}
	return f.f.Close()
}

// Architecture returns general.architecture, e.g. "llama".
func (f *File) Architecture() string { return f.String(architectureKey) }

// String returns a string value, "" where the key is absent or of another type.
func (f *File) String(key string) string {
	s, _ := f.Metadata[key].(string)
	return s
}

// Int returns an integer value.
func (f *File) Int(key string) (int64, bool) {
	switch v := f.Metadata[key].(type) {
	case int64:
		return v, true
	case uint64:
		return int64(v), v <= math.MaxInt64
	}
	return 0, false
}

// Section returns a reader over one tensor's bytes.
func (f *File) Section(t Tensor) *io.SectionReader { return io.NewSectionReader(f.f, t.Offset, t.Size) }

// Parse reads a header from the start of r, a file of size bytes. The File it returns has no data behind it.
func Parse(r io.Reader, path string, size int64) (*File, error) {
	d := &decoder{r: bufio.NewReaderSize(r, 1<<16), budget: maxMetadata}
	out := &File{Path: path, Metadata: map[string]any{}}
	if err := d.header(out, size); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("truncated: the header ends past byte %d", size)
		}
		return nil, &FormatError{Path: path, Reason: err.Error()}
	}
	return out, nil
}

type decoder struct {
	r      *bufio.Reader
	at     int64
	budget int64
	buf    [8]byte
}

func (d *decoder) header(out *File, size int64) error {
	m, err := d.u32()
	if err != nil {
		return err
	}
	if m != magic {
		return errors.New("not a GGUF file: it does not start with \"GGUF\"")
	}
	if out.Version, err = d.u32(); err != nil {
		return err
	}
	if out.Version != 2 && out.Version != 3 {
		return fmt.Errorf("GGUF version %d; versions 2 and 3 are known", out.Version)
	}
	tensors, err := d.count("tensors", maxTensors)
	if err != nil {
		return err
	}
	keys, err := d.count("metadata keys", maxKeys)
	if err != nil {
		return err
	}
	for range keys {
		if err := d.pair(out.Metadata); err != nil {
			return err
		}
	}
	for range tensors {
		t, err := d.tensor()
		if err != nil {
			return err
		}
		out.Tensors = append(out.Tensors, t)
	}
	return place(out, d.at, size)
}

// place turns the offsets, relative to the data section, into absolute ones and checks them.
func place(f *File, header, size int64) error {
	align := int64(defaultAlign)
	if v, ok := f.Int(alignmentKey); ok {
		align = v
	}
	if align <= 0 || align > 1<<20 {
		return fmt.Errorf("%s is %d", alignmentKey, align)
	}
	base := (header + align - 1) / align * align
	for i := range f.Tensors {
		t := &f.Tensors[i]
		if t.Offset < 0 || t.Offset > size || base+t.Offset+t.Size > size {
			return fmt.Errorf("truncated: tensor %s ends at byte %d, the file at %d; fetch the file again", t.Name, base+t.Offset+t.Size, size)
		}
		t.Offset += base
	}
	return nil
}

func (d *decoder) pair(into map[string]any) error {
	key, err := d.str()
	if err != nil {
		return err
	}
	kind, err := d.u32()
	if err != nil {
		return err
	}
	v, err := d.value(kind)
	if err != nil {
		return fmt.Errorf("metadata key %q: %w", key, err)
	}
	into[key] = v
	return nil
}

func (d *decoder) tensor() (Tensor, error) {
	name, err := d.str()
	if err != nil {
		return Tensor{}, err
	}
	dims, err := d.u32()
	if err != nil {
		return Tensor{}, err
	}
	if dims > maxDims {
		return Tensor{}, fmt.Errorf("tensor %q has %d dimensions", name, dims)
	}
	shape := make([]int64, dims)
	elems := int64(1)
	for i := range shape {
		v, err := d.u64()
		if err != nil {
			return Tensor{}, err
		}
		if v > math.MaxInt64/64 || v != 0 && elems > math.MaxInt64/64/int64(v) {
			return Tensor{}, fmt.Errorf("tensor %q: shape overflows", name)
		}
		shape[int(dims)-1-i] = int64(v)
		elems *= int64(v)
	}
	typ, err := d.u32()
	if err != nil {
		return Tensor{}, err
	}
	offset, err := d.u64()
	if err != nil {
		return Tensor{}, err
	}
	t := Tensor{Name: name, Type: Type(typ), Shape: shape, Offset: int64(offset)}
	if t.Offset < 0 {
		return Tensor{}, fmt.Errorf("tensor %q: offset overflows", name)
	}
	layout, ok := t.Type.layout()
	if !ok {
		return Tensor{}, fmt.Errorf("tensor %q has the unknown type %d", name, typ)
	}
	if dims > 0 && shape[dims-1]%layout.block != 0 {
		return Tensor{}, fmt.Errorf("tensor %q: rows of %d are no multiple of %s's block of %d", name, shape[dims-1], t.Type, layout.block)
	}
	t.Size = elems / layout.block * layout.bytes
	return t, nil
}

// Value types of the metadata, as the specification numbers them.
const (
	kindU8, kindI8, kindU16, kindI16, kindU32, kindI32, kindF32, kindBool = 0, 1, 2, 3, 4, 5, 6, 7
	kindString, kindArray, kindU64, kindI64, kindF64                      = 8, 9, 10, 11, 12
)

func (d *decoder) value(kind uint32) (any, error) {
	switch kind {
	case kindString:
		return d.str()
	case kindArray:
		return d.array()
	case kindU8, kindI8, kindBool:
		b, err := d.bytes(1)
		if err != nil {
			return nil, err
		}
		switch kind {
		case kindU8:
			return uint64(b[0]), nil
		case kindI8:
			return int64(int8(b[0])), nil
		}
		return b[0] != 0, nil
	case kindU16, kindI16:
		b, err := d.bytes(2)
		if err != nil {
			return nil, err
		}
		v := binary.LittleEndian.Uint16(b)
		if kind == kindU16 {
			return uint64(v), nil
		}
		return int64(int16(v)), nil
	case kindU32, kindI32, kindF32:
		v, err := d.u32()
		switch kind {
		case kindU32:
			return uint64(v), err
		case kindI32:
			return int64(int32(v)), err
		}
		return widen(math.Float32frombits(v)), err
	case kindU64, kindI64, kindF64:
		v, err := d.u64()
		switch kind {
		case kindU64:
			return v, err
		case kindI64:
			return int64(v), err
		}
		return math.Float64frombits(v), err
	}
	return nil, fmt.Errorf("unknown value type %d", kind)
}

// widen returns the float64 that v's shortest decimal names, so that a config's 1e-05 stays 1e-05.
func widen(v float32) float64 {
	out, err := strconv.ParseFloat(strconv.FormatFloat(float64(v), 'g', -1, 32), 64)
	if err != nil { // infinities and NaN have no such decimal
		return float64(v)
	}
	return out
}

func (d *decoder) array() (any, error) {
	kind, err := d.u32()
	if err != nil {
		return nil, err
	}
	n, err := d.count("array elements", maxArray)
	if err != nil {
		return nil, err
	}
	switch kind {
	case kindString:
		return list[string](d, kind, n)
	case kindBool:
		return list[bool](d, kind, n)
	case kindU8, kindU16, kindU32, kindU64:
		return list[uint64](d, kind, n)
	case kindI8, kindI16, kindI32, kindI64:
		return list[int64](d, kind, n)
	case kindF32, kindF64:
		return list[float64](d, kind, n)
	}
	return nil, fmt.Errorf("arrays of value type %d are not known", kind)
}

func list[T any](d *decoder, kind uint32, n uint64) ([]T, error) {
	var out []T
	for range n {
		v, err := d.value(kind)
		if err != nil {
			return nil, err
		}
		if d.budget -= 8; d.budget < 0 {
			return nil, errors.New("metadata is too large")
		}
		out = append(out, v.(T))
	}
	return out, nil
}

func (d *decoder) str() (string, error) {
	n, err := d.count("string bytes", maxString)
	if err != nil {
		return "", err
	}
	if d.budget -= int64(n); d.budget < 0 {
		return "", errors.New("metadata is too large")
	}
	var out []byte
	for n > 0 { // in pieces: a false length fails at the end of the file before it becomes an allocation
		piece := make([]byte, min(n, 1<<16))
		if _, err := io.ReadFull(d.r, piece); err != nil {
			return "", err
		}
		d.at += int64(len(piece))
		n -= uint64(len(piece))
		out = append(out, piece...)
	}
	return string(out), nil
}

func (d *decoder) count(what string, limit uint64) (uint64, error) {
	n, err := d.u64()
	if err != nil {
		return 0, err
	}
	if n > limit {
		return 0, fmt.Errorf("%d %s exceed the bound of %d", n, what, limit)
	}
	return n, nil
}

func (d *decoder) bytes(n int) ([]byte, error) {
	if _, err := io.ReadFull(d.r, d.buf[:n]); err != nil {
		return nil, err
	}
	d.at += int64(n)
	return d.buf[:n], nil
}

func (d *decoder) u32() (uint32, error) {
	b, err := d.bytes(4)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint32(b), nil
}

func (d *decoder) u64() (uint64, error) {
	b, err := d.bytes(8)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b), nil
}
