package clusterflags

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/discovery"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/urfave/cli/v2"
)

// Mode is what this process is to be.
type Mode int

// The modes.
const (
	Alone       Mode = iota // no cluster
	Coordinator             // serves requests, runs no stage
	Peer                    // runs one stage
)

// Settings is what the flags say of a cluster. All sizes are in bytes.
type Settings struct {
	Mode    Mode
	DryRun  bool
	Version string // of the program
	Name    string
	// Topology is the file's; nil where the coordinator is to plan it, or the peer to be told it.
	Topology *cluster.Config
	Node     cluster.Node // this process's in Topology
	NodeID   string       // Node's, or what the operator calls this peer; empty for neither

	ControlAddr   string // --cluster-control-addr, empty where not given
	ConfigOut     string // where the TOML goes; empty for the default of the mode
	Verify        bool
	NoAutoRestart bool
	MDNS          bool
	Notices       []string // for the log

	secret           cluster.SecretSource
	plan             cluster.PlanRequest // Peers apart with MDNS
	discoveryPort    int
	discoveryTarget  netip.Addr
	discoveryTimeout time.Duration
}

// Listen is the address that HTTP goes to.
type Listen struct {
	Host string
	Port int // 0 is chosen by the system
}

// Read takes the flags to Settings. All faults are told at once.
func Read(c *cli.Context, version string, http Listen) (*Settings, error) {
	r := reader{c: c, s: &Settings{Version: version, Name: c.String("cluster-name")}}
	r.mode()
	r.lone()
	r.settings(http)
	r.file()
	return r.s, errors.Join(r.faults...)
}

// ReadFile takes the flags of a command that coordinates the cluster of --distributed-config and serves nobody.
func ReadFile(c *cli.Context, version string) (*Settings, error) {
	r := reader{c: c, s: &Settings{Version: version, Name: c.String("cluster-name"), Mode: Coordinator}, coordinates: true}
	r.lone()
	r.settings(Listen{})
	r.file()
	return r.s, errors.Join(r.faults...)
}

type reader struct {
	c      *cli.Context
	s      *Settings
	faults []error
	// coordinates is set for a command that is a coordinator, whatever --node-id says.
	coordinates bool
}

func (r *reader) fault(format string, args ...any) {
	r.faults = append(r.faults, fmt.Errorf(format, args...))
}

// mode tells what the flags ask for, and refuses two things at once.
func (r *reader) mode() {
	auto, peer, file := r.c.IsSet("pp-auto"), r.c.Bool("pp-peer"), r.c.IsSet("distributed-config")
	switch {
	case auto && file:
		r.fault("--pp-auto and --distributed-config exclude each other: --pp-auto plans the cluster, the file is a plan: give one of them")
	case auto && peer:
		r.fault("--pp-auto and --pp-peer exclude each other: the coordinator runs no stage, so start one process for each")
	case auto:
		r.s.Mode = Coordinator
		for _, flag := range []string{"pp-layers", "pp-size"} {
			if r.c.IsSet(flag) {
				r.fault("--pp-auto and --%s exclude each other: --pp-auto N plans N stages; give --pp-layers with --distributed-config to cut by hand", flag)
			}
		}
	case peer:
		r.s.Mode = Peer
	}
	if r.s.DryRun = r.c.Bool("dry-run"); r.s.DryRun && !auto && !file {
		r.fault("--dry-run plans a cluster: give --pp-auto N or --distributed-config FILE as well")
	}
}

// lone refuses flags that would do nothing.
func (r *reader) lone() {
	auto, peer, file := r.c.IsSet("pp-auto"), r.c.Bool("pp-peer"), r.c.IsSet("distributed-config")
	mdns := r.c.String("cluster-discovery") == "mdns"
	for _, f := range []struct {
		name string
		ok   bool
		want string
	}{
		{"cluster-peers", auto && !mdns, "--pp-auto and --cluster-discovery=static"},
		{"cluster-discovery", auto || peer && !file, "--pp-auto or --pp-peer"},
		{"cluster-discovery-port", mdns, "--cluster-discovery=mdns"},
		{"cluster-discovery-target", mdns && peer, "--pp-peer and --cluster-discovery=mdns"},
		{"cluster-discovery-timeout", mdns && r.s.DryRun, "--dry-run and --cluster-discovery=mdns"},
		{"cluster-config-out", auto || peer, "--pp-auto or --pp-peer"},
		{"stage-memory", auto, "--pp-auto; in a file it is resources.memory_bytes"},
		{"node-id", file || peer, "--distributed-config or --pp-peer"},
		{"node-role", file, "--distributed-config"},
		{"peers", file, "--distributed-config"},
		{"cluster-control-addr", auto || peer || file, "--pp-auto, --pp-peer or --distributed-config"},
	} {
		if r.c.IsSet(f.name) && !f.ok {
			r.fault("--%s has no effect without %s", f.name, f.want)
		}
	}
}

func (r *reader) settings(http Listen) {
	c, s := r.c, r.s
	s.NodeID = c.String("node-id")
	if len(s.NodeID) > cluster.MaxNameLength || len(s.Name) > cluster.MaxNameLength {
		r.fault("--node-id and --cluster-name may have %d bytes at most", cluster.MaxNameLength)
	}
	s.ControlAddr, s.ConfigOut = c.String("cluster-control-addr"), c.String("cluster-config-out")
	s.Verify, s.NoAutoRestart = c.Bool("verify"), c.Bool("no-auto-restart")
	s.secret = secretSource(c)
	switch mode := c.String("cluster-discovery"); mode {
	case "static", "mdns", "": // a command without the flag has none
		s.MDNS = mode == "mdns"
	default:
		r.fault("--cluster-discovery %q: want static or mdns", mode)
	}
	s.discoveryPort, s.discoveryTimeout = c.Int("cluster-discovery-port"), time.Duration(c.Int("cluster-discovery-timeout"))*time.Second
	if s.MDNS && (s.discoveryPort < 1 || s.discoveryPort > 65535) {
		r.fault("--cluster-discovery-port %d: want 1 to 65535", s.discoveryPort)
	}
	if text := c.String("cluster-discovery-target"); s.MDNS && text != "" {
		var err error
		if s.discoveryTarget, err = netip.ParseAddr(text); err != nil || !s.discoveryTarget.Is4() {
			r.fault("--cluster-discovery-target %q: want an IPv4 address, e.g. 192.168.1.255", text)
		}
	}
	var memory []int64
	if text := c.String("stage-memory"); text != "" {
		var err error
		if memory, err = partition.ParseStageMemory(text); err != nil {
			r.faults = append(r.faults, err)
		}
	}
	s.plan = cluster.PlanRequest{
		Name: s.Name, Stages: c.Int("pp-auto"), Peers: strings.Split(c.String("cluster-peers"), ","), ControlAddr: s.ControlAddr,
		HTTPHost: http.Host, HTTPPort: http.Port, Memory: memory, Discovered: s.MDNS, DiscoveryPort: s.discoveryPort,
	}
}

// file reads the topology of --distributed-config and finds this process in it.
func (r *reader) file() {
	if !r.c.IsSet("distributed-config") {
		return
	}
	t, err := cluster.Load(r.c.String("distributed-config"))
	if err == nil && r.coordinatesByFlag() {
		t, err = t.WithCoordinator(r.s.ControlAddr)
	}
	if err != nil {
		r.faults = append(r.faults, err)
		return
	}
	if r.s.DryRun && !r.c.IsSet("node-id") {
		r.s.Topology = t
		return
	}
	var peers []string
	if text := r.c.String("peers"); text != "" {
		peers = strings.Split(text, ",")
	}
	id := r.c.String("node-id")
	if coordinator, ok := t.Coordinator(); ok && id == "" && r.coordinates {
		id = coordinator.ID
	}
	node, notices, err := t.Locate(cluster.Self{ID: id, Role: r.c.String("node-role"), Peers: peers})
	if err != nil {
		r.faults = append(r.faults, err)
		return
	}
	if line := t.Backend.Fallback(runtime.GOOS); line != "" {
		notices = append(notices, line)
	}
	r.s.Topology, r.s.Node, r.s.NodeID, r.s.Notices = t, node, node.ID, notices
	r.s.secret.TOMLFile = t.SecretPath()
	if r.c.IsSet("cluster-name") && r.s.Name != t.Name {
		r.fault("--cluster-name %s: %s names the cluster %s: change one of them", r.s.Name, t.Path, t.Name)
	}
	r.s.Name = t.Name
	mode := Peer
	if node.Role == cluster.RoleHybrid {
		mode = Coordinator
	}
	if r.coordinates && mode != Coordinator {
		r.fault("--node-id %s: %s gives it the role %s, but this command coordinates: leave the flag out", node.ID, t.Path, node.Role)
	}
	if r.s.Mode == Peer && mode != Peer {
		r.fault("--pp-peer: %s gives node %s the role %s, which runs no stage: leave --pp-peer out", t.Path, node.ID, node.Role)
	}
	r.s.Mode = mode
}

// coordinatesByFlag tells whether this process completes a file that has no coordinator.
func (r *reader) coordinatesByFlag() bool {
	return r.s.ControlAddr != "" && (r.coordinates || r.c.String("node-id") == cluster.CoordinatorID || r.s.DryRun)
}

// Secret returns the cluster's secret.
func (s *Settings) Secret() (securelink.Secret, error) { return cluster.LoadSecret(s.secret) }

// Plan returns the topology for the coordinator: the file's, or one of the peers that are named or found. ctx bounds the search.
func (s *Settings) Plan(ctx context.Context, secret securelink.Secret, log hclog.Logger) (*cluster.Config, error) {
	if s.Topology != nil {
		return s.Topology, nil
	}
	req, err := s.request(ctx, secret, log)
	if err != nil {
		return nil, err
	}
	planned, err := cluster.Plan(ctx, req)
	if err != nil {
		return nil, err
	}
	for _, n := range planned.Notices {
		log.Info(n)
	}
	return planned.Config, nil
}

// request completes the plan's request by the peers that announce themselves.
func (s *Settings) request(ctx context.Context, secret securelink.Secret, log hclog.Logger) (cluster.PlanRequest, error) {
	req := s.plan
	if !s.MDNS {
		return req, nil
	}
	search, err := discovery.NewSearch(discovery.SearchConfig{
		Secret: secret, Cluster: s.Name, Port: s.discoveryPort, Want: req.Stages, Log: log,
		OnChange: func(r discovery.Report) { log.Info("looking for peers", "found", r.String()) },
	})
	if err != nil {
		return req, err
	}
	report, err := search.Find(ctx)
	req.Peers, req.Seen = report.Peers(), report.String()
	return req, err
}

// RunDry plans, checks, writes the TOML and prints what came of it. The error is not nil where something is in the way.
func (s *Settings) RunDry(ctx context.Context, log hclog.Logger, probe func(securelink.Secret) cluster.Probe, out io.Writer) error {
	secret, err := s.Secret()
	secured := err == nil
	if err != nil && !errors.Is(err, cluster.ErrNoSecret) {
		return err
	}
	req := cluster.DryRunRequest{Plan: s.plan, Config: s.Topology, Version: s.Version, Out: s.Out()}
	switch {
	case secured:
		req.Probe = probe(secret)
	case s.MDNS:
		return fmt.Errorf("--cluster-discovery=mdns finds peers by their signature: %w", err)
	}
	if s.MDNS {
		search, done := context.WithTimeout(ctx, s.discoveryTimeout)
		req.Plan, err = s.request(search, secret, log)
		done()
		if _, missing := errors.AsType[*discovery.NotFoundError](err); err != nil && !missing {
			return err // too few are a conflict, which the plan tells
		}
	}
	dry, err := cluster.RunDry(ctx, req)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(out, dry.Text()); err != nil {
		return err
	}
	if n := len(dry.Conflicts); n > 0 {
		return fmt.Errorf("%d conflicts keep the cluster from coming up", n)
	}
	return nil
}

// PeerAddress is where a peer listens, and the flag or file that says so; empty where nothing does.
func (s *Settings) PeerAddress() (address, from string) {
	switch {
	case s.ControlAddr != "":
		return s.ControlAddr, "--cluster-control-addr"
	case s.Topology != nil:
		return s.Node.Address, fmt.Sprintf("%s: node %s: address", s.Topology.Path, s.Node.ID)
	case s.MDNS:
		return "0.0.0.0:0", "--cluster-discovery=mdns"
	}
	return "", ""
}

// ControlListen is where a coordinator listens, and the flag or file that says so.
func (s *Settings) ControlListen() (address, from string) {
	switch {
	case s.Topology != nil && s.Node.Address != s.ControlAddr:
		return s.Node.Address, fmt.Sprintf("%s: node %s: address", s.Topology.Path, s.Node.ID)
	case s.ControlAddr != "":
		return s.ControlAddr, cluster.FlagControlAddr
	}
	return net.JoinHostPort(strings.Trim(s.plan.HTTPHost, "[]"), strconv.Itoa(cluster.DefaultControlPort)), cluster.FlagControlAddr
}

// Announcement is what a peer's beacons say, and where they go.
func (s *Settings) Announcement(secret securelink.Secret, self securelink.Identity, listen netip.AddrPort, log hclog.Logger) discovery.AnnounceConfig {
	return discovery.AnnounceConfig{
		Secret: secret, Cluster: self.Cluster, NodeID: self.NodeID, Version: self.Version, Listen: listen,
		Target: s.discoveryTarget, Port: s.discoveryPort, Log: log,
	}
}

// Out is where a coordinator's plan is written; empty where the topology came from a file and no other was named.
func (s *Settings) Out() string {
	if s.ConfigOut == "" && s.Topology == nil {
		return cluster.DefaultConfigOut
	}
	return s.ConfigOut
}
