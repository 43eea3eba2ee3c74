package sdk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"math"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/protobuf/proto"
)

// The state of a sequence, outside of an executor: what it keeps in a range of layers, in a layout that is the contract's
// and no back end's, so that any executor of the family can go on from it. All numbers are little-endian. A state is
//
//	magic "MLXSTAT1", 8 bytes
//	header: a part that holds a StateHeader
//	sections, by layer and within it by index; each
//	  a part that holds a StateSection
//	  the rows, whose bytes the section tells
//	  CRC-32C of the rows, 4 bytes
//	an empty part
//
// and a part is its length, 4 bytes, a message of proto/executor.proto, and the CRC-32C of the message, 4 bytes.

const stateMagic = "MLXSTAT1"

// maxStatePart bounds a header or a section's description.
const maxStatePart = 1 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// StateKind is how one state of a layer is laid out.
type StateKind int

const (
	StateKV        StateKind = 1 + iota // keys [Rows, KeyWidth], then values [Rows, ValueWidth], of positions from First on
	StateLatent                         // [Rows, KeyWidth] of positions from First on: a head's values lie within its keys
	StateRecurrent                      // a matrix [Rows, KeyWidth] that stands for all positions
)

func (k StateKind) String() string {
	switch k {
	case StateKV:
		return "kv"
	case StateLatent:
		return "latent"
	case StateRecurrent:
		return "recurrent"
	}
	return fmt.Sprintf("kind(%d)", int(k))
}

// StateSection describes one state of one layer: the one of LayerProfile.States with that index. Its bytes are dense and
// row-major.
type StateSection struct {
	Layer      int // of the model
	Index      int // in LayerProfile.States
	Kind       StateKind
	Dtype      Dtype
	First      int // position of the first row, where a window has let older ones go; 0 for a recurrent state
	Rows       int
	KeyWidth   int // elements of a row: all heads' keys, or a recurrent state's columns
	ValueWidth int // elements of a row of values; 0 but for StateKV
}

// Bytes returns the size of the section's rows, false where it has none or overflows.
func (s *StateSection) Bytes() (int64, bool) {
	width, element := int64(s.KeyWidth)+int64(s.ValueWidth), int64(s.Dtype.Size())
	if s.Rows < 0 || s.KeyWidth < 1 || s.ValueWidth < 0 || element == 0 || width > math.MaxInt32 || int64(s.Rows) > math.MaxInt64/(width*element) {
		return 0, false
	}
	return int64(s.Rows) * width * element, true
}

func (s *StateSection) validate() error {
	_, sized := s.Bytes()
	kv := s.Kind == StateKV
	if !sized || s.Layer < 0 || s.Index < 0 || s.First < 0 || s.Kind < StateKV || s.Kind > StateRecurrent || kv != (s.ValueWidth > 0) ||
		s.Kind == StateRecurrent && s.First != 0 {
		return Errorf(CodeInvalid, "section %+v of a state makes no sense", *s)
	}
	return nil
}

// StateWriter writes a state: Begin, then the sections in their order, then Close.
type StateWriter struct {
	to     io.Writer
	header StateHeader
	report StateReport
	open   *stateRows
	last   StateSection // described before
	any    bool
	begun  bool
	err    error
}

// StateHeader says whose state it is.
type StateHeader struct {
	Family    string     // wire name
	Layers    LayerRange // that it has sections of
	Positions int        // of the sequence
}

// NewStateWriter writes to w. The caller of an executor's ExportState makes one and closes it.
func NewStateWriter(w io.Writer, family string, layers LayerRange) *StateWriter {
	return &StateWriter{to: w, header: StateHeader{Family: family, Layers: layers}}
}

// Begin tells how many positions the sequence has.
func (w *StateWriter) Begin(positions int) error {
	if w.begun || positions < 0 {
		return Errorf(CodeInternal, "a state of %d positions is begun, begun before: %v", positions, w.begun)
	}
	w.begun = true
	w.header.Positions = positions
	w.report.Positions = positions
	w.write([]byte(stateMagic))
	w.part(&pb.StateHeader{Family: w.header.Family, Layers: fromLayers(w.header.Layers), Positions: int64(positions)})
	return w.err
}

// Section begins the next state, whose rows are then written to the writer it returns: exactly the section's bytes.
func (w *StateWriter) Section(s StateSection) (io.Writer, error) {
	w.endSection()
	if err := w.checkSection(s); err != nil {
		return nil, err
	}
	w.part(&pb.StateSection{
		Layer: int64(s.Layer), Index: int64(s.Index), Kind: pb.StateKind(s.Kind), Dtype: pb.Dtype(s.Dtype),
		First: int64(s.First), Rows: int64(s.Rows), KeyWidth: int64(s.KeyWidth), ValueWidth: int64(s.ValueWidth),
	})
	size, _ := s.Bytes()
	w.last, w.any = s, true
	w.open = &stateRows{w: w, left: size, sum: crc32.New(castagnoli)}
	return w.open, w.err
}

func (w *StateWriter) checkSection(s StateSection) error {
	if w.err != nil {
		return w.err
	}
	if err := s.validate(); err != nil {
		return err
	}
	if !w.begun || s.Layer < w.header.Layers.Start || s.Layer >= w.header.Layers.End {
		return Errorf(CodeInternal, "a section of layer %d in a state of layers [%d, %d)", s.Layer, w.header.Layers.Start, w.header.Layers.End)
	}
	if w.any && !w.last.before(&s) {
		return Errorf(CodeInternal, "section %d of layer %d follows section %d of layer %d", s.Index, s.Layer, w.last.Index, w.last.Layer)
	}
	return nil
}

func (s *StateSection) before(next *StateSection) bool {
	return s.Layer < next.Layer || s.Layer == next.Layer && s.Index < next.Index
}

// Close ends the state.
func (w *StateWriter) Close() (StateReport, error) {
	w.endSection()
	if w.err == nil && !w.begun {
		w.err = Errorf(CodeInternal, "the executor exported no state")
	}
	w.part(nil)
	return w.report, w.err
}

func (w *StateWriter) endSection() {
	if w.open == nil {
		return
	}
	if w.err == nil && w.open.left != 0 {
		w.err = Errorf(CodeInternal, "a section of layer %d lacks %d bytes", w.last.Layer, w.open.left)
	}
	w.write(binary.LittleEndian.AppendUint32(nil, w.open.sum.Sum32()))
	w.open = nil
}

func (w *StateWriter) part(m proto.Message) {
	var body []byte
	if m != nil && w.err == nil {
		body, w.err = proto.Marshal(m)
	}
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(body)))
	b = append(b, body...)
	w.write(binary.LittleEndian.AppendUint32(b, crc32.Checksum(body, castagnoli)))
}

func (w *StateWriter) write(b []byte) {
	if w.err != nil {
		return
	}
	n, err := w.to.Write(b)
	w.report.Bytes += int64(n)
	if err != nil {
		w.err = fmt.Errorf("write a state: %w", err)
	}
}

// stateRows takes a section's rows.
type stateRows struct {
	w    *StateWriter
	left int64
	sum  hash.Hash32
}

func (r *stateRows) Write(b []byte) (int, error) {
	if r.w.open != r || int64(len(b)) > r.left {
		return 0, Errorf(CodeInternal, "%d bytes are written to a section that takes %d more", len(b), r.left)
	}
	r.left -= int64(len(b))
	r.sum.Write(b)
	r.w.write(b)
	if r.w.err != nil {
		return 0, r.w.err
	}
	return len(b), nil
}

// StateReader reads a state. Everything is checked before it is given out: a state that is cut short or damaged is an
// *Error of CodeCorrupt that names the place.
type StateReader struct {
	from   io.Reader
	header StateHeader
	report StateReport
	last   StateSection
	any    bool
	ended  bool
	rows   bytes.Buffer
}

// NewStateReader reads the header from r. A state of another family is refused; an empty family takes any.
func NewStateReader(r io.Reader, family string) (*StateReader, error) {
	s := &StateReader{from: r}
	var magic [len(stateMagic)]byte
	if err := s.read(magic[:], "its beginning"); err != nil {
		return nil, err
	}
	if string(magic[:]) != stateMagic {
		return nil, Errorf(CodeCorrupt, "a state begins with %q, want %q", magic[:], stateMagic)
	}
	m := &pb.StateHeader{}
	if empty, err := s.part(m, "its header"); err != nil || empty {
		return nil, errors.Join(err, damagedIf(empty, "its header is empty"))
	}
	var c counts
	s.header = StateHeader{Family: m.GetFamily(), Positions: c.to("positions of a state", m.GetPositions())}
	var err error
	if s.header.Layers, err = toLayers(m.GetLayers()); err != nil || c.err != nil {
		return nil, errors.Join(c.err, err)
	}
	if family != "" && s.header.Family != family {
		return nil, Errorf(CodeInvalid, "a state of family %q can't be used by family %q", s.header.Family, family)
	}
	s.report.Positions = s.header.Positions
	return s, nil
}

// Header says whose state it is.
func (s *StateReader) Header() StateHeader { return s.header }

// Next returns the next section and its rows, which are valid until the next call; io.EOF after the last.
func (s *StateReader) Next() (StateSection, []byte, error) {
	if s.ended {
		return StateSection{}, nil, io.EOF
	}
	section, end, err := s.section()
	if err != nil {
		return section, nil, err
	}
	if end {
		s.ended = true
		return section, nil, io.EOF
	}
	rows, err := s.sectionRows(&section)
	if err != nil {
		return section, nil, err
	}
	s.last, s.any = section, true
	return section, rows, nil
}

func (s *StateReader) section() (section StateSection, end bool, err error) {
	m := &pb.StateSection{}
	if end, err = s.part(m, "the description of a section"); err != nil || end {
		return section, end, err
	}
	dtype, err := toDtype(m.GetDtype())
	if err != nil {
		return section, false, err
	}
	var c counts
	section = StateSection{
		Layer: c.to("layer of a section", m.GetLayer()), Index: c.to("index of a section", m.GetIndex()),
		Kind: StateKind(m.GetKind()), Dtype: dtype, First: c.to("first position of a section", m.GetFirst()),
		Rows: c.to("rows of a section", m.GetRows()), KeyWidth: c.to("key width of a section", m.GetKeyWidth()),
		ValueWidth: c.to("value width of a section", m.GetValueWidth()),
	}
	if c.err != nil {
		return section, false, c.err
	}
	if err := section.validate(); err != nil {
		return section, false, err
	}
	if section.Layer < s.header.Layers.Start || section.Layer >= s.header.Layers.End || s.any && !s.last.before(&section) {
		return section, false, Errorf(CodeCorrupt, "section %d of layer %d is out of its place in a state of layers [%d, %d)",
			section.Index, section.Layer, s.header.Layers.Start, s.header.Layers.End)
	}
	return section, false, nil
}

// sectionRows reads a section's rows; memory is taken only as they come.
func (s *StateReader) sectionRows(section *StateSection) ([]byte, error) {
	where := fmt.Sprintf("section %d of layer %d", section.Index, section.Layer)
	size, _ := section.Bytes()
	s.rows.Reset()
	n, err := io.CopyN(&s.rows, s.from, size)
	s.report.Bytes += n
	if err != nil {
		return nil, cutShort(where, err)
	}
	var sum [4]byte
	if err := s.read(sum[:], where); err != nil {
		return nil, err
	}
	if got, want := crc32.Checksum(s.rows.Bytes(), castagnoli), binary.LittleEndian.Uint32(sum[:]); got != want {
		return nil, damaged("%s has checksum %08x, want %08x", where, got, want)
	}
	return s.rows.Bytes(), nil
}

// part reads a message; empty where the part is.
func (s *StateReader) part(m proto.Message, what string) (empty bool, err error) {
	var word [4]byte
	if err := s.read(word[:], what); err != nil {
		return false, err
	}
	size := binary.LittleEndian.Uint32(word[:])
	if size > maxStatePart {
		return false, damaged("%s has %d bytes, at most %d are believed", what, size, maxStatePart)
	}
	body := make([]byte, size+4)
	if err := s.read(body, what); err != nil {
		return false, err
	}
	body, sum := body[:size], binary.LittleEndian.Uint32(body[size:])
	if got := crc32.Checksum(body, castagnoli); got != sum {
		return false, damaged("%s has checksum %08x, want %08x", what, got, sum)
	}
	if err := proto.Unmarshal(body, m); err != nil {
		return false, damaged("%s can't be read: %v", what, err)
	}
	return size == 0, nil
}

func (s *StateReader) read(b []byte, what string) error {
	n, err := io.ReadFull(s.from, b)
	s.report.Bytes += int64(n)
	if err != nil {
		return cutShort(what, err)
	}
	return nil
}

// Report tells what was read so far.
func (s *StateReader) Report() StateReport { return s.report }

func cutShort(what string, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return damaged("it ends within %s", what)
	}
	return fmt.Errorf("read a state: %s: %w", what, err)
}

func damaged(format string, args ...any) error {
	return Errorf(CodeCorrupt, "a state is damaged: "+format, args...)
}

func damagedIf(is bool, text string) error {
	if !is {
		return nil
	}
	return damaged("%s", text)
}
