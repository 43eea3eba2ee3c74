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
	real := func(s *Speeds) func(int) time.Duration {
		return func(groups int) time.Duration { return s.round(streams, groups) }
	}
	for name, c := range map[string]struct {
		warmUp   *Speeds
		round    func(groups int) time.Duration
		then     func(groups int) time.Duration // from the middle on; nil is as before
		unclean  bool
		from, to int
	}{
		"right about two groups":   {warmUp: overlap, round: real(overlap), from: 2, to: 2},
		"right about one":          {warmUp: none, round: real(none), from: 1, to: 1},
		"a bad moment":             {warmUp: none, round: real(overlap), from: 1, to: 2},
		"a good moment":            {warmUp: overlap, round: real(none), from: 2, to: 1},
		"a processor goes later":   {warmUp: overlap, round: real(overlap), then: real(none), from: 2, to: 1},
		"a processor comes later":  {warmUp: none, round: real(none), then: real(overlap), from: 1, to: 2},
		"no warm-up":               {warmUp: nil, round: real(overlap), from: 1, to: 2},
		"prompts beside all steps": {warmUp: none, round: real(overlap), unclean: true, from: 1, to: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := rounds{speeds: c.warmUp, stages: stages, sizes: map[int]*contest{}}
			if got := r.groups(streams); got != c.from {
				t.Errorf("begins with %d groups, want %d", got, c.from)
			}
			const steps = 10 * nextTrial
			var total, best time.Duration
			for i := range steps {
				round := c.round
				if c.then != nil && i >= steps/2 {
					round = c.then
				}
				g := r.groups(streams)
				r.learn(streams, g, round(g), !c.unclean)
				total += round(g) / time.Duration(g)
				best += min(round(1), round(2)) / time.Duration(g) // of as many tokens
			}
			if got := r.groups(streams); got != c.to {
				t.Errorf("ends with %d groups, want %d", got, c.to)
			}
			if !c.unclean && c.then == nil && float64(total) > 1.05*float64(best) {
				t.Errorf("%d steps took %v, at best %v", steps, total, best)
			}
		})
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
