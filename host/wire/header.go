// Package wire owns the frame that tensors cross between nodes in: a fixed header, metadata, data.
//
// All numbers are little-endian. A frame is
//
//	offset  size  field
//	     0     4  magic "MXTF"
//	     4     1  version, 1
//	     5     1  kind, whose meaning is the caller's
//	     6     2  flags, likewise
//	     8     1  dtype
//	     9     1  rank, 0 to 4
//	    10     2  zero
//	    12     4  bytes of metadata
//	    16    16  4 dimensions of 4 bytes each, outermost first; those past the rank are zero
//	    32     8  bytes of data: exactly what dtype and dimensions ask for
//	    40        metadata, then data: dense and row-major
package wire

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// HeaderBytes is the size of a frame's header.
const HeaderBytes = 40

// MaxRank is the most dimensions that a tensor has.
const MaxRank = 4

const (
	magic   = "MXTF"
	version = 1
)

// Dtype is the element type of a frame's data.
type Dtype uint8

const (
	None     Dtype = iota // no tensor: rank 0 and no data
	Float32               // IEEE 754 binary32
	Float16               // IEEE 754 binary16
	BFloat16              // the upper half of a binary32
	Int8
	Uint8
	Int32
	Int4 // two a byte, the first in the low half; each innermost row begins a byte
	dtypes
)

var (
	dtypeNames = [dtypes]string{"none", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int4"}
	dtypeBits  = [dtypes]uint64{0, 32, 16, 16, 8, 8, 32, 4}
)

func (d Dtype) String() string {
	if d >= dtypes {
		return fmt.Sprintf("dtype(%d)", uint8(d))
	}
	return dtypeNames[d]
}

// Header describes a frame.
type Header struct {
	Kind  uint8
	Flags uint16
	Dtype Dtype
	Rank  int
	Dims  [MaxRank]uint32
	Meta  int   // bytes of metadata
	Data  int64 // bytes of data
}

// PartMessage is what a message is, to LimitError.
const PartMessage = "message"

// FormatError is a frame that is none, or one that contradicts itself.
type FormatError struct {
	Field     string
	Want, Got string
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("bad frame: %s is %s, want %s", e.Field, e.Got, e.Want)
}

// LimitError is a frame larger than the reader or the writer takes.
type LimitError struct {
	Part       string // "metadata", "data" or "message"
	Got, Limit int64
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("a frame with %d bytes of %s passes the limit of %d", e.Got, e.Part, e.Limit)
}

// DataBytes returns the bytes of a dense tensor; ok is false when they do not fit an int64 or there is no such tensor.
func DataBytes(d Dtype, dims ...uint32) (bytes int64, ok bool) {
	if d >= dtypes || len(dims) > MaxRank || d == None && len(dims) > 0 {
		return 0, false
	}
	if d == None {
		return 0, true
	}
	row := uint64(1)
	if n := len(dims); n > 0 {
		row, dims = uint64(dims[n-1]), dims[:n-1]
	}
	n := (row*dtypeBits[d] + 7) / 8 // below 2^34
	for _, dim := range dims {
		hi, lo := bits.Mul64(n, uint64(dim))
		if hi != 0 {
			return 0, false
		}
		n = lo
	}
	return int64(n), int64(n) >= 0
}

// SetMatrix makes the header that of a tensor [rows, width].
func (h *Header) SetMatrix(d Dtype, rows, width uint32) {
	h.Dtype, h.Rank, h.Dims = d, 2, [MaxRank]uint32{rows, width}
	h.Data, _ = DataBytes(d, rows, width)
}

// shape is for messages.
func (h Header) shape() string { return fmt.Sprintf("%v in %s", h.Dims[:h.Rank], h.Dtype) }

// Put writes the header to the first HeaderBytes of b.
func (h *Header) Put(b []byte) {
	_ = b[HeaderBytes-1]
	copy(b, magic)
	b[4], b[5] = version, h.Kind
	binary.LittleEndian.PutUint16(b[6:], h.Flags)
	b[8], b[9], b[10], b[11] = uint8(h.Dtype), uint8(h.Rank), 0, 0
	binary.LittleEndian.PutUint32(b[12:], uint32(h.Meta))
	for i, dim := range h.Dims {
		binary.LittleEndian.PutUint32(b[16+4*i:], dim)
	}
	binary.LittleEndian.PutUint64(b[32:], uint64(h.Data))
}

// ParseHeader reads a header of HeaderBytes. The error is a *FormatError.
func ParseHeader(b []byte) (Header, error) {
	_ = b[HeaderBytes-1]
	if string(b[:4]) != magic {
		return Header{}, badFormat("magic", fmt.Sprintf("%q", magic), fmt.Sprintf("%q", b[:4]))
	}
	if b[4] != version {
		return Header{}, badFormat("version", fmt.Sprint(version), fmt.Sprint(b[4]))
	}
	h := Header{
		Kind: b[5], Flags: binary.LittleEndian.Uint16(b[6:]), Dtype: Dtype(b[8]), Rank: int(b[9]),
		Meta: int(binary.LittleEndian.Uint32(b[12:])),
	}
	for i := range h.Dims {
		h.Dims[i] = binary.LittleEndian.Uint32(b[16+4*i:])
	}
	data := binary.LittleEndian.Uint64(b[32:])
	switch {
	case h.Dtype >= dtypes:
		return Header{}, badFormat("dtype", fmt.Sprintf("less than %d", dtypes), fmt.Sprint(b[8]))
	case h.Rank > MaxRank:
		return Header{}, badFormat("rank", fmt.Sprintf("at most %d", MaxRank), fmt.Sprint(h.Rank))
	case b[10] != 0 || b[11] != 0:
		return Header{}, badFormat("reserved field", "0", fmt.Sprint(binary.LittleEndian.Uint16(b[10:])))
	}
	for _, dim := range h.Dims[h.Rank:] {
		if dim != 0 {
			return Header{}, badFormat("dimension past the rank", "0", fmt.Sprint(dim))
		}
	}
	want, ok := DataBytes(h.Dtype, h.Dims[:h.Rank]...)
	if !ok {
		return Header{}, badFormat("shape", "a tensor of less than 2^63 bytes", h.shape())
	}
	if data != uint64(want) {
		return Header{}, badFormat("data length", fmt.Sprintf("%d for %s", want, h.shape()), fmt.Sprint(data))
	}
	h.Data = want
	return h, nil
}

func badFormat(field, want, got string) *FormatError {
	return &FormatError{Field: field, Want: want, Got: got}
}
