package main

import (
	"net/http"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

func absolute(t testing.TB, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// However a server ends, nothing is left of it and of its executors; what a killed one could not remove the next start does.
func TestServerLeavesNothing(t *testing.T) {
	n := hosts.Loopback(t, "only")
	host := n.Host("only")
	serve := func() *hosts.Process {
		p := host.Start(t, hosts.Command{Path: binary(t, "mlxcel-server"), Args: []string{
			"-m", absolute(t, tiny), "--pp-size", "2", "--host", "127.0.0.1", "--port", "0", "--log-format", "json"}})
		r := &running{t: t, url: p.URL(t)}
		r.waitReady()
		if found := p.Executors(t); len(found) != 2 {
			t.Errorf("%d executors, want 2", len(found))
		}
		return p
	}
	p := serve()
	executors := p.Executors(t)
	p.Signal(t, syscall.SIGKILL)
	p.Exit(t)
	for _, e := range executors {
		e.AwaitEnd(t)
	}
	n.CheckNothingLeft(t, nil, hosts.KindProcess, hosts.KindPort, hosts.KindMemory)
	p = serve()
	http.DefaultClient.CloseIdleConnections()
	p.Signal(t, syscall.SIGTERM)
	if code := p.Exit(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	n.CheckNothingLeft(t, nil)
}
