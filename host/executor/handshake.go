package executor

import (
	"strconv"
	"strings"
	"sync"
)

type lineKind int

const (
	lineHandshake lineKind = iota // go-plugin's one line: core version|contract version|network|address|…
	lineNoise                     // anything else
	lineTooMuch                   // the line after which we give up waiting for a handshake
)

// maxNoise is how many other lines a program may print before the handshake.
const maxNoise = 64

// handshake watches a program's standard output for go-plugin's handshake line and remembers what it needs
// for an error.
type handshake struct {
	mu      sync.Mutex
	seen    bool
	version int    // of the contract
	first   string // the first other line before it
	noise   int
}

func (h *handshake) take(line string) lineKind {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.seen {
		return lineNoise
	}
	if version, ok := parseHandshake(line); ok && h.noise < maxNoise {
		h.seen, h.version = true, version
		return lineHandshake
	}
	if h.first == "" {
		h.first = clip(strings.TrimSpace(line))
	}
	h.noise++
	if h.noise == maxNoise {
		return lineTooMuch
	}
	return lineNoise
}

// result returns whether the handshake came, its contract version, and what came before it.
func (h *handshake) result() (seen bool, version int, printed string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seen, h.version, h.first
}

func parseHandshake(line string) (version int, ok bool) {
	parts := strings.Split(strings.TrimSpace(line), "|")
	if len(parts) < 4 {
		return 0, false
	}
	if _, err := strconv.Atoi(parts[0]); err != nil {
		return 0, false
	}
	version, err := strconv.Atoi(parts[1])
	return version, err == nil
}
