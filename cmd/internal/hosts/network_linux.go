package hosts

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	lanName      = "eth0"
	wireName     = "wire0"
	sharedMemory = "/dev/shm"
	tunDevice    = "/dev/net/tun"
	required     = "MLXCEL_TEST_HOSTS" // "required": what New would skip fails
)

// Network is a set of hosts that reach each other and nothing else.
type Network struct {
	Hosts []*Host
	Wire  *Wire // nil on loopback

	dir    string // of all files of all hosts; short, for the sockets in it
	prefix netip.Prefix
	bridge *space // nil on loopback
}

// Host is one machine of a network.
type Host struct {
	Name string

	network   *Network
	index     int
	space     *space
	dir       string
	lan, wire netip.Addr
	client    *http.Client
	processes []*Process
}

// New makes one host per name for the time of a test. It skips the test where the rights for that are missing.
func New(t testing.TB, names ...string) *Network {
	t.Helper()
	n, err := newNetwork(names)
	if isMissingRight(err) && os.Getenv(required) != "required" {
		t.Skipf("hosts in network namespaces need CAP_SYS_ADMIN, CAP_NET_ADMIN and /dev/net/tun (run as root, or by unshare -Ur): %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.close)
	return n
}

func isMissingRight(err error) bool {
	var path *os.PathError
	return errors.Is(err, fs.ErrPermission) || errors.As(err, &path) && path.Path == tunDevice
}

// Loopback makes hosts that are addresses of this machine's loopback interface: for tests that need no more than processes that
// reach each other. Every network takes addresses of its own, so that fixed ports do not collide.
func Loopback(t testing.TB, names ...string) *Network {
	t.Helper()
	n := &Network{prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{127, byte(1 + rand.N(254)), byte(1 + rand.N(254)), 0}), 24)}
	err := n.addHosts(names, false)
	if err != nil {
		n.close()
		t.Fatal(err)
	}
	for _, h := range n.Hosts {
		h.lan = nth(n.prefix, h.index)
		h.wire = h.lan
	}
	t.Cleanup(n.close)
	return n
}

// Either makes hosts in namespaces where the rights for that are there, else on loopback.
func Either(t testing.TB, names ...string) *Network {
	t.Helper()
	n, err := newNetwork(names)
	if isMissingRight(err) && os.Getenv(required) != "required" {
		return Loopback(t, names...)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.close)
	return n
}

func newNetwork(names []string) (n *Network, err error) {
	n = &Network{prefix: netip.MustParsePrefix("10.77.0.0/24")}
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	if n.bridge, err = openSpace(true); err != nil {
		return n, err
	}
	// Without a forward delay of 0 a bridge holds everything back for 15 s.
	if err := n.bridge.ip("link add br0 type bridge forward_delay 0 mcast_snooping 0\nlink set br0 up\n"); err != nil {
		return n, err
	}
	if err := n.addHosts(names, true); err != nil {
		return n, err
	}
	for _, h := range n.Hosts {
		if err := h.plugIn(); err != nil {
			return n, err
		}
	}
	if err := n.layWire(); err != nil {
		return n, err
	}
	for _, h := range n.Hosts {
		if err := retry(func() error { return h.checkCable(true) }); err != nil {
			return n, err
		}
	}
	return n, nil
}

// nth is the address of a host in a network.
func nth(p netip.Prefix, index int) netip.Addr {
	a := p.Addr().As4()
	a[3] = byte(index + 1)
	return netip.AddrFrom4(a)
}

func (n *Network) addHosts(names []string, apart bool) (err error) {
	if n.dir, err = os.MkdirTemp("", "hosts"); err != nil {
		return err
	}
	for i, name := range names {
		h := &Host{Name: name, network: n, index: i, dir: filepath.Join(n.dir, strconv.Itoa(i))}
		h.client = &http.Client{Transport: &http.Transport{DialContext: h.Dial}}
		for _, dir := range []string{h.Temp(), h.Home(), h.Folder()} {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return err
			}
		}
		if h.space, err = openSpace(apart); err != nil {
			return fmt.Errorf("host %s: %w", name, err)
		}
		n.Hosts = append(n.Hosts, h)
	}
	return nil
}

// plugIn joins the host's first interface to the bridge. Addresses are only those that are given here, so that every run has
// the same; the default route leads to where nobody answers.
func (h *Host) plugIn() error {
	h.lan = nth(h.network.prefix, h.index)
	err := h.network.bridge.ip(fmt.Sprintf("link add %[1]s type veth peer name %[2]s netns /proc/self/fd/3\nlink set %[1]s master br0 up\n",
		h.port(), lanName), h.space.net)
	if err != nil {
		return fmt.Errorf("host %s: %w", h.Name, err)
	}
	err = h.space.ip(fmt.Sprintf("link set lo up\nlink set %[1]s addrgenmode none\naddr add %[2]s/24 brd + dev %[1]s\nlink set %[1]s up\nroute add default via %[3]s dev %[1]s\n",
		lanName, h.lan, nth(h.network.prefix, 253)))
	if err != nil {
		return fmt.Errorf("host %s: %w", h.Name, err)
	}
	return nil
}

// port is the bridge's end of the host's cable.
func (h *Host) port() string { return fmt.Sprintf("port%d", h.index) }

// layWire gives every host its second interface.
func (n *Network) layWire() error {
	var ends []*os.File
	var addresses []netip.Addr
	fail := func(err error) error {
		for _, end := range ends {
			end.Close()
		}
		return err
	}
	for _, h := range n.Hosts {
		h.wire = nth(netip.MustParsePrefix("10.78.0.0/24"), h.index)
		err := h.space.do(func() error {
			end, err := openTUN()
			if err == nil {
				ends = append(ends, end)
			}
			return err
		})
		if err == nil {
			err = h.space.ip(fmt.Sprintf("link set %[1]s addrgenmode none mtu %[2]d\naddr add %[3]s/24 dev %[1]s\nlink set %[1]s up\n", wireName, wireMTU, h.wire))
		}
		if err != nil {
			return fail(fmt.Errorf("host %s: %w", h.Name, err))
		}
		addresses = append(addresses, h.wire)
	}
	n.Wire = openWire(ends, addresses, 1)
	return nil
}

// close ends every process of every host and removes all files.
func (n *Network) close() {
	for _, h := range n.Hosts {
		for _, p := range h.processes {
			p.end()
		}
		h.client.CloseIdleConnections()
	}
	n.killStrays()
	if n.Wire != nil {
		n.Wire.close()
	}
	for _, h := range n.Hosts {
		h.space.close()
	}
	if n.bridge != nil {
		n.bridge.close()
	}
	if n.dir != "" {
		_ = os.RemoveAll(n.dir)
	}
}

// killStrays ends processes that outlived the one that started them.
func (n *Network) killStrays() {
	found, _ := n.find()
	for _, p := range found {
		_ = syscall.Kill(p.pid, syscall.SIGKILL)
	}
}

// Host returns the host of a name.
func (n *Network) Host(name string) *Host {
	for _, h := range n.Hosts {
		if h.Name == name {
			return h
		}
	}
	panic(fmt.Sprintf("no host %q", name))
}

// LAN is the host's address on the bridge with a port: "10.77.0.1:19001".
func (h *Host) LAN(port int) string { return netip.AddrPortFrom(h.lan, uint16(port)).String() }

// OnWire is the host's address on the wire with a port; on loopback the same as LAN.
func (h *Host) OnWire(port int) string { return netip.AddrPortFrom(h.wire, uint16(port)).String() }

// Temp is the TMPDIR of the host's processes.
func (h *Host) Temp() string { return filepath.Join(h.dir, "t") }

// Home is the HOME of the host's processes.
func (h *Host) Home() string { return filepath.Join(h.dir, "h") }

// Folder is the working folder of the host's processes.
func (h *Host) Folder() string { return filepath.Join(h.dir, "w") }

// Unplug pulls the cable of the host's first interface: the link is down on both sides.
func (h *Host) Unplug(t testing.TB) { h.setCable(t, "down") }

// Plug puts the cable back.
func (h *Host) Plug(t testing.TB) { h.setCable(t, "up") }

func (h *Host) setCable(t testing.TB, state string) {
	t.Helper()
	if h.network.bridge == nil {
		t.Fatal("a host on loopback has no cable")
	}
	if err := h.network.bridge.ip(fmt.Sprintf("link set %s %s\n", h.port(), state)); err != nil {
		t.Fatal(err)
	}
	if err := retry(func() error { return h.checkCable(state == "up") }); err != nil {
		t.Fatal(err)
	}
}

// checkCable tells whether both ends of the cable know that it is in or out. The kernel lets them know a little later.
func (h *Host) checkCable(in bool) error {
	err := h.space.do(func() error {
		link, err := net.InterfaceByName(lanName)
		if err == nil && (link.Flags&net.FlagRunning != 0) != in {
			err = fmt.Errorf("host %s: %s has the flags %s", h.Name, lanName, link.Flags)
		}
		return err
	})
	if err != nil {
		return err
	}
	state, err := h.network.bridge.ipOutput("-details", "-oneline", "link", "show", "dev", h.port())
	if err == nil && strings.Contains(state, "bridge_slave state forwarding") != in {
		err = fmt.Errorf("host %s: its port of the bridge is %s", h.Name, state)
	}
	return err
}

// Dial connects from the host. The address's host is an IP address.
func (h *Host) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = h.space.enter(func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Listen accepts connections on the host.
func (h *Host) Listen(network, address string) (l net.Listener, err error) {
	err = h.space.do(func() (err error) {
		l, err = net.Listen(network, address)
		return err
	})
	return l, err
}

// ListenPacket takes datagrams on the host.
func (h *Host) ListenPacket(network, address string) (c net.PacketConn, err error) {
	err = h.space.do(func() (err error) {
		c, err = net.ListenPacket(network, address)
		return err
	})
	return c, err
}

// Do runs a short job on the host's thread: sockets that it makes are the host's.
func (h *Host) Do(job func() error) error { return h.space.do(job) }

// HTTP is a client on the host.
func (h *Host) HTTP() *http.Client { return h.client }

// environment is what every process of the host gets.
func (h *Host) environment() []string {
	env := []string{"TMPDIR=" + h.Temp(), "HOME=" + h.Home()}
	for _, name := range []string{"PATH", "LANG", "LD_LIBRARY_PATH", "GOCOVERDIR"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// namespace identifies the host's network; 0 on loopback.
func (h *Host) namespace() (uint64, error) {
	if h.space.net == nil {
		return 0, nil
	}
	var stat unix.Stat_t
	err := unix.Fstat(int(h.space.net.Fd()), &stat)
	return stat.Ino, err
}
