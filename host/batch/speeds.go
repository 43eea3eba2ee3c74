package batch

import (
	"slices"
	"time"
)

// Speeds is how long steps take on a runtime, as Measure found it.
type Speeds struct {
	Steps []Speed       // by growing Batch
	Row   time.Duration // what one prompt row adds to a step
}

// Speed is the time of decode steps of one size. For k stages of stage time t and hops of h between them, Latency is
// k·t + k·h and Interval is t, of the slowest stage. Interval is measured with all stages at work, so that it counts
// what they take from each other on one machine.
type Speed struct {
	Batch    int           // sequences
	Latency  time.Duration // of a step alone
	Interval time.Duration // between the ends of steps that follow each other without a gap
}

// gain is what more groups must bring to be worth it: less is within the error of measurement.
const gain = 0.02

// Groups returns in how many groups to step a batch over that many stages: the G that makes one round over all
// groups, max(G·t(b/G), k·t(b/G) + k·h), the shortest. One group is the measure: it is 1 where nothing is known.
func (s *Speeds) Groups(batch, stages int) int {
	best := 1
	if s == nil || len(s.Steps) == 0 || stages < 2 {
		return best
	}
	shortest := s.round(batch, 1)
	for g := 2; g <= min(batch, 2*stages); g++ {
		if r := s.round(batch, g); float64(r) < (1-gain)*float64(shortest) {
			best, shortest = g, r
		}
	}
	return best
}

// round is the time in which each sequence of a batch gets a token.
func (s *Speeds) round(batch, groups int) time.Duration {
	of := s.at((batch + groups - 1) / groups)
	return max(time.Duration(groups)*of.Interval, of.Latency)
}

// at reads between what was measured in a straight line, and beyond it by the last two.
func (s *Speeds) at(batch int) Speed {
	i, exact := slices.BinarySearchFunc(s.Steps, batch, func(x Speed, b int) int { return x.Batch - b })
	if exact || len(s.Steps) == 1 {
		return s.Steps[min(i, len(s.Steps)-1)]
	}
	i = min(max(i, 1), len(s.Steps)-1)
	a, b := s.Steps[i-1], s.Steps[i]
	line := func(x, y time.Duration) time.Duration {
		return max(0, x+(y-x)*time.Duration(batch-a.Batch)/time.Duration(b.Batch-a.Batch))
	}
	return Speed{Batch: batch, Latency: line(a.Latency, b.Latency), Interval: line(a.Interval, b.Interval)}
}
