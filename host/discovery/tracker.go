package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/mlxcel/mlxcel/host/securelink"
)

// Reason is why a datagram does not count.
type Reason string

// The reasons.
const (
	ReasonNotBeacon    Reason = "no beacon"              // somebody else's traffic on the port
	ReasonVersion      Reason = "beacon version"         // of another version of mlxcel
	ReasonForged       Reason = "signature"              // another secret, or an attack
	ReasonMalformed    Reason = "malformed"              // signed with the secret, by no version of mlxcel
	ReasonOtherCluster Reason = "cluster name"           // another cluster with the same secret
	ReasonAddress      Reason = "source address"         // sent on by somebody, or translated on the way
	ReasonClock        Reason = "clock"                  // the clocks disagree, or it was recorded some time ago
	ReasonReplayed     Reason = "replayed"               // came before
	ReasonEarlierRun   Reason = "earlier run"            // of a node that has restarted since
	ReasonDuplicate    Reason = "node id taken"          // two running nodes with one id
	ReasonTooMany      Reason = "too many nodes to know" // past MaxNodes
)

// Limits of what a tracker keeps.
const (
	MaxNodes   = 1024
	maxRefused = 64 // kinds of refused datagrams, by source and reason
	maxRetired = 8  // earlier runs of one node
)

// TrackerConfig is what a tracker believes in.
type TrackerConfig struct {
	Secret  securelink.Secret // required
	Cluster string            // name of the cluster
	Window  time.Duration     // how far a sender's clock may be off either way; default 30 s
	Expiry  time.Duration     // how long a node is known after its last beacon; default 10 s
}

// Tracker knows the nodes that have announced themselves. It is not safe for concurrent use.
type Tracker struct {
	cfg     TrackerConfig
	key     []byte
	nodes   map[string]*node
	refused map[refusedKey]*Refused
	noise   int // datagrams that are no beacons
	dropped int // refused ones past maxRefused
}

// node is what is known of one id.
type node struct {
	id        string
	version   string
	boot      BootID
	seen      window
	newest    int64 // largest time of the beacons of this and earlier boots, ms
	last      time.Time
	addresses map[netip.AddrPort]time.Time // when each was last heard from
	retired   []BootID                     // earlier runs, the latest last
}

type refusedKey struct {
	from   netip.Addr
	reason Reason
}

// Refused is a kind of datagrams that did not count.
type Refused struct {
	From   netip.Addr
	Reason Reason
	Detail string // with what to change
	Count  int
	last   time.Time
}

// Outcome is what a datagram came to.
type Outcome string

// The outcomes.
const (
	Found     Outcome = "found"     // a node that was not known, or whose earlier beacons had expired
	Heard     Outcome = "heard"     // a known node, again
	Moved     Outcome = "moved"     // a known node, at an address that was not known
	Restarted Outcome = "restarted" // a known node, after a restart: what was known is replaced
	Ignored   Outcome = "ignored"   // refused
)

// NewTracker returns a tracker that knows no node.
func NewTracker(cfg TrackerConfig) (*Tracker, error) {
	if cfg.Secret.IsZero() {
		return nil, securelink.ErrNoSecret
	}
	if cfg.Window == 0 {
		cfg.Window = 30 * time.Second
	}
	if cfg.Expiry == 0 {
		cfg.Expiry = 10 * time.Second
	}
	return &Tracker{cfg: cfg, key: cfg.Secret.Key(keyPurpose), nodes: map[string]*node{}, refused: map[refusedKey]*Refused{}}, nil
}

// Observe takes a datagram that came from an address at a time.
func (t *Tracker) Observe(now time.Time, from netip.AddrPort, datagram []byte) (Outcome, Reason) {
	source := from.Addr().Unmap().WithZone("")
	b, err := Decode(datagram, t.key)
	if err != nil {
		return t.undecoded(now, source, b, err)
	}
	off := time.Duration(b.Time-now.UnixMilli()) * time.Millisecond
	n := t.nodes[b.NodeID]
	switch {
	case b.Cluster != t.cfg.Cluster:
		return t.refuse(now, source, ReasonOtherCluster, "node %q is of cluster %q, not %q: give both the same --cluster-name", b.NodeID, b.Cluster, t.cfg.Cluster)
	case b.Address.Addr() != source:
		return t.refuse(now, source, ReasonAddress, "node %q signed its beacon for %s: an address translator is in between, or somebody sends it on; use --cluster-discovery=static", b.NodeID, b.Address.Addr())
	case b.Time > now.Add(t.cfg.Window).UnixMilli() || b.Time < now.Add(-t.cfg.Window).UnixMilli():
		return t.refuse(now, source, ReasonClock, "the clock of node %q is %s, at most %s is allowed: set both clocks (NTP)", b.NodeID, offBy(off), t.cfg.Window)
	case n == nil && len(t.nodes) >= MaxNodes && !t.forget(now):
		return t.refuse(now, source, ReasonTooMany, "%d nodes are known already", len(t.nodes))
	case n == nil:
		t.nodes[b.NodeID] = newNode(b, now)
		return Found, ""
	case b.Boot != n.boot:
		return t.otherRun(now, source, n, b)
	case !n.seen.take(b.Counter):
		return t.refuse(now, source, ReasonReplayed, "node %q: this beacon came before", b.NodeID)
	}
	return n.hear(b, now, t.cfg.Expiry), ""
}

func offBy(off time.Duration) string {
	if off > 0 {
		return off.Round(time.Second).String() + " ahead"
	}
	return (-off).Round(time.Second).String() + " behind"
}

func (t *Tracker) undecoded(now time.Time, source netip.Addr, claimed *Beacon, err error) (Outcome, Reason) {
	if v, ok := errors.AsType[*VersionError](err); ok {
		return t.refuse(now, source, ReasonVersion, "%v", v)
	}
	switch {
	case errors.Is(err, ErrForged) && claimed != nil && claimed.Cluster != t.cfg.Cluster:
		return t.refuse(now, source, ReasonForged, "signed with another secret, and for cluster %q: it belongs to others, or it lacks this cluster's secret and --cluster-name", claimed.Cluster)
	case errors.Is(err, ErrForged):
		return t.refuse(now, source, ReasonForged, "not signed with this cluster's secret: copy the secret to that host")
	case errors.Is(err, ErrMalformed):
		return t.refuse(now, source, ReasonMalformed, "signed with the secret, but malformed: install the same version of mlxcel on every host")
	}
	t.noise++
	return Ignored, ReasonNotBeacon
}

func (t *Tracker) refuse(now time.Time, from netip.Addr, reason Reason, format string, args ...any) (Outcome, Reason) {
	key := refusedKey{from, reason}
	r := t.refused[key]
	if r == nil && len(t.refused) >= maxRefused {
		t.dropped++
		return Ignored, reason
	}
	if r == nil {
		r = &Refused{From: from, Reason: reason}
		t.refused[key] = r
	}
	if r.Count == 0 || reason != ReasonForged { // whoever forges does not get to write a text for each datagram
		r.Detail = fmt.Sprintf(format, args...)
	}
	r.last = now
	r.Count++
	return Ignored, reason
}

// otherRun takes a beacon of another run of a known node: a later one replaces what is known.
func (t *Tracker) otherRun(now time.Time, source netip.Addr, n *node, b *Beacon) (Outcome, Reason) {
	switch {
	case b.Time <= n.newest:
		return t.refuse(now, source, ReasonEarlierRun, "node %q has restarted since", b.NodeID)
	case slices.Contains(n.retired, b.Boot):
		// It is newer than the run that replaced it, so both run.
		return t.refuse(now, source, ReasonDuplicate, "node id %q is taken by %s as well: give each node a --node-id of its own", b.NodeID, n.list(now, t.cfg.Expiry)[0])
	}
	known := n.live(now, t.cfg.Expiry)
	next := newNode(b, now)
	next.retired = append(n.retired, n.boot)
	if len(next.retired) > maxRetired {
		next.retired = next.retired[1:]
	}
	t.nodes[b.NodeID] = next
	if !known {
		return Found, ""
	}
	return Restarted, ""
}

func newNode(b *Beacon, now time.Time) *node {
	n := &node{id: b.NodeID, boot: b.Boot, addresses: map[netip.AddrPort]time.Time{}}
	n.seen.take(b.Counter)
	n.note(b, now)
	return n
}

func (n *node) note(b *Beacon, now time.Time) {
	n.version, n.last = b.Version, now
	n.newest = max(n.newest, b.Time)
	n.addresses[b.Address] = now
}

func (n *node) hear(b *Beacon, now time.Time, expiry time.Duration) Outcome {
	known, at := n.live(now, expiry), n.list(now, expiry)
	for a, last := range n.addresses {
		if now.Sub(last) > expiry {
			delete(n.addresses, a)
		}
	}
	n.note(b, now)
	switch {
	case !known:
		return Found
	case !slices.Contains(at, b.Address):
		return Moved
	}
	return Heard
}

func (n *node) live(now time.Time, expiry time.Duration) bool { return now.Sub(n.last) <= expiry }

// list returns the addresses that the node was heard from lately, those that other hosts can reach first.
func (n *node) list(now time.Time, expiry time.Duration) []netip.AddrPort {
	var out []netip.AddrPort
	for a, last := range n.addresses {
		if now.Sub(last) <= expiry {
			out = append(out, a)
		}
	}
	class := func(a netip.AddrPort) int {
		switch {
		case a.Addr().IsLoopback():
			return 2
		case a.Addr().IsLinkLocalUnicast():
			return 1
		}
		return 0
	}
	slices.SortFunc(out, func(a, b netip.AddrPort) int {
		return cmp.Or(cmp.Compare(class(a), class(b)), strings.Compare(a.String(), b.String()))
	})
	return out
}

// forget drops the nodes whose beacons can't be replayed any more. Until then they are kept after they expire, for their
// counters and boots. It tells whether there is room now.
func (t *Tracker) forget(now time.Time) bool {
	for id, n := range t.nodes {
		if now.Sub(n.last) > 2*t.cfg.Window && !n.live(now, t.cfg.Expiry) {
			delete(t.nodes, id)
		}
	}
	return len(t.nodes) < MaxNodes
}

// window knows which counters came before, as far as the latest 64 go. Beacons of several interfaces overtake each other.
type window struct {
	started bool
	highest uint64
	bits    uint64 // bit i is highest-i
}

// take tells whether a counter is new, and remembers it.
func (w *window) take(counter uint64) bool {
	switch {
	case !w.started:
		*w = window{true, counter, 1}
	case counter > w.highest:
		w.bits = w.bits<<min(counter-w.highest, 64) | 1
		w.highest = counter
	case w.highest-counter >= 64 || w.bits>>(w.highest-counter)&1 == 1:
		return false
	default:
		w.bits |= 1 << (w.highest - counter)
	}
	return true
}
