package batch

import (
	"slices"
	"time"
)

// rounds corrects the number of groups by what steps really take for their rows: the warm-up may have come at a bad
// moment, or the machine have more or less to do since. Now and then it tries another number for a few rounds, more seldom
// the longer the one in use has held.
type rounds struct {
	speeds *Speeds // of the warm-up; nil where there was none
	stages int
	sizes  map[int]*contest // by size class of the streams
}

const (
	firstTrial = 64   // steps of a number of groups before another is tried; eight times as many after each trial that was lost
	lastTrial  = 2048 // at most
	trialLaps  = 8    // rounds of a trial
	leastSteps = 4    // that a comparison takes at least
	hopeless   = 1.25 // times the cost: a trial is lost as soon as that shows
)

// contest is between the number of groups in use and one on trial.
type contest struct {
	current, trial int             // groups; trial is 0 while there is none
	next           int             // whose turn it is on trial
	gap            int             // steps from one trial to the next
	left           int             // steps to the beginning or the end of a trial
	costs          map[int]*window // of a row, by groups
}

// groups returns in how many groups to step so many streams.
func (r *rounds) groups(streams int) int {
	if r.stages < 2 || streams < 2 {
		return 1
	}
	c := r.sizes[sizeClass(streams)]
	if c == nil {
		return r.speeds.Groups(streams, r.stages)
	}
	return min(c.using(), streams)
}

// candidates are the numbers worth using, at least two: one group, as many as there are stages, and what the warm-up found best.
func (r *rounds) candidates(streams int) []int {
	all := []int{1, min(r.stages, streams), r.speeds.Groups(streams, r.stages)}
	slices.Sort(all)
	return slices.Compact(all)
}

// learn takes the time of a step with streams.
func (r *rounds) learn(f *flight, wall time.Duration) {
	if r.stages < 2 || f.streams < 2 {
		return
	}
	class := sizeClass(f.streams)
	c := r.sizes[class]
	if c == nil {
		c = &contest{current: r.speeds.Groups(f.streams, r.stages), gap: firstTrial, left: firstTrial, costs: map[int]*window{}}
		r.sizes[class] = c
	}
	if f.groups != c.using() {
		return // begun before the last change
	}
	c.cost(f.groups).add(f.cost(wall))
	if c.left--; c.left <= 0 || c.trial > 0 && c.compare() > hopeless {
		c.turn(r.candidates(f.streams))
	}
}

// cost is what a row of the step has taken of the stages' time, which the step shared with those of the other groups. Prompt rows
// count like others: whatever the number of groups, there are as many of them.
func (f *flight) cost(wall time.Duration) time.Duration {
	rows := f.decodes + f.prefill
	if f.company {
		rows *= f.groups
	}
	return wall / time.Duration(rows)
}

func (c *contest) using() int {
	if c.trial > 0 {
		return c.trial
	}
	return c.current
}

func (c *contest) cost(groups int) *window {
	w := c.costs[groups]
	if w == nil {
		w = &window{}
		c.costs[groups] = w
	}
	return w
}

// turn begins a trial, or ends one.
func (c *contest) turn(candidates []int) {
	switch {
	case c.trial == 0:
		others := slices.DeleteFunc(candidates, func(groups int) bool { return groups == c.current })
		c.next++
		c.trial = others[c.next%len(others)]
		c.costs[c.trial] = &window{} // what it took long ago no longer counts
		c.left = trialLaps * c.trial
		return
	case c.compare() < 1-gain: // by more than the error of measurement
		c.current, c.gap = c.trial, firstTrial
	default:
		c.gap = min(8*c.gap, lastTrial)
	}
	c.trial, c.left = 0, c.gap
}

// compare returns the cost of the number on trial as a part of that of the one in use; 1 where too little is known.
func (c *contest) compare() float64 {
	now, then := c.cost(c.trial), c.cost(c.current)
	if min(now.len(), then.len()) < leastSteps {
		return 1
	}
	return float64(now.median()) / float64(max(then.median(), 1))
}
