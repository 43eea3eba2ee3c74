package chat_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/chat"
)

// Commands that make the test binary a child of its own tests.
const (
	childTrial  = "trial-child"  // what a real command's subcommand does
	childSilent = "silent-child" // is not the right command
	childHangs  = "hanging-child"
	childParent = "trial-parent" // starts a trial that does not end
)

func TestMain(m *testing.M) {
	if len(os.Args) < 2 {
		os.Exit(m.Run())
	}
	switch os.Args[1] {
	case childTrial:
		os.Exit(chat.ProbeMain(os.Stdin, os.Stdout))
	case childSilent:
		os.Exit(0)
	case childHangs:
		time.Sleep(time.Hour)
	case childParent:
		err := chat.Probe(context.Background(), throughPipe(os.Args[2]), endless)
		os.Exit(len(err.Error()) % 2)
	}
	os.Exit(m.Run())
}

const endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"

func trial() []string { return []string{os.Args[0], childTrial} }

// throughPipe is a child that holds the named pipe open for as long as it
// lives.
func throughPipe(pipe string) []string {
	return []string{"/bin/sh", "-c", `exec 9>"$1"; exec "$0" ` + childTrial, os.Args[0], pipe}
}

func TestProbePasses(t *testing.T) {
	for name, source := range map[string]string{
		"plain":        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
		"refuses":      "{{ raise_exception('no') }}",
		"fails":        "{{ nothing() }}",
		"deep but not": "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(100) }}",
	} {
		if err := chat.Probe(t.Context(), trial(), source); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestProbeUnsafe(t *testing.T) {
	for name, c := range map[string]struct{ source, says string }{
		"macro":           {"{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "macros that call one another: more than 200"},
		"range":           {"{{ range(30000000) | length }}", "elements of a range: more than 100000"},
		"stack":           {"{% set x = [] %}{% set _ = x.append(x) %}{% for i in x recursive %}{{ loop(x) }}{% endfor %}", "stack overflow"},
		"memory":          {"{% set n = namespace(x='0123456789abcdef') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}", ""},
		"only with tools": {"{% if tools %}{{ range(30000000) | length }}{% endif %}", "elements of a range"},
	} {
		err := chat.Probe(t.Context(), trial(), c.source)
		var unsafe *chat.UnsafeTemplateError
		if !errors.As(err, &unsafe) || !strings.Contains(unsafe.Reason, c.says) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestProbeDoesNotCompile(t *testing.T) {
	err := chat.Probe(t.Context(), trial(), "{% if %")
	var compile *chat.CompileError
	if !errors.As(err, &compile) {
		t.Errorf("got %v", err)
	}
}

func TestProbeCommands(t *testing.T) {
	var unsafe *chat.UnsafeTemplateError
	if err := chat.Probe(t.Context(), []string{os.Args[0], childSilent}, "x"); !errors.As(err, &unsafe) || !strings.Contains(err.Error(), "the right one") {
		t.Errorf("silent: got %v", err)
	}
	if err := chat.Probe(t.Context(), []string{filepath.Join(t.TempDir(), "missing")}, "x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: got %v", err)
	}
	if err := chat.Probe(t.Context(), nil, "x"); err == nil || errors.As(err, &unsafe) {
		t.Errorf("none: got %v", err)
	}
}

func TestProbeDeadline(t *testing.T) {
	for _, child := range []string{childTrial, childHangs} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		err := chat.Probe(ctx, []string{os.Args[0], child}, endless)
		cancel()
		var unsafe *chat.UnsafeTemplateError
		if !errors.As(err, &unsafe) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v", child, err)
		}
	}
}

// TestProbeCancelled stops a trial in its midst: the child is gone when Probe
// returns, which closes the pipe that it holds.
func TestProbeCancelled(t *testing.T) {
	pipe := newPipe(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := make(chan error, 1)
	go func() { result <- chat.Probe(ctx, throughPipe(pipe), endless) }()
	child, err := os.Open(pipe)
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if _, err := io.ReadAll(child); err != nil {
		t.Error(err)
	}
}

func newPipe(t *testing.T) string {
	t.Helper()
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	return pipe
}

// TestProbeParentKilled kills the parent of a trial: the child ends as well,
// which closes the pipe that it holds.
func TestProbeParentKilled(t *testing.T) {
	pipe := newPipe(t)
	parent := exec.Command(os.Args[0], childParent, pipe)
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	child, err := os.Open(pipe)
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := parent.Wait(); err == nil {
		t.Error("the parent ended before it was killed")
	}
	if _, err := io.ReadAll(child); err != nil {
		t.Error(err)
	}
}

func TestProbeModel(t *testing.T) {
	dir := folder(t, map[string]string{"chat_template.jinja": "F", "additional_chat_templates/bad.jinja": "{{ range(30000000) }}"})
	template, err := chat.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	var unsafe *chat.UnsafeTemplateError
	if err := template.Probe(t.Context(), trial()); !errors.As(err, &unsafe) || !strings.Contains(err.Error(), `"bad"`) {
		t.Errorf("got %v", err)
	}
}
