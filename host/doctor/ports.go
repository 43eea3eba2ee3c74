package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"github.com/mlxcel/mlxcel/host/cluster"
)

// port tells whether this node could listen at an endpoint, and else why not.
func (e *examination) port(ctx context.Context, p Endpoint) []Finding {
	a, err := cluster.ParseAddress(p.Address)
	if err != nil {
		return []Finding{fail("port", "correct "+p.Flag, "%v", err)}
	}
	name := fmt.Sprintf("port %s %d", p.Network, a.Port)
	if a.Port == 0 {
		return []Finding{ok("port "+p.Network, "%s: the system chooses a free one at each start", a)}
	}
	err = e.probes.Listen(ctx, p.Network, p.Address)
	dns, isDNS := errors.AsType[*net.DNSError](err)
	switch {
	case err == nil:
		return []Finding{ok(name, "%s is free", a)}
	case errors.Is(err, syscall.EADDRINUSE):
		return []Finding{e.taken(ctx, name, p, a)}
	case elsewhere(err) && p.Anywhere:
		return nil
	case elsewhere(err):
		return []Finding{fail(name, fmt.Sprintf("give one of this host's with %s, e.g. %s", p.Flag, e.example()), "%s is no address of this host", a)}
	case isDNS && p.Anywhere:
		return []Finding{warn(name, nameRemedy(a.Host), "%s: the name is not known here (%s)", a, dns.Err)}
	case isDNS:
		return []Finding{fail(name, nameRemedy(a.Host), "%s: the name is not known here (%s)", a, dns.Err)}
	case errors.Is(err, syscall.EACCES):
		return []Finding{fail(name, "give a port from 1024 on with "+p.Flag, "this user may not listen on %s", a)}
	}
	return []Finding{fail(name, "give another address with "+p.Flag, "%s can't be listened on: %v", a, err)}
}

// elsewhere tells whether an address can't be listened on because it is another machine's.
func elsewhere(err error) bool {
	return errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EAFNOSUPPORT)
}

func nameRemedy(host string) string {
	return fmt.Sprintf("give %s's IP address, or add the name to DNS or /etc/hosts", host)
}

// taken tells who has a port.
func (e *examination) taken(ctx context.Context, name string, p Endpoint, a cluster.Address) Finding {
	ip, isIP := a.IP()
	if !isIP {
		ip = netip.IPv6Unspecified()
	}
	holder, err := e.probes.Holder(p.Network, netip.AddrPortFrom(ip, uint16(a.Port)))
	by, stop := holder.String(), fmt.Sprintf("stop it (kill %d)", holder.PID)
	if err != nil {
		by, stop = fmt.Sprintf("a process that can't be named (%v)", err), "stop it"
	}
	ours := err == nil && strings.HasPrefix(holder.Name, "mlxcel")
	if p.Node && !e.secret.IsZero() {
		if c, err := e.probes.Ask(ctx, e.secret, Reachable(p.Address)); err == nil {
			return ok(name, "%s is held by %s, which is %s %s of this cluster (%s)", a, by, c.Role, c.Node, c.Phase)
		}
	}
	remedy := fmt.Sprintf("%s, or give another port with %s", stop, p.Flag)
	switch {
	case p.Network == "udp" && ours:
		return ok(name, "%s is held by %s: coordinators share it", a, by)
	case p.Network == "udp":
		return warn(name, remedy, "%s is held by %s: unless that is a coordinator, it takes beacons away", a, by)
	case ours:
		return warn(name, remedy, "%s is held by %s: is it what you are about to start?", a, by)
	}
	return fail(name, remedy, "%s is taken by %s", a, by)
}

// Reachable returns the address at which a listener on this host is dialled from this host: loopback's for a wildcard.
func Reachable(address string) string {
	a, err := cluster.ParseAddress(address)
	if err != nil || !a.Wildcard() {
		return address
	}
	host := "127.0.0.1"
	if ip, isIP := a.IP(); isIP && ip.Is6() {
		host = "::1"
	}
	return net.JoinHostPort(host, fmt.Sprint(a.Port))
}
