package batch

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

// Long prompts keep arriving while streams run: the worst gap between a stream's tokens stays within three times the
// usual one, and the prompts are answered.
func TestLongPromptsDoNotStallStreams(t *testing.T) {
	for _, c := range []struct {
		name   string
		stages int
		speeds *Speeds
	}{
		{"one stage", 1, nil},
		{"two stages, one group", 2, nil},
		{"two stages, groups", 2, linearSpeeds(2, 10, 0.5, 0.1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := func() Config {
				rt := newFake(c.stages)
				rt.chunk, rt.fixed, rt.perRow = 512, 10*time.Millisecond, 500*time.Microsecond
				cfg := configFor(rt)
				cfg.Speeds = c.speeds
				return cfg
			}
			bubble(t, config, func(t *testing.T, s *Scheduler) {
				var mu sync.Mutex
				var gaps []time.Duration
				var wait sync.WaitGroup
				for range 8 {
					stream := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 400, IgnoreEOS: true})
					wait.Go(func() {
						r, err := stream.Wait(nil)
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						defer mu.Unlock()
						for i := 1; i < len(r.Tokens); i++ {
							gaps = append(gaps, r.Tokens[i].At.Sub(r.Tokens[i-1].At))
						}
					})
				}
				for range 5 {
					time.Sleep(2 * time.Second)
					answer(t, s, Request{Prompt: prompt(1000), MaxTokens: 2})
				}
				wait.Wait()
				slices.Sort(gaps)
				median, p99 := gaps[len(gaps)/2], gaps[len(gaps)*99/100]
				t.Logf("%d gaps, median %v, p99 %v, worst %v", len(gaps), median, p99, gaps[len(gaps)-1])
				if p99 > 3*median {
					t.Errorf("p99 of the gaps is %v, the median %v", p99, median)
				}
			})
		})
	}
}

// What a prompt row takes shows in steps of few as well as in steps of many, however much the steps vary.
func TestPaceLearnsRows(t *testing.T) {
	const quiet, row = 20 * time.Millisecond, 2 * time.Millisecond
	for _, rows := range []int{1, 2, 3, 16, 100} {
		p := newPace(&Speeds{Steps: []Speed{{Batch: 4, Latency: quiet}}, Row: 10 * row})
		r := rand.New(rand.NewPCG(uint64(rows), 1))
		for range 320 {
			vary := time.Duration((r.Float64()*18 - 9) * float64(time.Millisecond)) // more than few rows take
			p.learn(&flight{decodes: 4, prefill: rows}, quiet+time.Duration(rows)*row+vary)
		}
		if got := p.row.median(); got < row/2 || got > row*3/2 {
			t.Errorf("steps of %d rows: %v a row, want %v", rows, got, row)
		}
	}
}

// A short prompt does not wait for a long one that came before it, and a burst is served by turns.
func TestBurstIsServedFairly(t *testing.T) {
	config := func() Config {
		cfg := configFor(newFake(2))
		cfg.MaxActive = 32
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		long := submit(t, s, Request{Prompt: prompt(2000), MaxTokens: 5, IgnoreEOS: true})
		var burst []*Stream
		for range 24 {
			burst = append(burst, submit(t, s, Request{Prompt: prompt(20), MaxTokens: 30, IgnoreEOS: true}))
		}
		last, err := long.Wait(nil)
		if err != nil {
			t.Fatal(err)
		}
		var first []time.Duration
		for _, stream := range burst {
			r, err := stream.Wait(nil)
			if err != nil {
				t.Fatal(err)
			}
			first = append(first, r.Timings.FirstToken)
			if r.Timings.FirstToken > last.Timings.FirstToken/2 {
				t.Errorf("a short prompt had its first token after %v, the long one after %v", r.Timings.FirstToken, last.Timings.FirstToken)
			}
		}
		const slack = 4 // prompts that share a step, or are reserved at the same time, are equals
		for i, at := range first {
			before := 0
			for _, other := range first {
				if other < at {
					before++
				}
			}
			if before > i+slack {
				t.Errorf("request %d of the burst had its first token after %d others: %v", i, before, first)
			}
		}
	})
}

// Groups never make a round longer than one group does, whatever was measured.
func TestGroupsAreNeverSlower(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		stages := 1 + rng.IntN(4)
		s := linearSpeeds(stages, rng.Float64()*20, rng.Float64()*5, rng.Float64()*10)
		for batch := 1; batch <= 40; batch++ {
			g := s.Groups(batch, stages)
			if g < 1 || g > batch || s.round(batch, g) > s.round(batch, 1) {
				t.Fatalf("%d stages, batch %d: %d groups take %v, one takes %v", stages, batch, g, s.round(batch, g), s.round(batch, 1))
			}
			for other := 1; other <= min(batch, 2*stages); other++ {
				if stages > 1 && float64(s.round(batch, other)) < (1-gain)*(1-gain)*float64(s.round(batch, g)) {
					t.Fatalf("%d stages, batch %d: %d groups take %v, %d would take %v", stages, batch, g, s.round(batch, g), other, s.round(batch, other))
				}
			}
		}
	}
}

func TestGroups(t *testing.T) {
	for _, c := range []struct {
		name       string
		speeds     *Speeds
		batch, k   int
		wantGroups int
	}{
		{"nothing measured", nil, 8, 2, 1},
		{"one stage", linearSpeeds(1, 1, 1, 0), 8, 1, 1},
		{"one stream", linearSpeeds(2, 1, 1, 0), 1, 2, 1},
		{"time grows with the batch", linearSpeeds(2, 0, 1, 0), 8, 2, 2},
		{"a hop costs a third group", linearSpeeds(2, 0, 1, 1.4), 9, 2, 3},
		{"two fill both stages also where time does not grow", linearSpeeds(2, 10, 0, 0), 8, 2, 1},
		{"a slow link", linearSpeeds(2, 1, 0.1, 100), 8, 2, 1},
	} {
		if got := c.speeds.Groups(c.batch, c.k); got != c.wantGroups {
			t.Errorf("%s: %d groups, want %d", c.name, got, c.wantGroups)
		}
	}
}

func TestSpeedsInterpolate(t *testing.T) {
	s := &Speeds{Steps: []Speed{{1, 10, 5}, {4, 40, 8}, {8, 60, 16}}}
	for _, c := range []struct{ batch, latency, interval int }{{1, 10, 5}, {2, 20, 6}, {4, 40, 8}, {6, 50, 12}, {8, 60, 16}, {16, 100, 32}} {
		if got := s.at(c.batch); got.Latency != time.Duration(c.latency) || got.Interval != time.Duration(c.interval) {
			t.Errorf("at %d: %+v, want %d and %d", c.batch, got, c.latency, c.interval)
		}
	}
}

func TestWindowForgets(t *testing.T) {
	var w window
	if w.median() != 0 {
		t.Error("an empty window has a median")
	}
	for range 40 {
		w.add(100)
	}
	w.add(9999)
	if w.median() != 100 {
		t.Errorf("one outlier moved the median to %v", w.median())
	}
	for range 8 {
		w.add(200)
	}
	if w.median() != 200 {
		t.Errorf("the median is %v, the latest values are 200", w.median())
	}
}
