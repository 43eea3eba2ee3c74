package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// executors returns the processes of the stages.
func (r *running) executors() []int {
	r.t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", r.cmd.Process.Pid))
	if err != nil {
		r.t.Fatal(err)
	}
	var pids []int
	for _, task := range tasks { // each thread lists the children that it has started
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", r.cmd.Process.Pid, task.Name()))
		if err != nil {
			continue // the thread has ended
		}
		for field := range strings.FieldsSeq(string(raw)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				r.t.Fatal(err)
			}
			pids = append(pids, pid)
		}
	}
	return pids
}

// An executor that dies costs the requests that run, each with an error that names the stage; the next request works.
func TestExecutorKilled(t *testing.T) {
	r := server(t, "--pp-size", "2")
	want := r.text("before", `,"temperature":0`)
	pids := r.executors()
	if len(pids) != 2 {
		t.Fatalf("executors %v", pids)
	}
	const streams = 4
	var answers [streams]*http.Response
	for i := range answers {
		answers[i] = r.open(`{"prompt":"x","stream":true,"ignore_eos":true,"max_tokens":4000}`)
		defer answers[i].Body.Close()
	}
	var readers [streams]*bufio.Reader
	for i, a := range answers {
		readers[i] = bufio.NewReader(a.Body)
		if _, err := readers[i].ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for i, reader := range readers {
		rest, err := io.ReadAll(reader)
		end := string(rest[max(0, len(rest)-600):])
		_, event, isError := strings.Cut(end, "event: error\n")
		if err != nil || !isError || strings.Contains(end, "[DONE]") || !strings.Contains(event, `"code":"stage_lost","stage":`) {
			t.Errorf("stream %d ends with %q, %v", i, end, err)
		}
	}
	r.waitReady()
	if got := r.text("before", `,"temperature":0`); got != want {
		t.Errorf("after the loss %q, before it %q", got, want)
	}
}

// frozenLimit is how long an executor that stands still may go unnoticed, its requests unanswered.
const frozenLimit = 5 * time.Second

// TestFrozenExecutor stops an executor, then sends it far more than a socket takes: every request is answered, the next one
// works, and the server can be ended.
func TestFrozenExecutor(t *testing.T) {
	for stage := range 2 {
		t.Run(fmt.Sprintf("stage %d", stage), func(t *testing.T) {
			r := server(t, "--pp-size", "2", "--parallel", "16", "--prefill-chunk-size", "16")
			want := r.text("before", `,"temperature":0`)
			pids := r.executors()
			if len(pids) != 2 {
				t.Fatalf("executors %v", pids)
			}
			if err := syscall.Kill(pids[stage], syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			r.floodFrozen(16)
			r.waitReady()
			if got := r.text("before", `,"temperature":0`); got != want {
				t.Errorf("after the loss %q, before it %q", got, want)
			}
			r.mustEnd()
		})
	}
}

// TestSigtermWhileFrozen ends a server whose executor stands still.
func TestSigtermWhileFrozen(t *testing.T) {
	r := server(t, "--pp-size", "2")
	if err := syscall.Kill(r.executors()[0], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	wait.Go(func() { // how it ends is as it may be: the server goes
		if answer, err := r.http.Post(r.url+"/v1/completions", "application/json", strings.NewReader(longPrompt)); err == nil {
			answer.Body.Close()
		}
	})
	r.mustEnd()
	wait.Wait()
}

// longPrompt has thousands of token ids. They take penalties, so that every stage that answers gets them all.
var longPrompt = fmt.Sprintf(`{"prompt":[%s300],"max_tokens":4,"presence_penalty":0.5}`, strings.Repeat("300,", 3000))

// floodFrozen sends requests to a server one of whose executors stands still, and wants a 503 for each within the limit.
func (r *running) floodFrozen(requests int) {
	r.t.Helper()
	began := time.Now()
	var wait sync.WaitGroup
	for range requests {
		wait.Go(func() {
			if status, body := r.complete(longPrompt); status != http.StatusServiceUnavailable || !strings.Contains(body, "stage_lost") {
				r.t.Errorf("%d %s, want 503 and the stage that is lost", status, body)
			}
		})
	}
	wait.Wait()
	if took := time.Since(began); took > frozenLimit {
		r.t.Errorf("the requests were answered after %v, want at most %v", took, frozenLimit)
	}
}

// mustEnd sends SIGTERM and waits for a good end.
func (r *running) mustEnd() {
	r.t.Helper()
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		r.t.Fatal(err)
	}
	if code := r.exit(); code != 0 {
		r.t.Errorf("exit code %d", code)
	}
}
