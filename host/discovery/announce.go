package discovery

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
)

const (
	// DefaultInterval is the time between two beacons of one address.
	DefaultInterval = time.Second
	// writeTimeout keeps an interface that takes nothing from holding up the others.
	writeTimeout = 100 * time.Millisecond
)

// Broadcast is the default target: every host of each subnet.
var Broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// AnnounceConfig is what a waiting node announces, and where.
type AnnounceConfig struct {
	Secret   securelink.Secret // required
	Cluster  string            // name
	NodeID   string            // the same after a restart
	Version  string            // of the program
	Listen   netip.AddrPort    // what the node's TCP listener is bound to; its port is not 0
	Target   netip.Addr        // --cluster-discovery-target, IPv4; default Broadcast
	Port     int               // --cluster-discovery-port, UDP; default DefaultPort
	Interval time.Duration     // default DefaultInterval
	Log      hclog.Logger      // default none
	Waiting  func() bool       // whether the node is free; while it is not, nothing is sent. Default always

	Interfaces func() ([]transport.Interface, error)               // default transport.Interfaces
	Route      func(netip.AddrPort) (netip.Addr, error)            // address that packets to a target leave from; default asks the system
	Open       func(name string, local netip.Addr) (Sender, error) // socket of one address; default UDP
	Now        func() time.Time                                    // default time.Now
	Rand       io.Reader                                           // of the boot id; default crypto/rand
}

// Sender is the part of a net.PacketConn that sends.
type Sender interface {
	WriteTo(p []byte, addr net.Addr) (int, error)
	SetWriteDeadline(t time.Time) error
	Close() error
}

// Announce sends beacons until ctx ends. It returns an error at once where the configuration can't work, and none later: an
// interface that fails is logged once and tried again each time, and never holds up another.
func Announce(ctx context.Context, cfg AnnounceConfig) error {
	a, err := newAnnouncer(cfg)
	if err != nil {
		return err
	}
	defer a.close()
	tick := time.NewTicker(a.cfg.Interval)
	defer tick.Stop()
	for {
		a.round()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// announcer sends rounds of beacons, one from each address.
type announcer struct {
	cfg     AnnounceConfig
	key     []byte
	boot    BootID
	counter uint64
	senders map[path]Sender
	failing map[path]string // what was logged of a path
	silent  bool            // nothing is announced, and that was logged
	listing string          // what was logged of the list of interfaces
}

// path is one address of this host and where its beacons go.
type path struct {
	name  string // of the interface
	local netip.Addr
	to    netip.AddrPort
}

func newAnnouncer(cfg AnnounceConfig) (*announcer, error) {
	if cfg.Secret.IsZero() {
		return nil, securelink.ErrNoSecret
	}
	if !cfg.Target.IsValid() {
		cfg.Target = Broadcast
	}
	if cfg.Target = cfg.Target.Unmap(); !cfg.Target.Is4() || cfg.Target.IsUnspecified() {
		return nil, fmt.Errorf("--cluster-discovery-target %s: beacons go to an IPv4 address: give a subnet's broadcast address or the coordinator's; IPv6 networks use --cluster-discovery=static", cfg.Target)
	}
	if ip := cfg.Listen.Addr().Unmap(); ip.Is6() && !ip.IsUnspecified() {
		return nil, fmt.Errorf("--cluster-control-addr %s: beacons announce IPv4 addresses: use --cluster-discovery=static", cfg.Listen)
	}
	if cfg.Port == 0 {
		cfg.Port = DefaultPort
	}
	if cfg.Interval == 0 {
		cfg.Interval = DefaultInterval
	}
	if cfg.Log == nil {
		cfg.Log = hclog.NewNullLogger()
	}
	if cfg.Interfaces == nil {
		cfg.Interfaces = transport.Interfaces
	}
	if cfg.Route == nil {
		cfg.Route = routeTo
	}
	if cfg.Open == nil {
		cfg.Open = openSender
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Rand == nil {
		cfg.Rand = rand.Reader
	}
	a := &announcer{cfg: cfg, key: cfg.Secret.Key(keyPurpose), senders: map[path]Sender{}, failing: map[path]string{}}
	if _, err := io.ReadFull(cfg.Rand, a.boot[:]); err != nil {
		return nil, fmt.Errorf("boot id of beacons: %w", err)
	}
	_, err := a.datagram(netip.AddrFrom4([4]byte{127, 0, 0, 1})) // so that a name that does not fit is known at once
	return a, err
}

// datagram makes the next beacon of an address.
func (a *announcer) datagram(local netip.Addr) ([]byte, error) {
	a.counter++
	b := Beacon{
		NodeID: a.cfg.NodeID, Cluster: a.cfg.Cluster, Version: a.cfg.Version,
		Address: netip.AddrPortFrom(local, a.cfg.Listen.Port()),
		Boot:    a.boot, Counter: a.counter, Time: a.cfg.Now().UnixMilli(),
	}
	return b.Encode(a.key)
}

// round sends one beacon over each path.
func (a *announcer) round() {
	if a.cfg.Waiting != nil && !a.cfg.Waiting() {
		return
	}
	paths := a.paths()
	sent := 0
	for _, p := range paths {
		err := a.send(p)
		if err == nil {
			sent++
		}
		a.report(p, err)
	}
	a.drop(paths)
	if sent == 0 && !a.silent {
		a.cfg.Log.Warn("no interface announces this node", "listen", a.cfg.Listen.String(), "target", a.cfg.Target.String(), "remedy", "bring an interface with an IPv4 address up, or name this node in the coordinator's --cluster-peers")
	}
	a.silent = sent == 0
}

func (a *announcer) paths() []path {
	interfaces, err := a.cfg.Interfaces()
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != a.listing {
		a.listing = text
		if err != nil {
			a.cfg.Log.Warn("some network interfaces are not announced", "error", err)
		}
	}
	target := netip.AddrPortFrom(a.cfg.Target, uint16(a.cfg.Port))
	paths := choosePaths(interfaces, a.cfg.Listen.Addr().Unmap(), target)
	if len(paths) > 0 || a.cfg.Target == Broadcast {
		return paths
	}
	local, err := a.cfg.Route(target) // the target is behind a router
	if err != nil || !boundTo(a.cfg.Listen.Addr().Unmap(), local) {
		return nil
	}
	return []path{{"route to " + target.Addr().String(), local, target}}
}

// choosePaths returns the addresses to send from. Tunnels and peer-to-peer interfaces are left out, and so is what the
// listener is not bound to, and subnets that a target is not in.
func choosePaths(interfaces []transport.Interface, listen netip.Addr, target netip.AddrPort) []path {
	var out []path
	for _, i := range interfaces {
		if !i.Up || i.PointToPoint || !i.Loopback && !i.Usable() {
			continue
		}
		for _, prefix := range i.Addresses {
			local, to := prefix.Addr(), target
			if !local.Is4() || !boundTo(listen, local) {
				continue
			}
			switch {
			case target.Addr() != Broadcast && !prefix.Contains(target.Addr()):
				continue
			case target.Addr() == Broadcast && i.Loopback:
				to = netip.AddrPortFrom(loopbackTarget, target.Port())
			}
			out = append(out, path{i.Name, local, to})
		}
	}
	return out
}

// boundTo tells whether a listener can be reached at a local address.
func boundTo(listen, local netip.Addr) bool { return listen.IsUnspecified() || listen == local }

func (a *announcer) send(p path) error {
	s := a.senders[p]
	if s == nil {
		var err error
		if s, err = a.cfg.Open(p.name, p.local); err != nil {
			return err
		}
		a.senders[p] = s
	}
	datagram, err := a.datagram(p.local)
	if err != nil {
		return err
	}
	if err := s.SetWriteDeadline(a.cfg.Now().Add(writeTimeout)); err != nil {
		return a.discard(p, err)
	}
	if _, err := s.WriteTo(datagram, net.UDPAddrFromAddrPort(p.to)); err != nil {
		return a.discard(p, err)
	}
	return nil
}

// discard closes a socket that failed, so that the next round opens another.
func (a *announcer) discard(p path, err error) error {
	s := a.senders[p]
	delete(a.senders, p)
	return errors.Join(err, s.Close())
}

// report logs a path's trouble when it begins, changes or ends.
func (a *announcer) report(p path, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text == a.failing[p] {
		return
	}
	if err != nil {
		a.failing[p] = text
		a.cfg.Log.Warn("an interface does not announce this node", "interface", p.name, "address", p.local.String(), "target", p.to.String(), "error", err)
		return
	}
	delete(a.failing, p)
	a.cfg.Log.Info("an interface announces this node again", "interface", p.name, "address", p.local.String())
}

// drop closes the sockets of addresses that are gone.
func (a *announcer) drop(paths []path) {
	current := map[path]bool{}
	for _, p := range paths {
		current[p] = true
	}
	for p, s := range a.senders {
		if !current[p] {
			s.Close()
			delete(a.senders, p)
		}
	}
	for p := range a.failing {
		if !current[p] {
			delete(a.failing, p)
		}
	}
}

func (a *announcer) close() { a.drop(nil) }

func routeTo(target netip.AddrPort) (netip.Addr, error) {
	conn, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(target))
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	return local.Addr().Unmap(), err
}
