package securelink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/internal/tcptest"
)

// refusals keeps what OnRefused is told.
type refusals struct {
	mu   sync.Mutex
	all  []error
	more chan struct{} // gets one for each, where there is room
}

func newRefusals() *refusals { return &refusals{more: make(chan struct{}, 1)} }

func (r *refusals) add(_ net.Addr, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, err)
	select {
	case r.more <- struct{}{}:
	default:
	}
}

// wait blocks until one that fits has come.
func (r *refusals) wait(fits func(error) bool) {
	for {
		r.mu.Lock()
		ok := slices.ContainsFunc(r.all, fits)
		r.mu.Unlock()
		if ok {
			return
		}
		<-r.more
	}
}

func listen(t *testing.T, maxPending int, decide func(Identity) *Refusal) (*Listener, *refusals) {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := newRefusals()
	l, err := NewListener(inner, ListenerConfig{Config: testConfig(t, RoleStage, "s"), MaxPending: maxPending, Decide: decide, OnRefused: r.add})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, r
}

func dial(t *testing.T, l *Listener) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// healthy is a client that does its part.
func healthy(t *testing.T, l *Listener) (client, server *Conn) {
	t.Helper()
	accepted := make(chan *Conn)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	client, err := Client(t.Context(), dial(t, l), testConfig(t, RoleCoordinator, "c"))
	if err != nil {
		t.Fatal(err)
	}
	return client, <-accepted
}

func ping(t *testing.T, a, b *Conn) {
	t.Helper()
	buf := make([]byte, 4)
	for _, c := range [][2]*Conn{{a, b}, {b, a}} {
		if _, err := c[0].Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c[1], buf); err != nil || string(buf) != "ping" {
			t.Fatalf("got %q, %v", buf, err)
		}
	}
}

// 10,000 clients begin a handshake and leave it at that. What is open already goes on, and who does its part gets in.
func TestHalfOpenHandshakes(t *testing.T) {
	const crowd, maxPending, kept = 10_000, 64, 1000
	l, _ := listen(t, maxPending, nil)
	before, beforeServer := healthy(t, l)
	h := sampleHello()
	hello := h.encode()
	partial := [][]byte{nil, hello[:3], hello[:prefixSize], hello[:100], hello[:]}
	var stay [kept]net.Conn // those before were given up long ago, and need no file here any more
	for i := range crowd {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if old := stay[i%kept]; old != nil {
			old.Close()
		}
		stay[i%kept] = c
		c.Write(partial[i%len(partial)])
		if i%500 == 0 {
			l.mu.Lock()
			if n := len(l.pending); n > maxPending {
				t.Errorf("%d unproven clients are kept", n)
			}
			l.mu.Unlock()
			ping(t, before, beforeServer)
			client, server := healthy(t, l)
			ping(t, client, server)
			client.Close()
			server.Close()
		}
	}
	for _, c := range stay {
		c.Close()
	}
}

func TestCrowdedOut(t *testing.T) {
	l, told := listen(t, 1, nil)
	first := dial(t, l)
	h := sampleHello()
	hello := h.encode()
	if _, err := first.Write(hello[:]); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(first, hello[:]); err != nil { // the listener's: it has this client
		t.Fatal(err)
	}
	dial(t, l)
	told.wait(func(err error) bool { return errors.Is(err, ErrCrowdedOut) })
	if _, err := first.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("the client that was given up read %v, which it could take for an answer", err)
	}
	client, server := healthy(t, l)
	ping(t, client, server)
}

func TestVictim(t *testing.T) {
	for name, c := range map[string]struct {
		pending string // a letter each for its source, in capitals where its hello has come, oldest first
		want    int
	}{
		"the only one":                     {"a", 0},
		"oldest":                           {"aaa", 0},
		"oldest without hello":             {"AAaAa", 2},
		"oldest where all have said hello": {"AAA", 0},
		"of the largest crowd":             {"abcbc" + "c", 2},
		"alone without hello is safe":      {"abBBb", 1},
		"alone and oldest is safe":         {"ABBBb", 4},
	} {
		var all []*pending
		for _, letter := range c.pending {
			lower := strings.ToLower(string(letter))
			p := &pending{source: source(addrText("10.0.0." + fmt.Sprint(lower[0]) + ":1"))}
			p.greeted.Store(lower != string(letter))
			all = append(all, p)
		}
		if got := victim(all); got != c.want {
			t.Errorf("%s: got %d, want %d", name, got, c.want)
		}
	}
}

type addrText string

func (a addrText) Network() string { return "test" }
func (a addrText) String() string  { return string(a) }

func TestSource(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"10.0.0.1:1", "10.0.0.1:2", true},
		{"10.0.0.1:1", "10.0.0.2:1", false},
		{"10.0.0.1:1", "[::ffff:10.0.0.1]:1", true},
		{"[2001:db8::1]:1", "[2001:db8::2]:9", true},
		{"[2001:db8::1]:1", "[2001:db8:0:1::1]:1", false},
		{"[fe80::1%eth0]:1", "[fe80::2%eth0]:1", true},
		{"pipe", "@", true},
	} {
		if got := source(addrText(c.a)) == source(addrText(c.b)); got != c.same {
			t.Errorf("%s and %s: same source is %v", c.a, c.b, got)
		}
	}
}

func TestListenerReports(t *testing.T) {
	l, told := listen(t, 0, func(id Identity) *Refusal {
		if id.NodeID == "unwanted" {
			return &Refusal{Code: RefusedRole, Text: "not you"}
		}
		return nil
	})
	_, err := Client(t.Context(), dial(t, l), testConfig(t, RoleTool, "unwanted"))
	if _, ok := errors.AsType[*RefusedError](err); !ok {
		t.Errorf("got %v", err)
	}
	other := testConfig(t, RoleTool, "t")
	other.Secret = testSecret(t, "another secret than the server's")
	if _, err := Client(t.Context(), dial(t, l), other); !errors.Is(err, ErrSecret) {
		t.Errorf("got %v", err)
	}
	dial(t, l).Write([]byte("GET / HTTP/1.1\r\n"))
	told.wait(func(err error) bool { refused, ok := errors.AsType[*RefusedError](err); return ok && refused.ByUs })
	told.wait(func(err error) bool { return errors.Is(err, ErrSecret) })
	told.wait(func(err error) bool { return errors.Is(err, ErrNotPeer) })
}

// Clients that prove nothing can't fill the log; what a member of the cluster was refused for always gets there.
func TestReportsAreBounded(t *testing.T) {
	var now time.Time
	var told []error
	r := newReporter(func(_ net.Addr, err error) { told = append(told, err) }, func() time.Time { return now })
	noise := &HandshakeError{Err: ErrNotPeer}
	for range 1000 {
		r.failed(nil, noise)
	}
	if len(told) != maxReports {
		t.Errorf("%d were reported", len(told))
	}
	r.failed(nil, &RefusedError{})
	if len(told) != maxReports+1 {
		t.Error("the refusal was not reported")
	}
	now = now.Add(time.Second)
	r.failed(nil, noise)
	if last := told[len(told)-1]; !errors.Is(last, ErrNotPeer) || !strings.Contains(last.Error(), "980 more") {
		t.Errorf("got %v", last)
	}
}

func TestListenerClose(t *testing.T) {
	l, _ := listen(t, 0, nil)
	silent := dial(t, l)
	// A client that has proven itself and that nobody accepted.
	waiting, err := Client(t.Context(), dial(t, l), testConfig(t, RoleCoordinator, "c"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Error(err)
	}
	if c, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept gave %v, %v", c, err)
	}
	for name, c := range map[string]net.Conn{"silent": silent, "waiting": waiting} {
		if n, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("%s: read %d bytes", name, n)
		}
	}
	if _, err := net.Dial("tcp", l.Addr().String()); err == nil {
		t.Error("the port is still open")
	}
}

// failingListener fails to accept some times before it is closed.
type failingListener struct {
	net.Listener
	failures int
}

var errTooMany = errors.New("too many open files")

func (l *failingListener) Accept() (net.Conn, error) {
	if l.failures > 0 {
		l.failures--
		return nil, errTooMany
	}
	return l.Listener.Accept()
}

func TestListenerOutlivesFailures(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := newRefusals()
	l, err := NewListener(&failingListener{inner, 2}, ListenerConfig{Config: testConfig(t, RoleStage, "s"), OnRefused: r.add})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, server := healthy(t, l)
	ping(t, client, server)
	r.wait(func(err error) bool { return errors.Is(err, errTooMany) })
}

func TestClientGivesUpOnADeafServer(t *testing.T) {
	client, _ := tcptest.Pair(t)
	cfg := testConfig(t, RoleCoordinator, "c")
	cfg.HandshakeTimeout = time.Millisecond
	_, err := Client(context.Background(), client, cfg)
	if handshake, ok := errors.AsType[*HandshakeError](err); !ok || !isTimeout(handshake.Err) {
		t.Errorf("got %v", err)
	}
}
