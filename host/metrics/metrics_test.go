package metrics

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/kvledger"
)

func text(m *Metrics) string {
	w := httptest.NewRecorder()
	m.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return w.Body.String()
}

// silent is a source without a model.
func silent() Source {
	return Source{Status: func() (batch.Status, bool) { return batch.Status{}, false }, Busy: func() []time.Duration { return nil }}
}

func TestMetrics(t *testing.T) {
	status := batch.Status{
		State: batch.StateReady, QueueDepth: 3, MaxActive: 16, InFlight: 2, LastStep: 20 * time.Millisecond,
		Active: make([]batch.ActiveRequest, 4), KV: []kvledger.StageUsage{{Used: 5, Budget: 9}, {Used: 6}},
		Counters: batch.Counters{Steps: 11, Finished: 7, Failed: 1, Rejections: map[batch.Rejection]uint64{{Stage: 1, Reason: kvledger.ReasonMemory}: 2}},
	}
	m := New("v1", Source{Status: func() (batch.Status, bool) { return status, true }, Busy: func() []time.Duration { return nil }})
	m.Request(Request{Route: "v1/completions", Status: 200, Took: time.Second, Generated: true, Queued: time.Second, FirstToken: 2 * time.Second, PromptTokens: 10, CompletionTokens: 4})
	m.Request(Request{Status: 404, Took: time.Millisecond})
	m.Gap(20 * time.Millisecond)
	got := text(m)
	for _, line := range []string{
		`mlxcel_http_requests_total{route="v1/completions",status="200"} 1`,
		`mlxcel_http_requests_total{route="other",status="404"} 1`,
		`mlxcel_http_request_seconds_sum{route="v1/completions"} 1`,
		"mlxcel_queue_seconds_count 1", "mlxcel_first_token_seconds_sum 2", "mlxcel_prompt_tokens_total 10", "mlxcel_completion_tokens_total 4",
		`mlxcel_token_gap_seconds_bucket{le="0.02"} 1`, `mlxcel_token_gap_seconds_bucket{le="0.015"} 0`,
		`mlxcel_state{state="ready"} 1`, "mlxcel_active_requests 4", "mlxcel_max_active_requests 16", "mlxcel_queued_requests 3", "mlxcel_steps_in_flight 2",
		"mlxcel_last_step_seconds 0.02", `mlxcel_kv_reserved_bytes{stage="1"} 6`, `mlxcel_kv_budget_bytes{stage="0"} 9`,
		"mlxcel_steps_total 11", `mlxcel_requests_total{outcome="finished"} 7`, `mlxcel_requests_total{outcome="failed"} 1`,
		`mlxcel_pp_admission_rejections_total{reason="memory",stage="1"} 2`, `mlxcel_build_info{version="v1"} 1`, "process_open_fds",
	} {
		if !strings.Contains(got, "\n"+line) {
			t.Errorf("no %s in\n%s", line, got)
		}
	}
}

// Before a model is loaded, and where nothing is counted, metrics are no trouble.
func TestWithoutScheduler(t *testing.T) {
	if got := text(New("v1", silent())); strings.Contains(got, "mlxcel_state") {
		t.Error(got)
	}
	var none *Metrics
	none.Request(Request{})
	none.Gap(time.Second)
}

// The share is of the time since the scrape before, however often somebody scrapes, and begins anew with new stages.
func TestBusyFraction(t *testing.T) {
	start := time.Unix(1000, 0)
	var now time.Time
	var busy []time.Duration
	source := silent()
	source.Busy, source.Now = func() []time.Duration { return busy }, func() time.Time { return now }
	m := New("v1", source)
	seconds := func(list ...float64) (out []time.Duration) {
		for _, s := range list {
			out = append(out, time.Duration(s*float64(time.Second)))
		}
		return out
	}
	for _, step := range []struct {
		at   float64
		busy []time.Duration
		want []string // of each stage; none where nothing can be told
	}{
		{0, nil, nil},
		{1, seconds(10, 20), nil},
		{11, seconds(15, 28), []string{"0.5", "0.8"}},
		{12, seconds(15, 28.8), []string{"0.4545", "0.8"}}, // a second scraper, right after
		{21, seconds(16, 34), []string{"0.1111", "0.5777"}},
		{27, seconds(16, 34), []string{"0", "0"}},
		{28, seconds(0.5, 0.25), nil},
		{38, seconds(5.5, 2.75), []string{"0.5", "0.25"}},
		{48, nil, nil},
	} {
		now, busy = start.Add(time.Duration(step.at*float64(time.Second))), step.busy
		got := text(m)
		for stage, want := range step.want {
			line := "mlxcel_pp_stage_busy_fraction{stage=\"" + strconv.Itoa(stage) + "\"} " + want
			if !strings.Contains(got, "\n"+line) {
				t.Errorf("at %v: no %s in\n%s", step.at, line, got)
			}
		}
		if step.want == nil && strings.Contains(got, "busy_fraction{") {
			t.Errorf("at %v: a fraction of nothing in\n%s", step.at, got)
		}
	}
}
