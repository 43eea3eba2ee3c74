package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/mlxcel/mlxcel/host/transport"
)

func nic(name string, addresses ...string) transport.Interface {
	i := transport.Interface{Name: name, Up: true}
	for _, a := range addresses {
		i.Addresses = append(i.Addresses, netip.MustParsePrefix(a))
	}
	return i
}

func machine() []transport.Interface {
	lo := nic("lo", "127.0.0.1/8", "::1/128")
	lo.Loopback = true
	down := nic("eth9", "10.9.0.1/24")
	down.Up = false
	tunnel := nic("utun3", "100.64.0.1/32")
	tunnel.PointToPoint = true
	return []transport.Interface{lo, nic("eth0", "192.168.1.11/24", "fd00::11/64"), nic("eth1", "10.0.0.11/16"), down, tunnel,
		nic("awdl0", "169.254.1.1/16"), nic("llw0", "169.254.2.2/16")}
}

func TestChoosePaths(t *testing.T) {
	lo := loopbackTarget.String()
	for _, tc := range []struct {
		name, listen, target string
		want                 []string
	}{
		{"every usable interface", "0.0.0.0", "255.255.255.255", []string{"lo 127.0.0.1 " + lo, "eth0 192.168.1.11 255.255.255.255", "eth1 10.0.0.11 255.255.255.255"}},
		{"a listener on both families", "::", "255.255.255.255", []string{"lo 127.0.0.1 " + lo, "eth0 192.168.1.11 255.255.255.255", "eth1 10.0.0.11 255.255.255.255"}},
		{"a listener on one address", "10.0.0.11", "255.255.255.255", []string{"eth1 10.0.0.11 255.255.255.255"}},
		{"a listener on loopback", "127.0.0.1", "255.255.255.255", []string{"lo 127.0.0.1 " + lo}},
		{"a directed broadcast", "0.0.0.0", "10.0.255.255", []string{"eth1 10.0.0.11 10.0.255.255"}},
		{"the coordinator", "0.0.0.0", "192.168.1.10", []string{"eth0 192.168.1.11 192.168.1.10"}},
		{"a coordinator on another subnet than the listener", "10.0.0.11", "192.168.1.10", nil},
		{"a coordinator behind a router", "0.0.0.0", "172.16.0.1", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got []string
			for _, p := range choosePaths(machine(), netip.MustParseAddr(tc.listen), netip.AddrPortFrom(netip.MustParseAddr(tc.target), 49555)) {
				got = append(got, fmt.Sprintf("%s %s %s", p.name, p.local, p.to.Addr()))
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// wire is what fake sockets send to.
type wire struct {
	sent    []string // "<from> > <to>"
	beacons [][]byte
	open    int
	broken  map[netip.Addr]error
}

type fakeSender struct {
	w     *wire
	local netip.Addr
}

func (s fakeSender) WriteTo(p []byte, to net.Addr) (int, error) {
	if err := s.w.broken[s.local]; err != nil {
		return 0, err
	}
	s.w.sent = append(s.w.sent, fmt.Sprintf("%s > %s", s.local, to))
	s.w.beacons = append(s.w.beacons, append([]byte(nil), p...))
	return len(p), nil
}
func (fakeSender) SetWriteDeadline(time.Time) error { return nil }
func (s fakeSender) Close() error                   { s.w.open--; return nil }

func testAnnouncer(t *testing.T, w *wire, log *bytes.Buffer, change func(*AnnounceConfig)) *announcer {
	t.Helper()
	cfg := AnnounceConfig{
		Secret: secret(t, ourSecret), Cluster: "pp", NodeID: "a", Version: "1.0", Listen: netip.MustParseAddrPort("0.0.0.0:19001"),
		Log:        hclog.New(&hclog.LoggerOptions{Output: log, DisableTime: true}),
		Interfaces: func() ([]transport.Interface, error) { return machine(), nil },
		Open:       func(_ string, local netip.Addr) (Sender, error) { w.open++; return fakeSender{w, local}, nil },
		Now:        func() time.Time { return time.Unix(1_800_000_000, 0) },
		Rand:       bytes.NewReader(make([]byte, 16)),
	}
	if change != nil {
		change(&cfg)
	}
	a, err := newAnnouncer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestRoundsReachATracker(t *testing.T) {
	w, log := &wire{}, &bytes.Buffer{}
	a := testAnnouncer(t, w, log, nil)
	tracker, err := NewTracker(TrackerConfig{Secret: secret(t, ourSecret), Cluster: "pp"})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_800_000_000, 0)
	for range 3 {
		a.round()
	}
	for i, datagram := range w.beacons {
		from, _, _ := strings.Cut(w.sent[i], " ")
		if o, r := tracker.Observe(now, netip.AddrPortFrom(netip.MustParseAddr(from), 40000), datagram); o == Ignored {
			t.Errorf("beacon %d of %s: ignored: %s", i, from, r)
		}
	}
	want := "found 1 of 1; a at 10.0.0.11:19001, 192.168.1.11:19001, 127.0.0.1:19001 (version 1.0)"
	if got := tracker.Report(now, 1).String(); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if len(w.sent) != 9 || w.open != 3 {
		t.Errorf("%d beacons from %d sockets, want 9 from 3", len(w.sent), w.open)
	}
	a.close()
	if w.open != 0 || log.Len() > 0 {
		t.Errorf("%d sockets left open; log: %s", w.open, log)
	}
}

// A node that serves a coordinator is not offered to another.
func TestABusyNodeIsSilent(t *testing.T) {
	w, free := &wire{}, false
	a := testAnnouncer(t, w, &bytes.Buffer{}, func(cfg *AnnounceConfig) { cfg.Waiting = func() bool { return free } })
	defer a.close()
	a.round()
	if len(w.sent) != 0 {
		t.Errorf("%d beacons of a busy node", len(w.sent))
	}
	free = true
	a.round()
	if len(w.sent) != 3 {
		t.Errorf("%d beacons of a free node, want 3", len(w.sent))
	}
}

func TestOneBadInterfaceStopsNoOther(t *testing.T) {
	w, log := &wire{broken: map[netip.Addr]error{}}, &bytes.Buffer{}
	a := testAnnouncer(t, w, log, nil)
	bad := netip.MustParseAddr("192.168.1.11")
	w.broken[bad] = errors.New("network is unreachable")
	for range 5 {
		a.round()
	}
	if len(w.sent) != 10 {
		t.Errorf("%d beacons, want 10 from the two good interfaces", len(w.sent))
	}
	if n := strings.Count(log.String(), "network is unreachable"); n != 1 || !strings.Contains(log.String(), "interface=eth0") {
		t.Errorf("logged %d times, want once with the interface's name: %s", n, log)
	}
	delete(w.broken, bad)
	a.round()
	if !strings.Contains(log.String(), "announces this node again: interface=eth0") || len(w.sent) != 13 {
		t.Errorf("%d beacons, want 13; log: %s", len(w.sent), log)
	}
	a.close()
	if w.open != 0 {
		t.Errorf("%d sockets left open", w.open)
	}
}

func TestInterfacesComeAndGo(t *testing.T) {
	w, log := &wire{}, &bytes.Buffer{}
	interfaces := machine()
	var listing error
	a := testAnnouncer(t, w, log, func(c *AnnounceConfig) {
		c.Interfaces = func() ([]transport.Interface, error) { return interfaces, listing }
	})
	a.round()
	interfaces, listing = interfaces[:2], errors.New("eth1: no such device")
	a.round()
	a.round()
	if w.open != 2 || len(w.sent) != 7 {
		t.Errorf("%d sockets and %d beacons, want 2 and 7", w.open, len(w.sent))
	}
	if strings.Count(log.String(), "no such device") != 1 {
		t.Errorf("the failed listing is logged other than once: %s", log)
	}
	interfaces = nil
	a.round()
	a.round()
	if w.open != 0 || strings.Count(log.String(), "no interface announces this node") != 1 {
		t.Errorf("%d sockets; log: %s", w.open, log)
	}
}

func TestATargetBehindARouter(t *testing.T) {
	for listen, want := range map[string]int{"0.0.0.0:1": 1, "192.168.1.11:1": 1, "10.0.0.11:1": 0} {
		w := &wire{}
		a := testAnnouncer(t, w, &bytes.Buffer{}, func(c *AnnounceConfig) {
			c.Listen, c.Target = netip.MustParseAddrPort(listen), netip.MustParseAddr("172.16.0.1")
			c.Route = func(netip.AddrPort) (netip.Addr, error) { return netip.MustParseAddr("192.168.1.11"), nil }
		})
		a.round()
		if len(w.sent) != want {
			t.Errorf("listening on %s: sent %q, want %d", listen, w.sent, want)
		}
	}
}

func TestAnnounceRefuses(t *testing.T) {
	for name, change := range map[string]func(*AnnounceConfig){
		"an IPv6 target":      func(c *AnnounceConfig) { c.Target = netip.MustParseAddr("ff02::1") },
		"a wildcard target":   func(c *AnnounceConfig) { c.Target = netip.MustParseAddr("0.0.0.0") },
		"an IPv6 listener":    func(c *AnnounceConfig) { c.Listen = netip.MustParseAddrPort("[fd00::1]:1") },
		"port 0":              func(c *AnnounceConfig) { c.Listen = netip.MustParseAddrPort("0.0.0.0:0") },
		"no id":               func(c *AnnounceConfig) { c.NodeID = "" },
		"no random boot id":   func(c *AnnounceConfig) { c.Rand = strings.NewReader("") },
		"a long cluster name": func(c *AnnounceConfig) { c.Cluster = strings.Repeat("x", 65) },
	} {
		cfg := AnnounceConfig{Secret: secret(t, ourSecret), Cluster: "pp", NodeID: "a", Listen: netip.MustParseAddrPort("0.0.0.0:19001")}
		change(&cfg)
		if err := Announce(t.Context(), cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := Announce(t.Context(), AnnounceConfig{NodeID: "a", Listen: netip.MustParseAddrPort("0.0.0.0:19001")}); err == nil {
		t.Error("no secret: no error")
	}
}

// Two coordinators of one host both find a node over loopback, through real sockets.
func TestSearchOverLoopback(t *testing.T) {
	free, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := free.LocalAddr().(*net.UDPAddr).Port
	free.Close()

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	announced := make(chan error, 1)
	announcing, stop := context.WithCancel(ctx)
	go func() {
		announced <- Announce(announcing, AnnounceConfig{
			Secret: secret(t, ourSecret), Cluster: "pp", NodeID: "a", Version: "1.0",
			Listen: netip.MustParseAddrPort("127.0.0.1:19001"), Port: port, Interval: 10 * time.Millisecond,
		})
	}()
	defer func() {
		stop()
		if err := <-announced; err != nil {
			t.Error(err)
		}
		cancel()
	}()

	type result struct {
		report Report
		err    error
	}
	results := make(chan result)
	coordinators := 2
	if loopbackTarget == netip.AddrFrom4([4]byte{127, 0, 0, 1}) {
		coordinators = 1 // no broadcast on this system's loopback interface: one listener gets each datagram
	}
	for range coordinators {
		go func() {
			s, err := NewSearch(SearchConfig{Secret: secret(t, ourSecret), Cluster: "pp", Port: port, Want: 1, Settle: time.Millisecond})
			if err != nil {
				results <- result{err: err}
				return
			}
			report, err := s.Find(ctx)
			results <- result{report, err}
		}()
	}
	for range coordinators {
		r := <-results
		if r.err != nil || !slices.Equal(r.report.Peers(), []string{"127.0.0.1:19001"}) {
			t.Errorf("found %v, error %v", r.report.Peers(), r.err)
		}
	}
}

// fakeListener gives datagrams and then nothing until it is closed.
type fakeListener struct {
	net.PacketConn
	incoming chan datagram
	closed   chan struct{}
}

func (l *fakeListener) ReadFrom(p []byte) (int, net.Addr, error) {
	select {
	case d := <-l.incoming:
		return copy(p, d.data), net.UDPAddrFromAddrPort(d.from), nil
	case <-l.closed:
		return 0, nil, net.ErrClosed
	}
}

func (l *fakeListener) Close() error { close(l.closed); return nil }

func TestFindReportsWhatItSawWhenItEnds(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	l := &fakeListener{incoming: make(chan datagram), closed: make(chan struct{})}
	var reports []string
	ctx, cancel := context.WithCancel(t.Context())
	s, err := NewSearch(SearchConfig{
		Secret: secret(t, ourSecret), Cluster: "pp", Want: 2, Now: func() time.Time { return now },
		Listen: func(context.Context, int) (net.PacketConn, error) { return l, nil },
		OnChange: func(r Report) {
			reports = append(reports, r.String())
			if len(r.Nodes) == 1 {
				cancel()
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for i, text := range []string{theirSecret, ourSecret} {
			address := netip.MustParseAddrPort(fmt.Sprintf("10.0.0.%d:19001", i+1))
			b := Beacon{NodeID: "a", Cluster: "pp", Version: "1.0", Address: address, Counter: 1, Time: now.UnixMilli()}
			data, err := b.Encode(secret(t, text).Key(keyPurpose))
			if err != nil {
				panic(err)
			}
			l.incoming <- datagram{address, data}
		}
	}()
	report, err := s.Find(ctx)
	missing, ok := errors.AsType[*NotFoundError](err)
	if !ok || !errors.Is(err, context.Canceled) || len(report.Nodes) != 1 {
		t.Fatalf("report %v, error %v", report, err)
	}
	for _, want := range []string{"found 1 of 2", "a at 10.0.0.2:19001", "refused 10.0.0.1: not signed with this cluster's secret", "UDP port 49555", "--cluster-discovery-target"} {
		if !strings.Contains(missing.Error(), want) {
			t.Errorf("error %q lacks %q", missing, want)
		}
	}
	if len(reports) != 2 || reports[0] != "found 0 of 2" {
		t.Errorf("reports %q", reports)
	}
}

func TestFindNamesThePortItCantHave(t *testing.T) {
	s, err := NewSearch(SearchConfig{Secret: secret(t, ourSecret), Want: 1, Listen: func(context.Context, int) (net.PacketConn, error) {
		return nil, errors.New("permission denied")
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Find(t.Context()); err == nil || !strings.Contains(err.Error(), "UDP port 49555") || !strings.Contains(err.Error(), "--cluster-discovery-port") {
		t.Errorf("error %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	key := secret(f, ourSecret).Key(keyPurpose)
	b := Beacon{NodeID: "stage-0", Cluster: "pp", Version: "1.0", Address: netip.MustParseAddrPort("10.0.0.1:19001"), Counter: 1, Time: 1}
	good, err := b.Encode(key)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:BeaconSize-1])
	f.Add([]byte("mlxbcn\x01\x00"))
	f.Fuzz(func(t *testing.T, in []byte) {
		// As it comes, and as whoever holds the secret could send it.
		if _, err := Decode(in, key); err == nil && !bytes.Equal(in, good) {
			t.Fatal("a beacon that nobody signed")
		}
		if len(in) < signedSize {
			return
		}
		signed := append(bytes.Clone(in[:signedSize]), sign(key, in[:signedSize])...)
		b, err := Decode(signed, key)
		if err != nil {
			return
		}
		again, err := b.Encode(key)
		if err != nil || !bytes.Equal(again, signed) {
			t.Fatalf("%+v is encoded otherwise than it was decoded: %v", b, err)
		}
	})
}
