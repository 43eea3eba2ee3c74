package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/mlxcel/mlxcel/host/securelink"
)

// Summary writes a topology for a reader.
func (c *Config) Summary() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Cluster: %s\n", c.Name)
	fmt.Fprintf(&b, "  TP size: %d, PP size: %d\n", c.TensorParallel, c.PipelineParallel)
	fmt.Fprintf(&b, "  Nodes (%d):\n", len(c.Nodes))
	for _, n := range c.ordered() {
		fmt.Fprintf(&b, "    - %s @ %s [%s]\n", n.ID, n.Address, n.Role)
	}
	return b.String()
}

// Probe asks who listens at an address. The error is a *Refusal, wrapped or not, where a node answers that is none of this
// cluster's; any other error is a node that does not answer.
type Probe func(ctx context.Context, address string) (securelink.Identity, error)

// DryRunRequest is a plan to be checked without starting anything.
type DryRunRequest struct {
	Plan    PlanRequest
	Config  *Config // a topology that was read from a file; Plan is not used then
	Version string  // of the program
	Out     string  // where the TOML goes; empty writes none

	// Probe connects to the peers; nil where there is no secret to do it with.
	Probe Probe
	// Bind tells whether this machine could listen at an address; default TryListen.
	Bind func(ctx context.Context, address string) error
}

// DryRun is what came of a request.
type DryRun struct {
	Config    *Config // nil where no plan could be made
	Out       string  // the absolute path of the TOML; empty where none was written
	Notices   []string
	Conflicts []Conflict
}

// RunDry plans, checks and writes the TOML, which is left alone where there are conflicts. The error is of the file only.
func RunDry(ctx context.Context, req DryRunRequest) (*DryRun, error) {
	out := &DryRun{Config: req.Config}
	if req.Config == nil {
		planned, err := Plan(ctx, req.Plan)
		if conflicts, ok := errors.AsType[*ConflictError](err); ok {
			out.Conflicts = conflicts.Conflicts
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		out.Config, out.Notices = planned.Config, planned.Notices
	}
	nodes := out.Config.ordered()
	for i, answer := range ask(ctx, req.Probe, nodes) {
		out.check(ctx, req, nodes[i], answer)
	}
	if req.Out == "" || len(out.Conflicts) > 0 {
		return out, nil
	}
	path, err := filepath.Abs(req.Out)
	if err != nil {
		return nil, err
	}
	out.Out = path
	return out, WriteFile(path, out.Config)
}

// answer is what a probe of a node came to.
type answer struct {
	asked bool
	who   securelink.Identity
	err   error
}

// ask probes all nodes but the coordinator at once.
func ask(ctx context.Context, probe Probe, nodes []Node) []answer {
	answers := make([]answer, len(nodes))
	if probe == nil {
		return answers
	}
	var wg sync.WaitGroup
	for i, n := range nodes {
		if n.Role == RoleHybrid {
			continue
		}
		wg.Go(func() {
			who, err := probe(ctx, n.Address)
			answers[i] = answer{true, who, err}
		})
	}
	wg.Wait()
	return answers
}

// check looks at one node: who listens there, and whether its port is free where it is this machine's.
func (d *DryRun) check(ctx context.Context, req DryRunRequest, n Node, a answer) {
	refusal, refused := errors.AsType[*Refusal](a.err)
	if a.asked && a.err == nil && a.who.Version != req.Version {
		refusal, refused = RefuseVersion(req.Version, a.who.Version), true
	}
	switch {
	case refused:
		d.conflict(refusal.Remedy, "%s @ %s: %s", n.ID, n.Address, refusal.Reason)
		return
	case a.err != nil:
		d.notice("%s @ %s does not answer yet: %v", n.ID, n.Address, a.err)
	case a.asked && a.who.Role == securelink.RoleStage:
		return // the port is held by the very peer that the plan names
	}
	bind := req.Bind
	if bind == nil {
		bind = TryListen
	}
	d.checkPort(bind(ctx, n.Address), n, a.asked)
}

// elsewhere tells whether an address can't be listened on because it is another machine's.
func elsewhere(err error) bool {
	return errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EAFNOSUPPORT)
}

func (d *DryRun) checkPort(err error, n Node, asked bool) {
	dns, isDNS := errors.AsType[*net.DNSError](err)
	switch {
	case err == nil || elsewhere(err):
	case isDNS:
		d.notice("%s @ %s: the name is not known here (%s): the port was not checked", n.ID, n.Address, dns.Err)
	case errors.Is(err, syscall.EADDRINUSE) && n.Role == RoleHybrid:
		d.conflict("stop that process, or give another port with "+FlagControlAddr, "%s @ %s: the TCP port is taken by another process", n.ID, n.Address)
	case errors.Is(err, syscall.EADDRINUSE) && !asked:
		d.conflict(fmt.Sprintf("if that is the node itself, give %s so that it can be asked; else stop that process, or name another port in %s", FlagSecretFile, FlagSeeds),
			"%s @ %s: the TCP port is taken by another process", n.ID, n.Address)
	case errors.Is(err, syscall.EADDRINUSE):
		d.conflict("stop that process, or name another port in "+FlagSeeds, "%s @ %s: the TCP port is taken by another process", n.ID, n.Address)
	default:
		d.conflict("give a port from 1024 on that this user may listen on", "%s @ %s: the port can't be listened on: %v", n.ID, n.Address, err)
	}
}

func (d *DryRun) conflict(remedy, format string, args ...any) {
	d.Conflicts = append(d.Conflicts, Conflict{fmt.Sprintf(format, args...), remedy})
}

func (d *DryRun) notice(format string, args ...any) {
	d.Notices = append(d.Notices, fmt.Sprintf(format, args...))
}

// Text is what the command prints.
func (d *DryRun) Text() string {
	var b strings.Builder
	if d.Config != nil {
		b.WriteString(d.Config.Summary())
	}
	if d.Out != "" {
		fmt.Fprintf(&b, "Emitted cluster TOML at: %s\n", d.Out)
	}
	for _, n := range d.Notices {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	if len(d.Conflicts) > 0 {
		fmt.Fprintf(&b, "Conflicts (%d), no cluster TOML written:\n", len(d.Conflicts))
	}
	for _, c := range d.Conflicts {
		fmt.Fprintf(&b, "  - %s\n    remedy: %s\n", strings.ReplaceAll(c.What, "\n", "\n    "), c.Remedy)
	}
	return b.String()
}

// Err returns the conflicts, nil if there are none.
func (d *DryRun) Err() error {
	if len(d.Conflicts) == 0 {
		return nil
	}
	return &ConflictError{d.Conflicts}
}

// TryListen listens at a TCP address for a moment.
func TryListen(ctx context.Context, address string) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return l.Close()
}

// WriteFile writes a topology's TOML, whole or not at all. A file that holds the same bytes already is not touched.
func WriteFile(path string, c *Config) error {
	raw := c.Render()
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, raw) {
		return nil
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", FlagConfigOut, err)
	}
	if err := replaceFile(path, raw); err != nil {
		return fmt.Errorf("%s: %w", FlagConfigOut, err)
	}
	return nil
}

func replaceFile(path string, raw []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".cluster-*.toml")
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
