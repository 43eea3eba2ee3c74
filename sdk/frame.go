package sdk

import (
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
)

// A frame of the step stream is the length of its message, 4 bytes, little-endian, and the message.
const (
	frameHeader  = 4
	streamBuffer = 64 << 10 // bytes that are read at once
)

func appendStreamFrame(b []byte, m proto.Message) ([]byte, error) {
	at := len(b)
	b = append(b, make([]byte, frameHeader)...)
	b, err := proto.MarshalOptions{}.MarshalAppend(b, m)
	if err != nil {
		return nil, fmt.Errorf("step stream: encode a message: %w", err)
	}
	binary.LittleEndian.PutUint32(b[at:], uint32(len(b)-at-frameHeader))
	return b, nil
}

// readStreamFrame reads a frame's message into buf, which it may replace.
func readStreamFrame(r io.Reader, buf []byte) ([]byte, error) {
	var header [frameHeader]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return buf, err
	}
	size, err := frameSize(header[:])
	if err != nil {
		return buf, err
	}
	if cap(buf) < size {
		buf = make([]byte, size)
	}
	buf = buf[:size]
	_, err = io.ReadFull(r, buf)
	return buf, err
}

func frameSize(header []byte) (int, error) {
	size := binary.LittleEndian.Uint32(header)
	if size > maxMessage {
		return 0, fmt.Errorf("a frame of %d bytes passes the limit of %d", size, maxMessage)
	}
	return int(size), nil
}
