package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// These tests run the program as a user does: the built binary with the built executors, over HTTP.
const (
	root    = "../.."
	tiny    = root + "/testdata/parity/llama-tied-q4"
	patient = 2 * time.Minute // for what must happen at all; nothing is measured by it
)

func binary(t testing.TB, name string) string {
	t.Helper()
	path, err := filepath.Abs(root + "/bin/" + name)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("%v; run make build", err)
	}
	return path
}

// running is a server that was started.
type running struct {
	t    testing.TB
	cmd  *exec.Cmd
	url  string
	http http.Client
	log  *bytes.Buffer // complete once the process has ended
	done chan error
}

// start runs a server on a free port and waits until it is ready.
func start(t testing.TB, program []string, args ...string) *running {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patient)
	args = slices.Concat(program[1:], []string{"--port", "0"}, args)
	r := &running{t: t, cmd: exec.CommandContext(ctx, binary(t, program[0]), args...), log: &bytes.Buffer{}, done: make(chan error, 1)}
	r.cmd.Stderr = r.log
	out, err := r.cmd.StdoutPipe()
	if err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	lines := bufio.NewReader(out)
	first, _ := lines.ReadString('\n')
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, lines)
		r.done <- r.cmd.Wait()
	}()
	var ok bool
	if r.url, ok = strings.CutPrefix(strings.TrimSpace(first), "listening on "); !ok {
		cancel()
		<-ended
		t.Fatalf("the server began with %q: %s", first, r.log)
	}
	r.waitReady()
	return r
}

func server(t testing.TB, args ...string) *running {
	return start(t, []string{"mlxcel-server"}, append([]string{"-m", tiny}, args...)...)
}

// waitReady asks until the server takes requests.
func (r *running) waitReady() {
	r.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patient); time.Now().Before(deadline); <-tick.C {
		if status, _ := r.get("/health"); status == http.StatusOK {
			return
		}
	}
	r.t.Fatal("the server does not become ready")
}

// exit waits for the process and returns its exit code.
func (r *running) exit() int {
	r.t.Helper()
	select {
	case <-r.done:
		return r.cmd.ProcessState.ExitCode()
	case <-time.After(patient):
		r.t.Fatal("the server does not end")
		return -1
	}
}

func (r *running) get(path string) (int, string) {
	answer, err := r.http.Get(r.url + path)
	if err != nil {
		return 0, err.Error()
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	return answer.StatusCode, string(body)
}

func (r *running) open(body string) *http.Response {
	r.t.Helper()
	answer, err := r.http.Post(r.url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	return answer
}

func (r *running) complete(body string) (int, string) {
	r.t.Helper()
	answer := r.open(body)
	defer answer.Body.Close()
	raw, err := io.ReadAll(answer.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return answer.StatusCode, string(raw)
}

// text runs a prompt and returns the answer.
func (r *running) text(prompt, more string) string {
	status, body := r.complete(fmt.Sprintf(`{"prompt":%q,"max_tokens":24,"ignore_eos":true%s}`, prompt, more))
	var a struct {
		Choices []struct{ Text string }
	}
	if err := json.Unmarshal([]byte(body), &a); err != nil || status != http.StatusOK {
		r.t.Errorf("%d %s", status, body)
		return ""
	}
	return a.Choices[0].Text
}

// What runs beside a request changes nothing about its answer.
func TestConcurrentAnswersAreThoseAlone(t *testing.T) {
	r := server(t, "--pp-size", "2", "--parallel", "12")
	const n = 32
	ask := func(i int) string {
		more := `,"temperature":0`
		if i%2 == 1 {
			more = fmt.Sprintf(`,"temperature":1,"top_p":0.9,"seed":%d,"presence_penalty":0.5`, i)
		}
		return r.text(strings.Repeat(fmt.Sprintf("Number %d. ", i), 1+i%7), more)
	}
	var alone, together [n]string
	for i := range n {
		alone[i] = ask(i)
	}
	var wait sync.WaitGroup
	for i := range n {
		wait.Go(func() { together[i] = ask(i) })
	}
	wait.Wait()
	if alone != together {
		t.Errorf("alone:\n%q\ntogether:\n%q", alone, together)
	}
}

func TestServeIsTheSameServer(t *testing.T) {
	r := start(t, []string{"mlxcel", "serve"}, "-m", tiny, "--alias", "other,name", "--no-warmup")
	if status, body := r.get("/v1/models/name"); status != http.StatusOK {
		t.Errorf("%d %s", status, body)
	}
	if text := r.text("x", ""); text == "" {
		t.Error("no answer")
	}
}

// A port of its own is for metrics alone, and the main one then has none.
func TestMetricsHaveTheirOwnListener(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().(*net.TCPAddr)
	free.Close()
	r := server(t, "--metrics-port", fmt.Sprint(addr.Port))
	r.text("x", "")
	if status, _ := r.get("/metrics"); status != http.StatusNotFound {
		t.Errorf("status %d on the main port", status)
	}
	apart := &running{t: t, url: "http://" + addr.String()}
	if _, body := apart.get("/metrics"); !strings.Contains(body, `mlxcel_http_requests_total{route="v1/completions",status="200"} 1`) {
		t.Error(body)
	}
	if status, _ := apart.get("/v1/models"); status != http.StatusNotFound {
		t.Errorf("status %d for models on the metrics port", status)
	}
}

// The first signal lets what runs come to its end and takes nothing new.
func TestSignalDrains(t *testing.T) {
	r := server(t)
	answer := r.open(`{"prompt":"x","stream":true,"ignore_eos":true,"max_tokens":2000}`)
	defer answer.Body.Close()
	stream := bufio.NewReader(answer.Body)
	if _, err := stream.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for status := http.StatusOK; status == http.StatusOK; { // the signal is on its way
		status, _ = r.get("/health")
	}
	rest, err := io.ReadAll(stream)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the stream ends with %q, %v", rest[max(0, len(rest)-200):], err)
	}
	if code := r.exit(); code != 0 {
		t.Errorf("exit code %d: %s", code, r.log)
	}
}

// The second one does not wait.
func TestSecondSignalStops(t *testing.T) {
	r := server(t, "--timeout", "0")
	answer := r.open(`{"prompt":"x","stream":true,"ignore_eos":true,"max_tokens":4000}`)
	defer answer.Body.Close()
	stream := bufio.NewReader(answer.Body)
	if _, err := stream.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	for status := http.StatusOK; status == http.StatusOK; {
		status, _ = r.get("/health")
	}
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	if code := r.exit(); code != 0 {
		t.Errorf("exit code %d: %s", code, r.log)
	}
	rest, _ := io.ReadAll(stream)
	if strings.Contains(string(rest), "[DONE]") {
		t.Error("the answer came to its end")
	}
}

func TestWarnsWhenEveryoneMayCall(t *testing.T) {
	const warning = "everyone who reaches this address can use the server"
	key := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(key, []byte("k\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		want bool
	}{{[]string{"--host", "0.0.0.0"}, true}, {nil, false}, {[]string{"--host", "0.0.0.0", "--api-key-file", key}, false}} {
		r := server(t, append(tc.args, "--no-warmup")...)
		_ = r.cmd.Process.Signal(syscall.SIGTERM)
		if code := r.exit(); code != 0 || strings.Contains(r.log.String(), warning) != tc.want {
			t.Errorf("%v: exit code %d, log %s", tc.args, code, r.log)
		}
	}
}

func TestStartFailsWithReasons(t *testing.T) {
	taken := server(t)
	_, port, _ := strings.Cut(strings.TrimPrefix(taken.url, "http://"), ":")
	for _, tc := range []struct {
		args []string
		says string
	}{
		{nil, "no model: give --model FOLDER"},
		{[]string{"-m", "nowhere", "--port", "0"}, "nowhere: no such model folder"},
		{[]string{"-m", tiny, "--port", port}, "--port " + port},
		{[]string{"-m", tiny, "--port", "0", "--kv-budget", "1GiB,1GiB"}, "2 sizes for 1 stages"},
		{[]string{"-m", tiny, "--nonsense"}, "nonsense"},
	} {
		out, err := exec.CommandContext(t.Context(), binary(t, "mlxcel-server"), tc.args...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), tc.says) {
			t.Errorf("%v: %v, %s", tc.args, err, out)
		}
	}
	if out, err := exec.CommandContext(t.Context(), binary(t, "mlxcel-server"), "--version").Output(); err != nil || !strings.HasPrefix(string(out), "mlxcel-server version ") {
		t.Errorf("%s, %v", out, err)
	}
}
