package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/discovery"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
)

const secretText = "sixteen bytes or more"

// want is a finding: its level, its name, and parts of its text and of its remedy, separated by "|".
type want struct {
	level        Level
	name         string
	text, remedy string
}

// check compares findings one by one. Whatever is not ok has a remedy, and what is has none.
func check(t *testing.T, got []Finding, wants ...want) {
	t.Helper()
	if len(got) != len(wants) {
		t.Errorf("%d findings, want %d: %q", len(got), len(wants), got)
		return
	}
	for i, w := range wants {
		g := got[i]
		if g.Level != w.level || g.Name != w.name || !containsAll(g.Text, w.text) || !containsAll(g.Remedy, w.remedy) {
			t.Errorf("finding %d is %q, want %q", i, g, w)
		}
		if (g.Level == OK) != (g.Remedy == "") {
			t.Errorf("finding %d: level %s with the remedy %q", i, g.Level, g.Remedy)
		}
		if g.Remedy != "" && strings.Contains(g.Text, g.Remedy) {
			t.Errorf("finding %d says its remedy twice: %q", i, g)
		}
	}
}

func containsAll(text, parts string) bool {
	return !slices.ContainsFunc(strings.Split(parts, "|"), func(p string) bool { return !strings.Contains(text, p) })
}

func iface(name string, mtu int, addresses ...string) transport.Interface {
	i := transport.Interface{Name: name, Up: true, MTU: mtu}
	for _, a := range addresses {
		i.Addresses = append(i.Addresses, netip.MustParsePrefix(a))
	}
	return i
}

func loopback() transport.Interface {
	lo := iface("lo", 65536, "127.0.0.1/8", "::1/128")
	lo.Loopback = true
	return lo
}

// examine is an examination with good probes, for a test to change.
func examine(t *testing.T, cfg Config) *examination {
	t.Helper()
	secret, err := securelink.NewSecret([]byte(secretText))
	if err != nil {
		t.Fatal(err)
	}
	list := []transport.Interface{loopback(), iface("eth0", 1500, "192.168.1.10/24")}
	return &examination{cfg: cfg, secret: secret, interfaces: list, probes: Probes{
		Interfaces: func() ([]transport.Interface, error) { return list, nil },
		Listen:     func(context.Context, string, string) error { return nil },
		Holder:     func(string, netip.AddrPort) (Process, error) { return Process{7, "web server"}, nil },
		Find: func(context.Context, securelink.Secret) (discovery.Report, error) {
			return discovery.Report{}, &discovery.NotFoundError{Port: 49555, Err: context.DeadlineExceeded}
		},
		Ask:       func(context.Context, securelink.Secret, string) (*Contact, error) { return contact(), nil },
		Executors: func(context.Context) (*engine.PluginList, error) { return goodExecutors(), nil },
		Inspect:   func(context.Context) (*engine.Inspection, error) { return goodModel(), nil },
	}}
}

func contact() *Contact {
	return &Contact{
		Node: "stage-0", Role: "stage", Phase: "waiting", Remote: netip.MustParseAddrPort("192.168.1.11:19001"),
		Local: netip.MustParseAddr("192.168.1.10"), RoundTrip: 200 * time.Microsecond, Skew: -3 * time.Millisecond, PathMTU: 1500,
	}
}

func goodExecutors() *engine.PluginList {
	return &engine.PluginList{Folders: []string{"/plugins"}, Entries: []executor.Entry{goodExecutor("llama")}}
}

func goodExecutor(family string) executor.Entry {
	return executor.Entry{
		Path: "/plugins/" + family, Name: family, Version: "v1", Runtime: "mlx 0.32.4", Families: []sdk.Family{{Name: family}},
		Device: sdk.Device{Kind: "cpu", Name: "some CPU", TotalMemory: 16 << 30, FreeMemory: 8 << 30},
	}
}

func goodModel() *engine.Inspection {
	return &engine.Inspection{
		Model: &modelrepo.Model{Dir: "/model"}, Family: sdk.Family{Name: "llama"}, Plugin: "/plugins/llama",
		Profile: &sdk.ModelProfile{Embedding: 1 << 20, Head: 1 << 20, TiedBytes: 1 << 20, Layers: make([]sdk.LayerProfile, 3)},
		Checks:  []engine.Check{{Name: "weights", Text: "1 files"}},
	}
}

func TestInterfaces(t *testing.T) {
	down, tunnel := iface("eth9", 1500, "10.9.0.1/24"), iface("wg0", 1420, "10.8.0.2/24")
	down.Up, tunnel.PointToPoint = false, true
	list := []transport.Interface{
		loopback(), iface("eth0", 1500, "192.168.1.10/24", "fe80::1/64"), down, tunnel, iface("awdl0", 1500, "fe80::2/64"), iface("veth1", 1500),
		iface("veth2", 1500, "fe80::3/64"),
	}
	check(t, interfaces(list, true),
		want{OK, "interface eth0", "192.168.1.10, MTU 1500", ""},
		want{OK, "interface wg0", "10.8.0.2|tunnel", ""},
		want{OK, "interfaces not used", "lo (for nodes on this host only)|eth9 (is down)|awdl0 (peer-to-peer radio|veth1 (no address)|veth2 (link-local", ""})
	check(t, interfaces([]transport.Interface{loopback()}, true),
		want{Failure, "interfaces", "none that another host", "ip link set"}, want{OK, "interfaces not used", "lo", ""})
	check(t, interfaces([]transport.Interface{loopback()}, false),
		want{Warning, "interfaces", "none that another host", ""}, want{OK, "interfaces not used", "lo", ""})
}

func TestUnreadableInterfaces(t *testing.T) {
	e := examine(t, Config{})
	e.probes.Interfaces = func() ([]transport.Interface, error) { return nil, errors.New("eth7: gone") }
	check(t, e.network(),
		want{Warning, "interfaces", "eth7: gone", "ip address"}, want{Warning, "interfaces", "none", "ip link"}, want{Failure, "addresses", "none", "bring"})
}

func TestAddresses(t *testing.T) {
	remote, local := []Peer{{ID: "a", Address: "192.168.1.11:19001"}}, []Peer{{ID: "a", Address: "127.0.0.1:19001"}}
	for name, tc := range map[string]struct {
		cfg  Config
		want want
	}{
		"no address given":         {Config{}, want{OK, "addresses", "192.168.1.10, 127.0.0.1, ::1, in this order", ""}},
		"wildcard":                 {Config{Own: "0.0.0.0:19001"}, want{OK, "addresses", "192.168.1.10, 127.0.0.1, in this order", ""}},
		"empty host":               {Config{Own: ":19001"}, want{OK, "addresses", "192.168.1.10, 127.0.0.1, ::1, in this order", ""}},
		"one address":              {Config{Own: "192.168.1.10:19001", Peers: remote}, want{OK, "addresses", "192.168.1.10, in this order", ""}},
		"a name":                   {Config{Own: "studio-1.local:19001", Peers: remote}, want{OK, "addresses", "studio-1.local:19001: each node looks the name up", ""}},
		"loopback, peers here":     {Config{Own: "127.0.0.1:19001", Peers: local}, want{OK, "addresses", "127.0.0.1", ""}},
		"loopback, peers away":     {Config{Own: "127.0.0.1:19001", Peers: remote}, want{Failure, "addresses", "can't reach this one at 127.0.0.1:19001", "--cluster-control-addr, e.g. 192.168.1.10:19001"}},
		"loopback of coordinator":  {Config{Own: "127.0.0.1:19000", Peers: remote, Coordinator: true}, want{OK, "addresses", "127.0.0.1", ""}},
		"something else than that": {Config{Own: "19001"}, want{Failure, "addresses", "no address", "correct --cluster-control-addr"}},
	} {
		t.Run(name, func(t *testing.T) { check(t, []Finding{examine(t, tc.cfg).addresses()}, tc.want) })
	}
}

func TestInterfaceMTU(t *testing.T) {
	eth, fast, slow := iface("eth0", 1500, "192.168.1.10/24"), iface("eth1", 9000, "10.0.0.1/24"), iface("eth2", 1400, "10.1.0.1/24")
	tunnel := iface("wg0", 1420, "10.8.0.2/24")
	tunnel.PointToPoint = true
	check(t, interfaceMTU([]transport.Interface{loopback(), eth, tunnel}))
	check(t, interfaceMTU([]transport.Interface{eth, fast}), want{Warning, "interface MTU", "9000 on eth1; 1500 on eth0", "same MTU"})
	check(t, interfaceMTU([]transport.Interface{slow}), want{Warning, "interface MTU", "eth2 has 1400", "ip link set dev eth2 mtu 1500"})
}

func TestSecret(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, loose := file("good", secretText+"\n", 0o600), file("loose", secretText, 0o644)
	for name, tc := range map[string]struct {
		source cluster.SecretSource
		want   want
	}{
		"none":          {cluster.SecretSource{}, want{Failure, "secret", "no cluster secret", "--cluster-secret-file|MLXCEL_CLUSTER_SECRET|secret_file|mlxcel cluster secret new"}},
		"good":          {cluster.SecretSource{File: good}, want{OK, "secret", "--cluster-secret-file " + good, ""}},
		"of the TOML":   {cluster.SecretSource{TOMLFile: good}, want{OK, "secret", "secret_file " + good, ""}},
		"path variable": {cluster.SecretSource{EnvFile: good}, want{OK, "secret", "MLXCEL_CLUSTER_SECRET_FILE " + good, ""}},
		"variable":      {cluster.SecretSource{EnvValue: secretText}, want{OK, "secret", "MLXCEL_CLUSTER_SECRET holds", ""}},
		"loose":         {cluster.SecretSource{File: loose}, want{Failure, "secret", "--cluster-secret-file " + loose + "|mode 0644", "chmod 600 " + loose + "|--allow-loose-secret"}},
		"loose, let be": {cluster.SecretSource{File: loose, AllowLoose: true}, want{Warning, "secret", "mode 0644", "chmod 600 " + loose}},
		"missing":       {cluster.SecretSource{EnvFile: filepath.Join(dir, "missing")}, want{Failure, "secret", "MLXCEL_CLUSTER_SECRET_FILE|no such file", "copy it"}},
		"short":         {cluster.SecretSource{File: file("short", "15 bytes of it.", 0o600)}, want{Failure, "secret", "15 bytes, want at least 16", "mlxcel cluster secret new"}},
		"short value":   {cluster.SecretSource{EnvValue: "short"}, want{Failure, "secret", "MLXCEL_CLUSTER_SECRET: it has 5 bytes", "mlxcel cluster secret new"}},
		"a folder":      {cluster.SecretSource{File: dir}, want{Failure, "secret", "is a folder", "give the file"}},
		"under a file":  {cluster.SecretSource{File: filepath.Join(good, "x")}, want{Failure, "secret", "not a directory", "right to read it"}},
	} {
		t.Run(name, func(t *testing.T) {
			e := examine(t, Config{Secret: tc.source})
			got := e.checkSecret()
			check(t, []Finding{got}, tc.want)
			if strings.Contains(got.Text+got.Remedy, secretText) {
				t.Errorf("the secret is in %q", got)
			}
			if e.secret.IsZero() != (got.Level == Failure) {
				t.Errorf("the secret is kept: %t, beside %q", !e.secret.IsZero(), got)
			}
		})
	}
}

func TestPorts(t *testing.T) {
	mine := func(string, netip.AddrPort) (Process, error) { return Process{9, "mlxcel-server"}, nil }
	hidden := func(string, netip.AddrPort) (Process, error) { return Process{}, errHidden }
	control := Endpoint{Network: "tcp", Address: "192.168.1.10:19001", Flag: cluster.FlagControlAddr, Node: true}
	http := Endpoint{Network: "tcp", Address: "127.0.0.1:8080", Flag: cluster.FlagPort}
	beacons := Endpoint{Network: "udp", Address: "0.0.0.0:49555", Flag: "--cluster-discovery-port"}
	named, anywhere := control, control
	named.Address, anywhere.Anywhere = "studio-9.local:19001", true
	noName := &net.DNSError{Err: "no such host", Name: "studio-9.local"}
	for name, tc := range map[string]struct {
		point  Endpoint
		listen error
		holder func(string, netip.AddrPort) (Process, error)
		ask    error // of who holds it
		want   []want
	}{
		"free":               {point: control, want: []want{{OK, "port tcp 19001", "192.168.1.10:19001 is free", ""}}},
		"any":                {point: Endpoint{Network: "tcp", Address: "0.0.0.0:0"}, want: []want{{OK, "port tcp", "the system chooses", ""}}},
		"taken":              {point: http, listen: syscall.EADDRINUSE, want: []want{{Failure, "port tcp 8080", "taken by web server (pid 7)", "kill 7|--port"}}},
		"taken by ours":      {point: http, listen: syscall.EADDRINUSE, holder: mine, want: []want{{Warning, "port tcp 8080", "mlxcel-server (pid 9)", "kill 9"}}},
		"taken by hidden":    {point: http, listen: syscall.EADDRINUSE, holder: hidden, want: []want{{Failure, "port tcp 8080", "can't be named|as root", "stop it, or"}}},
		"the node itself":    {point: control, listen: syscall.EADDRINUSE, holder: mine, want: []want{{OK, "port tcp 19001", "mlxcel-server (pid 9), which is stage stage-0 of this cluster (waiting)", ""}}},
		"no node":            {point: control, listen: syscall.EADDRINUSE, ask: securelink.ErrNotPeer, want: []want{{Failure, "port tcp 19001", "taken by web server (pid 7)", "--cluster-control-addr"}}},
		"elsewhere":          {point: control, listen: syscall.EADDRNOTAVAIL, want: []want{{Failure, "port tcp 19001", "no address of this host", "e.g. 192.168.1.10:19001"}}},
		"elsewhere, rightly": {point: anywhere, listen: syscall.EADDRNOTAVAIL},
		"low":                {point: control, listen: syscall.EACCES, want: []want{{Failure, "port tcp 19001", "may not listen", "from 1024 on"}}},
		"unknown name":       {point: named, listen: noName, want: []want{{Failure, "port tcp 19001", "not known here (no such host)", "studio-9.local's IP address"}}},
		"other":              {point: control, listen: syscall.EMFILE, want: []want{{Failure, "port tcp 19001", "too many open files", "--cluster-control-addr"}}},
		"no address":         {point: Endpoint{Network: "tcp", Address: "19001", Flag: "cluster.toml"}, want: []want{{Failure, "port", "no address", "correct cluster.toml"}}},
		"beacons taken":      {point: beacons, listen: syscall.EADDRINUSE, want: []want{{Warning, "port udp 49555", "web server (pid 7)|takes beacons away", "--cluster-discovery-port"}}},
		"beacons shared":     {point: beacons, listen: syscall.EADDRINUSE, holder: mine, want: []want{{OK, "port udp 49555", "coordinators share it", ""}}},
	} {
		t.Run(name, func(t *testing.T) {
			e := examine(t, Config{})
			e.probes.Listen = func(_ context.Context, network, address string) error {
				if network != tc.point.Network || address != tc.point.Address {
					t.Errorf("listens at %s %s", network, address)
				}
				return tc.listen
			}
			if tc.holder != nil {
				e.probes.Holder = tc.holder
			}
			e.probes.Ask = func(context.Context, securelink.Secret, string) (*Contact, error) { return contact(), tc.ask }
			check(t, e.port(t.Context(), tc.point), tc.want...)
		})
	}
}

func TestReachable(t *testing.T) {
	for address, want := range map[string]string{
		"0.0.0.0:19000": "127.0.0.1:19000", ":19000": "127.0.0.1:19000", "[::]:19000": "[::1]:19000",
		"192.168.1.10:19000": "192.168.1.10:19000", "studio:19000": "studio:19000", "nonsense": "nonsense",
	} {
		if got := Reachable(address); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
}

func TestPeer(t *testing.T) {
	const name = "peer stage-0"
	fine := []want{
		{OK, name, "stage stage-0, waiting, answers from 192.168.1.11:19001", ""}, {OK, name + " clock", "3ms behind", ""},
		{OK, name + " round trip", "200µs", ""}, {OK, name + " MTU", "1500 on the path, interface eth0 has 1500", ""},
	}
	but := func(i int, w want) []want { out := slices.Clone(fine); out[i] = w; return out }
	for label, tc := range map[string]struct {
		mdns   bool
		change func(*Contact)
		want   []want
	}{
		"fine":         {false, func(*Contact) {}, fine},
		"same clock":   {false, func(c *Contact) { c.Skew = 90 * time.Microsecond }, but(1, want{OK, name + " clock", "less than 1ms", ""})},
		"5 s":          {true, func(c *Contact) { c.Skew = 5 * time.Second }, but(1, want{OK, name + " clock", "5s ahead", ""})},
		"6 s":          {true, func(c *Contact) { c.Skew = 6 * time.Second }, but(1, want{Warning, name + " clock", "6s ahead|30s off at most", "NTP"})},
		"31 s":         {false, func(c *Contact) { c.Skew = -31 * time.Second }, but(1, want{Warning, name + " clock", "31s behind|would be refused", "NTP"})},
		"31 s, mdns":   {true, func(c *Contact) { c.Skew = -31 * time.Second }, but(1, want{Failure, name + " clock", "31s behind|are refused", "NTP"})},
		"far":          {false, func(c *Contact) { c.RoundTrip = 11 * time.Millisecond }, but(2, want{Warning, name + " round trip", "11ms", "wired"})},
		"narrow":       {false, func(c *Contact) { c.PathMTU = 1420 }, but(3, want{Warning, name + " MTU", "1420 on the path|less than Ethernet's 1500", "tunnel"})},
		"large lost":   {false, func(c *Contact) { c.FullSize = context.DeadlineExceeded }, but(3, want{Failure, name + " MTU", "large ones do not: no answer", "same MTU|ip link set dev eth0 mtu 1500"})},
		"path unknown": {false, func(c *Contact) { c.PathMTU = 0 }, but(3, want{OK, name + " MTU", "interface eth0 has 1500|not known", ""})},
		"loopback": {false, func(c *Contact) { c.Local, c.PathMTU = netip.MustParseAddr("127.0.0.1"), 65483 },
			but(3, want{OK, name + " MTU", "65483 on the path, interface lo has 65536", ""})},
		"no interface": {false, func(c *Contact) { c.Local = netip.MustParseAddr("10.9.9.9") }, but(3, want{OK, name + " MTU", "1500 on the path, through an interface that is not listed", ""})},
	} {
		t.Run(label, func(t *testing.T) {
			c := contact()
			tc.change(c)
			check(t, examine(t, Config{MDNS: tc.mdns}).peer(answer{peer: Peer{ID: "stage-0"}, contact: c}), tc.want...)
		})
	}
}

func TestPathNarrowerThanInterface(t *testing.T) {
	e := examine(t, Config{})
	e.interfaces[1].MTU = 9000
	check(t, []Finding{e.mtu("peer", contact())}, want{Warning, "peer MTU", "1500 on the path, interface eth0 has 9000", "same MTU"})
}

func TestPathsDiffer(t *testing.T) {
	one, other, here := contact(), contact(), contact()
	other.PathMTU, here.PathMTU, here.Local = 9000, 65483, netip.MustParseAddr("127.0.0.1")
	lost := answer{peer: Peer{ID: "lost"}, err: syscall.ECONNREFUSED}
	check(t, pathMTU([]answer{{peer: Peer{ID: "a"}, contact: one}, {peer: Peer{ID: "b"}, contact: one}, {peer: Peer{ID: "here"}, contact: here}, lost}))
	check(t, pathMTU([]answer{{peer: Peer{ID: "a"}, contact: one}, {peer: Peer{ID: "b"}, contact: other}}),
		want{Warning, "peers MTU", "9000 on b; 1500 on a", "same MTU"})
}

func TestUnreachable(t *testing.T) {
	const address = "studio-9.local:19001"
	dial := func(err error) error {
		return &transport.DialError{Attempts: []transport.Attempt{{Address: address, Err: err}}}
	}
	refusal := func(code securelink.RefusalCode, text string) error {
		return dial(&securelink.RefusedError{Addr: address, Refusal: securelink.Refusal{Code: code, Text: text}})
	}
	for name, tc := range map[string]struct {
		err  error
		want want
	}{
		"name":     {dial(&net.DNSError{Err: "no such host"}), want{Failure, "x", address + ": the name is not known here (no such host)", "studio-9.local's IP address"}},
		"closed":   {dial(fmt.Errorf("dial: %w", syscall.ECONNREFUSED)), want{Failure, "x", address + ": nobody listens", "start mlxcel there"}},
		"no route": {dial(syscall.EHOSTUNREACH), want{Failure, "x", "no way to that host", "cables"}},
		"silent":   {dial(context.DeadlineExceeded), want{Failure, "x", "no answer", "firewall lets TCP port 19001 in"}},
		"stranger": {dial(&securelink.HandshakeError{Peer: address, Err: securelink.ErrNotPeer}), want{Failure, "x", "does not speak", "check the port"}},
		"secret":   {dial(&securelink.SecretError{Peer: address}), want{Failure, "x", "secrets differ", "copy the same file"}},
		"protocol": {dial(&securelink.ProtocolError{Got: 4, Want: 5}), want{Failure, "x", "protocol version 4, want 5", "same version of mlxcel"}},
		"version":  {refusal(securelink.RefusedVersion, cluster.RefuseVersion("v2", "v1").Error()), want{Failure, "x", `version "v1", want "v2"`, "same version of mlxcel"}},
		"cluster":  {refusal(securelink.RefusedCluster, cluster.RefuseCluster("a", "b").Error()), want{Failure, "x", `"b", want "a"`, "--cluster-name"}},
		"busy":     {refusal(securelink.RefusedBusy, "too many"), want{Failure, "x", "too many", "stop that one"}},
		"other":    {errors.New("whatever"), want{Failure, "x", "whatever", "log of the node"}},
	} {
		t.Run(name, func(t *testing.T) { check(t, []Finding{Unreachable("x", address, tc.err)}, tc.want) })
	}
	if f := Unreachable("peer "+address, address, syscall.ECONNREFUSED); strings.Contains(f.Text, address) {
		t.Errorf("the address is told twice: %q", f)
	}
}

func TestPeersThatMayBeDown(t *testing.T) {
	e := examine(t, Config{})
	e.probes.Ask = func(context.Context, securelink.Secret, string) (*Contact, error) { return nil, syscall.ECONNREFUSED }
	check(t, e.peers(t.Context(), []Peer{{ID: "coordinator", Address: "a:1", Optional: true}, {ID: "stage-0", Address: "b:1"}}),
		want{Warning, "peer coordinator", "a:1: nobody", "start"}, want{Failure, "peer stage-0", "b:1: nobody", "start"})
	e.secret = securelink.Secret{}
	check(t, e.peers(t.Context(), []Peer{{ID: "stage-0", Address: "b:1"}}), want{Failure, "peers", "not asked", "secret"})
	check(t, e.peers(t.Context(), nil))
}

func TestDiscovery(t *testing.T) {
	missing := func(r discovery.Report) error {
		return &discovery.NotFoundError{Report: r, Port: 49555, Err: context.DeadlineExceeded}
	}
	run := func(r discovery.Report, err error) ([]Peer, []Finding) {
		e := examine(t, Config{MDNS: true})
		e.probes.Find = func(context.Context, securelink.Secret) (discovery.Report, error) { return r, err }
		return e.discover(t.Context())
	}
	none := discovery.Report{}
	peers, findings := run(none, missing(none))
	check(t, findings, want{Failure, "discovery", "no node announces itself", "UDP port 49555|--cluster-discovery-target"})
	if len(peers) != 0 {
		t.Errorf("peers %v", peers)
	}
	some := discovery.Report{
		Nodes: []discovery.Node{{ID: "studio-1", Version: "v1", Addresses: []netip.AddrPort{netip.MustParseAddrPort("192.168.1.11:19001"), netip.MustParseAddrPort("10.0.0.11:19001")}}},
		Refused: []discovery.Refused{
			{From: netip.MustParseAddr("192.168.1.12"), Reason: discovery.ReasonClock, Detail: `the clock of node "studio-2" is 40s ahead, at most 30s is allowed: set both clocks (NTP)`},
			{From: netip.MustParseAddr("192.168.1.13"), Reason: discovery.ReasonForged, Detail: "not signed with this cluster's secret: copy the secret to that host"},
		},
	}
	peers, findings = run(some, missing(some))
	check(t, findings,
		want{OK, "discovery", "studio-1 (version v1)|192.168.1.11:19001, 10.0.0.11:19001", ""},
		want{Failure, "beacons from 192.168.1.12", "40s ahead", "set both clocks"},
		want{Warning, "beacons from 192.168.1.13", "not signed", "copy the secret"})
	if len(peers) != 1 || peers[0] != (Peer{ID: "studio-1", Address: "192.168.1.11:19001"}) {
		t.Errorf("peers %v", peers)
	}
	_, findings = run(none, syscall.EADDRINUSE)
	check(t, findings, want{Failure, "discovery", "in use", "--cluster-discovery-port"})
	e := examine(t, Config{MDNS: true})
	e.secret = securelink.Secret{}
	_, findings = e.discover(t.Context())
	check(t, findings, want{Failure, "discovery", "no secret", "secret"})
}

func TestExecutors(t *testing.T) {
	const path = "/plugins/x"
	for name, tc := range map[string]struct {
		problem error
		level   Level
		text    string
		remedy  string
	}{
		"mode":      {&executor.NotExecutableError{Path: path}, Failure, "not executable", "chmod +x " + path},
		"trust":     {&executor.UntrustedError{Path: path, Why: "everybody may write it", Fix: "chmod o-w " + path}, Failure, "everybody may write it", "chmod o-w"},
		"checksum":  {&executor.ChecksumError{Path: path, State: executor.ChecksumMismatch, Want: "aa", Got: "bb"}, Failure, "aa|bb", "install the binary again"},
		"no sum":    {&executor.ChecksumError{Path: path, File: path + ".sha256", State: executor.ChecksumMissing}, Failure, "no checksum", path + ".sha256"},
		"contract":  {&executor.ContractError{Path: path, Want: 2, Got: 1}, Failure, "version 1", "update the executor"},
		"newer":     {&executor.ContractError{Path: path, Want: 2, Got: 3}, Failure, "version 3", "update mlxcel"},
		"hung":      {&executor.StartTimeoutError{Path: path, Timeout: time.Second, Phase: executor.PhaseDescribe}, Failure, "hung in describe", "see what it waits for"},
		"stranger":  {&executor.NotPluginError{Path: path, Output: "hello", LastLines: []string{"a line"}}, Failure, "hello|a line", "remove it"},
		"duplicate": {&executor.DuplicateError{Path: path, Shadowed: []executor.Shadow{{Family: "llama", By: "/plugins/llama"}}}, Warning, "llama by /plugins/llama", "order of --plugin-dir"},
		"died":      {&executor.DeathError{Plugin: path, PID: 3, ExitCode: 2, Phase: executor.PhaseStart}, Failure, "exit code 2", "install it again"},
	} {
		t.Run(name, func(t *testing.T) {
			check(t, []Finding{oneExecutor(executor.Entry{Path: path, Problem: tc.problem})}, want{tc.level, "executor x", tc.text, tc.remedy})
		})
	}
}

func TestNoExecutor(t *testing.T) {
	for _, coordinator := range []bool{false, true} {
		e := examine(t, Config{Coordinator: coordinator})
		e.probes.Executors = func(context.Context) (*engine.PluginList, error) {
			return &engine.PluginList{Folders: []string{"/a", "/b"}}, nil
		}
		level := Failure
		if coordinator {
			level = Warning
		}
		check(t, e.executors(t.Context()), want{level, "executors", "/a, /b", "--plugin-dir"})
	}
	e := examine(t, Config{})
	e.probes.Executors = func(context.Context) (*engine.PluginList, error) { return nil, errors.New("set TMPDIR") }
	check(t, e.executors(t.Context()), want{Failure, "executors", "set TMPDIR", "message"})
}

func TestDevices(t *testing.T) {
	one, twin, full, other, silent := goodExecutor("llama"), goodExecutor("gemma4"), goodExecutor("x"), goodExecutor("y"), goodExecutor("z")
	full.Device.FreeMemory = 1 << 30
	other.Runtime = "mlx 0.33.0"
	silent.Device.TotalMemory = 0
	unused := goodExecutor("unused")
	unused.Device.Kind, unused.Problem = "metal", &executor.DuplicateError{}
	check(t, devices([]executor.Entry{one, twin, unused}), want{OK, "device", "mlx 0.32.4 on cpu (some CPU): 16.0 GiB memory, 8.0 GiB free", ""})
	check(t, devices([]executor.Entry{full}), want{Warning, "device", "1.0 GiB free|little", "end programs"})
	check(t, devices([]executor.Entry{silent}), want{Warning, "device", "does not say", "--stage-memory"})
	check(t, devices([]executor.Entry{one, other}), want{OK, "device", "0.32.4", ""}, want{OK, "device", "0.33.0", ""}, want{Warning, "device", "2 versions", "one release"})
}

func TestModel(t *testing.T) {
	broken := goodModel()
	broken.Profile = nil
	broken.Checks = []engine.Check{{Name: "weights", Err: errors.New("model.safetensors: cut short")}, {Name: "tokenizer", Text: "fine"}}
	unknown := &executor.UnknownModelError{Kind: "model_type", Name: "gpt9", Folders: []string{"/plugins"}}
	for name, tc := range map[string]struct {
		found       *engine.Inspection
		err         error
		coordinator bool
		want        []want
	}{
		"good":    {goodModel(), nil, false, []want{{OK, "model", "/model: family llama, executor llama, 3 layers, 1.0 MiB", ""}, {OK, "model weights", "1 files", ""}}},
		"broken":  {broken, nil, false, []want{{OK, "model", "family llama", ""}, {Failure, "model weights", "cut short", "again"}, {OK, "model tokenizer", "fine", ""}}},
		"no such": {nil, errors.New("config.json: no such file"), false, []want{{Failure, "model", "/model: config.json: no such file", "--model"}}},
		"unknown": {&engine.Inspection{Checks: goodModel().Checks}, unknown, false, []want{{OK, "model weights", "", ""}, {Failure, "model", `"gpt9"`, "--plugin-dir"}}},
		"unknown to the coordinator": {&engine.Inspection{Checks: goodModel().Checks}, unknown, true,
			[]want{{OK, "model weights", "", ""}, {Warning, "model", `"gpt9"`, "--plugin-dir"}}},
	} {
		t.Run(name, func(t *testing.T) {
			e := examine(t, Config{Model: "/model", Coordinator: tc.coordinator})
			e.probes.Inspect = func(context.Context) (*engine.Inspection, error) { return tc.found, tc.err }
			check(t, e.model(t.Context()), tc.want...)
		})
	}
}

// What only a cluster needs is no failure of a machine that is to be in none.
func TestRun(t *testing.T) {
	e := examine(t, Config{})
	taken := Endpoint{Network: "tcp", Address: "127.0.0.1:19000", Flag: cluster.FlagControlAddr}
	e.probes.Listen = func(context.Context, string, string) error { return syscall.EADDRINUSE }
	for _, clustered := range []bool{false, true} {
		report, err := Run(t.Context(), Config{Clustered: clustered, Endpoints: []Endpoint{taken}, Model: "/model"}, e.probes)
		if err != nil {
			t.Fatal(err)
		}
		bad := Warning
		if clustered {
			bad = Failure
		}
		check(t, report,
			want{OK, "interface eth0", "", ""}, want{OK, "interfaces not used", "lo", ""}, want{OK, "addresses", "", ""},
			want{bad, "secret", "no cluster secret", ""}, want{bad, "port tcp 19000", "web server", ""},
			want{OK, "executor llama", "starts and answers: version v1, llama", ""}, want{OK, "device", "", ""},
			want{OK, "model", "", ""}, want{OK, "model weights", "", ""})
		if n := report.Count(bad); n != 2 {
			t.Errorf("%d findings of level %s, want 2", n, bad)
		}
	}
}

func TestRunAsksWhoIsFound(t *testing.T) {
	e := examine(t, Config{})
	node := discovery.Node{ID: "studio-1", Addresses: []netip.AddrPort{netip.MustParseAddrPort("192.168.1.11:19001")}}
	e.probes.Find = func(context.Context, securelink.Secret) (discovery.Report, error) {
		r := discovery.Report{Nodes: []discovery.Node{node}}
		return r, &discovery.NotFoundError{Report: r, Err: context.DeadlineExceeded}
	}
	report, err := Run(t.Context(), Config{Clustered: true, MDNS: true, Secret: cluster.SecretSource{EnvValue: secretText}}, e.probes)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(report, func(f Finding) bool { return f.Name == "peer studio-1" && f.Level == OK }) || report.Count(Failure) > 0 {
		t.Errorf("findings %q", report)
	}
}

func TestRunTellsOfTheFile(t *testing.T) {
	e := examine(t, Config{})
	topology := &cluster.Config{Nodes: make([]cluster.Node, 3)}
	for _, tc := range []struct {
		cfg  Config
		want want
	}{
		{Config{File: "c.toml", FileErr: errors.New("nodes[1].stage is missing"), Clustered: true}, want{Failure, "cluster file", "nodes[1].stage", "c.toml"}},
		{Config{File: "c.toml", Topology: topology, Clustered: true}, want{OK, "cluster file", "3 nodes|--node-id", ""}},
		{Config{File: "c.toml", Topology: topology, Node: "stage-1", Clustered: true}, want{OK, "cluster file", "this one is stage-1", ""}},
	} {
		report, err := Run(t.Context(), tc.cfg, e.probes)
		if err != nil {
			t.Fatal(err)
		}
		check(t, report[:1], tc.want)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, Config{}, examine(t, Config{}).probes); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
}
