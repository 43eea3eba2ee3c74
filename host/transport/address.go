package transport

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"
)

// Interface is one network interface, as far as the choice of addresses needs it.
type Interface struct {
	Name         string
	Up           bool
	Loopback     bool
	PointToPoint bool // a tunnel
	MTU          int
	Addresses    []netip.Prefix
}

// Interfaces lists this host's. An interface whose addresses can't be read is left out, and named in the error beside
// the usable rest.
func Interfaces() ([]Interface, error) {
	list, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list network interfaces: %w", err)
	}
	var out []Interface
	var faults []string
	for _, i := range list {
		addresses, err := i.Addrs()
		if err != nil {
			faults = append(faults, fmt.Sprintf("%s: %v", i.Name, err))
			continue
		}
		one := Interface{
			Name: i.Name, MTU: i.MTU, Up: i.Flags&net.FlagUp != 0, Loopback: i.Flags&net.FlagLoopback != 0,
			PointToPoint: i.Flags&net.FlagPointToPoint != 0,
		}
		for _, a := range addresses {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				one.Addresses = append(one.Addresses, netip.PrefixFrom(p.Addr().Unmap(), p.Bits()))
			}
		}
		out = append(out, one)
	}
	if faults != nil {
		return out, fmt.Errorf("read interface addresses: %s", strings.Join(faults, "; "))
	}
	return out, nil
}

// rank orders interfaces by how likely another host reaches them; lower is better.
type rank int

const (
	rankWired    rank = iota
	rankVirtual       // bridges and pairs of containers and virtual machines
	rankTunnel        // VPNs and other point-to-point interfaces
	rankLoopback      // for nodes on this host
	rankNever         // peer-to-peer radio links that no other node can dial
)

// nameRanks are patterns (path.Match) of interface names that say what they are, on Linux and macOS.
var nameRanks = []struct {
	pattern string
	rank    rank
}{
	{"awdl[0-9]*", rankNever}, {"llw[0-9]*", rankNever}, {"p2p0", rankNever}, {"p2p-*", rankNever}, {"anpi[0-9]*", rankNever}, {"ap[0-9]*", rankNever},
	{"utun[0-9]*", rankTunnel}, {"tun[0-9]*", rankTunnel}, {"tap[0-9]*", rankTunnel}, {"wg*", rankTunnel}, {"ppp[0-9]*", rankTunnel},
	{"ipsec[0-9]*", rankTunnel}, {"gif[0-9]*", rankTunnel}, {"stf[0-9]*", rankTunnel}, {"tailscale*", rankTunnel}, {"zt*", rankTunnel},
	{"docker*", rankVirtual}, {"br-*", rankVirtual}, {"virbr*", rankVirtual}, {"vmnet*", rankVirtual}, {"cni*", rankVirtual},
	{"flannel*", rankVirtual}, {"cali*", rankVirtual}, {"lxcbr*", rankVirtual}, {"lxdbr*", rankVirtual}, {"podman*", rankVirtual},
}

func (i Interface) rank() rank {
	switch {
	case !i.Up:
		return rankNever
	case i.Loopback:
		return rankLoopback
	}
	for _, r := range nameRanks {
		if match, err := path.Match(r.pattern, i.Name); err == nil && match {
			return r.rank
		}
	}
	if i.PointToPoint {
		return rankTunnel
	}
	return rankWired
}

// Usable tells whether another host may be able to reach this one over the interface.
func (i Interface) Usable() bool { r := i.rank(); return r != rankNever && r != rankLoopback }

// Candidates returns the addresses at which a listener may be reached, the likeliest first: its own where it is bound to
// one, else that port on every interface that another host can dial. Tunnels come after everything wired, loopback,
// which only nodes on this host can use, last. IPv6 link-local addresses are left out: their zone means nothing elsewhere.
func Candidates(listener netip.AddrPort, interfaces []Interface) []netip.AddrPort {
	bound := listener.Addr().Unmap()
	if !bound.IsUnspecified() {
		return []netip.AddrPort{netip.AddrPortFrom(bound, listener.Port())}
	}
	type candidate struct {
		addr netip.Addr
		rank rank
	}
	var found []candidate
	for _, i := range interfaces {
		r := i.rank()
		if r == rankNever {
			continue
		}
		for _, p := range i.Addresses {
			a := p.Addr()
			if bound.Is4() && !a.Is4() || a.Is6() && a.IsLinkLocalUnicast() || a.IsMulticast() {
				continue
			}
			found = append(found, candidate{a, r})
		}
	}
	slices.SortStableFunc(found, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(family(a.addr), family(b.addr)))
	})
	var out []netip.AddrPort
	for _, c := range found {
		if a := netip.AddrPortFrom(c.addr, listener.Port()); !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// family puts routed IPv4 addresses before IPv6, and self-assigned ones after both.
func family(a netip.Addr) int {
	switch {
	case a.IsLinkLocalUnicast():
		return 2
	case a.Is6():
		return 1
	}
	return 0
}
