package securelink

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/host/internal/tcptest"
)

func testSecret(t testing.TB, raw string) Secret {
	t.Helper()
	s, err := NewSecret([]byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func testConfig(t testing.TB, role Role, node string) Config {
	return Config{Secret: testSecret(t, "0123456789abcdef0123456789abcdef"),
		Self: Identity{Role: role, NodeID: node, Cluster: "test", Version: "v0.8.0"}}
}

// shakeHands runs both ends over the given connections.
func shakeHands(t testing.TB, client, server net.Conn, clientCfg, serverCfg Config, decide func(Identity) *Refusal) (c, s *Conn, clientErr, serverErr error) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s, serverErr = Server(t.Context(), server, serverCfg, decide)
	}()
	c, clientErr = Client(t.Context(), client, clientCfg)
	<-done
	return c, s, clientErr, serverErr
}

// secure returns both ends of a secured connection over the given ones.
func secure(t testing.TB, client, server net.Conn) (*Conn, *Conn) {
	t.Helper()
	c, s, err1, err2 := shakeHands(t, client, server, testConfig(t, RoleCoordinator, "c"), testConfig(t, RoleStage, "s"), nil)
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	return c, s
}

// securePair returns both ends of a secured TCP connection on loopback, of which the first dialled.
func securePair(t testing.TB) (*Conn, *Conn) {
	t.Helper()
	client, server := tcptest.Pair(t)
	return secure(t, client, server)
}

func TestHalfClose(t *testing.T) {
	c, s := securePair(t)
	want := bytes.Repeat([]byte("0123456789"), 300_000)
	var wg sync.WaitGroup
	wg.Go(func() {
		c.Write(want)
		c.CloseWrite()
	})
	got, err := io.ReadAll(s) // returns without an error only for an orderly close
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("server read %d bytes, %v", len(got), err)
	}
	wg.Wait()
	if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a write after CloseWrite gave %v", err)
	}
	if _, err := s.Write([]byte("answer")); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "answer" {
		t.Errorf("client read %q, %v", got, err)
	}
}

func TestEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(*Conn)
		want error
	}{
		"orderly":            {func(c *Conn) { c.Close() }, io.EOF},
		"orderly, half":      {func(c *Conn) { c.CloseWrite() }, io.EOF},
		"abrupt":             {func(c *Conn) { c.conn.Close() }, io.ErrUnexpectedEOF},
		"abrupt, half":       {func(c *Conn) { c.conn.(*net.TCPConn).CloseWrite() }, io.ErrUnexpectedEOF},
		"abrupt in a record": {func(c *Conn) { c.conn.Write([]byte{9, 0, 0, 0, 1}); c.conn.Close() }, io.ErrUnexpectedEOF},
	} {
		t.Run(name, func(t *testing.T) {
			client, server := securePair(t)
			client.Write([]byte("last words"))
			c.end(client)
			got, err := readUntilError(server)
			if string(got) != "last words" || err != c.want {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestCloseTwice(t *testing.T) {
	c, _ := securePair(t)
	if err := errors.Join(c.Close(), c.Close()); err != nil {
		t.Error(err)
	}
	if err := c.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("SetDeadline gave %v", err)
	}
	if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Write gave %v", err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read gave %v", err)
	}
}

// A peer that takes nothing holds Close up for closeWait, no longer.
func TestCloseDoesNotHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		c, _ := secure(t, client, server)
		defer server.Close()
		start := time.Now()
		if err := c.Close(); err != nil || time.Since(start) != closeWait {
			t.Errorf("Close gave %v after %s", err, time.Since(start))
		}
	})
}

// Nor does a write that is stuck.
func TestCloseEndsAWrite(t *testing.T) {
	client, server := net.Pipe()
	c, _ := secure(t, client, server)
	defer server.Close()
	done := make(chan error)
	go func() {
		_, err := c.Write(make([]byte, 1<<20))
		done <- err
	}()
	if _, err := server.Read(make([]byte, 1)); err != nil { // the write is on its way
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write gave %v", err)
	}
}

// A read that ran into its deadline, in the middle of a record or between two, goes on where it was.
func TestReadDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		c, s := secure(t, client, server)
		defer c.conn.Close()
		record := sealed(t, c.out, "slowly")[0]
		got := make([]byte, 100)
		for i := range record {
			s.SetReadDeadline(time.Now().Add(time.Second))
			if n, err := s.Read(got); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("with %d bytes of a record: %d, %v", i, n, err)
			}
			s.SetReadDeadline(time.Time{})
			go client.Write(record[i : i+1])
			if i == len(record)-1 {
				break
			}
			s.SetReadDeadline(time.Now().Add(time.Second))
			s.Read(got)
		}
		if n, err := s.Read(got); err != nil || string(got[:n]) != "slowly" {
			t.Errorf("got %q, %v", got[:n], err)
		}
	})
}

// After a write that was cut, the peer could not make sense of another.
func TestWriteDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		c, s := secure(t, client, server)
		defer server.Close()
		c.SetWriteDeadline(time.Now().Add(time.Second))
		if _, err := c.Write([]byte("nobody reads")); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("Write gave %v", err)
		}
		c.SetWriteDeadline(time.Time{})
		if _, err := c.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the next Write gave %v", err)
		}
		c.Close()
		if _, err := s.Read(make([]byte, 1)); err != io.ErrUnexpectedEOF {
			t.Errorf("the peer read %v", err)
		}
	})
}

// Many goroutines write, read and close at once: each write arrives as a whole, until the close.
func TestConcurrentUse(t *testing.T) {
	c, s := securePair(t)
	const writers, each, size = 4, 200, 1000
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for range each {
				half := bytes.Repeat([]byte{byte('a' + w)}, size/2)
				if _, err := c.WriteBuffers(half, half); err != nil {
					t.Error(err)
				}
				c.SetWriteDeadline(time.Now().Add(time.Minute))
			}
		})
	}
	wg.Go(func() { // the other direction meanwhile
		if _, err := s.Write(make([]byte, 100*size)); err != nil {
			t.Error(err)
		}
	})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() { readUntilError(c) })
	}
	counts := map[byte]int{}
	message := make([]byte, size)
	for range writers * each {
		if _, err := io.ReadFull(s, message); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(message, bytes.Repeat(message[:1], size)) {
			t.Fatal("two writes are mixed")
		}
		counts[message[0]]++
	}
	wg.Wait()
	for range 3 {
		wg.Go(func() { c.Close() })
		wg.Go(func() { c.Write([]byte("too late or just in time")) })
	}
	if _, err := readUntilError(s); err != io.EOF {
		t.Errorf("the end is %v", err)
	}
	wg.Wait()
	readers.Wait()
	if len(counts) != writers || counts['a'] != each {
		t.Errorf("got %v", counts)
	}
}

// Neither end needs memory for a record, of any size, once its buffers have grown.
func TestNoAllocations(t *testing.T) {
	c, s := securePair(t)
	for _, size := range []int{1, 8 << 10, maxRecordText, 5*maxRecordText + 100} {
		head, data := make([]byte, 64), make([]byte, size)
		got := make([]byte, len(head)+len(data))
		start, end := make(chan bool), make(chan error)
		go func() {
			for range start {
				_, err := io.ReadFull(s, got)
				end <- err
			}
		}()
		round := func() {
			start <- true
			if _, err := c.WriteBuffers(head, data); err != nil {
				t.Error(err)
			}
			if err := <-end; err != nil {
				t.Error(err)
			}
		}
		if n := testing.AllocsPerRun(50, round); n != 0 {
			t.Errorf("%d bytes: %v allocations", size, n)
		}
		close(start)
	}
}
