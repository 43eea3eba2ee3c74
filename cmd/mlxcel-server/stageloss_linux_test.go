package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
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
