package securelink

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"
)

// wireConn is a connection on which all bytes have come already. What is written is kept.
type wireConn struct {
	io.Reader
	written bytes.Buffer
	closed  bool
}

func (c *wireConn) Write(p []byte) (int, error)      { return c.written.Write(p) }
func (c *wireConn) Close() error                     { c.closed = true; return nil }
func (c *wireConn) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *wireConn) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *wireConn) SetDeadline(time.Time) error      { return nil }
func (c *wireConn) SetReadDeadline(time.Time) error  { return nil }
func (c *wireConn) SetWriteDeadline(time.Time) error { return nil }

func testStream(t testing.TB, key byte, every uint64) *keyedStream {
	s, err := newKeyedStream(bytes.Repeat([]byte{key}, 32), every)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// sealed returns the records of the given texts, as the peer sends them. An empty text is its close.
func sealed(t testing.TB, s *keyedStream, texts ...string) [][]byte {
	var records [][]byte
	for _, text := range texts {
		record, err := s.seal(make([]byte, len(text)+recordOverhead), []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		records = append(records, record)
	}
	return records
}

const keyIn, keyOut = 1, 2

func receiver(t testing.TB, wire io.Reader) (*Conn, *wireConn) {
	under := &wireConn{Reader: wire}
	return newConn(under, Identity{Role: RoleStage, NodeID: "peer"}, testStream(t, keyIn, 3), testStream(t, keyOut, 3)), under
}

// Someone on the way does something to the records. What was sent before it arrives, and nothing after.
func TestRecordAttacks(t *testing.T) {
	texts := []string{"zero", "one", "two", "three", "four", ""} // keys change after "two"
	other := sealed(t, testStream(t, keyIn, 3), "ZERO", "ONE", "TWO", "THREE")
	foreign := sealed(t, testStream(t, keyOut, 3), texts...)
	flip := func(record, at int, bit byte) func([][]byte) [][]byte {
		return func(r [][]byte) [][]byte { r[record][at] ^= bit; return r }
	}
	for name, c := range map[string]struct {
		attack func([][]byte) [][]byte
		want   string // what arrives
		err    error
	}{
		"none":                  {func(r [][]byte) [][]byte { return r }, "zeroonetwothreefour", io.EOF},
		"replayed":              {func(r [][]byte) [][]byte { return slices.Insert(r, 2, r[1]) }, "zeroone", ErrRecordForged},
		"replayed at once":      {func(r [][]byte) [][]byte { return slices.Insert(r, 1, r[0]) }, "zero", ErrRecordForged},
		"replayed later":        {func(r [][]byte) [][]byte { return slices.Insert(r, 5, r[0]) }, "zeroonetwothreefour", ErrRecordForged},
		"replayed, next key":    {func(r [][]byte) [][]byte { r[3] = r[0]; return r }, "zeroonetwo", ErrRecordForged},
		"reordered":             {func(r [][]byte) [][]byte { r[1], r[2] = r[2], r[1]; return r }, "zero", ErrRecordForged},
		"reordered, next key":   {func(r [][]byte) [][]byte { r[2], r[3] = r[3], r[2]; return r }, "zeroone", ErrRecordForged},
		"first dropped":         {func(r [][]byte) [][]byte { return r[1:] }, "", ErrRecordForged},
		"dropped":               {func(r [][]byte) [][]byte { return slices.Delete(r, 1, 2) }, "zero", ErrRecordForged},
		"all up to the close":   {func(r [][]byte) [][]byte { return r[5:] }, "", ErrRecordForged},
		"closed early":          {func(r [][]byte) [][]byte { return slices.Insert(r, 2, r[5]) }, "zeroone", ErrRecordForged},
		"injected":              {func(r [][]byte) [][]byte { return slices.Insert(r, 1, bytes.Repeat([]byte{4, 0, 0, 0}, 6)) }, "zero", ErrRecordForged},
		"of another stream":     {func(r [][]byte) [][]byte { r[1] = foreign[1]; return r }, "zero", ErrRecordForged},
		"forged close":          {func(r [][]byte) [][]byte { return slices.Insert(r, 1, make([]byte, recordOverhead)) }, "zero", ErrRecordForged},
		"same number, resealed": {func(r [][]byte) [][]byte { r[1] = append(slices.Clone(other[1][:7]), r[1][7:]...); return r }, "zero", ErrRecordForged},
		"text flipped":          {flip(1, 4, 1), "zero", ErrRecordForged},
		"tag flipped":           {flip(1, 22, 0x80), "zero", ErrRecordForged},
		"length shorter":        {flip(1, 0, 1), "zero", ErrRecordForged},
		"length longer":         {flip(1, 0, 4), "zero", ErrRecordForged},
		"length huge":           {flip(1, 3, 0x80), "zero", ErrRecordTooLong},
		"length one too many":   {func(r [][]byte) [][]byte { binary.LittleEndian.PutUint32(r[1], maxRecordText+1); return r }, "zero", ErrRecordTooLong},
		"length all ones":       {func(r [][]byte) [][]byte { copy(r[1], "\xff\xff\xff\xff"); return r }, "zero", ErrRecordTooLong},
		"cut between records":   {func(r [][]byte) [][]byte { return r[:2] }, "zeroone", io.ErrUnexpectedEOF},
		"cut before the close":  {func(r [][]byte) [][]byte { return r[:5] }, "zeroonetwothreefour", io.ErrUnexpectedEOF},
		"cut in a header":       {func(r [][]byte) [][]byte { r[2] = r[2][:3]; return r[:3] }, "zeroone", io.ErrUnexpectedEOF},
		"cut in a text":         {func(r [][]byte) [][]byte { r[2] = r[2][:5]; return r[:3] }, "zeroone", io.ErrUnexpectedEOF},
		"cut in a tag":          {func(r [][]byte) [][]byte { r[2] = r[2][:len(r[2])-1]; return r[:3] }, "zeroone", io.ErrUnexpectedEOF},
		"cut in the close":      {func(r [][]byte) [][]byte { r[5] = r[5][:19]; return r }, "zeroonetwothreefour", io.ErrUnexpectedEOF},
		"bytes after close":     {func(r [][]byte) [][]byte { return append(r, []byte("anything")) }, "zeroonetwothreefour", io.EOF},
		"nothing":               {func([][]byte) [][]byte { return nil }, "", io.ErrUnexpectedEOF},
	} {
		t.Run(name, func(t *testing.T) {
			records := c.attack(sealed(t, testStream(t, keyIn, 3), texts...))
			conn, under := receiver(t, bytes.NewReader(bytes.Join(records, nil)))
			got, err := readUntilError(conn)
			if string(got) != c.want || !errors.Is(err, c.err) {
				t.Fatalf("got %q, %v; want %q, %v", got, err, c.want, c.err)
			}
			if _, again := conn.Read(make([]byte, 9)); again != err {
				t.Errorf("the next Read gave %v", again)
			}
			forged, isForged := errors.AsType[*RecordError](err)
			if isForged != under.closed {
				t.Errorf("closed: %v after %v", under.closed, err)
			}
			if !isForged {
				return
			}
			if forged.Peer.NodeID != "peer" {
				t.Errorf("the error does not name the peer: %+v", forged)
			}
			if _, err := conn.Write([]byte("x")); !errors.Is(err, c.err) {
				t.Errorf("Write after it gave %v", err)
			}
		})
	}
}

func readUntilError(r io.Reader) (got []byte, err error) {
	buf := make([]byte, 1000)
	for {
		n, err := r.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil {
			return got, err
		}
	}
}

// What one end writes, in any portions, the other reads, in any portions, over many changes of keys.
func TestRecordsCarryAnyPortions(t *testing.T) {
	want := make([]byte, 300_000)
	for i := range want {
		want[i] = byte(i ^ i>>8)
	}
	for _, portion := range []int{1, 7, 1000, maxRecordText - 1, maxRecordText, maxRecordText + 1, len(want)} {
		under := &wireConn{}
		sender := newConn(under, Identity{}, testStream(t, keyOut, 3), testStream(t, keyIn, 3))
		text := want[:min(len(want), 400*portion)]
		for rest := text; len(rest) > 0; {
			n := min(portion, len(rest))
			if written, err := sender.WriteBuffers(rest[:n/3], nil, rest[n/3:n/2], rest[n/2:n]); err != nil || written != n {
				t.Fatal(written, err)
			}
			rest = rest[n:]
		}
		sender.CloseWrite()
		for _, take := range []int{1, 333, 1 << 20} {
			conn, _ := receiver(t, bytes.NewReader(under.written.Bytes()))
			got := make([]byte, 0, len(text))
			buf, err := make([]byte, take), error(nil)
			for n := 0; err == nil; got = append(got, buf[:n]...) {
				n, err = conn.Read(buf)
			}
			if err != io.EOF || !bytes.Equal(got, text) {
				t.Fatalf("portions of %d, read by %d: %d of %d bytes, %v", portion, take, len(got), len(text), err)
			}
		}
	}
}

// The same text has another look in each record and under each key, and a key is not met again.
func TestRekey(t *testing.T) {
	const every = 4
	s := testStream(t, keyIn, every)
	keys, looks := map[string]int{}, map[string]int{}
	for i := range 5 * every {
		looks[string(sealed(t, s, "the same")[0])]++
		keys[string(s.key)]++
		if want := (i / every) + 1; len(keys) != want {
			t.Fatalf("after record %d: %d keys, want %d", i, len(keys), want)
		}
	}
	if len(looks) != 5*every {
		t.Errorf("%d records look like another", 5*every-len(looks))
	}
	// An end that changes its key elsewhere does not understand the other.
	records := sealed(t, testStream(t, keyIn, every+1), "a", "b", "c", "d", "e")
	conn := newConn(&wireConn{Reader: bytes.NewReader(bytes.Join(records, nil))}, Identity{}, testStream(t, keyIn, every), testStream(t, keyOut, every))
	if got, err := readUntilError(conn); string(got) != "abcd" || !errors.Is(err, ErrRecordForged) {
		t.Errorf("got %q, %v", got, err)
	}
}

// Whoever has no key makes no record: all bytes end in an error, and no byte gets through.
func FuzzRecord(f *testing.F) {
	f.Add([]byte{}, uint8(0))
	records := sealed(f, testStream(f, keyOut, 3), "text", "")
	f.Add(bytes.Join(records, nil), uint8(1))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, uint8(2))
	f.Add(make([]byte, 2*recordOverhead), uint8(7))
	f.Fuzz(func(t *testing.T, wire []byte, genuine uint8) {
		// Some genuine records come first, so that the reader is anywhere in its stream.
		s := testStream(t, keyIn, 3)
		var want []byte
		var before [][]byte
		for range genuine % 8 {
			before = append(before, sealed(t, s, "genuine")...)
			want = append(want, "genuine"...)
		}
		conn, _ := receiver(t, io.MultiReader(bytes.NewReader(bytes.Join(before, nil)), bytes.NewReader(wire)))
		got, err := readUntilError(conn)
		if !bytes.Equal(got, want) {
			t.Fatalf("%q got through", got)
		}
		_, forged := errors.AsType[*RecordError](err)
		if !forged && err != io.ErrUnexpectedEOF {
			t.Fatalf("got %v", err)
		}
	})
}
