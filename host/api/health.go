package api

import (
	"net/http"

	"github.com/mlxcel/mlxcel/host/batch"
)

const (
	pathHealth   = "/health"
	pathHealthV1 = "/v1/health"
	pathLive     = "/health/live"
)

// healthBody says ok, or what is wrong in the shape of an error.
type healthBody struct {
	Status string       `json:"status"`
	Error  *errorObject `json:"error,omitempty"`
}

// health is GET /health: readiness. It is 200 only while requests are taken and make progress.
func (s *Server) health(w http.ResponseWriter, _ *http.Request) *Error {
	writeHealth(w, s.ready())
	return nil
}

// live is GET /health/live: liveness. Loading, draining and starting a lost stage again are no reason to kill the process;
// work that stands still, and a model that can't be started again, are.
func (s *Server) live(w http.ResponseWriter, _ *http.Request) *Error {
	if m := s.model.Load(); m != nil && m.Scheduler.Healthy(s.now()) != nil {
		if state := m.Scheduler.Status().State; state == batch.StateReady || state == batch.StateFailed {
			writeHealth(w, s.ready())
			return nil
		}
	}
	writeHealth(w, nil)
	return nil
}

func (s *Server) ready() *Error {
	m, e := s.loaded()
	if e != nil {
		return e
	}
	if s.draining.Load() {
		e = &Error{Message: batch.ErrDraining.Error()}
		e.unavailable(CodeDraining, 0)
		return e
	}
	err := m.Scheduler.Healthy(s.now())
	if err == nil {
		return nil
	}
	e = errorOf(err, "")
	switch m.Scheduler.Status().State {
	case batch.StateReady:
		e.unavailable(CodeNoProgress, 0)
	case batch.StateDraining, batch.StateClosed:
		e.unavailable(CodeDraining, 0)
	default:
		e.unavailable(CodeStageLost, 0)
	}
	return e
}

func writeHealth(w http.ResponseWriter, e *Error) {
	if e == nil {
		writeJSON(w, http.StatusOK, healthBody{Status: "ok"})
		return
	}
	body := e.body()
	writeJSON(w, e.Status, healthBody{Status: e.Code, Error: &body.Error})
}

// metrics is GET /metrics.
func (s *Server) metrics(w http.ResponseWriter, r *http.Request) *Error {
	s.cfg.Metrics.ServeHTTP(w, r)
	return nil
}
