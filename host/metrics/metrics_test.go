package metrics

import (
	"net/http"
	"net/http/httptest"
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

func TestMetrics(t *testing.T) {
	status := batch.Status{
		State: batch.StateReady, QueueDepth: 3, MaxActive: 16, InFlight: 2, LastStep: 20 * time.Millisecond,
		Active: make([]batch.ActiveRequest, 4), KV: []kvledger.StageUsage{{Used: 5, Budget: 9}, {Used: 6}},
		Counters: batch.Counters{Steps: 11, Finished: 7, Failed: 1, Rejections: map[batch.Rejection]uint64{{Stage: 1, Reason: kvledger.ReasonMemory}: 2}},
	}
	m := New("v1", func() (batch.Status, bool) { return status, true })
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
	if got := text(New("v1", func() (batch.Status, bool) { return batch.Status{}, false })); strings.Contains(got, "mlxcel_state") {
		t.Error(got)
	}
	var none *Metrics
	none.Request(Request{})
	none.Gap(time.Second)
}
