package discovery

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Node is a node that waits for a coordinator.
type Node struct {
	ID        string
	Version   string           // of the program
	Addresses []netip.AddrPort // at least one; those that other hosts can reach first, then by their text
}

// Report is what a tracker knows at one moment.
type Report struct {
	Want    int       // nodes that are looked for
	Nodes   []Node    // by id
	Refused []Refused // by source and reason; of late only
	Others  int       // refused beacons that are in no entry of Refused
	Noise   int       // datagrams that are no beacons
}

// Report returns what is known.
func (t *Tracker) Report(now time.Time, want int) Report {
	t.forget(now)
	r := Report{Want: want, Others: t.dropped, Noise: t.noise}
	for _, n := range t.nodes {
		if n.live(now, t.cfg.Expiry) {
			r.Nodes = append(r.Nodes, Node{ID: n.id, Version: n.version, Addresses: n.list(now, t.cfg.Expiry)})
		}
	}
	for key, refused := range t.refused {
		if now.Sub(refused.last) > 2*t.cfg.Window {
			delete(t.refused, key)
			continue
		}
		if refused.Reason != ReasonReplayed && refused.Reason != ReasonEarlierRun { // what every restart and every second interface brings
			r.Refused = append(r.Refused, *refused)
		}
	}
	slices.SortFunc(r.Nodes, func(a, b Node) int { return strings.Compare(a.ID, b.ID) })
	slices.SortFunc(r.Refused, func(a, b Refused) int {
		return cmp.Or(a.From.Compare(b.From), strings.Compare(string(a.Reason), string(b.Reason)))
	})
	return r
}

// Complete tells whether all nodes that are looked for are there.
func (r Report) Complete() bool { return len(r.Nodes) >= r.Want }

// Peers returns one address of each node, as text.
func (r Report) Peers() []string {
	out := make([]string, len(r.Nodes))
	for i, n := range r.Nodes {
		out[i] = n.Addresses[0].String()
	}
	return out
}

// String tells what was found, and what was refused and why, in one line.
func (r Report) String() string {
	parts := []string{fmt.Sprintf("found %d of %d", len(r.Nodes), r.Want)}
	for _, n := range r.Nodes {
		parts = append(parts, fmt.Sprintf("%s at %s (version %s)", n.ID, join(n.Addresses), n.Version))
	}
	for _, f := range r.Refused {
		parts = append(parts, fmt.Sprintf("refused %s: %s", f.From, f.Detail))
	}
	if r.Others > 0 {
		parts = append(parts, fmt.Sprintf("refused %d more", r.Others))
	}
	if len(r.Nodes) == 0 && len(r.Refused) == 0 && r.Noise > 0 {
		parts = append(parts, fmt.Sprintf("datagrams of other programs came: %d", r.Noise))
	}
	return strings.Join(parts, "; ")
}

// kinds is equal for reports that differ only in numbers and in what somebody without the secret can vary at will.
func (r Report) kinds() string {
	var b strings.Builder
	for _, n := range r.Nodes {
		fmt.Fprintln(&b, n.ID, n.Version, join(n.Addresses))
	}
	for _, f := range r.Refused {
		fmt.Fprintln(&b, f.From, f.Reason)
	}
	fmt.Fprintln(&b, r.Want, r.Noise > 0, r.Others > 0)
	return b.String()
}

func join(addresses []netip.AddrPort) string {
	texts := make([]string, len(addresses))
	for i, a := range addresses {
		texts[i] = a.String()
	}
	return strings.Join(texts, ", ")
}

// NotFoundError is a search that ended before it had found all.
type NotFoundError struct {
	Report Report
	Port   int   // UDP
	Err    error // why it ended
}

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("%s (%v): %s", e.Report, e.Err, Remedy(e.Port))
}

// Unwrap returns why the search ended.
func (e *NotFoundError) Unwrap() error { return e.Err }

// Remedy says what to look at where a node is not found.
func Remedy(port int) string {
	return fmt.Sprintf("check that each peer runs with --cluster-discovery=mdns, the same --cluster-name and the same secret; that the firewall here lets UDP port %d in; and that broadcasts reach this subnet, else give the peers this host's address with --cluster-discovery-target; or name the peers with --cluster-peers and --cluster-discovery=static", port)
}
