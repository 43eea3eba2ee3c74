package metrics

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// busyWindow is the least time that a busy fraction is of: remote stages tell their numbers about once a second.
const busyWindow = 5 * time.Second

var descBusy = describe("pp_stage_busy_fraction", "Share of the time since the scrape before, or of the last seconds, that a stage computed.", "stage")

// busyCollector turns what the stages have computed so far into the share of the latest time.
type busyCollector struct {
	busy func() []time.Duration // of each stage since it was started; nil while there is none
	now  func() time.Time

	mu      sync.Mutex
	samples []busySample // oldest first; the first is the last one that is at least a window old
}

type busySample struct {
	at   time.Time
	busy []time.Duration
}

// Describe is prometheus.Collector's.
func (c *busyCollector) Describe(out chan<- *prometheus.Desc) { out <- descBusy }

// Collect is prometheus.Collector's.
func (c *busyCollector) Collect(out chan<- prometheus.Metric) {
	for stage, f := range c.fractions() {
		out <- prometheus.MustNewConstMetric(descBusy, prometheus.GaugeValue, f, strconv.Itoa(stage))
	}
}

// fractions takes a sample and compares it with an earlier one; before there is one, nothing is told.
func (c *busyCollector) fractions() []float64 {
	now := busySample{c.now(), c.busy()}
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.samples); n > 0 && restarted(c.samples[n-1], now) {
		c.samples = nil
	}
	c.samples = append(c.samples, now)
	for len(c.samples) > 1 && now.at.Sub(c.samples[1].at) >= busyWindow {
		c.samples = c.samples[1:]
	}
	first := c.samples[0]
	elapsed := now.at.Sub(first.at)
	if elapsed <= 0 {
		return nil
	}
	var list []float64
	for i, busy := range now.busy {
		list = append(list, min(1, float64(busy-first.busy[i])/float64(elapsed)))
	}
	return list
}

// restarted tells whether the stages are others than before.
func restarted(before, now busySample) bool {
	if len(before.busy) != len(now.busy) {
		return true
	}
	for i := range now.busy {
		if now.busy[i] < before.busy[i] {
			return true
		}
	}
	return false
}
