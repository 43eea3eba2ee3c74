package hosts

import (
	"context"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
)

// each runs a test on both kinds of networks.
func each(t *testing.T, test func(t *testing.T, n *Network)) {
	t.Run("namespaces", func(t *testing.T) { test(t, New(t, "a", "b")) })
	t.Run("loopback", func(t *testing.T) { test(t, Loopback(t, "a", "b")) })
}

func TestAwait(t *testing.T) {
	n := Loopback(t, "a")
	p := actor(t, n.Hosts[0], "log=offer", "log=commit", "log=offer", "log=load a stage", "exit=xxx")
	first := p.Await(t, IsMessage("offer").With("stage", 1))
	if first.Level != "info" || first.Module != "actor" || !reflect.DeepEqual(first.Fields, map[string]any{"stage": 1.0}) {
		t.Errorf("%+v", first)
	}
	if since := time.Since(first.Logged); since < 0 || since > Patience {
		t.Errorf("logged %v ago", since)
	}
	second := p.Await(t, IsMessage("offer")) // the next one, so "commit" is past
	if second.Logged.Before(first.Logged) {
		t.Errorf("%v is before %v", second, first)
	}
	p.Await(t, IsMessage("nothing").Or(Says("load")))
	if code := p.Exit(t); code != 3 {
		t.Errorf("exit code %d", code)
	}
	<-p.Exited()
	if _, err := p.Next(t.Context(), IsMessage("commit")); !errors.Is(err, io.EOF) {
		t.Errorf("%v, want the end of the log", err)
	}
	if got := len(p.Events()); got != 4 {
		t.Errorf("%d events", got)
	}
}

func TestAwaitEndsWithItsContext(t *testing.T) {
	n := Loopback(t, "a")
	p := actor(t, n.Hosts[0], "log=here")
	p.Await(t, Says("here"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Next(ctx, IsMessage("here")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestParseEvent(t *testing.T) {
	now := time.Unix(1, 0)
	logged := time.Date(2024, 1, 2, 3, 4, 5, 678000, time.UTC)
	for _, tc := range []struct {
		line string
		want Event
	}{
		{"plain text", Event{Message: "plain text", Logged: now}},
		{"12", Event{Message: "12", Logged: now}},
		{`{"@level":"warn","@message":"m","@module":"x.y","@timestamp":"2024-01-02T03:04:05.000678Z","node":"n","n":[1]}`,
			Event{Level: "warn", Module: "x.y", Message: "m", Logged: logged, Fields: map[string]any{"node": "n", "n": []any{1.0}}}},
	} {
		tc.want.Line = tc.line
		if got := parseEvent(tc.line, false, now); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%+v, want %+v", got, tc.want)
		}
	}
}

func TestHTTP(t *testing.T) {
	each(t, func(t *testing.T, n *Network) {
		p := actor(t, n.Hosts[0], "http="+n.Hosts[0].LAN(8080))
		url := p.URL(t)
		if want := "http://" + n.Hosts[0].LAN(8080); url != want {
			t.Errorf("%s, want %s", url, want)
		}
		for _, h := range n.Hosts {
			answer, err := h.HTTP().Get(url)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(answer.Body)
			answer.Body.Close()
			if err != nil || answer.StatusCode != http.StatusOK || string(body) != "hello" {
				t.Errorf("%s %q %v", answer.Status, body, err)
			}
		}
	})
}

func TestSignals(t *testing.T) {
	n := Loopback(t, "a")
	p := actor(t, n.Hosts[0], "log=ready")
	p.Await(t, Says("ready"))
	p.Signal(t, syscall.SIGSTOP)
	if one, err := readProcess(p.PID()); err != nil || one.state != "T" {
		t.Errorf("state %q, %v", one.state, err)
	}
	p.Signal(t, syscall.SIGCONT)
	p.Signal(t, syscall.SIGKILL)
	if code := p.Exit(t); code != -1 {
		t.Errorf("exit code %d", code)
	}
}

func TestExecutors(t *testing.T) {
	n := Loopback(t, "a")
	p := actor(t, n.Hosts[0], "child="+program(t, "plugins/toy"), "child="+program(t, ""))
	p.Await(t, Says("born"))
	p.Await(t, Says("born"))
	found := p.Executors(t)
	if len(found) != 1 || found[0].Family != "toy" {
		t.Fatalf("%+v", found)
	}
	found[0].Signal(t, syscall.SIGSTOP)
	if one, err := readProcess(found[0].PID); err != nil || one.state != "T" {
		t.Errorf("state %q, %v", one.state, err)
	}
	found[0].Signal(t, syscall.SIGKILL)
	found[0].AwaitEnd(t)
	if left := p.Executors(t); len(left) != 0 {
		t.Errorf("%+v", left)
	}
}

func TestOwnEnvironment(t *testing.T) {
	t.Setenv("MLXCEL_CLUSTER_SECRET", "of the test's own environment")
	n := Loopback(t, "a", "b")
	for _, h := range n.Hosts {
		env := strings.Join(h.environment(), "\n")
		if strings.Contains(env, "SECRET") || !strings.Contains(env, "TMPDIR="+h.Temp()) || !strings.Contains(env, "HOME="+h.Home()) {
			t.Error(env)
		}
	}
	if n.Hosts[0].Temp() == n.Hosts[1].Temp() {
		t.Error("both have one folder")
	}
}
