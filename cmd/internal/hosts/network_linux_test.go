package hosts

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// join connects two hosts by TCP over the wire.
func join(t *testing.T, from, to *Host) (dialled, accepted net.Conn) {
	t.Helper()
	l, err := to.Listen("tcp", to.OnWire(9000))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if dialled, err = from.Dial(t.Context(), "tcp", to.OnWire(9000)); err != nil {
		t.Fatal(err)
	}
	if accepted, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialled.Close(); accepted.Close() })
	if got, _, _ := net.SplitHostPort(accepted.RemoteAddr().String()); from.OnWire(0) != net.JoinHostPort(got, "0") {
		t.Errorf("the peer is %s, want %s", got, from.OnWire(0))
	}
	return dialled, accepted
}

func TestWireDelays(t *testing.T) {
	n := New(t, "a", "b")
	near, far := join(t, n.Hosts[0], n.Hosts[1])
	go io.Copy(far, far)
	const delay = 30 * time.Millisecond
	n.Wire.Shape(Quality{Delay: delay, Jitter: time.Millisecond})
	for range 3 {
		start := time.Now()
		if _, err := near.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(near, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 2*delay {
			t.Errorf("the round trip took %v, want at least %v", took, 2*delay)
		}
	}
}

// TCP repairs what the wire loses; that it loses something the counter of the sender's kernel shows.
func TestWireLoses(t *testing.T) {
	n := New(t, "a", "b")
	near, far := join(t, n.Hosts[0], n.Hosts[1])
	n.Wire.Shape(Quality{Loss: 0.05})
	sent := make([]byte, 512<<10)
	if _, err := rand.Read(sent); err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = near.Write(sent)
		near.Close()
	}()
	got, err := io.ReadAll(far)
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d bytes arrived of %d, %v", len(got), len(sent), err)
	}
	var counters string
	if err := n.Hosts[0].Do(func() error {
		raw, err := os.ReadFile("/proc/thread-self/net/snmp")
		counters = string(raw)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if again := counter(t, counters, "Tcp:", "RetransSegs"); again == "0" {
		t.Error("nothing was sent again")
	}
}

// counter reads one of /proc/net/snmp: a line of names, then one of values.
func counter(t *testing.T, table, protocol, name string) string {
	t.Helper()
	var names []string
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		switch {
		case fields[0] != protocol:
		case names == nil:
			names = fields
		default:
			for i, n := range names {
				if n == name {
					return fields[i]
				}
			}
		}
	}
	t.Fatalf("no counter %s %s", protocol, name)
	return ""
}

// inbox takes datagrams on a host's port 7.
func inbox(t *testing.T, h *Host) (next func() string) {
	t.Helper()
	c, err := h.ListenPacket("udp", h.OnWire(7))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return func() string {
		t.Helper()
		buf := make([]byte, 100)
		_ = c.SetReadDeadline(time.Now().Add(Patience))
		n, _, err := c.ReadFrom(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:n])
	}
}

func post(t *testing.T, from, to *Host, text string) {
	t.Helper()
	c, err := from.Dial(t.Context(), "udp", to.OnWire(7))
	if err == nil {
		_, err = c.Write([]byte(text))
		c.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What one host sends is carried in order, so once its datagram to c has arrived, that to b has arrived or is lost.
func TestWireIsCutAndHealed(t *testing.T) {
	n := New(t, "a", "b", "c")
	a, b, c := n.Hosts[0], n.Hosts[1], n.Hosts[2]
	atB, atC := inbox(t, b), inbox(t, c)
	near, far := join(t, a, b)
	for _, tc := range []struct {
		name      string
		cut, heal func()
	}{
		{"host", func() { n.Wire.Cut(b) }, func() { n.Wire.Heal(b) }},
		{"direction", func() { n.Wire.ShapePath(a, b, Quality{Cut: true}) }, func() { n.Wire.ShapePath(a, b, Quality{}) }},
	} {
		tc.cut()
		post(t, a, b, "lost")
		if _, err := near.Write([]byte("sent again")); err != nil {
			t.Fatal(err)
		}
		post(t, a, c, "passes")
		if got := atC(); got != "passes" {
			t.Errorf("%s: %q", tc.name, got)
		}
		tc.heal()
		post(t, a, b, "healed")
		if got := atB(); got != "healed" {
			t.Errorf("%s: %q arrives in spite of the cut", tc.name, got)
		}
		got := make([]byte, len("sent again"))
		if _, err := io.ReadFull(far, got); err != nil || string(got) != "sent again" {
			t.Errorf("%s: %q, %v", tc.name, got, err)
		}
	}
}

// Only the direction that was cut is.
func TestWireIsCutOneWay(t *testing.T) {
	n := New(t, "a", "b")
	n.Wire.ShapePath(n.Hosts[0], n.Hosts[1], Quality{Cut: true})
	atA := inbox(t, n.Hosts[0])
	post(t, n.Hosts[1], n.Hosts[0], "this way")
	if got := atA(); got != "this way" {
		t.Error(got)
	}
}

func TestWireHasABandwidth(t *testing.T) {
	n := New(t, "a", "b")
	near, far := join(t, n.Hosts[0], n.Hosts[1])
	const rate, size = 1 << 20, 256 << 10
	n.Wire.Shape(Quality{Rate: rate})
	start := time.Now()
	go func() { _, _ = near.Write(make([]byte, size)) }()
	if _, err := io.ReadFull(far, make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if took, least := time.Since(start), size*time.Second/rate; took < least {
		t.Errorf("%d bytes took %v at %d bytes a second, want at least %v", size, took, rate, least)
	}
}

func TestBridgeBroadcasts(t *testing.T) {
	n := New(t, "a", "b", "c")
	for _, target := range []string{"255.255.255.255:49555", "10.77.0.255:49555"} {
		var receivers []net.PacketConn
		for _, h := range n.Hosts[1:] {
			r, err := h.ListenPacket("udp4", "0.0.0.0:49555")
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			receivers = append(receivers, r)
		}
		s, err := n.Hosts[0].ListenPacket("udp4", n.Hosts[0].LAN(0))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		to, err := net.ResolveUDPAddr("udp4", target)
		if err == nil {
			_, err = s.WriteTo([]byte("here I am"), to)
		}
		if err != nil {
			t.Fatal(err)
		}
		for i, r := range receivers {
			buf := make([]byte, 100)
			_ = r.SetReadDeadline(time.Now().Add(Patience))
			got, from, err := r.ReadFrom(buf)
			if err != nil || string(buf[:got]) != "here I am" || from.String() != s.LocalAddr().String() {
				t.Errorf("%s: host %d got %q from %v, %v", target, i+1, buf[:got], from, err)
			}
			r.Close()
		}
	}
}

func TestCable(t *testing.T) {
	n := New(t, "a", "b")
	running := func() bool {
		var link *net.Interface
		err := n.Hosts[0].Do(func() (err error) {
			link, err = net.InterfaceByName(lanName)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return link.Flags&net.FlagRunning != 0
	}
	n.Hosts[0].Unplug(t)
	if running() {
		t.Error("the link is up without its cable")
	}
	n.Hosts[0].Plug(t)
	if !running() {
		t.Error("the link is down with its cable")
	}
	l, err := n.Hosts[1].Listen("tcp", n.Hosts[1].LAN(80))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := n.Hosts[0].Dial(t.Context(), "tcp", n.Hosts[1].LAN(80))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestHostsAreApart(t *testing.T) {
	n := New(t, "a", "b")
	for _, h := range n.Hosts {
		l, err := h.Listen("tcp", "127.0.0.1:80") // each has a loopback of its own
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		var names []string
		err = h.Do(func() error {
			links, err := net.Interfaces()
			for _, link := range links {
				addresses, wrong := link.Addrs()
				for _, a := range addresses {
					names = append(names, link.Name+" "+a.String())
				}
				err = errors.Join(err, wrong)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		names = slices.DeleteFunc(names, func(n string) bool { return n == "lo ::1/128" }) // not every kernel has IPv6
		want := []string{lanName + " " + h.lan.String() + "/24", "lo 127.0.0.1/8", wireName + " " + h.wire.String() + "/24"}
		if slices.Sort(names); !slices.Equal(names, want) {
			t.Errorf("host %s has %q, want %q", h.Name, names, want)
		}
	}
	if n.Host("b") != n.Hosts[1] {
		t.Error("names are mixed up")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := n.Hosts[0].Dial(ctx, "tcp", n.Hosts[1].LAN(1)); err == nil {
		t.Error("a cancelled dial goes on")
	}
}

// Without the rights a test is skipped with the reason, unless that was forbidden.
func TestMissingRights(t *testing.T) {
	run := func(env ...string) string {
		var out []byte
		done := make(chan struct{})
		go onOwnThread(func() {
			defer close(done)
			_ = unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_ADMIN, 0, 0, 0) // who may not do this has no rights to lose
			cmd := exec.Command(program(t, ""), "-test.run=^TestHostsAreApart$", "-test.v")
			cmd.Env = append(os.Environ(), env...)
			out, _ = cmd.CombinedOutput()
		})
		<-done
		return string(out)
	}
	if out := run(required + "="); !strings.Contains(out, "--- SKIP") || !strings.Contains(out, "CAP_SYS_ADMIN") {
		t.Error(out)
	}
	if out := run(required + "=required"); !strings.Contains(out, "--- FAIL") {
		t.Error(out)
	}
}
