package wire

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/mlxcel/mlxcel/host/internal/tcptest"
)

var roomy = Limits{Meta: 1 << 20, Data: 1 << 20}

func TestDataBytes(t *testing.T) {
	for _, c := range []struct {
		dtype Dtype
		dims  []uint32
		want  int64
		ok    bool
	}{
		{None, nil, 0, true},
		{None, []uint32{1}, 0, false},
		{Float32, nil, 4, true},
		{Float32, []uint32{2, 3}, 24, true},
		{Float16, []uint32{2, 3}, 12, true},
		{BFloat16, []uint32{2, 3}, 12, true},
		{Int8, []uint32{2, 3}, 6, true},
		{Uint8, []uint32{5}, 5, true},
		{Int32, []uint32{1, 2, 3, 4}, 96, true},
		{Int4, []uint32{2, 3}, 4, true}, // a row begins a byte
		{Int4, nil, 1, true},
		{Int4, []uint32{8}, 4, true},
		{Float32, []uint32{0, math.MaxUint32}, 0, true},
		{Float32, []uint32{1, 2, 3, 4, 5}, 0, false},
		{dtypes, nil, 0, false},
		{Float32, []uint32{math.MaxUint32, math.MaxUint32, math.MaxUint32}, 0, false},
		{Float32, []uint32{math.MaxUint32, math.MaxUint32}, 0, false}, // 2^66
		{Uint8, []uint32{1 << 31, math.MaxUint32}, math.MaxUint32 << 31, true},
		{Uint8, []uint32{math.MaxUint32, math.MaxUint32}, 0, false}, // fits a uint64 only
	} {
		if got, ok := DataBytes(c.dtype, c.dims...); ok != c.ok || ok && got != c.want {
			t.Errorf("%v in %s: got %d, %v; want %d, %v", c.dims, c.dtype, got, ok, c.want, c.ok)
		}
	}
}

func matrix(rows, width uint32) Header {
	h := Header{Kind: 7, Flags: 0x8001, Meta: 3}
	h.SetMatrix(BFloat16, rows, width)
	return h
}

func TestHeaderLayout(t *testing.T) {
	h := matrix(5, 6)
	var b [HeaderBytes]byte
	h.Put(b[:])
	want := "MXTF" + "\x01\x07\x01\x80" + "\x03\x02\x00\x00" + "\x03\x00\x00\x00" +
		"\x05\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" + "\x3c\x00\x00\x00\x00\x00\x00\x00"
	if string(b[:]) != want {
		t.Errorf("got  %q\nwant %q", b, want)
	}
	if got, err := ParseHeader(b[:]); err != nil || got != h {
		t.Errorf("got %+v, %v; want %+v", got, err, h)
	}
}

func TestBadHeaders(t *testing.T) {
	for name, c := range map[string]struct {
		at    int
		value byte
		field string
	}{
		"magic":            {0, 'm', "magic"},
		"version":          {4, 2, "version"},
		"dtype":            {8, byte(dtypes), "dtype"},
		"no tensor":        {8, byte(None), "shape"},
		"rank":             {9, 5, "rank"},
		"smaller rank":     {9, 1, "dimension past the rank"},
		"reserved":         {10, 1, "reserved field"},
		"stray dimension":  {24, 1, "dimension past the rank"},
		"other rows":       {16, 6, "data length"},
		"other data":       {32, 61, "data length"},
		"data past 2^63":   {39, 0x80, "data length"},
		"rows of gigabyte": {19, 0xff, "data length"},
	} {
		t.Run(name, func(t *testing.T) {
			h := matrix(5, 6)
			var b [HeaderBytes]byte
			h.Put(b[:])
			b[c.at] = c.value
			_, err := ParseHeader(b[:])
			if e, ok := errors.AsType[*FormatError](err); !ok || e.Field != c.field {
				t.Errorf("got %v, want a fault of %s", err, c.field)
			}
		})
	}
}

// frame is one whole frame, for tests.
type frame struct {
	h    Header
	meta string
	data string
}

func (f frame) write(t *testing.T, w *Writer, ownMeta bool) {
	t.Helper()
	meta := []byte(f.meta)
	if ownMeta {
		meta = append(w.Meta(), f.meta...)
	}
	if err := w.Write(f.h, meta, []byte(f.data)); err != nil {
		t.Fatal(err)
	}
}

func someFrames() []frame {
	tensor := func(d Dtype, rows, width uint32) frame {
		f := frame{h: Header{Kind: uint8(d), Flags: uint16(rows)}}
		f.h.SetMatrix(d, rows, width)
		for i := range f.h.Data {
			f.data += string(rune('a' + i%26))
		}
		f.meta = strings.Repeat("m", int(rows*width)%700)
		return f
	}
	frames := []frame{{h: Header{Kind: 1}}, {h: Header{Kind: 2}, meta: "meta only"}, {h: Header{Kind: 3}, meta: strings.Repeat("long", 50000)}}
	for d := Float32; d < dtypes; d++ {
		frames = append(frames, tensor(d, 1, 1), tensor(d, 3, 5), tensor(d, 0, 9), tensor(d, 40, 61))
	}
	return frames
}

// Frames arrive as they were sent, whatever pieces they come in, and whether their data is read or not.
func TestFramesArriveAsSent(t *testing.T) {
	for _, ownMeta := range []bool{true, false} {
		var stream bytes.Buffer
		w := NewWriter(&stream, roomy)
		for _, f := range someFrames() {
			f.write(t, w, ownMeta)
		}
		sent := stream.Bytes()
		for name, r := range map[string]io.Reader{
			"whole": bytes.NewReader(sent), "halves": iotest.HalfReader(bytes.NewReader(sent)), "bytes": iotest.OneByteReader(bytes.NewReader(sent)),
		} {
			t.Run(fmt.Sprintf("%s, own metadata %v", name, ownMeta), func(t *testing.T) { checkFrames(t, NewReader(r, roomy)) })
		}
	}
}

func checkFrames(t *testing.T, r *Reader) {
	for i, f := range someFrames() {
		h, meta, err := r.Next()
		if err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
		if h.Kind != f.h.Kind || h.Flags != f.h.Flags || h.Dtype != f.h.Dtype || h.Dims != f.h.Dims || h.Data != int64(len(f.data)) || string(meta) != f.meta {
			t.Fatalf("frame %d: got %+v with %d bytes of metadata", i, h, len(meta))
		}
		data := make([]byte, h.Data)
		if i%3 == 1 {
			data = data[:len(data)/2] // the rest is skipped
		}
		if err := r.ReadData(data); err != nil || string(data) != f.data[:len(data)] {
			t.Fatalf("data of frame %d: %v, or other bytes", i, err)
		}
	}
	if _, _, err := r.Next(); err != io.EOF {
		t.Errorf("after the last frame: %v, want EOF", err)
	}
}

// A stream that ends within a frame says so, wherever that is.
func TestStreamThatEndsEarly(t *testing.T) {
	var stream bytes.Buffer
	f := frame{h: matrix(2, 3), meta: "abc", data: "0123456789ab"}
	f.write(t, NewWriter(&stream, roomy), true)
	for n := range stream.Len() {
		r := NewReader(bytes.NewReader(stream.Bytes()[:n]), roomy)
		h, _, err := r.Next()
		if err == nil {
			err = r.ReadData(make([]byte, h.Data))
		}
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if err != want {
			t.Errorf("after %d bytes: %v, want %v", n, err, want)
		}
		if n < HeaderBytes {
			continue
		}
		r = NewReader(bytes.NewReader(stream.Bytes()[:n]), roomy)
		if _, _, err = r.Next(); err == nil {
			_, _, err = r.Next() // skips the data
		}
		if err != io.ErrUnexpectedEOF {
			t.Errorf("skipping after %d bytes: %v", n, err)
		}
	}
}

func TestLimits(t *testing.T) {
	f := frame{h: matrix(2, 3), meta: "abc", data: "0123456789ab"}
	var stream bytes.Buffer
	f.write(t, NewWriter(&stream, roomy), true)
	for _, c := range []struct {
		limits Limits
		part   string
	}{{Limits{Meta: 2, Data: 12}, "metadata"}, {Limits{Meta: 3, Data: 11}, "data"}, {Limits{Meta: 3, Data: 12}, ""}} {
		_, _, readErr := NewReader(bytes.NewReader(stream.Bytes()), c.limits).Next()
		writeErr := NewWriter(io.Discard, c.limits).Write(f.h, []byte(f.meta), []byte(f.data))
		for _, err := range []error{readErr, writeErr} {
			e, ok := errors.AsType[*LimitError](err)
			if ok != (c.part != "") || ok && e.Part != c.part {
				t.Errorf("limits %+v: got %v", c.limits, err)
			}
		}
	}
}

// What is announced but does not come costs no memory.
func TestAnnouncedMetadataIsNotBelieved(t *testing.T) {
	h := Header{Meta: 1 << 30}
	var b [HeaderBytes + 10]byte
	h.Put(b[:])
	r := NewReader(bytes.NewReader(b[:]), Limits{Meta: 1 << 30})
	if _, _, err := r.Next(); err != io.ErrUnexpectedEOF {
		t.Errorf("got %v", err)
	}
	if cap(r.meta) > readStep {
		t.Errorf("%d bytes were taken for 10", cap(r.meta))
	}
}

func TestWrongUse(t *testing.T) {
	w := NewWriter(io.Discard, roomy)
	for name, err := range map[string]error{
		"data of another size": w.Write(matrix(2, 3), nil, make([]byte, 11)),
		"data without a dtype": w.Write(Header{}, nil, make([]byte, 1)),
		"rank of 5":            w.Write(Header{Dtype: Uint8, Rank: 5}, nil, make([]byte, 1)),
	} {
		if _, ok := errors.AsType[*FormatError](err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	var stream bytes.Buffer
	frame{h: matrix(1, 1), data: "ab"}.write(t, NewWriter(&stream, roomy), true)
	r := NewReader(&stream, roomy)
	if _, _, err := r.Next(); err != nil {
		t.Fatal(err)
	}
	if _, ok := errors.AsType[*FormatError](r.ReadData(make([]byte, 3))); !ok {
		t.Error("more data was read than the frame has")
	}
}

// gatherer takes several slices at once, as a secured connection does.
type gatherer struct {
	bytes.Buffer
	calls int
}

func (g *gatherer) WriteBuffers(bufs ...[]byte) (n int, err error) {
	g.calls++
	for _, b := range bufs {
		m, _ := g.Write(b)
		n += m
	}
	return n, nil
}

func TestHeaderAndDataGoInOneCall(t *testing.T) {
	g := &gatherer{}
	f := frame{h: matrix(2, 3), meta: "abc", data: "0123456789ab"}
	f.write(t, NewWriter(g, roomy), true)
	if g.calls != 1 {
		t.Errorf("%d calls for a frame", g.calls)
	}
	h, meta, err := NewReader(g, roomy).Next()
	if err != nil || string(meta) != "abc" || h.Data != 12 {
		t.Errorf("got %+v, %q, %v", h, meta, err)
	}
}

func TestFramesCostNoAllocations(t *testing.T) {
	near, far := tcptest.Pair(t)
	w, r := NewWriter(near, roomy), NewReader(far, roomy)
	h := matrix(16, 256)
	data, into := make([]byte, h.Data), make([]byte, h.Data)
	got := testing.AllocsPerRun(200, func() {
		if err := w.Write(h, append(w.Meta(), "some metadata"...), data); err != nil {
			t.Fatal(err)
		}
		if _, _, err := r.Next(); err != nil {
			t.Fatal(err)
		}
		if err := r.ReadData(into); err != nil {
			t.Fatal(err)
		}
	})
	if got != 0 {
		t.Errorf("%v allocations per frame", got)
	}
}

func FuzzHeader(f *testing.F) {
	for _, fr := range someFrames() {
		var b [HeaderBytes]byte
		fr.h.Put(b[:])
		f.Add(b[:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < HeaderBytes {
			return
		}
		h, err := ParseHeader(b)
		if err != nil {
			return
		}
		var again [HeaderBytes]byte
		h.Put(again[:])
		if !bytes.Equal(again[:], b[:HeaderBytes]) {
			t.Errorf("%+v was read from other bytes than it writes", h)
		}
		if n, ok := DataBytes(h.Dtype, h.Dims[:h.Rank]...); !ok || n != h.Data || n < 0 {
			t.Errorf("%+v: %d, %v", h, n, ok)
		}
	})
}

// Any bytes give frames within the limits, then an error.
func FuzzStream(f *testing.F) {
	var stream bytes.Buffer
	w := NewWriter(&stream, Limits{Meta: 100, Data: 100})
	for _, fr := range someFrames() {
		_ = w.Write(fr.h, []byte(fr.meta), []byte(fr.data)) // those that fit
	}
	f.Add(stream.Bytes())
	f.Add(stream.Bytes()[:stream.Len()-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(bytes.NewReader(b), Limits{Meta: 100, Data: 100})
		left := len(b)
		for {
			h, meta, err := r.Next()
			if err != nil {
				return
			}
			if h.Meta > 100 || len(meta) != h.Meta || h.Data > 100 {
				t.Fatalf("%+v passes the limits", h)
			}
			if left -= HeaderBytes + h.Meta; left < 0 {
				t.Fatal("more frames than bytes")
			}
			if h.Flags&1 == 0 && r.ReadData(make([]byte, h.Data)) != nil {
				return
			}
		}
	})
}

// messages reads all that a connection of messages brings.
func messages(b []byte, limit int) (kinds []uint8, bodies []string, err error) {
	r := NewMessageReader(bytes.NewReader(b), limit)
	for {
		kind, body, err := r.Next()
		if err != nil {
			return kinds, bodies, err
		}
		kinds, bodies = append(kinds, kind), append(bodies, string(body))
	}
}

func TestMessagesArriveAsSent(t *testing.T) {
	long := strings.Repeat("x", 200_000)
	b := []byte(Preface)
	for kind, body := range []string{"", "a", long, strings.Repeat("y", 127), strings.Repeat("z", 128)} {
		b = AppendMessage(b, uint8(kind), []byte(body))
	}
	kinds, bodies, err := messages(b, len(long))
	if err != io.EOF || len(bodies) != 5 || bodies[2] != long || bodies[1] != "a" || kinds[4] != 4 || len(bodies[4]) != 128 {
		t.Fatalf("%v, %d bodies, %v", kinds, len(bodies), err)
	}
	if want := len(Preface) + 5 + 3*1 + 3 + 2 + 1 + len(long) + 127 + 128; len(b) != want {
		t.Errorf("%d bytes, want %d", len(b), want)
	}
	if _, _, err := messages(b, len(long)-1); err == nil || !strings.Contains(err.Error(), "200000 bytes of message passes the limit") {
		t.Errorf("past the limit: %v", err)
	}
}

func TestBadMessages(t *testing.T) {
	for name, c := range map[string]struct {
		b    string
		want string
	}{
		"a tensor's frame":    {"MXTF\x01\x00", "bad frame: preface"},
		"another version":     {"MXTM\x02\x00", "bad frame: preface"},
		"nothing":             {"", "EOF"},
		"half a preface":      {Preface[:3], "unexpected EOF"},
		"a kind alone":        {Preface + "\x01", "unexpected EOF"},
		"half a length":       {Preface + "\x01\x80", "unexpected EOF"},
		"a length too long":   {Preface + "\x01\x80\x80\x80\x80\x80\x01", "at most 5 bytes of varint"},
		"a length with zeros": {Preface + "\x01\x81\x00", "want 1 bytes of varint"},
		"half a body":         {Preface + "\x01\x02a", "unexpected EOF"},
		"an endless body":     {Preface + "\x01\xff\xff\xff\xff\x0f", "passes the limit"},
	} {
		if _, _, err := messages([]byte(c.b), 100); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// What is read is what AppendMessage writes: there is one way to say a thing.
func FuzzMessages(f *testing.F) {
	f.Add(AppendMessage(AppendMessage([]byte(Preface), 1, []byte("body")), 2, nil))
	f.Add([]byte(Preface + "\x01\x80\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		kinds, bodies, err := messages(b, 1<<10)
		again := []byte(Preface)
		for i := range kinds {
			again = AppendMessage(again, kinds[i], []byte(bodies[i]))
		}
		if err == io.EOF && len(b) >= len(Preface) && string(again) != string(b) || len(kinds) > 0 && !bytes.HasPrefix(b, again) {
			t.Errorf("%x was read as %x, %v", b, again, err)
		}
	})
}
