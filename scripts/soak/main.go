// Command soak keeps a server busy with requests that join, leave, are cancelled and bring long prompts, and then tells whether
// anything failed that was not asked for, memory or handles grew, or streams stalled. It needs Linux: it reads /proc.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"slices"
	"sync"
	"time"
)

// options is what the flags say.
type options struct {
	bin, model string
	duration   time.Duration
	streams    int
	stages     int
	gapRatio   float64 // of the 99th percentile to the median
	noise      float64 // share of the processors that others may take for gaps to be judged
	growth     float64 // of resident memory, as a share
	seed       uint64
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin/mlxcel-server", "the server")
	flag.StringVar(&o.model, "model", "models/smollm2-135m-instruct", "the model's folder")
	flag.DurationVar(&o.duration, "duration", time.Minute, "how long to keep it busy")
	flag.IntVar(&o.streams, "streams", 16, "requests at a time")
	flag.IntVar(&o.stages, "stages", 2, "pipeline stages")
	flag.Float64Var(&o.gapRatio, "gap", 3, "99th percentile of the gaps between tokens, in medians, at most")
	flag.Float64Var(&o.noise, "noise", 0.1, "share of the processors that other programs may take; past it the gaps are told but not judged")
	flag.Float64Var(&o.growth, "growth", 0.05, "growth of resident memory at most, as a share")
	flag.Uint64Var(&o.seed, "seed", 1, "of what the requests are")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := soak(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// soak runs the load twice: what the first quarter has left behind is what the rest must not add to.
func soak(ctx context.Context, o options) (err error) {
	s, err := startServer(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	first := &tally{}
	before, err := phase(ctx, s, o, first, o.duration/4)
	if err != nil {
		return err
	}
	began, err := s.work()
	if err != nil {
		return err
	}
	rest := &tally{}
	after, err := phase(ctx, s, o, rest, o.duration-o.duration/4)
	if err != nil {
		return err
	}
	fmt.Printf("after a quarter: %s\nat the end:      %s\n", before, after)
	fmt.Println(rest.report())
	ended, err := s.work()
	fmt.Println(ended.since(began))
	if ended.disturbed(began) > o.noise {
		fmt.Println("the gaps are not judged: too much of the machine went to others")
		o.gapRatio = math.Inf(1)
	}
	return errors.Join(err, errors.Join(first.errs...), rest.faults(o.gapRatio), after.grownFrom(before, o.growth))
}

// phase keeps the server busy for a time and returns what it holds when all is quiet again.
func phase(ctx context.Context, s *server, o options, t *tally, d time.Duration) (usage, error) {
	end := time.Now().Add(d)
	var wait sync.WaitGroup
	for i := range o.streams {
		c := newClient(s.url, t, o.seed+uint64(i))
		wait.Go(func() {
			for time.Now().Before(end) && ctx.Err() == nil {
				c.request(ctx)
			}
			c.http.CloseIdleConnections()
		})
	}
	wait.Wait()
	if ctx.Err() != nil {
		return usage{}, ctx.Err()
	}
	return s.quiet(ctx)
}

// tally gathers what the requests came to.
type tally struct {
	mu     sync.Mutex
	counts map[string]int
	gaps   []time.Duration
	errs   []error
}

func (t *tally) add(kind string, gaps []time.Duration, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.counts == nil {
		t.counts = map[string]int{}
	}
	t.counts[kind]++
	t.gaps = append(t.gaps, gaps...)
	if err != nil {
		t.errs = append(t.errs, fmt.Errorf("%s: %w", kind, err))
	}
}

// percentiles returns the median and the 99th percentile of the gaps.
func (t *tally) percentiles() (median, p99 time.Duration) {
	if len(t.gaps) == 0 {
		return 0, 0
	}
	slices.Sort(t.gaps)
	return t.gaps[len(t.gaps)/2], t.gaps[len(t.gaps)*99/100]
}

func (t *tally) report() string {
	median, p99 := t.percentiles()
	return fmt.Sprintf("requests %v, %d gaps between tokens: median %v, 99th percentile %v (%.2f medians), longest %v",
		t.counts, len(t.gaps), median, p99, float64(p99)/float64(max(1, median)), t.longest())
}

func (t *tally) longest() time.Duration {
	if len(t.gaps) == 0 {
		return 0
	}
	return slices.Max(t.gaps)
}

// faults tells what was wrong.
func (t *tally) faults(ratio float64) error {
	const shown = 5
	errs := t.errs
	if more := len(errs) - shown; more > 0 {
		errs = append(slices.Clone(errs[:shown]), fmt.Errorf("and %d more requests failed", more))
	}
	if t.counts[kindWhole] == 0 || t.counts[kindLeft] == 0 || t.counts[kindLong] == 0 || t.counts[kindBad] == 0 {
		errs = append(errs, fmt.Errorf("not every kind of request was made: %v; give it more time", t.counts))
	}
	if median, p99 := t.percentiles(); float64(p99) > ratio*float64(median) {
		errs = append(errs, fmt.Errorf("the 99th percentile of the gaps between tokens is %v, more than %g times the median of %v", p99, ratio, median))
	}
	return errors.Join(errs...)
}
