// Package metrics owns what is counted for Prometheus: requests as they end, and the scheduler as it stands when asked.
package metrics

import (
	"net/http"
	"strconv"
	"time"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Metrics is a registry of its own. A nil one counts nothing.
type Metrics struct {
	handler  http.Handler
	requests *prometheus.CounterVec
	took     *prometheus.HistogramVec
	queued   prometheus.Histogram
	first    prometheus.Histogram
	gap      prometheus.Histogram
	prompt   prometheus.Counter
	answer   prometheus.Counter
}

// Request is one that has ended.
type Request struct {
	Route            string // of a fixed set; empty where none was reached
	Status           int    // of HTTP
	Took             time.Duration
	Generated        bool // it was for an answer; else what follows means nothing
	Queued           time.Duration
	FirstToken       time.Duration // 0 where none came
	PromptTokens     int
	CompletionTokens int
}

// Buckets in seconds: a queue is empty or long, a token takes milliseconds to seconds.
var (
	longBuckets  = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}
	tokenBuckets = []float64{0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5}
)

// Source is what is asked when Prometheus asks.
type Source struct {
	Status func() (batch.Status, bool) // of the scheduler; false while there is none
	Busy   func() []time.Duration      // that each stage has computed since its start; nil while there is none
	Now    func() time.Time            // default time.Now
}

// New makes a registry.
func New(version string, from Source) *Metrics {
	if from.Now == nil {
		from.Now = time.Now
	}
	registry := prometheus.NewRegistry()
	m := &Metrics{
		handler: promhttp.HandlerFor(registry, promhttp.HandlerOpts{}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mlxcel_http_requests_total", Help: "Requests answered, by route and HTTP status."}, []string{"route", "status"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "mlxcel_http_request_seconds", Help: "Time from a request's arrival to the end of its answer.", Buckets: longBuckets}, []string{"route"}),
		queued: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "mlxcel_queue_seconds", Help: "Time that a request waited before it joined.", Buckets: longBuckets}),
		first: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "mlxcel_first_token_seconds", Help: "Time from a request's arrival in the queue to its first token.", Buckets: longBuckets}),
		gap: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "mlxcel_token_gap_seconds", Help: "Time between tokens of one answer.", Buckets: tokenBuckets}),
		prompt: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "mlxcel_prompt_tokens_total", Help: "Prompt tokens of requests that have ended."}),
		answer: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "mlxcel_completion_tokens_total", Help: "Tokens of answers that have ended."}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "mlxcel_build_info", Help: "1, with the version.", ConstLabels: prometheus.Labels{"version": version}})
	build.Set(1)
	registry.MustRegister(m.requests, m.took, m.queued, m.first, m.gap, m.prompt, m.answer, build, schedulerCollector{from.Status}, &busyCollector{busy: from.Busy, now: from.Now},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Request counts a request that has ended.
func (m *Metrics) Request(r Request) {
	if m == nil {
		return
	}
	if r.Route == "" {
		r.Route = "other"
	}
	m.requests.WithLabelValues(r.Route, strconv.Itoa(r.Status)).Inc()
	m.took.WithLabelValues(r.Route).Observe(r.Took.Seconds())
	if !r.Generated {
		return
	}
	m.queued.Observe(r.Queued.Seconds())
	m.prompt.Add(float64(r.PromptTokens))
	m.answer.Add(float64(r.CompletionTokens))
	if r.FirstToken > 0 {
		m.first.Observe(r.FirstToken.Seconds())
	}
}

// Gap counts the time between two tokens of one answer.
func (m *Metrics) Gap(d time.Duration) {
	if m != nil {
		m.gap.Observe(d.Seconds())
	}
}

// ServeHTTP writes all metrics.
func (m *Metrics) ServeHTTP(w http.ResponseWriter, r *http.Request) { m.handler.ServeHTTP(w, r) }
