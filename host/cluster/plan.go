package cluster

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/mlxcel/mlxcel/host/discovery"
)

// Conflict is one thing that keeps a cluster from coming up.
type Conflict struct {
	What   string
	Remedy string // the flag to change, the rule to look at, or what to use instead
}

// ConflictError is every conflict of a plan.
type ConflictError struct{ Conflicts []Conflict }

func (e *ConflictError) Error() string {
	errs := make([]error, len(e.Conflicts))
	for i, c := range e.Conflicts {
		errs[i] = fmt.Errorf("%s: %s", c.What, c.Remedy)
	}
	return joinLines(errs).Error()
}

// PlanRequest is what --pp-auto and its companions say.
type PlanRequest struct {
	Name        string   // --cluster-name; default DefaultName
	Stages      int      // --pp-auto
	Peers       []string // host:port, in any order: --cluster-peers, or what was found
	ControlAddr string   // --cluster-control-addr; default the HTTP host on DefaultControlPort
	HTTPHost    string   // --host
	HTTPPort    int      // --port; 0 is chosen by the system
	Backend     Backend  // default BackendTCP
	Memory      []int64  // --stage-memory, bytes: one for each stage, or one for all; empty takes what devices report

	Discovered    bool   // Peers come from beacons, not from --cluster-peers
	DiscoveryPort int    // with Discovered, their UDP port; default discovery.DefaultPort
	Seen          string // with Discovered, what was seen and refused, for the message that too few were found

	// Route returns the address of this machine that packets to a host leave from; default RouteTo.
	Route func(ctx context.Context, host string) (netip.Addr, error)
}

// Planned is a topology and what its operator should know of it.
type Planned struct {
	Config  *Config
	Notices []string
}

// Plan makes a topology: the coordinator, then one stage for each of the first Stages peers, sorted by their text. The same
// request gives the same topology, whatever the order of its peers. The error is a *ConflictError.
func Plan(ctx context.Context, req PlanRequest) (*Planned, error) {
	p := &planner{ctx: ctx, req: req}
	peers := p.peers()
	control := p.control(peers)
	p.collision(control, peers)
	if len(p.conflicts) > 0 {
		return nil, &ConflictError{p.conflicts}
	}
	c := &Config{Name: req.Name, PipelineParallel: req.Stages, TensorParallel: 1, Backend: req.Backend}
	if c.Name == "" {
		c.Name = DefaultName
	}
	c.Backend = c.backend()
	c.Nodes = []Node{{ID: CoordinatorID, Address: control.String(), Role: RoleHybrid, Stage: Unset, Rank: Unset}}
	for i, peer := range peers {
		c.Nodes = append(c.Nodes, Node{ID: fmt.Sprintf("stage-%d", i), Address: peer.String(), Role: RolePipelineStage, Stage: i, Rank: Unset, MemoryBytes: p.memory(i)})
	}
	if len(p.conflicts) > 0 {
		return nil, &ConflictError{p.conflicts}
	}
	if err := c.Validate(); err != nil {
		return nil, &ConflictError{[]Conflict{{err.Error(), fmt.Sprintf("change %s, %s or %s", FlagClusterName, FlagSeeds, FlagControlAddr)}}}
	}
	return &Planned{c, p.notices}, nil
}

type planner struct {
	ctx       context.Context
	req       PlanRequest
	conflicts []Conflict
	notices   []string
}

func (p *planner) conflict(remedy, format string, args ...any) {
	p.conflicts = append(p.conflicts, Conflict{fmt.Sprintf(format, args...), remedy})
}

func (p *planner) notice(format string, args ...any) {
	p.notices = append(p.notices, fmt.Sprintf(format, args...))
}

// peers returns the stages' addresses in order.
func (p *planner) peers() []Address {
	if p.req.Stages < MinStages || p.req.Stages > MaxNodes-1 {
		p.conflict(fmt.Sprintf("give %s a number from %d to %d, or leave it out to serve from one machine", FlagAuto, MinStages, MaxNodes-1),
			"%s is %d: a pipeline has at least two stages", FlagAuto, p.req.Stages)
		return nil
	}
	unique := p.unique()
	if found, want := len(unique), p.req.Stages; found < want {
		p.conflict(p.shortageRemedy(found), "%s %d needs %d peers, found %d of %d%s", FlagAuto, want, want, found, want, p.found(unique))
		return nil
	}
	for _, left := range unique[p.req.Stages:] {
		p.notice("peer %s is not used: %s asks for %d stages, and the first in order are taken", left, FlagAuto, p.req.Stages)
	}
	return unique[:p.req.Stages]
}

// unique returns the usable peers, sorted by their text and each once.
func (p *planner) unique() []Address {
	var all []Address
	for _, text := range p.req.Peers {
		text = strings.TrimSpace(text)
		if text == "" {
			continue // a comma too many
		}
		a, err := ParseAddress(text)
		if err == nil {
			err = a.Reachable()
		}
		if err != nil {
			p.conflict(fmt.Sprintf("correct %s", FlagSeeds), "%v", err)
			continue
		}
		all = append(all, a)
	}
	slices.SortFunc(all, func(a, b Address) int { return strings.Compare(a.String(), b.String()) })
	first := map[string]Address{}
	var out []Address
	for _, a := range all {
		if other, ok := first[a.Key()]; ok {
			p.notice("peer %s counts once: it is %s again", a, other)
			continue
		}
		first[a.Key()] = a
		out = append(out, a)
	}
	return out
}

func (p *planner) found(unique []Address) string {
	texts := make([]string, len(unique))
	for i, a := range unique {
		texts[i] = a.String()
	}
	out := ""
	if len(texts) > 0 {
		out = " (" + strings.Join(texts, ", ") + ")"
	}
	for _, more := range append(slices.Clone(p.notices), p.req.Seen) {
		if more != "" {
			out += "; " + more
		}
	}
	return out
}

func (p *planner) shortageRemedy(found int) string {
	remedy := "name more of them in " + FlagSeeds
	if p.req.Discovered {
		port := p.req.DiscoveryPort
		if port == 0 {
			port = discovery.DefaultPort
		}
		remedy = discovery.Remedy(port)
	}
	if found >= MinStages {
		remedy += fmt.Sprintf(", or lower %s to %d", FlagAuto, found)
	}
	return remedy
}

// control returns the coordinator's control address, with a host that others can reach.
func (p *planner) control(peers []Address) Address {
	text, flag := p.req.ControlAddr, FlagControlAddr
	if text == "" {
		text, flag = net.JoinHostPort(strings.Trim(p.req.HTTPHost, "[]"), strconv.Itoa(DefaultControlPort)), FlagHost
	}
	control, err := ParseAddress(text)
	if err != nil {
		p.conflict("correct "+flag, "%v", err)
		return Address{}
	}
	if control.Wildcard() && len(peers) > 0 {
		control = p.route(control, flag, peers[0])
	}
	if err := control.Reachable(); err != nil && len(p.conflicts) == 0 {
		p.conflict("correct "+flag, "the coordinator's control address %v", err)
	}
	return control
}

// route replaces a wildcard by the address that packets to a peer leave from.
func (p *planner) route(control Address, flag string, peer Address) Address {
	route := p.req.Route
	if route == nil {
		route = RouteTo
	}
	ip, err := route(p.ctx, peer.Host)
	if err != nil {
		p.conflict(fmt.Sprintf("give %s an address of this machine that peers reach", FlagControlAddr),
			"%s is a wildcard, and there is no route to the first peer %s to take an address from: %v", flag, peer, err)
		return control
	}
	out := control.withHost(ip)
	p.notice("the control address is %s, the address of the route to %s, as %s is a wildcard", out, peer, flag)
	return out
}

// collision finds a control address that the HTTP listener or a peer takes, and a peer that the HTTP listener takes.
func (p *planner) collision(control Address, peers []Address) {
	http := Address{Host: strings.Trim(p.req.HTTPHost, "[]"), Port: p.req.HTTPPort}
	if control.Port != 0 && http.overlaps(control) {
		p.conflict(fmt.Sprintf("change %s or %s", FlagControlAddr, FlagPort), "the control address %s collides with the HTTP listen address %s", control, http)
	}
	for _, peer := range peers {
		if control.Port != 0 && peer.Key() == control.Key() {
			p.conflict(fmt.Sprintf("change %s, or the peer's in %s", FlagControlAddr, FlagSeeds), "the control address %s is a peer's", control)
		}
		if http.Port != 0 && peer.Key() == http.Key() {
			p.conflict(fmt.Sprintf("change %s, or the peer's in %s", FlagPort, FlagSeeds), "the HTTP listen address %s is a peer's", http)
		}
	}
}

// memory returns what --stage-memory gives a stage.
func (p *planner) memory(stage int) int64 {
	switch n := len(p.req.Memory); {
	case n == 0:
		return 0
	case n == 1:
		return p.req.Memory[0]
	case n == p.req.Stages:
		return p.req.Memory[stage]
	}
	if stage == 0 {
		p.conflict("give one size, or one for each stage", "%s has %d sizes for %d stages", FlagStageMemory, len(p.req.Memory), p.req.Stages)
	}
	return 0
}

// RouteTo returns the address of this machine that packets to a host leave from. It sends none.
func RouteTo(ctx context.Context, host string) (netip.Addr, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "udp", net.JoinHostPort(host, strconv.Itoa(DefaultControlPort)))
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	return local.Addr().Unmap(), err
}
