package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/discovery"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
)

// Limits past which a peer's clock and distance are worth a word.
const (
	skewLimit  = 30 * time.Second // of discovery: beacons of a clock further off are refused
	skewNotice = 5 * time.Second
	// tripNotice is many times a local network's. Each token crosses every link once.
	tripNotice = 10 * time.Millisecond
)

// discover listens for beacons.
func (e *examination) discover(ctx context.Context) ([]Peer, []Finding) {
	const name = "discovery"
	if e.secret.IsZero() {
		return nil, []Finding{fail(name, "see the finding on the secret", "beacons are signed, and there is no secret to tell them by")}
	}
	report, err := e.probes.Find(ctx, e.secret)
	missing, isMissing := errors.AsType[*discovery.NotFoundError](err)
	var out []Finding
	switch {
	case isMissing && len(report.Nodes) == 0:
		out = append(out, fail(name, discovery.Remedy(missing.Port), "no node announces itself"))
	case err != nil && !isMissing:
		out = append(out, fail(name, "give another --cluster-discovery-port to every node, or use "+cluster.FlagDiscovery+"=static", "%v", err))
	}
	var peers []Peer
	for _, n := range report.Nodes {
		out = append(out, ok(name, "%s (version %s) announces itself at %s", n.ID, n.Version, join(n.Addresses)))
		peers = append(peers, Peer{ID: n.ID, Address: n.Addresses[0].String()})
	}
	for _, r := range report.Refused {
		out = append(out, refusedBeacon(r))
	}
	return peers, out
}

// refusedBeacon is a failure only where the sender is certain to be of this cluster.
func refusedBeacon(r discovery.Refused) Finding {
	what, remedy := split(r.Detail)
	f := warn("beacons from "+r.From.String(), remedy, "refused: %s", what)
	if r.Reason == discovery.ReasonClock || r.Reason == discovery.ReasonDuplicate {
		f.Level = Failure
	}
	return f
}

// answer is what became of one peer.
type answer struct {
	peer    Peer
	contact *Contact
	err     error
}

// peers asks all of them at once.
func (e *examination) peers(ctx context.Context, list []Peer) []Finding {
	if len(list) > 0 && e.secret.IsZero() {
		return []Finding{fail("peers", "see the finding on the secret", "not asked: nodes answer only to who has the secret")}
	}
	answers := make([]answer, len(list))
	var all sync.WaitGroup
	for i, p := range list {
		all.Go(func() {
			c, err := e.probes.Ask(ctx, e.secret, p.Address)
			answers[i] = answer{p, c, err}
		})
	}
	all.Wait()
	var out []Finding
	for _, a := range answers {
		out = append(out, e.peer(a)...)
	}
	return append(out, pathMTU(answers)...)
}

// peer tells of one.
func (e *examination) peer(a answer) []Finding {
	name := "peer " + a.peer.ID
	if a.err != nil {
		f := Unreachable(name, a.peer.Address, a.err)
		if a.peer.Optional && f.Level == Failure {
			f.Level = Warning
		}
		return []Finding{f}
	}
	c := a.contact
	text := fmt.Sprintf("%s %s, %s", c.Role, c.Node, c.Phase)
	if at := c.Remote.String(); at != a.peer.ID {
		text += ", answers from " + at
	}
	return []Finding{
		ok(name, "%s", text),
		skew(name, c.Skew, e.cfg.MDNS), trip(name, c.RoundTrip), e.mtu(name, c),
	}
}

func skew(name string, skew time.Duration, beacons bool) Finding {
	name += " clock"
	const remedy = "set both clocks, e.g. by NTP"
	text := skew.Abs().Round(time.Millisecond).String() + " ahead"
	if skew < 0 {
		text = strings.Replace(text, "ahead", "behind", 1)
	}
	switch {
	case skew.Abs() < time.Millisecond:
		return ok(name, "less than 1ms off")
	case skew.Abs() > skewLimit && beacons:
		return fail(name, remedy, "%s: beacons more than %v off are refused", text, skewLimit)
	case skew.Abs() > skewLimit:
		return warn(name, remedy, "%s: with %s=mdns, beacons more than %v off would be refused", text, cluster.FlagDiscovery, skewLimit)
	case skew.Abs() > skewNotice:
		return warn(name, remedy, "%s: beacons may be %v off at most", text, skewLimit)
	}
	return ok(name, "%s", text)
}

func trip(name string, trip time.Duration) Finding {
	name += " round trip"
	text := trip.Round(10 * time.Microsecond).String()
	if trip > tripNotice {
		return warn(name, "use a wired local network, and the address of its interface", "%s: every token waits for half of that on each link", text)
	}
	return ok(name, "%s", text)
}

// mtu compares the path to a peer with the interface that leads to it.
func (e *examination) mtu(name string, c *Contact) Finding {
	name += " MTU"
	own, size := e.leaving(c.Local)
	via := fmt.Sprintf("interface %s has %d", own, size)
	if own == "" {
		via, own = "through an interface that is not listed", "eth0"
	}
	text := fmt.Sprintf("%d on the path, %s", c.PathMTU, via)
	path := c.PathMTU
	if path == 0 {
		path, text = size, via+", the path's is not known on this system"
	}
	lower := "else let ICMP \"fragmentation needed\" through, or lower the MTU of both ends: " + raiseMTU(own, ethernetMTU)
	switch {
	case c.FullSize != nil:
		why, _ := noAnswer("", c.FullSize)
		return fail(name, "give every interface and switch on the way the same MTU; "+lower, "%s: small packets get through, large ones do not: %s", text, why)
	case c.Local.IsLoopback():
		return ok(name, "%s", text)
	case path < ethernetMTU:
		return warn(name, "look for a tunnel or VPN on the way", "%s: less than Ethernet's %d, so more packets for each tensor", text, ethernetMTU)
	case size != 0 && path < size:
		return warn(name, "give every interface and switch on the way the same MTU", "%s: something on the way takes less than this host's interface", text)
	}
	return ok(name, "%s", text)
}

// leaving finds the interface with an address; there is none where it came or went just now.
func (e *examination) leaving(local netip.Addr) (name string, mtu int) {
	for _, i := range e.interfaces {
		if slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.Addr() == local }) {
			return i.Name, i.MTU
		}
	}
	return "", 0
}

// pathMTU compares the paths to the peers.
func pathMTU(answers []answer) []Finding {
	sizes := map[int][]string{}
	for _, a := range answers {
		if a.err == nil && a.contact.PathMTU != 0 && !a.contact.Local.IsLoopback() {
			sizes[a.contact.PathMTU] = append(sizes[a.contact.PathMTU], a.peer.ID)
		}
	}
	if len(sizes) < 2 {
		return nil
	}
	return []Finding{warn("peers MTU", "give all interfaces of the network, on every host, the same MTU", "the paths to the peers differ: %s", groups(sizes))}
}

// Unreachable tells why a node gave no answer, and what to do.
func Unreachable(name, address string, err error) Finding {
	if dial, is := errors.AsType[*transport.DialError](err); is && len(dial.Attempts) == 1 {
		err = dial.Attempts[0].Err // which does not repeat the address
	}
	why, remedy := noAnswer(address, err)
	if !strings.HasSuffix(name, address) {
		why = address + ": " + why
	}
	return fail(name, remedy, "%s", why)
}

// noAnswer tells errors of the network and of the handshake from each other.
func noAnswer(address string, err error) (why, remedy string) {
	if r := cluster.FromHandshake(err); r != nil {
		return refused(r)
	}
	host, port, _ := net.SplitHostPort(address)
	dns, isDNS := errors.AsType[*net.DNSError](err)
	timeout, isNet := errors.AsType[net.Error](err)
	switch {
	case isDNS:
		return fmt.Sprintf("the name is not known here (%s)", dns.Err), nameRemedy(host)
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nobody listens there", "start mlxcel there, or correct the address"
	case errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH):
		return "there is no way to that host", "check the address, the cables, and that both hosts are in one network"
	case errors.Is(err, context.DeadlineExceeded) || isNet && timeout.Timeout():
		return "no answer", "check that the host is up and that its firewall lets TCP port " + port + " in"
	case errors.Is(err, securelink.ErrNotPeer) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET):
		return err.Error(), "check the port: something else than a node of a cluster listens there, or the node is ending"
	}
	return err.Error(), "look at the log of the node there"
}

// refused is a node that answers and does not want this one, or is not wanted.
func refused(r *cluster.Refusal) (why, remedy string) {
	remedy = r.Remedy
	switch {
	case remedy != "":
	case r.Code == cluster.CodeVersion:
		remedy = cluster.RefuseVersion("", "").Remedy
	case r.Code == cluster.CodeCluster:
		remedy = cluster.RefuseCluster("", "").Remedy
	default:
		remedy = "look at the log of the node there"
	}
	return apart(r.Reason, remedy), remedy
}
