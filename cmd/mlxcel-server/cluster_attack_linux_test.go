package main

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

// otherVersion builds the server as another version of itself.
func otherVersion(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mlxcel-server")
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-X main.version=v0.0.0-other", "-o", path, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// otherModel copies a model and changes a byte that no reader of JSON sees.
func otherModel(t *testing.T, folder string) string {
	t.Helper()
	changed := t.TempDir()
	if err := os.CopyFS(changed, os.DirFS(folder)); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(changed, "config.json")
	raw, err := os.ReadFile(config)
	if err == nil {
		err = os.WriteFile(config, append(raw, '\n'), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

// bare copies the server to where no executors are.
func bare(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mlxcel-server")
	raw, err := os.ReadFile(binary(t, "mlxcel-server"))
	if err == nil {
		err = os.WriteFile(path, raw, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// A node that does not fit is refused with a reason that names what is wanted, what is there and what to change, in the logs of
// both sides; nothing starts anywhere, and the very next bring-up with the right node works.
func TestClusterRefusals(t *testing.T) {
	_, version, _ := strings.Cut(output(t, "mlxcel-server", "--version"), "version ")
	version = strings.TrimSpace(version)
	for _, tc := range []struct {
		name        string
		program     func(*testing.T) string
		args        func(*testing.T) []string
		coordinator []string // what it must say
		peer        []string
	}{
		{"secret", nil, func(t *testing.T) []string {
			return []string{"--cluster-secret-file", secretFile(t, "quite another secret")}
		},
			[]string{"the cluster secrets differ", "--cluster-secret-file", "MLXCEL_CLUSTER_SECRET_FILE", "MLXCEL_CLUSTER_SECRET", "secret_file"}, []string{"secret"}},
		{"program version", otherVersion, nil,
			[]string{"v0.0.0-other", version, "install the same version"}, []string{"v0.0.0-other", version}},
		{"cluster name", nil, func(*testing.T) []string { return []string{"--cluster-name", "elsewhere"} },
			[]string{`"elsewhere"`, `"mlxcel-cluster"`, "--cluster-name"}, []string{`"elsewhere"`, `"mlxcel-cluster"`}},
		{"model", nil, func(t *testing.T) []string { return []string{"-m", otherModel(t, tiny)} },
			[]string{"the model differs", "config.json"}, []string{"the model differs", "config.json"}},
		{"capability", bare, nil,
			[]string{"pipeline capability mismatch", "family llama", "no executors", "drop", "--plugin-dir"}, []string{"no executor"}},
		{"memory", nil, nil, []string{"stage 1", "short"}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCluster(t, hosts.Either(t, clusterHosts(2)...), tiny)
			c.startPeer(0)
			odd := hosts.Command{Path: binary(t, "mlxcel-server"), Args: []string{"-m", c.model, "--cluster-secret-file", c.secret,
				"--log-format", "json", "--verbose", "--pp-peer", "--cluster-control-addr", c.peerAddress(1)}}
			if tc.program != nil {
				odd.Path = tc.program(t)
			}
			if tc.args != nil {
				odd.Args = append(odd.Args, tc.args(t)...)
			}
			c.peers[1] = c.run(c.peerHost(1), odd)
			for _, p := range c.peers {
				p.Await(t, isWaiting)
			}
			var more []string
			if tc.name == "memory" {
				more = []string{"--stage-memory", "1GiB,1KiB"}
			}
			c.startCoordinator(more...)
			if code := c.coordinator.Exit(t); code != 1 {
				t.Errorf("the coordinator ends with exit code %d", code)
			}
			saysAll(t, c.coordinator, tc.coordinator)
			saysAll(t, c.peers[1], tc.peer)
			for _, p := range c.peers {
				if says(p, `"phase":"loading"`) || says(p, `"phase":"committed"`) {
					t.Errorf("%s has begun its stage", p)
				}
			}
			c.peers[1].Signal(t, syscall.SIGTERM)
			if code := c.peers[1].Exit(t); code != 0 {
				t.Errorf("the odd peer ends with exit code %d", code)
			}
			c.startPeer(1).Await(t, isWaiting)
			c.startCoordinator()
			if text := c.ready().text("x", ""); text == "" {
				t.Error("no answer")
			}
			c.stop()
		})
	}
}

// output runs a program to its end.
func output(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), binary(t, program), args...).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func says(p *hosts.Process, text string) bool {
	return slices.ContainsFunc(p.Events(), func(e hosts.Event) bool { return strings.Contains(e.Line, text) })
}

// saysAll checks that one line of a log, unquoted, has all texts.
func saysAll(t *testing.T, p *hosts.Process, texts []string) {
	t.Helper()
	all := func(e hosts.Event) bool {
		line := strings.ReplaceAll(e.Line, `\"`, `"`)
		return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) })
	}
	if len(texts) > 0 && !slices.ContainsFunc(p.Events(), all) {
		t.Errorf("%s has no line with %q", p, texts)
	}
}

// A peer serves one coordinator. Another one waits, and is told for whom.
func TestClusterIsBusy(t *testing.T) {
	n := hosts.Either(t, append(clusterHosts(2), "second")...)
	c := newCluster(t, n, tiny)
	r := c.bringUp()
	second := c.start(n.Host("second"), "--pp-auto", "2", "--cluster-peers", c.peerAddress(0)+","+c.peerAddress(1),
		"--cluster-control-addr", n.Host("second").LAN(controlPort), "--port", "0")
	told := second.Await(t, hosts.IsMessage("waiting for a peer"))
	if reason := fmt.Sprint(told.Fields["error"]); !strings.Contains(reason, "serves coordinator coordinator") || !strings.Contains(reason, "use another node") {
		t.Errorf("the second coordinator is told %s", reason)
	}
	if text := r.text("x", ""); text == "" {
		t.Error("no answer beside a second coordinator")
	}
	second.Signal(t, syscall.SIGTERM)
	if code := second.Exit(t); code != 0 {
		t.Errorf("the second coordinator ends with exit code %d", code)
	}
	c.stop()
}

// Whoever reaches the ports and has no secret can't disturb a cluster that serves, nor keep an honest node out.
func TestClusterUnderAttack(t *testing.T) {
	n := hosts.Either(t, append(clusterHosts(2), "attacker")...)
	c := newCluster(t, n, tiny)
	r := c.bringUp()
	want := r.choices("x")
	attacker := n.Host("attacker")
	targets := []string{c.peerAddress(0), c.peerAddress(1), n.Host(coordinatorHost).LAN(controlPort)}
	check := func(during string) {
		t.Helper()
		if got := r.choices("x"); got != want {
			t.Errorf("%s the answer is\n%s\nbefore\n%s", during, got, want)
		}
		for _, target := range targets {
			status := n.Host(coordinatorHost).Start(t, hosts.Command{Path: binary(t, "mlxcel"), Args: []string{
				"cluster", "status", "--cluster-control-addr", target, "--cluster-secret-file", c.secret}})
			if code := status.Exit(t); code != 0 {
				t.Errorf("%s the node at %s does not answer: exit code %d", during, target, code)
			}
		}
	}
	check("before the attack")
	var all sync.WaitGroup
	for _, target := range targets {
		all.Go(func() { throwBytes(t, attacker, target) })
	}
	all.Wait()
	check("after random bytes")
	open := halfOpen(t, attacker, targets[0], 10_000)
	check("with 10,000 half-open connections")
	for _, conn := range open {
		conn.Close()
	}
	const bounded = 1000 // lines
	for _, p := range c.all {
		lines := 0
		for _, e := range p.Events() {
			if e.Message == "refused a connection" {
				lines++
			}
		}
		if lines == 0 || lines > bounded {
			t.Errorf("%s tells of %d connections that it refused, want some, and %d at most", p, lines, bounded)
		}
	}
	c.stop()
}

// throwBytes opens connections and sends bytes of which some begin like a hello; every one is closed soon.
func throwBytes(t *testing.T, from *hosts.Host, target string) {
	t.Helper()
	random := rand.New(rand.NewPCG(1, 2))
	const hello = "mlxcel\x05\x00" // how one begins, of this version of the protocol
	var all sync.WaitGroup
	for i := range 100 {
		noise := make([]byte, random.IntN(4096))
		for j := range noise {
			noise[j] = byte(random.Uint32())
		}
		if i%2 == 0 {
			copy(noise, hello)
		}
		all.Go(func() {
			conn, err := from.Dial(t.Context(), "tcp", target)
			if err != nil {
				t.Errorf("%s: %v", target, err)
				return
			}
			defer conn.Close()
			_, _ = conn.Write(noise) // it may have been closed
			_ = conn.SetReadDeadline(time.Now().Add(hosts.Patience))
			if n, err := io.Copy(io.Discard, conn); isTimeout(err) || n > 1024 {
				t.Errorf("%s answers %d random bytes with %d, %v", target, len(noise), n, err)
			}
		})
	}
	all.Wait()
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error)
	return ok && timeout.Timeout()
}

// halfOpen opens connections and says nothing on them.
func halfOpen(t *testing.T, from *hosts.Host, target string, n int) []net.Conn {
	t.Helper()
	const atOnce = 64
	var mu sync.Mutex
	var open []net.Conn
	t.Cleanup(func() {
		for _, conn := range open {
			conn.Close()
		}
	})
	next := make(chan struct{})
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() {
			for range next {
				conn, err := from.Dial(t.Context(), "tcp", target)
				if err != nil {
					t.Errorf("%s: %v", target, err)
					continue
				}
				mu.Lock()
				open = append(open, conn)
				mu.Unlock()
			}
		})
	}
	for range n {
		next <- struct{}{}
	}
	close(next)
	all.Wait()
	return open
}

// The secret is in the environment of who was given it there, and nowhere else: not of executors, not in an argument, a log or a file.
func TestSecretStaysInside(t *testing.T) {
	c := newCluster(t, hosts.Either(t, clusterHosts(2)...), tiny)
	raw, err := os.ReadFile(c.secret)
	if err != nil {
		t.Fatal(err)
	}
	for i := range c.peers {
		c.peers[i] = c.run(c.peerHost(i), hosts.Command{Path: binary(t, "mlxcel-server"), Env: []string{"MLXCEL_CLUSTER_SECRET=" + strings.TrimSpace(string(raw))},
			Args: []string{"-m", c.model, "--log-format", "json", "--verbose", "--pp-peer", "--cluster-control-addr", c.peerAddress(i)}})
		c.peers[i].Await(t, isWaiting)
	}
	c.startCoordinator()
	r := c.ready()
	for _, p := range c.all {
		checkProcess(t, p.PID(), "cmdline", raw)
		for _, e := range p.Executors(t) {
			checkProcess(t, e.PID, "cmdline", raw)
			checkProcess(t, e.PID, "environ", raw)
		}
	}
	for _, path := range []string{"/v1/models", "/metrics", "/health", "/props"} {
		if _, body := r.get(path); strings.Contains(body, strings.TrimSpace(string(raw))) {
			t.Errorf("%s tells the secret", path)
		}
	}
	c.stop()
}

func checkProcess(t *testing.T, pid int, file string, secret []byte) {
	t.Helper()
	held, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		t.Fatal(err)
	}
	if len(held) == 0 || bytes.Contains(held, bytes.TrimSpace(secret)) {
		t.Errorf("process %d has the secret in %s (%d bytes)", pid, file, len(held))
	}
}

// No role of a cluster starts without a secret, and each says where it is looked for.
func TestNoSecretNoStart(t *testing.T) {
	loose := secretFile(t, "a secret that everybody can read")
	if err := os.Chmod(loose, 0o644); err != nil {
		t.Fatal(err)
	}
	ways := []string{"--cluster-secret-file", "MLXCEL_CLUSTER_SECRET_FILE", "MLXCEL_CLUSTER_SECRET", "secret_file", "mlxcel cluster secret new"}
	c := newCluster(t, hosts.Loopback(t, clusterHosts(2)...), tiny)
	for _, tc := range []struct {
		name string
		args []string
		says []string
	}{
		{"peer", []string{"--pp-peer", "--cluster-control-addr", c.peerAddress(0)}, ways},
		{"coordinator", []string{"--pp-auto", "2", "--cluster-peers", c.peerAddress(0) + "," + c.peerAddress(1)}, ways},
		{"stage of a file", []string{"--distributed-config", c.topology(), "--node-id", "stage-0"}, ways},
		{"coordinator of a file", []string{"--distributed-config", c.topology(), "--node-id", "coordinator"}, ways},
		{"short", []string{"--pp-peer", "--cluster-control-addr", c.peerAddress(0), "--cluster-secret-file", secretFile(t, "short")}, []string{"has 5 bytes, want at least 16"}},
		{"loose", []string{"--pp-peer", "--cluster-control-addr", c.peerAddress(0), "--cluster-secret-file", loose}, []string{"chmod", "--allow-loose-secret"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := c.run(c.net.Hosts[0], hosts.Command{Path: binary(t, "mlxcel-server"), Args: append([]string{"-m", c.model, "--port", "0"}, tc.args...)})
			if code := p.Exit(t); code != 1 {
				t.Errorf("exit code %d", code)
			}
			var text strings.Builder
			for _, e := range p.Events() {
				text.WriteString(e.Line + "\n")
			}
			for _, want := range tc.says {
				if !strings.Contains(text.String(), want) {
					t.Errorf("it says %q, without %q", text.String(), want)
				}
			}
		})
	}
}
