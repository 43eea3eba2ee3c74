package hosts

import (
	"math/rand/v2"
	"time"
)

// Quality is what a wire does to packets. The zero value carries them all at once.
type Quality struct {
	Delay  time.Duration // one way
	Jitter time.Duration // up to so much more, uniformly; packets keep their order
	Loss   float64       // share of packets that are lost, 0 to 1
	Rate   int64         // bytes per second; 0 is no limit
	Cut    bool          // nothing arrives, not even what is under way
}

// line computes when the packets of one direction arrive.
type line struct {
	quality Quality
	random  *rand.Rand
	free    time.Time // when the sender has put its last packet on the wire
	last    time.Time // when that packet arrives
}

// send puts a packet on the wire and returns when it arrives, or false if it does not.
func (l *line) send(now time.Time, size int) (time.Time, bool) {
	q := l.quality
	if q.Cut || l.random.Float64() < q.Loss {
		return time.Time{}, false
	}
	l.free = later(l.free, now)
	if q.Rate > 0 {
		l.free = l.free.Add(time.Duration(float64(size) / float64(q.Rate) * float64(time.Second)))
	}
	arrival := l.free.Add(q.Delay)
	if q.Jitter > 0 {
		arrival = arrival.Add(rand.N(q.Jitter))
	}
	l.last = later(l.last, arrival)
	return l.last, true
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
