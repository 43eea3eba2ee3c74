package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// server is the program under load.
type server struct {
	cmd  *exec.Cmd
	url  string
	http http.Client
}

const (
	readyTimeout = 2 * time.Minute
	quietTimeout = time.Minute
	pollInterval = 100 * time.Millisecond
)

func startServer(ctx context.Context, o options) (*server, error) {
	args := []string{"--model", o.model, "--port", "0", "--parallel", strconv.Itoa(o.streams), "--log-file", os.DevNull}
	if o.stages > 1 {
		args = append(args, "--pp-size", strconv.Itoa(o.stages))
	}
	s := &server{cmd: exec.Command(o.bin, args...)}
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	if err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if !ok {
		return nil, errors.Join(fmt.Errorf("the server began with %q", line), s.stop())
	}
	s.url = url
	if err := poll(ctx, readyTimeout, func() (bool, error) { return s.get("/health", nil) == nil, nil }); err != nil {
		return nil, errors.Join(fmt.Errorf("the server does not become ready: %w", err), s.stop())
	}
	return s, nil
}

// poll asks until the answer is yes.
func poll(ctx context.Context, timeout time.Duration, ask func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if yes, err := ask(); yes || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *server) get(path string, into any) error {
	answer, err := s.http.Get(s.url + path)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	raw, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		return errors.Join(fmt.Errorf("%s: status %d", path, answer.StatusCode), err)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(raw, into)
}

// quiet waits until no request runs, and returns what the processes hold.
func (s *server) quiet(ctx context.Context) (u usage, err error) {
	err = poll(ctx, quietTimeout, func() (bool, error) {
		var slots []struct {
			Processing bool `json:"is_processing"`
		}
		if err := s.get("/slots", &slots); err != nil {
			return false, err
		}
		for _, slot := range slots {
			if slot.Processing {
				return false, nil
			}
		}
		return true, nil
	})
	if err != nil {
		return u, fmt.Errorf("requests run that nobody waits for: %w", err)
	}
	s.http.CloseIdleConnections()
	// The server notices that connections are closed a little later than we do.
	last := -1
	err = poll(ctx, quietTimeout, func() (bool, error) {
		u, err = s.usage()
		steady := u.handles == last
		last = u.handles
		return steady, err
	})
	return u, err
}

// stop has the server end in order.
func (s *server) stop() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return s.cmd.Wait()
}

// usage is what the server and its executors hold together.
type usage struct {
	processes int
	resident  int64 // bytes
	server    int64 // of them, the server's own
	handles   int
}

func (u usage) String() string {
	const mib = 1 << 20
	return fmt.Sprintf("%d processes, %.1f MiB resident (%.1f in the server), %d handles",
		u.processes, float64(u.resident)/mib, float64(u.server)/mib, u.handles)
}

// handleSlack is for what a runtime opens once and keeps.
const handleSlack = 4

func (u usage) grownFrom(before usage, share float64) error {
	var errs []error
	if limit := float64(before.resident) * (1 + share); float64(u.resident) > limit {
		errs = append(errs, fmt.Errorf("resident memory grew from %d to %d bytes, more than %g%%", before.resident, u.resident, 100*share))
	}
	if u.handles > before.handles+handleSlack {
		errs = append(errs, fmt.Errorf("handles grew from %d to %d", before.handles, u.handles))
	}
	if u.processes != before.processes {
		errs = append(errs, fmt.Errorf("%d processes became %d: an executor has died", before.processes, u.processes))
	}
	return errors.Join(errs...)
}

// tree returns the process and its descendants, itself first.
func (s *server) tree() ([]int, error) {
	pids := []int{s.cmd.Process.Pid}
	for i := 0; i < len(pids); i++ {
		children, err := childrenOf(pids[i])
		if err != nil {
			return nil, err
		}
		pids = append(pids, children...)
	}
	return pids, nil
}

// usage adds up the process and its descendants.
func (s *server) usage() (u usage, err error) {
	pids, err := s.tree()
	for _, pid := range pids {
		handles, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			return u, err
		}
		resident, err := residentOf(pid)
		if err != nil {
			return u, err
		}
		if u.processes == 0 {
			u.server = resident
		}
		u.processes, u.handles, u.resident = u.processes+1, u.handles+len(handles), u.resident+resident
	}
	return u, err
}

func childrenOf(pid int) ([]int, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // each thread lists those that it has started
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // the thread has ended
		}
		if err != nil {
			return nil, err
		}
		for field := range strings.FieldsSeq(string(raw)) {
			child, err := strconv.Atoi(field)
			if err != nil {
				return nil, err
			}
			pids = append(pids, child)
		}
	}
	return pids, nil
}

// residentOf returns the private memory of a process: files that are mapped come and go with the page cache.
func residentOf(pid int) (int64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status has no RssAnon", pid)
}
