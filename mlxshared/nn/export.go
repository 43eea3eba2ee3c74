package nn

import (
	"bytes"
	"fmt"
	"io"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// Section describes an exported state. The elements are row-major and little-endian, without padding.
type Section struct {
	Kind       sdk.StateKind
	Dtype      mlx.Dtype
	First      int // position of the first row; past 0 where a window let go of older ones
	Rows       int
	KeyWidth   int // elements of a row of all heads' keys, or of the matrix
	ValueWidth int // of all heads' values; 0 but for sdk.StateKV
}

// Bytes is the section's size.
func (s *Section) Bytes() int64 {
	return int64(s.Rows) * int64(s.KeyWidth+s.ValueWidth) * int64(s.Dtype.Size())
}

// exportRows is the number of positions that are copied at once.
const exportRows = 256

// Section covers what the state has not let go of.
func (s *kvState) Section() Section {
	out := Section{
		Kind: sdk.StateKV, Dtype: s.spec.Dtype, First: s.first, Rows: s.Len() - s.first,
		KeyWidth: s.spec.KVHeads * s.spec.KeyDim, ValueWidth: s.spec.KVHeads * s.spec.ValueDim,
	}
	if s.spec.Latent {
		out.Kind, out.KeyWidth, out.ValueWidth = sdk.StateLatent, s.spec.KeyDim, 0
	}
	return out
}

func (s *kvState) Export(w io.Writer) error {
	keys, values := s.cache.RowBytes()
	if err := s.exportPart(w, keys, func(pos, n int, b []byte) error { return s.cache.Read(pos, n, b, nil) }); err != nil {
		return err
	}
	return s.exportPart(w, values, func(pos, n int, b []byte) error { return s.cache.Read(pos, n, nil, b) })
}

// exportPart writes the keys or the values, of which a row has the given bytes.
func (s *kvState) exportPart(w io.Writer, row int, read func(pos, n int, b []byte) error) error {
	buffer := make([]byte, exportRows*row)
	for pos, end := s.first, s.Len(); row > 0 && pos < end; pos += exportRows {
		n := min(exportRows, end-pos)
		if err := read(pos, n, buffer[:n*row]); err != nil {
			return err
		}
		if _, err := w.Write(buffer[:n*row]); err != nil {
			return fmt.Errorf("writing a state: %w", err)
		}
	}
	return nil
}

func (s *kvState) Import(in Section, length int, r io.Reader) error {
	if err := s.fits(in, length); err != nil {
		return err
	}
	keyBytes, valueBytes := s.cache.RowBytes()
	keys, err := readPart(r, int64(in.Rows)*int64(keyBytes))
	if err != nil {
		return err
	}
	if err := s.cache.Begin(in.First); err != nil {
		return err
	}
	s.first = in.First
	for at := 0; at < in.Rows; at += exportRows {
		n := min(exportRows, in.Rows-at)
		values, err := readPart(r, int64(n)*int64(valueBytes))
		if err != nil {
			return err
		}
		if err := s.cache.Append(n, keys[at*keyBytes:(at+n)*keyBytes], values); err != nil {
			return err
		}
	}
	return nil
}

// fits refuses a section that is not this state's, or lacks positions that the next row sees.
func (s *kvState) fits(in Section, length int) error {
	want := s.Section()
	want.First, want.Rows = in.First, in.Rows
	seen := 0
	if s.spec.Sliding > 0 {
		seen = max(0, length+1-s.spec.Sliding)
	}
	switch {
	case s.Len() != 0:
		return sdk.Errorf(sdk.CodeInvalid, "a state of %d positions can't be imported into", s.Len())
	case in != want:
		return sdk.Errorf(sdk.CodeInvalid, "a %v section of %v with rows of %d and %d elements, want %v of %v with %d and %d", in.Kind, in.Dtype,
			in.KeyWidth, in.ValueWidth, want.Kind, want.Dtype, want.KeyWidth, want.ValueWidth)
	case in.First < 0 || in.Rows < 0 || in.Rows != length-in.First || in.First > seen:
		return sdk.Errorf(sdk.CodeInvalid, "positions [%d, %d+%d) of a state of %d, whose next row sees those from %d on", in.First, in.First,
			in.Rows, length, seen)
	}
	return nil
}

// readPart reads n bytes. Memory grows with what comes, not with what a header promises.
func readPart(r io.Reader, n int64) ([]byte, error) {
	var b bytes.Buffer
	if _, err := io.CopyN(&b, r, n); err != nil {
		return nil, fmt.Errorf("reading a state: %d of %d bytes: %w", b.Len(), n, err)
	}
	return b.Bytes(), nil
}

func (s *recurrentState) Section() Section {
	return Section{Kind: sdk.StateRecurrent, Dtype: s.spec.Dtype, Rows: s.spec.Rows, KeyWidth: s.spec.Cols}
}

// Export writes the matrix; snapshots stay behind.
func (s *recurrentState) Export(w io.Writer) error {
	section := s.Section()
	data := make([]byte, section.Bytes())
	if err := s.state.Read(data); err != nil {
		return err
	}
	if _, err := w.Write(data); err != nil {
		return fmt.Errorf("writing a state: %w", err)
	}
	return nil
}

func (s *recurrentState) Import(in Section, length int, r io.Reader) error {
	switch want := s.Section(); {
	case s.Len() != 0:
		return sdk.Errorf(sdk.CodeInvalid, "a state of %d positions can't be imported into", s.Len())
	case in != want:
		return sdk.Errorf(sdk.CodeInvalid, "a %v section of %v [%d, %d] from position %d, want %v of %v [%d, %d]", in.Kind, in.Dtype, in.Rows, in.KeyWidth,
			in.First, want.Kind, want.Dtype, want.Rows, want.KeyWidth)
	}
	data, err := readPart(r, in.Bytes())
	if err != nil {
		return err
	}
	return s.state.Write(data, length)
}
