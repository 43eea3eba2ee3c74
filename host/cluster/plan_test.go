package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/securelink"
)

// TestDryRuns runs the files of testdata/dryrun. The machine has the address 192.168.1.10, its HTTP listener is at 127.0.0.1:8080.
//
//	dryrun [stages=<n>] [name=<name>] [host=<host>] [port=<n>] [control=<addr>] [memory=<sizes>] [busy=<addr>] [discovered] [routeless]
//	[probe] the input's lines are "<peer> [version=<v> | refuses | coordinator | silent]"
//
// prints what the command does, and with `toml` the file that it writes.
func TestDryRuns(t *testing.T) {
	datadriven.Walk(t, "testdata/dryrun", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			req := scanDryRun(t, d)
			out, err := RunDry(t.Context(), req)
			if err != nil {
				return err.Error() + "\n"
			}
			if (out.Err() == nil) != (len(out.Conflicts) == 0) {
				t.Errorf("%s: %d conflicts and error %v", d.Pos, len(out.Conflicts), out.Err())
			}
			text := strings.ReplaceAll(out.Text(), filepath.Dir(filepath.Dir(req.Out)), "<here>")
			if d.HasArg("toml") {
				raw, err := os.ReadFile(req.Out)
				if err != nil {
					t.Errorf("%s: %v", d.Pos, err)
				}
				text += string(raw)
			}
			return text
		})
	})
}

func scanDryRun(t *testing.T, d *datadriven.TestData) DryRunRequest {
	plan := PlanRequest{Stages: 2, HTTPHost: "127.0.0.1", HTTPPort: 8080}
	var memory, busy string
	for key, dest := range map[string]any{"stages": &plan.Stages, "name": &plan.Name, "host": &plan.HTTPHost, "port": &plan.HTTPPort,
		"control": &plan.ControlAddr, "memory": &memory, "busy": &busy, "seen": &plan.Seen} {
		d.MaybeScanArgs(t, key, dest)
	}
	if memory != "" {
		sizes, err := partition.ParseStageMemory(memory)
		if err != nil {
			t.Fatal(err)
		}
		plan.Memory = sizes
	}
	plan.Discovered = d.HasArg("discovered")
	plan.Route = func(_ context.Context, host string) (netip.Addr, error) {
		if d.HasArg("routeless") {
			return netip.Addr{}, fmt.Errorf("no route to %s", host)
		}
		return netip.MustParseAddr("192.168.1.10"), nil
	}
	req := DryRunRequest{Version: "1.0", Out: filepath.Join(t.TempDir(), ".mlxcel", "cluster.toml")}
	answers := map[string]string{}
	for line := range strings.Lines(d.Input) {
		peer, answer, _ := strings.Cut(strings.TrimSpace(line), " ")
		plan.Peers = append(plan.Peers, peer)
		answers[peer] = answer
	}
	if d.HasArg("probe") {
		req.Probe = func(_ context.Context, address string) (securelink.Identity, error) { return probe(answers[address]) }
	}
	req.Plan, req.Bind = plan, func(_ context.Context, address string) error { return bind(address, busy) }
	return req
}

func probe(answer string) (securelink.Identity, error) {
	who := securelink.Identity{Role: securelink.RoleStage, NodeID: "x", Version: "1.0"}
	switch {
	case answer == "refuses":
		return who, fmt.Errorf("probe: %w", RefuseCluster("a", "b"))
	case answer == "silent":
		return who, errors.New("connection refused")
	case answer == "coordinator":
		who.Role = securelink.RoleCoordinator
	case answer != "":
		who.Version = strings.TrimPrefix(answer, "version=")
	}
	return who, nil
}

func bind(address, busy string) error {
	host, _, err := net.SplitHostPort(address)
	switch {
	case err != nil:
		return err
	case address == busy:
		return &net.OpError{Op: "listen", Err: os.NewSyscallError("bind", syscall.EADDRINUSE)}
	case strings.HasSuffix(host, ".invalid"):
		return &net.DNSError{Err: "no such host", Name: host}
	case host != "127.0.0.1" && host != "192.168.1.10":
		return &net.OpError{Op: "listen", Err: os.NewSyscallError("bind", syscall.EADDRNOTAVAIL)}
	case strings.HasSuffix(address, ":80"):
		return &net.OpError{Op: "listen", Err: os.NewSyscallError("bind", syscall.EACCES)}
	}
	return nil
}

// The same peers give the same bytes, whatever their order and however often.
func TestPlansAreByteIdentical(t *testing.T) {
	peers := []string{"192.168.1.9:19001", "192.168.1.11:19001", "studio-2.local:19001", "Studio-1.local:19001", "[fd00::2]:19001", "[FD00::2]:19001", "192.168.1.11:19002"}
	var first []byte
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		random.Shuffle(len(peers), func(i, j int) { peers[i], peers[j] = peers[j], peers[i] })
		planned, err := Plan(t.Context(), PlanRequest{Stages: 6, Peers: peers, ControlAddr: "192.168.1.10:19000", HTTPHost: "127.0.0.1", HTTPPort: 8080})
		if err != nil {
			t.Fatal(err)
		}
		raw := planned.Config.Render()
		if first == nil {
			first = raw
		}
		if !bytes.Equal(raw, first) {
			t.Fatalf("peers %q give\n%s\nthe first order gave\n%s", peers, raw, first)
		}
	}
	again, err := Parse(first, "")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(again.Render(), first) {
		t.Error("the file is written otherwise than it was read")
	}
}

func TestWriteFile(t *testing.T) {
	c := mustParse(t, twoStages)
	path := filepath.Join(t.TempDir(), "a", "b", "cluster.toml")
	for range 2 {
		if err := WriteFile(path, c); err != nil {
			t.Fatal(err)
		}
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, c); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("a file with the same bytes is replaced: %v", err)
	}
	c.Name = "other"
	if err := WriteFile(path, c); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(raw, c.Render()) {
		t.Errorf("%v\n%s", err, raw)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("files left behind: %v, %v", entries, err)
	}
	if err := WriteFile(filepath.Join(path, "x.toml"), c); err == nil || !strings.Contains(err.Error(), FlagConfigOut) {
		t.Errorf("under a file: %v", err)
	}
}

// The real checks of ports and routes, on loopback.
func TestPortsAndRoutes(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	taken := l.Addr().String()
	if err := TryListen(t.Context(), taken); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a taken port: %v", err)
	}
	l.Close()
	if err := TryListen(t.Context(), taken); err != nil {
		t.Errorf("a free port: %v", err)
	}
	if ip, err := RouteTo(t.Context(), "127.0.0.1"); err != nil || !ip.IsLoopback() {
		t.Errorf("route to loopback: %s, %v", ip, err)
	}
}
