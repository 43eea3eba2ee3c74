package doctor

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/securelink"
)

// These tests look at this host, and at nodes that they start on it.

func secretOf(t *testing.T, text string) securelink.Secret {
	t.Helper()
	s, err := securelink.NewSecret([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// node serves a coordinator's status until the test ends.
func node(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg := securelink.ListenerConfig{Config: securelink.Config{
		Secret: secretOf(t, secretText), Self: securelink.Identity{NodeID: "coordinator", Cluster: "test", Version: "v1"},
	}}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		status := func() bringup.Status {
			return bringup.Status{Cluster: "test", Node: "coordinator", Version: "v1", Role: "coordinator", Phase: bringup.PhaseReady}
		}
		if err := bringup.ServeStatus(ctx, cfg, l, status); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); done.Wait() })
	return l.Addr().String()
}

func probesFor(clusterName, version string) Probes {
	return System(SystemConfig{Self: securelink.Identity{NodeID: "tool", Cluster: clusterName, Version: version}})
}

func TestAsk(t *testing.T) {
	address := node(t)
	c, err := probesFor("test", "v1").Ask(t.Context(), secretOf(t, secretText), address)
	if err != nil {
		t.Fatal(err)
	}
	if c.Node != "coordinator" || c.Role != "coordinator" || c.Phase != "ready" || c.Remote.String() != address || !c.Local.IsLoopback() {
		t.Errorf("contact %+v", c)
	}
	if c.RoundTrip <= 0 || c.FullSize != nil || (c.PathMTU > 0) != (runtime.GOOS == "linux") {
		t.Errorf("contact %+v", c)
	}
}

func TestAskIsRefused(t *testing.T) {
	address := node(t)
	for name, tc := range map[string]struct {
		cluster, version, secret string
		code                     cluster.Code
	}{
		"secret":  {"test", "v1", "another sixteen bytes", cluster.CodeSecret},
		"version": {"test", "v2", secretText, cluster.CodeVersion},
		"cluster": {"other", "v1", secretText, cluster.CodeCluster},
	} {
		_, err := probesFor(tc.cluster, tc.version).Ask(t.Context(), secretOf(t, tc.secret), address)
		if r := cluster.FromHandshake(err); r == nil || r.Code != tc.code {
			t.Errorf("%s: %v, want a refusal of code %s", name, err, tc.code)
		}
	}
}

// narrow forwards connections, and breaks those on which much is sent to the node.
func narrow(t *testing.T, to string, most int64) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				t.Error(err)
				in.Close()
				return
			}
			all.Go(func() { io.CopyN(out, in, most); in.Close(); out.Close() })
			all.Go(func() { io.Copy(in, out); in.Close(); out.Close() })
		}
	})
	t.Cleanup(func() { l.Close(); all.Wait() })
	return l.Addr().String()
}

func TestAskFindsThatLargePacketsAreLost(t *testing.T) {
	address := narrow(t, node(t), 9000)
	c, err := probesFor("test", "v1").Ask(t.Context(), secretOf(t, secretText), address)
	if err != nil {
		t.Fatal(err)
	}
	if c.FullSize == nil {
		t.Errorf("contact %+v, want an error of large packets", c)
	}
}

func TestListen(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := probesFor("test", "v1")
	for _, taken := range []net.Addr{tcp.Addr(), udp.LocalAddr()} {
		if err := p.Listen(t.Context(), taken.Network(), taken.String()); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("%s %s: %v, want %v", taken.Network(), taken, err, syscall.EADDRINUSE)
		}
		if err := p.Listen(t.Context(), taken.Network(), "127.0.0.1:0"); err != nil {
			t.Error(err)
		}
		holder, err := p.Holder(taken.Network(), netip.MustParseAddrPort(taken.String()))
		if (err == nil) != (runtime.GOOS == "linux") {
			t.Errorf("%s %s: held by %v, %v", taken.Network(), taken, holder, err)
		}
	}
	if err := errors.Join(tcp.Close(), udp.Close()); err != nil {
		t.Error(err)
	}
}
