package executor

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/hashicorp/go-hclog"
)

const (
	keptLines   = 20       // log lines kept for an error's text
	maxLogLine  = 64 << 10 // bytes of one line; longer ones are cut
	maxKeptLine = 2 << 10  // bytes of one kept line
)

// logRing keeps the last lines of an executor's log.
type logRing struct {
	mu    sync.Mutex
	lines []string
}

func (r *logRing) add(line string) {
	if len(line) > maxKeptLine {
		line = line[:maxKeptLine] + "…"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.lines) == keptLines {
		r.lines = slices.Delete(r.lines, 0, 1)
	}
	r.lines = append(r.lines, line)
}

func (r *logRing) last() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.lines)
}

// pumpLog forwards an executor's standard error to the host's log until its end. Lines in hclog's JSON form
// keep their level and fields; a Go panic is an error; anything else, such as what a C library prints, is
// debug.
func pumpLog(r io.Reader, log hclog.Logger, ring *logRing) {
	panicking := false
	eachLine(r, func(line string) {
		if entry, ok := parseLogLine(line); ok {
			ring.add(entry.String())
			log.Log(entry.level, entry.message, entry.fields...)
			return
		}
		ring.add(line)
		if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") {
			panicking = true
		}
		if panicking {
			log.Error(line)
		} else {
			log.Debug(line)
		}
	})
}

// logEntry is one line of hclog's JSON form.
type logEntry struct {
	level   hclog.Level
	module  string
	message string
	fields  []any // key, value, key, value, …; keys in order
}

func parseLogLine(line string) (logEntry, bool) {
	if !strings.HasPrefix(line, "{") {
		return logEntry{}, false
	}
	var raw map[string]any
	if json.Unmarshal([]byte(line), &raw) != nil {
		return logEntry{}, false
	}
	message, ok := raw["@message"].(string)
	levelName, ok2 := raw["@level"].(string)
	if !ok || !ok2 {
		return logEntry{}, false
	}
	e := logEntry{level: hclog.LevelFromString(levelName), message: message}
	if e.level == hclog.NoLevel {
		e.level = hclog.Debug
	}
	e.module, _ = raw["@module"].(string)
	keys := make([]string, 0, len(raw))
	for k := range raw {
		if !strings.HasPrefix(k, "@") {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	for _, k := range keys {
		e.fields = append(e.fields, k, raw[k])
	}
	return e, true
}

// String is the entry as a person reads it: "[ERROR] llama: message: key=value".
func (e logEntry) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "[%s] ", strings.ToUpper(e.level.String()))
	if e.module != "" {
		b.WriteString(e.module + ": ")
	}
	b.WriteString(e.message)
	for i := 0; i+1 < len(e.fields); i += 2 {
		fmt.Fprintf(&b, " %v=%v", e.fields[i], e.fields[i+1])
	}
	return b.String()
}

// eachLine calls f for each line of r until its end or an error. A line longer than maxLogLine is cut and
// its rest dropped, so that a program that prints without newlines costs no memory and never blocks.
func eachLine(r io.Reader, f func(string)) {
	reader := bufio.NewReaderSize(r, maxLogLine)
	for {
		line, more, err := reader.ReadLine()
		if err != nil {
			return
		}
		f(strings.ToValidUTF8(string(line), "\uFFFD"))
		for more && err == nil {
			_, more, err = reader.ReadLine()
		}
	}
}
