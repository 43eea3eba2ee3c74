package hosts

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// Event is one line that a process wrote.
type Event struct {
	Logged  time.Time // when, by the line's own account; when it was read if it has none
	Level   string    // "info", …; empty unless it is a line of a JSON log
	Module  string
	Message string         // the whole line unless it is one of a JSON log
	Fields  map[string]any // what else the line has, as encoding/json reads it
	Stdout  bool
	Line    string
}

// parseEvent reads a line of hclog's JSON format, or takes it as it is.
func parseEvent(text string, stdout bool, now time.Time) Event {
	e := Event{Line: text, Message: text, Logged: now, Stdout: stdout}
	var fields map[string]any
	if json.Unmarshal([]byte(text), &fields) != nil {
		return e
	}
	take := func(key string) string {
		s, _ := fields[key].(string)
		delete(fields, key)
		return s
	}
	e.Level, e.Module, e.Message = take("@level"), take("@module"), take("@message")
	if at, err := time.Parse(time.RFC3339Nano, take("@timestamp")); err == nil {
		e.Logged = at
	}
	e.Fields = fields
	return e
}

// Match says which event is waited for.
type Match struct {
	what string
	is   func(Event) bool
}

func (m Match) String() string { return m.what }

// Says matches a message that contains a text.
func Says(text string) Match {
	return Match{fmt.Sprintf("%q", text), func(e Event) bool { return strings.Contains(e.Message, text) }}
}

// IsMessage matches a message that is exactly so.
func IsMessage(text string) Match {
	return Match{fmt.Sprintf("exactly %q", text), func(e Event) bool { return e.Message == text }}
}

// With asks for a field of a value as well; both are compared as printed.
func (m Match) With(key string, value any) Match {
	return Match{fmt.Sprintf("%s with %s=%v", m.what, key, value), func(e Event) bool {
		got, ok := e.Fields[key]
		return ok && m.is(e) && fmt.Sprint(got) == fmt.Sprint(value)
	}}
}

// Or matches what one of both does.
func (m Match) Or(other Match) Match {
	return Match{m.what + " or " + other.what, func(e Event) bool { return m.is(e) || other.is(e) }}
}

// journal keeps what a process wrote.
type journal struct {
	mu      sync.Mutex
	events  []Event
	writers int           // streams that have not ended
	changed chan struct{} // closed with every change
}

func newJournal(writers int) *journal {
	return &journal{writers: writers, changed: make(chan struct{})}
}

// record reads a stream to its end.
func (j *journal) record(stream io.Reader, stdout bool) {
	lines := bufio.NewReader(stream)
	for {
		text, err := lines.ReadString('\n')
		if text = strings.TrimRight(text, "\r\n"); text != "" {
			j.add(parseEvent(text, stdout, time.Now()))
		}
		if err != nil {
			break
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.writers--
	j.tell()
}

func (j *journal) add(e Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.events = append(j.events, e)
	j.tell()
}

func (j *journal) tell() {
	close(j.changed)
	j.changed = make(chan struct{})
}

// after returns the events from an index on, whether more can come, and what tells that more came.
func (j *journal) after(index int) (events []Event, more bool, changed <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.events[index:], j.writers > 0, j.changed
}

// next returns the first matching event from an index on, and the index behind it.
func (j *journal) next(ctx context.Context, index int, m Match) (Event, int, error) {
	for {
		events, more, changed := j.after(index)
		for i, e := range events {
			if m.is(e) {
				return e, index + i + 1, nil
			}
		}
		index += len(events)
		if !more {
			return Event{}, index, io.EOF
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Event{}, index, ctx.Err()
		}
	}
}

// awaitEnd waits until nothing more can come, but not for long: a child that outlives its process may hold its streams.
func (j *journal) awaitEnd(atMost time.Duration) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	for {
		_, more, changed := j.after(0)
		if !more {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			return
		}
	}
}
