package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
)

// work is processor time since the machine's start, in ticks.
type work struct {
	total  int64 // of all processors, idle or not
	idle   int64
	stolen int64 // by the machine that this one runs on
	ours   int64 // the server's with its executors, and this program's
}

// work reads what the processors did.
func (s *server) work() (w work, err error) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return w, err
	}
	first, _, _ := strings.Cut(string(raw), "\n")
	fields := strings.Fields(first)
	const idle, wait, stolen, last = 4, 5, 8, 8 // fields past them are counted within others
	if len(fields) <= last {
		return w, fmt.Errorf("/proc/stat begins with %q", first)
	}
	for i, field := range fields[1 : last+1] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return w, fmt.Errorf("/proc/stat: %w", err)
		}
		w.total += n
		switch i + 1 {
		case idle, wait:
			w.idle += n
		case stolen:
			w.stolen += n
		}
	}
	pids, err := s.tree()
	for _, pid := range append(pids, os.Getpid()) {
		ticks, statErr := ticksOf(pid)
		err = errors.Join(err, statErr)
		w.ours += ticks
	}
	return w, err
}

// ticksOf returns the processor time of a process.
func ticksOf(pid int) (int64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(raw), ") ") // behind the name
	fields := strings.Fields(rest)
	const user, system = 11, 12
	if len(fields) <= system {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	a, err1 := strconv.ParseInt(fields[user], 10, 64)
	b, err2 := strconv.ParseInt(fields[system], 10, 64)
	return a + b, errors.Join(err1, err2)
}

// disturbed is the share of the processors that went to others, on this machine or on the one that it runs on.
func (w work) disturbed(before work) float64 {
	total := w.total - before.total
	others := total - (w.idle - before.idle) - (w.ours - before.ours)
	return float64(max(0, others)) / float64(max(1, total))
}

// since tells what the processors did from before to w: stalls while others compute are not the server's.
func (w work) since(before work) string {
	total := max(1, w.total-before.total)
	share := func(n int64) float64 { return 100 * float64(max(0, n)) / float64(total) }
	idle, stolen, ours := w.idle-before.idle, w.stolen-before.stolen, w.ours-before.ours
	return fmt.Sprintf("%d processors: %.0f%% the server and its load, %.0f%% other programs, %.0f%% stolen by the host, %.0f%% idle",
		runtime.NumCPU(), share(ours), share(total-idle-stolen-ours), share(stolen), share(idle))
}
