// Package stopseq owns finding stop strings in text that arrives in pieces.
package stopseq

import "errors"

// ErrEmpty is returned for a stop string without a character: it would stop everything at once.
var ErrEmpty = errors.New("a stop string is empty, want at least one character")

// Matcher looks for stop strings in a stream of text. What it finds does not depend on how the text is cut into pieces:
// the first position at which some stop string is complete ends the text; of several that are complete there, the
// longest counts. A Matcher belongs to one goroutine.
type Matcher struct {
	stops   []*stop
	held    []byte // the longest suffix of the text that is the beginning of a stop string
	matched string
}

// New returns a matcher for the stop strings; without any it passes all text on.
func New(stops ...string) (*Matcher, error) {
	m := &Matcher{}
	for _, s := range stops {
		if s == "" {
			return nil, ErrEmpty
		}
		m.stops = append(m.stops, &stop{text: s, fallback: fallbacks(s)})
	}
	return m, nil
}

// Push takes the next piece of text. It returns the text that is certainly not part of a stop string and was not
// returned before. With done, matched is the stop string found; emit ends before it, and what follows it is dropped, as
// is the text of later calls.
func (m *Matcher) Push(text string) (emit, matched string, done bool) {
	if m.matched != "" {
		return "", m.matched, true
	}
	m.held = append(m.held, text...)
	begin := len(m.held) - len(text)
	for i := begin; i < len(m.held); i++ {
		if s := m.advance(m.held[i]); s != nil {
			emit = string(m.held[:i+1-len(s.text)])
			m.held, m.matched = nil, s.text
			return emit, m.matched, true
		}
	}
	return m.release(m.open()), "", false
}

// Flush returns the text that was held back, when no more text comes. The matcher is then as new.
func (m *Matcher) Flush() string {
	text := m.release(0)
	m.matched = ""
	for _, s := range m.stops {
		s.length = 0
	}
	return text
}

// advance takes a byte and returns the longest stop string that it completes.
func (m *Matcher) advance(b byte) *stop {
	var found *stop
	for _, s := range m.stops {
		if s.advance(b) && (found == nil || len(s.text) > len(found.text)) {
			found = s
		}
	}
	return found
}

// open returns how many bytes at the end of the text may still become a stop string.
func (m *Matcher) open() int {
	longest := 0
	for _, s := range m.stops {
		longest = max(longest, s.length)
	}
	return longest
}

// release returns all of the held text but the last keep bytes.
func (m *Matcher) release(keep int) string {
	cut := len(m.held) - keep
	text := string(m.held[:cut])
	m.held = append(m.held[:0], m.held[cut:]...)
	return text
}

// stop is a stop string and how much of it the end of the text matches (Knuth, Morris, Pratt, 1977).
type stop struct {
	text     string
	fallback []int // fallback[n]: the longest proper suffix of text[:n] that text begins with
	length   int
}

func fallbacks(text string) []int {
	f := make([]int, len(text)+1)
	for n, k := 2, 0; n <= len(text); n++ {
		for k > 0 && text[k] != text[n-1] {
			k = f[k]
		}
		if text[k] == text[n-1] {
			k++
		}
		f[n] = k
	}
	return f
}

// advance reports whether b completes the stop string.
func (s *stop) advance(b byte) bool {
	for s.length > 0 && s.text[s.length] != b {
		s.length = s.fallback[s.length]
	}
	if s.text[s.length] == b {
		s.length++
	}
	return s.length == len(s.text)
}
