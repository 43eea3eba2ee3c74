package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// running is a generate command that is under way.
type running struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  *bufio.Reader
	errs bytes.Buffer
	tmp  string // its TMPDIR, where run folders are
}

func start(t *testing.T, args ...string) *running {
	t.Helper()
	r := &running{t: t, tmp: t.TempDir()}
	r.cmd = exec.CommandContext(t.Context(), binary(t), append([]string{"generate", "--ignore-eos"}, args...)...)
	r.cmd.Env = append(os.Environ(), "TMPDIR="+r.tmp)
	r.cmd.Stderr = &r.errs
	out, err := r.cmd.StdoutPipe()
	if err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	r.out = bufio.NewReader(out)
	return r
}

// read waits for n bytes of the answer.
func (r *running) read(n int) {
	r.t.Helper()
	if got, err := io.CopyN(io.Discard, r.out, int64(n)); err != nil {
		r.t.Fatalf("after %d bytes of the answer: %v: %s", got, err, r.errs.String())
	}
}

// executors returns the process ids of the executors by parent.
func (r *running) executors() []int {
	var pids []int
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		raw, err := os.ReadFile(path)
		if err != nil {
			continue // it has just ended
		}
		// "pid (name) state ppid …"; the name may hold anything.
		_, rest, ok := strings.Cut(string(raw), ") ")
		fields := strings.Fields(rest)
		if ok && len(fields) > 1 && fields[1] == strconv.Itoa(r.cmd.Process.Pid) && fields[0] != "Z" {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	return pids
}

func resident(t *testing.T, pid int) int64 {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(raw))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

// gone waits until none of the processes runs.
func gone(t *testing.T, pids []int) {
	t.Helper()
	const patience = 20 * time.Second
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0) // they are no children of ours, so there is nothing to Wait for
		if err == unix.ESRCH {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(patience.Milliseconds()))
		unix.Close(fd)
		if err != nil || n != 1 {
			t.Fatalf("executor %d still runs (%v)", pid, err)
		}
	}
}

func tinyArgs(more ...string) []string {
	return append([]string{"-m", tiny, "--prompt-ids", "312,51,259"}, more...)
}

// TestKilledHost: executors end with their host, however it ends, and the next run sweeps what it left.
func TestKilledHost(t *testing.T) {
	r := start(t, tinyArgs("-n", "4000", "--pp-size", "2")...)
	r.read(20)
	pids := r.executors()
	if len(pids) != 2 {
		t.Fatalf("%d executors, want 2", len(pids))
	}
	if err := r.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = r.cmd.Wait()
	gone(t, pids)
	next := exec.CommandContext(t.Context(), binary(t), "plugins")
	next.Env = append(os.Environ(), "TMPDIR="+r.tmp)
	if out, err := next.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	left, _ := filepath.Glob(filepath.Join(r.tmp, "mlxcel-*", "*"))
	if len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestInterrupted(t *testing.T) {
	r := start(t, tinyArgs("-n", "4000", "--pp-size", "2")...)
	r.read(20)
	pids := r.executors()
	if err := r.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, r.out)
	_ = r.cmd.Wait()
	if code := r.cmd.ProcessState.ExitCode(); code != exitInterrupted || !strings.Contains(r.errs.String(), "interrupted") {
		t.Errorf("exit code %d: %s", code, r.errs.String())
	}
	gone(t, pids)
}

// TestKilledExecutor: the death of an executor ends the run at once, with an error that names its stage.
func TestKilledExecutor(t *testing.T) {
	r := start(t, tinyArgs("-n", "4000", "--pp-size", "2")...)
	r.read(20)
	pids := r.executors()
	if err := syscall.Kill(pids[len(pids)-1], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, r.out)
	_ = r.cmd.Wait()
	message := r.errs.String()
	if r.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(message, "stage ") || !strings.Contains(message, "killed") {
		t.Errorf("exit code %d: %s", r.cmd.ProcessState.ExitCode(), message)
	}
	gone(t, pids)
}

// TestMemoryIsFlat: 2,000 decode steps cost their KV cache and nothing else.
func TestMemoryIsFlat(t *testing.T) {
	const (
		warm, steps  = 300, 2000
		kvPerToken   = 6 * 2 * 2 * 32 * 2 // layers, keys and values, heads, width, bytes
		slack        = 4 << 20            // allocator's caches and the Go heap's breathing
		bytesAtWarm  = warm / 2           // the tiny model writes about a byte a token
		bytesAtSteps = steps / 2
	)
	r := start(t, tinyArgs("-n", "4000", "--threads", "1")...)
	r.read(bytesAtWarm)
	pids := r.executors()
	before := resident(t, pids[0])
	r.read(bytesAtSteps)
	after := resident(t, pids[0])
	if grown := after - before; grown > 4000*kvPerToken+slack {
		t.Errorf("resident memory grew by %d bytes, %d of which the KV cache may have", grown, 4000*kvPerToken)
	}
	if err := r.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = r.cmd.Wait()
}

// TestResidentMemory: a stage holds its weights, its KV cache and at most 150 MB more.
func TestResidentMemory(t *testing.T) {
	const more = 150_000_000
	r := start(t, "-m", smolLM2, "-p", "Count to one hundred.", "-n", "400", "--pp-layers", "0-9,10-29")
	r.read(100)
	held := map[int64]bool{}
	for _, pid := range r.executors() {
		held[resident(t, pid)] = true
	}
	if err := r.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = r.cmd.Wait()
	plan := answerOf(t, "-m", smolLM2, "-p", "x", "-n", "1", "--pp-layers", "0-9,10-29").Plan
	if len(held) != len(plan.Stages) {
		t.Fatalf("%d executors for %d stages", len(held), len(plan.Stages))
	}
	most := int64(0)
	for _, s := range plan.Stages {
		most = max(most, s.Bytes)
	}
	raw, _ := json.Marshal(plan)
	for rss := range held {
		if limit := most + 440*23040 + more; rss > limit {
			t.Errorf("an executor holds %d bytes, want at most %d: %s", rss, limit, raw)
		}
	}
}
