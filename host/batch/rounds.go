package batch

import (
	"slices"
	"time"
)

// rounds corrects the number of groups by what rounds over the streams really take: the warm-up may have come at a bad
// moment, or the machine have more or less to do since. Now and then it tries another number for a few rounds.
type rounds struct {
	speeds *Speeds // of the warm-up; nil where there was none
	stages int
	sizes  map[int]*contest // by size class of the streams
}

const (
	firstTrial = 64   // steps before another number of groups is tried for the first time
	nextTrial  = 2048 // and between later trials: they must not cost much
	trialLaps  = 8    // rounds of a trial
	leastLaps  = 4    // rounds without prompts that a comparison takes at least
)

// contest is between the number of groups in use and one on trial.
type contest struct {
	current, trial int // groups; trial is 0 while there is none
	next           int // whose turn it is on trial
	left           int // steps to the beginning or the end of a trial
	times          map[int]*window
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

// candidates are the numbers worth a trial: one group, as many as there are stages, and what the warm-up found best.
func (r *rounds) candidates(streams int) []int {
	all := []int{1, min(r.stages, streams), r.speeds.Groups(streams, r.stages)}
	slices.Sort(all)
	return slices.Compact(all)
}

// learn takes the time of a step of so many streams in so many groups; clean is one without prompt rows beside it.
func (r *rounds) learn(streams, groups int, wall time.Duration, clean bool) {
	if r.stages < 2 || streams < 2 {
		return
	}
	class := sizeClass(streams)
	c := r.sizes[class]
	if c == nil {
		c = &contest{current: r.speeds.Groups(streams, r.stages), left: firstTrial, times: map[int]*window{}}
		r.sizes[class] = c
	}
	if groups != c.using() {
		return // begun before the last change
	}
	if clean {
		c.time(groups).add(wall / time.Duration(streams))
	}
	if c.left--; c.left <= 0 {
		c.turn(r.candidates(streams))
	}
}

func (c *contest) using() int {
	if c.trial > 0 {
		return c.trial
	}
	return c.current
}

func (c *contest) time(groups int) *window {
	w := c.times[groups]
	if w == nil {
		w = &window{}
		c.times[groups] = w
	}
	return w
}

// turn begins a trial, or ends one.
func (c *contest) turn(candidates []int) {
	if c.trial == 0 {
		c.next++
		if c.trial = candidates[c.next%len(candidates)]; c.trial != c.current {
			c.times[c.trial] = &window{} // what it took long ago no longer counts
			c.left = trialLaps * c.trial
			return
		}
	} else if c.better() {
		c.current = c.trial
	}
	c.trial, c.left = 0, nextTrial
}

// better tells whether the number on trial has shown itself faster by more than the error of measurement.
func (c *contest) better() bool {
	now, then := c.time(c.trial), c.time(c.current)
	return now.len() >= leastLaps && then.len() > 0 && float64(now.median()) < (1-gain)*float64(then.median())
}
