package batch

import (
	"testing"
	"time"
)

// Whatever the warm-up said, and whatever the machine did since, the fastest number of groups is found, and kept.
func TestRoundsAreCorrected(t *testing.T) {
	const streams, stages = 8, 2
	overlap := linearSpeeds(stages, 1, 1, 0) // two groups of four take 5 ms each, one of eight 18
	none := linearSpeeds(stages, 1, 1, 0)    // as if another program had had one of the two processors
	for i := range none.Steps {
		none.Steps[i].Interval = none.Steps[i].Latency
	}
	type machine = func(groups, prompt int) time.Duration // of a step
	real := func(s *Speeds) machine {
		return func(groups, prompt int) time.Duration { return s.round(groups*(streams/groups+prompt), groups) }
	}
	const prompts = 6 // rows that each round has to take beside its streams, where there are any
	for name, c := range map[string]struct {
		warmUp   *Speeds
		is       machine
		then     machine // from the middle on; nil is as before
		prompts  func(round int) bool
		from, to int
	}{
		"right about two groups":    {warmUp: overlap, is: real(overlap), from: 2, to: 2},
		"right about one":           {warmUp: none, is: real(none), from: 1, to: 1},
		"a bad moment":              {warmUp: none, is: real(overlap), from: 1, to: 2},
		"a good moment":             {warmUp: overlap, is: real(none), from: 2, to: 1},
		"a processor goes later":    {warmUp: overlap, is: real(overlap), then: real(none), from: 2, to: 1},
		"a processor comes later":   {warmUp: none, is: real(none), then: real(overlap), from: 1, to: 2},
		"no warm-up":                {warmUp: nil, is: real(overlap), from: 1, to: 2},
		"prompts beside all steps":  {warmUp: none, is: real(overlap), prompts: func(int) bool { return true }, from: 1, to: 2},
		"prompts beside some steps": {warmUp: overlap, is: real(none), prompts: func(round int) bool { return round%3 == 0 }, from: 2, to: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := rounds{speeds: c.warmUp, stages: stages, sizes: map[int]*contest{}}
			if got := r.groups(streams); got != c.from {
				t.Errorf("begins with %d groups, want %d", got, c.from)
			}
			const steps = 10 * lastTrial
			var total, best time.Duration
			for i := range steps {
				is := c.is
				if c.then != nil && i >= steps/2 {
					is = c.then
				}
				g := r.groups(streams)
				share := func(groups int) int {
					if c.prompts == nil || !c.prompts(i/g) {
						return 0
					}
					return prompts / groups
				}
				took := is(g, share(g))
				r.learn(&flight{streams: streams, groups: g, decodes: streams / g, prefill: share(g), company: g > 1}, took)
				total += took / time.Duration(g)
				best += min(is(1, share(1)), is(2, share(2))) / time.Duration(g) // of as many rows
			}
			if got := r.groups(streams); got != c.to {
				t.Errorf("ends with %d groups, want %d", got, c.to)
			}
			if c.then == nil && float64(total) > 1.05*float64(best) {
				t.Errorf("%d steps took %v, at best %v", steps, total, best)
			}
		})
	}
}

// A number of groups that is on trial for nothing costs little: trials become rare.
func TestTrialsBecomeRare(t *testing.T) {
	r := rounds{speeds: linearSpeeds(2, 1, 1, 0), stages: 2, sizes: map[int]*contest{}}
	trials := map[bool]int{}
	const half = 4 * lastTrial
	for i := range 2 * half {
		g := r.groups(8)
		if g == 1 {
			trials[i >= half]++
		}
		r.learn(&flight{streams: 8, groups: g, decodes: 8 / g, company: g > 1}, r.speeds.round(8, g))
	}
	if first, later := trials[false], trials[true]; later == 0 || first <= later || later > half/lastTrial*trialLaps {
		t.Errorf("%d steps on trial in the first %d, %d in as many after them", first, half, later)
	}
}

// A warm-up that was disturbed costs no more than the time to the first trial.
func TestDisturbedWarmUp(t *testing.T) {
	serve := func(speeds *Speeds) (took time.Duration) {
		config := func() Config {
			cfg := configFor(newFake(2))
			cfg.MaxActive, cfg.Speeds = 8, speeds
			return cfg
		}
		bubble(t, config, func(t *testing.T, s *Scheduler) {
			began := time.Now()
			var streams []*Stream
			for range 8 {
				streams = append(streams, submit(t, s, Request{Prompt: prompt(4), MaxTokens: 1000, IgnoreEOS: true}))
			}
			for _, stream := range streams {
				if _, err := stream.Wait(nil); err != nil {
					t.Error(err)
				}
			}
			took = time.Since(began)
		})
		return took
	}
	right := linearSpeeds(2, 4, 1, 0.1) // what the fake takes
	wrong := linearSpeeds(2, 4, 1, 0.1)
	for i := range wrong.Steps {
		wrong.Steps[i].Interval = wrong.Steps[i].Latency
	}
	if at, best := serve(wrong), serve(right); float64(at) > 1.1*float64(best) {
		t.Errorf("took %v after a disturbed warm-up, %v after a quiet one", at, best)
	}
}
