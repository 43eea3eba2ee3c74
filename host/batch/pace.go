package batch

import (
	"math/bits"
	"time"
)

// pace knows how long steps take, from those that have ended.
type pace struct {
	quiet [bits.UintSize]window // steps without prompt rows beside them, by the size class of their decodes
	row   window                // what one prompt row adds

	// What steps with prompt rows took beyond one without, since row was last added to.
	extra     time.Duration
	extraRows int
}

// newPace starts with what was measured at warm-up, nil for nothing.
func newPace(speeds *Speeds) pace {
	var p pace
	if speeds == nil {
		return p
	}
	for _, s := range speeds.Steps {
		p.quiet[sizeClass(s.Batch)].add(s.Latency)
	}
	if speeds.Row > 0 {
		p.row.add(speeds.Row)
	}
	return p
}

func sizeClass(decodes int) int { return bits.Len(uint(decodes)) }

// leastTold is the prompt rows that tell what one takes, of several steps where they have few: the time of few is lost in how
// much that of steps varies.
const leastTold = 16

// learn takes the time of a step that has ended.
func (p *pace) learn(f *flight, wall time.Duration) {
	switch {
	case f.aborted:
	case f.decodes == 0 && f.company: // it waited for others
	case f.prefill > 0:
		p.extra, p.extraRows = p.extra+wall-p.step(max(1, f.decodes)), p.extraRows+f.prefill
		if p.extraRows >= leastTold || p.row.len() == 0 {
			p.row.add(max(0, p.extra) / time.Duration(p.extraRows))
			p.extra, p.extraRows = 0, 0
		}
	case !f.mixed:
		p.quiet[sizeClass(f.decodes)].add(wall)
	}
}

// step is the time of a step of so many decodes and no prompt rows, of the nearest size that is known; 0 where none is.
func (p *pace) step(decodes int) time.Duration {
	class := sizeClass(decodes)
	if class == 0 {
		return 0
	}
	for d := range p.quiet {
		for _, near := range []int{class - d, class + d} {
			if near > 0 && near < len(p.quiet) && p.quiet[near].len() > 0 {
				return p.quiet[near].median()
			}
		}
	}
	return 0
}

// rows is how many prompt rows make a step of so many decodes take stall times as long as one of full decodes does without:
// few streams must not make slow the prompts that are about to join them.
func (p *pace) rows(decodes, full int, stall float64) int {
	quiet, row := p.step(max(1, full, decodes)), p.row.median()
	if quiet == 0 || row == 0 {
		return unmeasuredChunk
	}
	spare := stall*float64(quiet) - float64(p.step(max(1, decodes)))
	return max(leastChunk, int(spare/float64(row)))
}

// expected is how long a step should take; 0 where nothing is known.
func (p *pace) expected(f *flight) time.Duration {
	return p.step(max(1, f.decodes)) + time.Duration(f.prefill)*p.row.median()
}

// window holds the latest few of a series: a median of few follows changes, and no outlier moves it.
type window struct {
	values [15]time.Duration
	n      int // ever added
}

func (w *window) add(v time.Duration) {
	w.values[w.n%len(w.values)] = v
	w.n++
}

func (w *window) len() int { return min(w.n, len(w.values)) }

// median is 0 for an empty window.
func (w *window) median() time.Duration {
	n := w.len()
	if n == 0 {
		return 0
	}
	values := w.values
	return median(values[:n])
}

// mean is an exponentially weighted one.
type mean struct {
	v     float64 // ns
	begun bool
}

func (m *mean) add(d time.Duration) {
	if !m.begun {
		m.v, m.begun = float64(d), true
		return
	}
	const weight = 0.2
	m.v += weight * (float64(d) - m.v)
}

func (m *mean) value() time.Duration { return time.Duration(m.v) }
