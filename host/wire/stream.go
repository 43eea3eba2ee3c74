package wire

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net"
)

// Limits bound what one frame may carry.
type Limits struct {
	Meta int   // bytes of metadata
	Data int64 // bytes of data
}

// maxMeta is what the header can say.
const maxMeta = math.MaxUint32

// check compares a header with the limits.
func (l Limits) check(h Header) error {
	if h.Meta > min(l.Meta, maxMeta) {
		return &LimitError{Part: "metadata", Got: int64(h.Meta), Limit: int64(l.Meta)}
	}
	if h.Data > l.Data {
		return &LimitError{Part: "data", Got: h.Data, Limit: l.Data}
	}
	return nil
}

// buffersWriter is a connection that takes several slices at once, without joining them first.
type buffersWriter interface {
	WriteBuffers(bufs ...[]byte) (int, error)
}

// Writer writes frames. It keeps its memory, so that a frame costs no allocation. One goroutine at a time may use it.
type Writer struct {
	to     io.Writer
	many   buffersWriter // to, where it is one
	limits Limits
	head   []byte // header and metadata
	bufs   [2][]byte
	net    net.Buffers
}

// NewWriter returns a writer on a connection. One with a method WriteBuffers(bufs ...[]byte) (int, error) gets header
// and data in one call.
func NewWriter(to io.Writer, limits Limits) *Writer {
	w := &Writer{to: to, limits: limits}
	w.many, _ = to.(buffersWriter)
	return w
}

// Meta returns the empty buffer that a frame's metadata is to be appended to, for Write.
func (w *Writer) Meta() []byte {
	if cap(w.head) < HeaderBytes {
		w.head = make([]byte, HeaderBytes, 512)
	}
	return w.head[HeaderBytes:HeaderBytes]
}

// Write writes one frame; h's Meta and Data are set from meta and data. A meta that was appended to Meta's buffer is not
// copied. It is an error for data to be of another size than h's shape asks for.
func (w *Writer) Write(h Header, meta, data []byte) error {
	h.Meta, h.Data = len(meta), int64(len(data))
	if err := w.limits.check(h); err != nil {
		return err
	}
	if h.Rank < 0 || h.Rank > MaxRank {
		return badFormat("rank", fmt.Sprintf("at most %d", MaxRank), fmt.Sprint(h.Rank))
	}
	if want, ok := DataBytes(h.Dtype, h.Dims[:h.Rank]...); !ok || want != h.Data {
		return badFormat("data length", fmt.Sprintf("%d for %s", want, h.shape()), fmt.Sprint(len(data)))
	}
	w.frame(h, meta)
	return w.send(data)
}

// frame puts header and metadata into w.head.
func (w *Writer) frame(h Header, meta []byte) {
	own := w.Meta()
	if len(meta) > 0 && cap(own) > 0 && &own[:1][0] == &meta[0] {
		w.head = w.head[:HeaderBytes+len(meta)]
	} else {
		w.head = append(w.head[:HeaderBytes], meta...)
	}
	h.Put(w.head)
}

func (w *Writer) send(data []byte) (err error) {
	w.bufs = [2][]byte{w.head, data}
	switch {
	case len(data) == 0:
		_, err = w.to.Write(w.head)
	case w.many != nil:
		_, err = w.many.WriteBuffers(w.bufs[:]...)
	default:
		w.net = w.bufs[:]
		_, err = w.net.WriteTo(w.to)
	}
	w.bufs = [2][]byte{}
	return err
}

// Reader reads frames. It keeps its memory, so that a frame costs no allocation. One goroutine at a time may use it.
type Reader struct {
	from   *bufio.Reader
	limits Limits
	head   [HeaderBytes]byte
	meta   []byte
	left   int64 // data of the current frame not read
}

// NewReader returns a reader on a connection. It may read ahead, but never past what the peer has sent.
func NewReader(from io.Reader, limits Limits) *Reader {
	return &Reader{from: bufio.NewReaderSize(from, 4<<10), limits: limits}
}

// Next returns the header and the metadata of the next frame; the metadata is valid until the call after it. Data that
// was not read is skipped. The error is io.EOF where the stream ends between frames, io.ErrUnexpectedEOF where it ends
// within one, a *FormatError, a *LimitError, or the connection's; no frame follows an error.
func (r *Reader) Next() (Header, []byte, error) {
	if err := r.skip(); err != nil {
		return Header{}, nil, err
	}
	if _, err := io.ReadFull(r.from, r.head[:]); err != nil {
		return Header{}, nil, err
	}
	h, err := ParseHeader(r.head[:])
	if err == nil {
		err = r.limits.check(h)
	}
	if err == nil {
		r.meta, err = readGrowing(r.from, r.meta[:0], h.Meta)
	}
	if err != nil {
		return Header{}, nil, err
	}
	r.left = h.Data
	return h, r.meta, nil
}

// readStep is what a buffer grows by at first, so that memory is taken as bytes come, not as they are announced.
const readStep = 64 << 10

// readGrowing appends the next n bytes of a stream to an empty buffer.
func readGrowing(from io.Reader, buf []byte, n int) ([]byte, error) {
	for len(buf) < n {
		have := len(buf)
		if have == cap(buf) {
			buf = append(make([]byte, 0, min(n, max(512, readStep, 2*have))), buf...)
		}
		buf = buf[:min(n, cap(buf))]
		if _, err := io.ReadFull(from, buf[have:]); err != nil {
			return buf, within(err)
		}
	}
	return buf, nil
}

// ReadData reads the next bytes of the frame's data, as many as dst has; asking for more than are left is an error.
func (r *Reader) ReadData(dst []byte) error {
	if int64(len(dst)) > r.left {
		return badFormat("data left", fmt.Sprint(len(dst)), fmt.Sprint(r.left))
	}
	n, err := io.ReadFull(r.from, dst)
	r.left -= int64(n)
	return within(err)
}

// skip drops what is left of the current frame.
func (r *Reader) skip() error {
	for r.left > 0 {
		n, err := r.from.Discard(int(min(r.left, 1<<20)))
		r.left -= int64(n)
		if err != nil {
			return within(err)
		}
	}
	return nil
}

// within turns the end of the stream into one in the middle of a frame.
func within(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
