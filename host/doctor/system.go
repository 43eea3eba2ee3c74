package doctor

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/discovery"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"google.golang.org/grpc/metadata"
)

// askTimeout bounds one question to a node, and connecting to it.
const askTimeout = 5 * time.Second

// SystemConfig is what the probes of this host need.
type SystemConfig struct {
	Self             securelink.Identity // of this tool: the cluster's name and the program's version
	DiscoveryPort    int                 // UDP
	DiscoveryTimeout time.Duration       // how long beacons are listened for
	Engine           engine.Config       // of executors and the model
}

// System returns the probes of this host.
func System(cfg SystemConfig) Probes {
	s := system{cfg}
	return Probes{
		Interfaces: transport.Interfaces,
		Listen:     listen,
		Holder: func(network string, at netip.AddrPort) (Process, error) {
			return holder(os.DirFS("/proc"), network, at)
		},
		Find:      s.find,
		Ask:       s.ask,
		Executors: func(ctx context.Context) (*engine.PluginList, error) { return engine.Plugins(ctx, cfg.Engine) },
		Inspect:   func(ctx context.Context) (*engine.Inspection, error) { return engine.Inspect(ctx, cfg.Engine) },
	}
}

type system struct{ cfg SystemConfig }

func listen(ctx context.Context, network, address string) error {
	var lc net.ListenConfig
	if network == "udp" {
		c, err := lc.ListenPacket(ctx, network, address)
		if err != nil {
			return err
		}
		return c.Close()
	}
	l, err := lc.Listen(ctx, network, address)
	if err != nil {
		return err
	}
	return l.Close()
}

// find listens for as long as it may: how many nodes there are is not known.
func (s system) find(ctx context.Context, secret securelink.Secret) (discovery.Report, error) {
	search, err := discovery.NewSearch(discovery.SearchConfig{
		Secret: secret, Cluster: s.cfg.Self.Cluster, Port: s.cfg.DiscoveryPort, Want: discovery.MaxNodes,
	})
	if err != nil {
		return discovery.Report{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.DiscoveryTimeout)
	defer cancel()
	return search.Find(ctx)
}

// ask gets a node's status, then asks again in packets as large as the path takes.
func (s system) ask(ctx context.Context, secret securelink.Secret, address string) (*Contact, error) {
	var over route
	a, err := s.askOver(ctx, secret, address, &over)
	if err != nil {
		return nil, err
	}
	c := &Contact{Node: a.Node, Role: a.Role, Phase: string(a.Phase), RoundTrip: a.RoundTrip, Skew: a.Skew}
	_, c.FullSize = s.askOver(metadata.AppendToOutgoingContext(ctx, paddingKey, strings.Repeat("x", padding)), secret, address, &over)
	over.mu.Lock()
	defer over.mu.Unlock()
	c.Remote, c.Local, c.PathMTU = over.remote, over.local, over.mtu
	return c, nil
}

// A header that nobody reads fills packets of up to 9000 bytes, which is what jumbo frames have.
const (
	paddingKey = "x-padding"
	padding    = 24 << 10 // bytes
)

func (s system) askOver(ctx context.Context, secret securelink.Secret, address string, r *route) (*bringup.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	a, err := bringup.Ask(ctx, transport.Dialer{
		Secure: securelink.Config{Secret: secret, Self: s.cfg.Self}, Dial: r.dial, Timeout: askTimeout,
	}, address)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err() // whatever noticed it first
	}
	return a, err
}

// route is what a connection went over.
type route struct {
	mu     sync.Mutex
	remote netip.AddrPort
	local  netip.Addr
	mtu    int // bytes; 0 where the system does not tell
}

func (r *route) dial(ctx context.Context, address string) (net.Conn, error) {
	c, err := (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	tcp := c.(*net.TCPConn)
	remote, local := tcp.RemoteAddr().(*net.TCPAddr).AddrPort(), tcp.LocalAddr().(*net.TCPAddr).AddrPort()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.remote = netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())
	r.local = local.Addr().Unmap().WithZone("")
	return &routed{tcp, r}, nil
}

// routed is a connection that notes what its route takes when it ends: by then the system knows.
type routed struct {
	*net.TCPConn
	route *route
}

func (c *routed) Close() error {
	if mtu, err := connMTU(c.TCPConn); err == nil { // an error is of a connection that is closed already
		c.route.mu.Lock()
		c.route.mtu = mtu
		c.route.mu.Unlock()
	}
	return c.TCPConn.Close()
}
