package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/transport"
)

// ethernetMTU is what every Ethernet carries, in bytes.
const ethernetMTU = 1500

// network tells of interfaces and of the addresses that follow from them.
func (e *examination) network() []Finding {
	list, err := e.probes.Interfaces()
	e.interfaces = list
	var out []Finding
	if err != nil {
		out = append(out, warn("interfaces", "look at the named interfaces with `ip address` or `ifconfig`", "some are left out: %v", err))
	}
	out = append(out, interfaces(list, e.remotePeers())...)
	out = append(out, e.addresses())
	return append(out, interfaceMTU(list)...)
}

// wildcard is where a listener would have to be bound to be reached at every address.
var wildcard = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)

// interfaces tells of each interface that other hosts can dial, and of the others why they can't. remote tells that there are
// other hosts.
func interfaces(list []transport.Interface, remote bool) []Finding {
	var out []Finding
	var skipped []string
	for _, i := range list {
		if why := unused(i); why != "" {
			skipped = append(skipped, fmt.Sprintf("%s (%s)", i.Name, why))
			continue
		}
		text := fmt.Sprintf("%s, MTU %d", join(addressesOf(i)), i.MTU)
		if i.PointToPoint {
			text += ", a tunnel: dialled last, and it carries no beacons"
		}
		out = append(out, ok("interface "+i.Name, "%s", text))
	}
	if len(out) == 0 {
		none := warn("interfaces", "bring an interface with an address up, e.g. `ip link set dev eth0 up`", "none that another host could reach")
		if remote {
			none.Level = Failure
		}
		out = append(out, none)
	}
	if skipped != nil {
		out = append(out, ok("interfaces not used", "%s", strings.Join(skipped, ", ")))
	}
	return out
}

// unused says why no other host dials an interface, empty where one may.
func unused(i transport.Interface) string {
	switch {
	case !i.Up:
		return "is down"
	case i.Loopback:
		return "for nodes on this host only"
	case !i.Usable():
		return "peer-to-peer radio, which no other node can dial"
	case len(i.Addresses) == 0:
		return "no address"
	case len(addressesOf(i)) == 0:
		return "link-local IPv6 addresses only, which mean nothing on other hosts"
	}
	return ""
}

func addressesOf(i transport.Interface) []netip.Addr {
	return hosts([]transport.Interface{i}, wildcard)
}

// hosts are the addresses at which a listener may be reached, the likeliest first.
func hosts(list []transport.Interface, listener netip.AddrPort) []netip.Addr {
	var out []netip.Addr
	for _, a := range transport.Candidates(listener, list) {
		out = append(out, a.Addr())
	}
	return out
}

func join[T fmt.Stringer](list []T) string {
	texts := make([]string, len(list))
	for i, v := range list {
		texts[i] = v.String()
	}
	return strings.Join(texts, ", ")
}

// addresses tells at which addresses other nodes find this one.
func (e *examination) addresses() Finding {
	const name = "addresses"
	listener := wildcard
	if e.cfg.Own != "" {
		a, err := cluster.ParseAddress(e.cfg.Own)
		if err != nil {
			return fail(name, "correct "+cluster.FlagControlAddr, "%v", err)
		}
		ip, isIP := a.IP()
		switch {
		case a.Wildcard() && !isIP:
			ip = netip.IPv6Unspecified()
		case !isIP:
			return ok(name, "%s: each node looks the name up itself", a)
		}
		listener = netip.AddrPortFrom(ip, uint16(a.Port))
	}
	found := hosts(e.interfaces, listener)
	reachable := slices.DeleteFunc(slices.Clone(found), netip.Addr.IsLoopback)
	switch {
	case len(reachable) == 0 && e.cfg.Own != "" && !e.cfg.Coordinator && e.remotePeers():
		return fail(name, "give an address that the other hosts can dial with "+cluster.FlagControlAddr+", e.g. "+e.example(),
			"nodes on other hosts can't reach this one at %s", e.cfg.Own)
	case len(found) == 0:
		return fail(name, "bring an interface with an address up", "this node can be reached at none")
	}
	return ok(name, "other nodes would reach this one at %s, in this order", join(found))
}

// example is an address that this node could listen on.
func (e *examination) example() string {
	for _, a := range hosts(e.interfaces, wildcard) {
		if !a.IsLoopback() {
			return netip.AddrPortFrom(a, cluster.DefaultControlPort+1).String()
		}
	}
	return "192.168.1.11:19001"
}

// remotePeers tells whether a peer's address is not loopback's.
func (e *examination) remotePeers() bool {
	return slices.ContainsFunc(e.cfg.Peers, func(p Peer) bool {
		a, err := cluster.ParseAddress(p.Address)
		ip, isIP := a.IP()
		return err == nil && a.Host != "localhost" && !(isIP && ip.IsLoopback())
	})
}

// interfaceMTU compares the interfaces. Tunnels carry less by nature.
func interfaceMTU(list []transport.Interface) []Finding {
	const name = "interface MTU"
	sizes := map[int][]string{}
	var out []Finding
	for _, i := range list {
		if unused(i) != "" || i.PointToPoint {
			continue
		}
		sizes[i.MTU] = append(sizes[i.MTU], i.Name)
		if i.MTU < ethernetMTU {
			out = append(out, warn(name, raiseMTU(i.Name, ethernetMTU)+", if its network carries that", "%s has %d, less than Ethernet's %d: more packets for each tensor", i.Name, i.MTU, ethernetMTU))
		}
	}
	if len(sizes) > 1 {
		out = append(out, warn(name, "nothing, where they are different networks; else give all interfaces of a network, on every host, the same MTU", "the interfaces differ: %s", groups(sizes)))
	}
	return out
}

func raiseMTU(name string, mtu int) string {
	return fmt.Sprintf("run `ip link set dev %s mtu %d` (Linux) or `ifconfig %s mtu %d`", name, mtu, name, mtu)
}

// groups writes sizes, the largest first, with who has them.
func groups(sizes map[int][]string) string {
	var keys []int
	for size := range sizes {
		keys = append(keys, size)
	}
	slices.Sort(keys)
	slices.Reverse(keys)
	parts := make([]string, len(keys))
	for i, size := range keys {
		parts[i] = fmt.Sprintf("%d on %s", size, strings.Join(sizes[size], ", "))
	}
	return strings.Join(parts, "; ")
}
