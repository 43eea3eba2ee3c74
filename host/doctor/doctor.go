// Package doctor owns the checks of what a node needs: addresses, ports, the cluster's secret, its peers, executors and the model.
// Each check is a function over what probes told it, and its findings are data.
package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/discovery"
	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
)

// Level says how bad a finding is.
type Level string

// The levels.
const (
	OK      Level = "ok"
	Warning Level = "warning" // it works, but not as well as it could, or not for everything
	Failure Level = "failure" // it does not work
)

// Finding is what one check found.
type Finding struct {
	Name   string `json:"name"` // of what was looked at, e.g. "port tcp 19000"
	Level  Level  `json:"level"`
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"` // what to do; empty where all is well
}

func ok(name, format string, args ...any) Finding {
	return Finding{Name: name, Level: OK, Text: fmt.Sprintf(format, args...)}
}

func warn(name, remedy, format string, args ...any) Finding {
	return Finding{Name: name, Level: Warning, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

func fail(name, remedy, format string, args ...any) Finding {
	return Finding{Name: name, Level: Failure, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

// Report is all findings, in the order of the checks.
type Report []Finding

// Count returns how many findings are of a level.
func (r Report) Count(level Level) int {
	n := 0
	for _, f := range r {
		if f.Level == level {
			n++
		}
	}
	return n
}

// Config says what is to be looked at.
type Config struct {
	Clustered   bool // this is to be a node of a cluster; without it, what only a cluster needs is a warning at most
	Coordinator bool // the node runs no stage, so it needs no executor

	File      string          // --distributed-config; empty for none
	FileErr   error           // what is wrong with it, or with this node's place in it
	Topology  *cluster.Config // what it holds; nil for none
	Node      string          // this node's id there; empty where nothing says
	Own       string          // host:port that this node listens on, as it was given; empty where nothing says
	Endpoints []Endpoint      // what this node would listen on
	Peers     []Peer          // that are named
	MDNS      bool            // peers announce themselves as well

	Secret cluster.SecretSource
	Model  string // folder; empty checks none
}

// Endpoint is a port that is to be free.
type Endpoint struct {
	Network  string // "tcp" or "udp"
	Address  string // host:port
	Flag     string // that changes it
	Node     bool   // a node of the cluster listens there, so one that runs already may
	Anywhere bool   // it may be another machine's, which is then not checked
}

// Peer is another node.
type Peer struct {
	ID       string // in the cluster's TOML, or its address
	Address  string // host:port
	Optional bool   // it need not run yet
}

// Contact is what was learned of a node that answered.
type Contact struct {
	Node      string
	Role      string // "coordinator" or "stage"
	Phase     string
	Remote    netip.AddrPort // that answered
	Local     netip.Addr     // of this host, that the connection left from
	RoundTrip time.Duration
	Skew      time.Duration // the node's clock minus this one's
	PathMTU   int           // bytes; 0 where the system does not tell
	FullSize  error         // why packets as large as the path's MTU are lost; nil where they are not
}

// Process is a program that runs.
type Process struct {
	PID  int
	Name string
}

func (p Process) String() string { return fmt.Sprintf("%s (pid %d)", p.Name, p.PID) }

// Probes are the ways to look at the world. System returns those of this host.
type Probes struct {
	Interfaces func() ([]transport.Interface, error)
	Listen     func(ctx context.Context, network, address string) error // for a moment
	Holder     func(network string, at netip.AddrPort) (Process, error) // of a port; an unspecified address matches all
	Find       func(context.Context, securelink.Secret) (discovery.Report, error)
	Ask        func(context.Context, securelink.Secret, string) (*Contact, error)
	Executors  func(context.Context) (*engine.PluginList, error)
	Inspect    func(context.Context) (*engine.Inspection, error)
}

// Run looks at everything. What can't be looked at is a finding too; only ctx ends it early.
func Run(ctx context.Context, cfg Config, probes Probes) (Report, error) {
	e := &examination{cfg: cfg, probes: probes}
	e.cluster(ctx)
	e.add(e.executors(ctx)...)
	if cfg.Model != "" {
		e.add(e.model(ctx)...)
	}
	return e.report, context.Cause(ctx)
}

// examination is one run of the checks.
type examination struct {
	cfg        Config
	probes     Probes
	report     Report
	interfaces []transport.Interface
	secret     securelink.Secret // zero where there is none
}

func (e *examination) add(findings ...Finding) { e.report = append(e.report, findings...) }

// cluster runs the checks of what only a cluster needs.
func (e *examination) cluster(ctx context.Context) {
	from := len(e.report)
	e.add(e.file()...)
	e.add(e.network()...)
	e.add(e.checkSecret())
	for _, p := range e.cfg.Endpoints {
		e.add(e.port(ctx, p)...)
	}
	peers := e.cfg.Peers
	if e.cfg.MDNS {
		found, findings := e.discover(ctx)
		e.add(findings...)
		peers = append(peers[:len(peers):len(peers)], found...)
	}
	e.add(e.peers(ctx, peers)...)
	if e.cfg.Clustered {
		return
	}
	for i := range e.report[from:] {
		if f := &e.report[from+i]; f.Level == Failure {
			f.Level = Warning
		}
	}
}

// file tells of the cluster's TOML.
func (e *examination) file() []Finding {
	const name = "cluster file"
	switch {
	case e.cfg.File == "":
		return nil
	case e.cfg.FileErr != nil:
		return []Finding{fail(name, "correct "+e.cfg.File+" or the flags that it disagrees with", "%v", e.cfg.FileErr)}
	case e.cfg.Node == "":
		return []Finding{ok(name, "%s: %d nodes; %s tells which one this is", e.cfg.File, len(e.cfg.Topology.Nodes), cluster.FlagNodeID)}
	}
	return []Finding{ok(name, "%s: %d nodes, this one is %s", e.cfg.File, len(e.cfg.Topology.Nodes), e.cfg.Node)}
}

// apart takes a remedy out of a text that ends with it, or has it before further lines.
func apart(text, remedy string) string { return strings.Replace(text, ": "+remedy, "", 1) }

// split takes a text of the form "what is wrong: what to do" apart.
func split(text string) (what, remedy string) {
	what, remedy, _ = strings.Cut(text, ": ")
	return what, remedy
}
