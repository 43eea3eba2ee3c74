package transport

import (
	"encoding/binary"
	"fmt"
	"time"
)

// HeartbeatConfig says how often to beat and when silence is death.
type HeartbeatConfig struct {
	Interval time.Duration // between beats; default 500 ms
	Limit    time.Duration // of silence; default 2.5 s, so that with the checks between a silent node is found within 3 s
}

// WithDefaults fills what was left at zero.
func (c HeartbeatConfig) WithDefaults() HeartbeatConfig {
	if c.Interval == 0 {
		c.Interval = 500 * time.Millisecond
	}
	if c.Limit == 0 {
		c.Limit = 2500 * time.Millisecond
	}
	return c
}

// checkEvery is the time between two looks at the silence.
func (c HeartbeatConfig) checkEvery() time.Duration { return c.Interval / 2 }

// SilentError is a node whose heartbeats stopped though its connection is open: it hangs, was stopped, or the network
// drops what it sends.
type SilentError struct {
	For, Limit time.Duration
}

func (e *SilentError) Error() string {
	return fmt.Sprintf("no heartbeat for %v (limit %v): the node hangs, was stopped, or is cut off", e.For.Round(time.Millisecond), e.Limit)
}

// Beat is one heartbeat. Times are nanoseconds of the clock of the node that took them, and mean nothing elsewhere.
type Beat struct {
	Sequence uint64
	Sent     int64 // when, by the sender's clock
	Echo     int64 // Sent of the last beat that the sender heard; 0 before the first
	Held     int64 // how long ago, when this beat was sent, the sender heard it
}

// beatSize is the length of a Beat on the wire: its fields as little-endian 64-bit numbers.
const beatSize = 4 * 8

func (b Beat) append(out []byte) []byte {
	out = binary.LittleEndian.AppendUint64(out, b.Sequence)
	out = binary.LittleEndian.AppendUint64(out, uint64(b.Sent))
	out = binary.LittleEndian.AppendUint64(out, uint64(b.Echo))
	return binary.LittleEndian.AppendUint64(out, uint64(b.Held))
}

func parseBeat(raw *[beatSize]byte) Beat {
	number := func(i int) uint64 { return binary.LittleEndian.Uint64(raw[8*i:]) }
	return Beat{Sequence: number(0), Sent: int64(number(1)), Echo: int64(number(2)), Held: int64(number(3))}
}

// Monitor judges one node by its heartbeats. It is pure: the caller brings the time and carries the beats.
type Monitor struct {
	cfg   HeartbeatConfig
	start time.Time
	heard time.Time // the last sign of life; the start counts as one
	sent  uint64
	last  Beat // heard
	rtt   time.Duration
}

// NewMonitor begins to count silence at now.
func NewMonitor(cfg HeartbeatConfig, now time.Time) *Monitor {
	return &Monitor{cfg: cfg.WithDefaults(), start: now, heard: now}
}

// clock is a time as beats carry it; never 0, which stands for none.
func (m *Monitor) clock(t time.Time) int64 { return int64(t.Sub(m.start)) + 1 }

// Next returns the beat to send now.
func (m *Monitor) Next(now time.Time) Beat {
	m.sent++
	b := Beat{Sequence: m.sent, Sent: m.clock(now)}
	if m.last.Sequence > 0 {
		b.Echo, b.Held = m.last.Sent, int64(now.Sub(m.heard))
	}
	return b
}

// DisorderError is a heartbeat that is not the next one. The link keeps order, so the sender is at fault.
type DisorderError struct {
	Got, Want uint64
}

func (e *DisorderError) Error() string {
	return fmt.Sprintf("heartbeat %d, want %d", e.Got, e.Want)
}

// Heard takes in a beat. The error is a *DisorderError.
func (m *Monitor) Heard(b Beat, now time.Time) error {
	if want := m.last.Sequence + 1; b.Sequence != want {
		return &DisorderError{Got: b.Sequence, Want: want}
	}
	m.last, m.heard = b, now
	if b.Echo > 0 && b.Held >= 0 {
		if trip := time.Duration(m.clock(now) - b.Echo - b.Held); trip >= 0 {
			m.rtt = trip
		}
	}
	return nil
}

// Check returns a *SilentError once the node has been silent for longer than the limit.
func (m *Monitor) Check(now time.Time) error {
	if silence := now.Sub(m.heard); silence > m.cfg.Limit {
		return &SilentError{For: silence, Limit: m.cfg.Limit}
	}
	return nil
}

// RoundTrip is the last measured time of a beat there and back, without what the other node held it; 0 before the first.
func (m *Monitor) RoundTrip() time.Duration { return m.rtt }
