package wire

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"
)

// A connection that carries messages only spares them the header of a tensor. Each direction begins with Preface; a
// message is then its kind (1 byte), the number of its bytes as an unsigned varint (LEB128, as short as can be), and these.

// Preface is what each direction of a connection of messages begins with: a magic and a version.
const Preface = "MXTM\x01"

// maxLength is the most bytes of a message's length.
const maxLength = 5

// AppendMessage appends a message.
func AppendMessage(b []byte, kind uint8, body []byte) []byte {
	b = binary.AppendUvarint(append(b, kind), uint64(len(body)))
	return append(b, body...)
}

// MessageReader reads messages. It keeps its memory. One goroutine at a time may use it.
type MessageReader struct {
	from  *bufio.Reader
	limit int
	begun bool
	body  []byte
}

// NewMessageReader returns a reader of messages of limit bytes at most. It may read ahead, but never past what the peer has
// sent.
func NewMessageReader(from io.Reader, limit int) *MessageReader {
	return &MessageReader{from: bufio.NewReaderSize(from, 4<<10), limit: limit}
}

// Next returns the next message, which is valid until the call after it. The error is io.EOF where the stream ends between
// messages, io.ErrUnexpectedEOF where it ends within one, a *FormatError, a *LimitError, or the connection's; nothing
// follows an error.
func (r *MessageReader) Next() (kind uint8, body []byte, err error) {
	if !r.begun {
		if err := r.preface(); err != nil {
			return 0, nil, err
		}
		r.begun = true
	}
	if kind, err = r.from.ReadByte(); err != nil {
		return 0, nil, err
	}
	length, err := r.length()
	if err != nil {
		return 0, nil, within(err)
	}
	if length > uint64(max(r.limit, 0)) {
		return 0, nil, &LimitError{Part: PartMessage, Got: int64(length), Limit: int64(r.limit)}
	}
	if r.body, err = readGrowing(r.from, r.body[:0], int(length)); err != nil {
		return 0, nil, err
	}
	return kind, r.body, nil
}

func (r *MessageReader) preface() error {
	var got [len(Preface)]byte
	if _, err := io.ReadFull(r.from, got[:]); err != nil {
		return err
	}
	if string(got[:]) != Preface {
		return badFormat("preface", fmt.Sprintf("%q", Preface), fmt.Sprintf("%q", got[:]))
	}
	return nil
}

func (r *MessageReader) length() (uint64, error) {
	var n uint64
	for i := range maxLength {
		b, err := r.from.ReadByte()
		if err != nil {
			return 0, err
		}
		n |= uint64(b&0x7f) << (7 * i)
		if b < 0x80 {
			if b == 0 && i > 0 {
				return 0, badFormat("length", fmt.Sprintf("%d bytes of varint", max(1, (bits.Len64(n)+6)/7)), fmt.Sprint(i+1))
			}
			return n, nil
		}
	}
	return 0, badFormat("length", fmt.Sprintf("at most %d bytes of varint", maxLength), "more")
}
