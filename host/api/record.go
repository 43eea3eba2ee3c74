package api

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/mlxcel/mlxcel/host/metrics"
)

// record is what the access log says of a request. It is the request's writer as well, to see what was answered.
type record struct {
	http.ResponseWriter
	id      string
	route   string // without the leading slash; empty where none was reached
	started time.Time
	status  int // 0 while nothing was written
	err     *Error

	model      string // empty where nothing was generated
	choices    int
	prompt     int // tokens
	completion int
	finish     []string
	queued     time.Duration // of the choice that waited longest
	first      time.Duration // to the first token, of the slowest choice
	speed      float64       // tokens per second of the slowest choice; 0 where nothing was measured
}

func (r *record) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *record) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	return r.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController reach the connection.
func (r *record) Unwrap() http.ResponseWriter { return r.ResponseWriter }

type recordKey struct{}

func withRecord(ctx context.Context, r *record) context.Context {
	return context.WithValue(ctx, recordKey{}, r)
}

func recordOf(ctx context.Context) *record { return ctx.Value(recordKey{}).(*record) }

// begin notes what is to be generated.
func (r *record) begin(j *job) {
	r.model = j.model.IDs[0]
	r.choices = j.choices * len(j.prompts)
	for _, in := range j.prompts {
		r.prompt += len(in.ids)
	}
}

// end notes what was.
func (r *record) end(choices []*choice) {
	for _, c := range choices {
		r.completion += c.generated
		r.queued = max(r.queued, c.timings.Queued)
		r.first = max(r.first, c.timings.FirstToken)
		if speed := c.timings.TokensPerSecond(c.generated); speed > 0 && (r.speed == 0 || speed < r.speed) {
			r.speed = speed
		}
		if reason := string(c.reason); reason != "" && !slices.Contains(r.finish, reason) {
			r.finish = append(r.finish, reason)
		}
	}
}

// account writes the access log and counts, when a request has been answered.
func (s *Server) account(r *record, req *http.Request) {
	took := s.now().Sub(r.started)
	status := r.status
	if r.err != nil { // also of a stream that had begun with 200
		status = r.err.Status
	}
	s.cfg.Metrics.Request(metrics.Request{
		Route: r.route, Status: status, Took: took, Generated: r.model != "", Queued: r.queued, FirstToken: r.first,
		PromptTokens: r.prompt, CompletionTokens: r.completion,
	})
	fields := []any{"request", r.id, "method", req.Method, "path", req.URL.Path, "status", status, "ms", milliseconds(took)}
	if r.model != "" {
		fields = append(fields, "model", r.model, "choices", r.choices, "prompt_tokens", r.prompt, "completion_tokens", r.completion,
			"queue_ms", milliseconds(r.queued), "first_token_ms", milliseconds(r.first), "tok_per_s", r.speed, "finish", r.finish)
	}
	if r.err != nil {
		fields = append(fields, "error", r.err.Code, "message", r.err.Message)
	}
	if r.model == "" && status < http.StatusBadRequest || open(req.URL.Path) { // probes would drown the rest
		s.log.Debug("request", fields...)
		return
	}
	s.log.Info("request", fields...)
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// logPrompt writes a prompt to the log, where the operator has asked for that.
func (s *Server) logPrompt(r *http.Request, text string) {
	if s.cfg.LogPrompts {
		s.log.Info("prompt", "request", recordOf(r.Context()).id, "text", text)
	}
}
