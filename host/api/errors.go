package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/pipeline"
)

// Error is an answer that is an error, in the shape of OpenAI's API.
type Error struct {
	Status     int           // of HTTP
	Message    string        // complete by itself
	Type       string        // one of the Type constants
	Code       string        // finer than Type, stable; empty for none
	Param      string        // path of the field at fault; empty for none
	Stage      *int          // the stage at fault; nil for none
	RetryAfter time.Duration // 0 for none
}

func (e *Error) Error() string { return e.Message }

// Types of errors.
const (
	TypeInvalidRequest = "invalid_request_error"
	TypeAuthentication = "authentication_error"
	TypePermission     = "permission_error"
	TypeNotFound       = "not_found_error"
	TypeRateLimit      = "rate_limit_error"
	TypeUnavailable    = "service_unavailable_error"
	TypeTimeout        = "timeout_error"
	TypeServer         = "server_error"
)

// Codes of errors.
const (
	CodeInvalidKey      = "invalid_api_key"
	CodeInvalidJSON     = "invalid_json"
	CodeInvalidValue    = "invalid_value"
	CodeUnsupported     = "unsupported_parameter"
	CodeModelNotFound   = "model_not_found"
	CodeContextLength   = "context_length_exceeded"
	CodeTemplateRefused = "chat_template_refused"
	CodeBodyTooLarge    = "body_too_large"
	CodeSlowBody        = "body_too_slow"
	CodeHostNotAllowed  = "host_not_allowed"
	CodeOriginRefused   = "origin_not_allowed"
	CodeQueueFull       = "queue_full"
	CodeAdmission       = "kv_admission_rejected"
	CodeStageLost       = "stage_lost"
	CodeStageFailed     = "stage_failed"
	CodeLoading         = "loading"
	CodeDraining        = "draining"
	CodeNoProgress      = "no_progress"
	CodeTimeout         = "request_timeout"
)

// errorBody is what goes over the wire. Null members are there as OpenAI sends them.
type errorBody struct {
	Error errorObject `json:"error"`
}

type errorObject struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
	Stage   *int    `json:"stage,omitempty"`
}

func (e *Error) body() errorBody {
	optional := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	return errorBody{errorObject{e.Message, e.Type, optional(e.Param), optional(e.Code), e.Stage}}
}

func (e *Error) write(w http.ResponseWriter) {
	if e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int((e.RetryAfter+time.Second-1)/time.Second)))
	}
	if e.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	writeJSON(w, e.Status, e.body())
}

// writeJSON answers with a value. An error is of the connection, which the client knows better than we do.
func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// invalid is a request that makes no sense; param is the path of the field at fault.
func invalid(param, format string, args ...any) *Error {
	message := fmt.Sprintf(format, args...)
	if param != "" {
		message = param + ": " + message
	}
	return &Error{Status: http.StatusBadRequest, Type: TypeInvalidRequest, Code: CodeInvalidValue, Param: param, Message: message}
}

// unsupported is a request that makes sense, but not here.
func unsupported(param, format string, args ...any) *Error {
	e := invalid(param, format, args...)
	e.Code = CodeUnsupported
	return e
}

// statusClientGone is what the log shows for a client that left; nobody receives it.
const statusClientGone = 499

// errorOf turns what the scheduler says into an answer. param is the field that holds the prompt.
func errorOf(err error, param string) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	e := &Error{Status: http.StatusInternalServerError, Type: TypeServer, Message: firstLine(err)}
	if s, ok := errors.AsType[*pipeline.StageError](err); ok {
		e.Stage = &s.Place.Stage
	}
	switch {
	case is[*kvledger.TooLongError](err):
		e.refuse(CodeContextLength, param)
	case is[*batch.TokenRangeError](err), errors.Is(err, batch.ErrEmptyPrompt):
		e.refuse(CodeInvalidValue, param)
	case is[*batch.QueueFullError](err):
		full, _ := errors.AsType[*batch.QueueFullError](err)
		e.Status, e.Type, e.Code, e.RetryAfter = http.StatusTooManyRequests, TypeRateLimit, CodeQueueFull, full.RetryAfter
	case is[*kvledger.AdmissionDiagnostic](err): // also the reason of a deadline
		d, _ := errors.AsType[*kvledger.AdmissionDiagnostic](err)
		e.unavailable(CodeAdmission, time.Second)
		e.Stage = &d.Stage
	case is[*batch.DeadlineError](err):
		e.Status, e.Type, e.Code = http.StatusGatewayTimeout, TypeTimeout, CodeTimeout
	case errors.Is(err, batch.ErrDraining), errors.Is(err, batch.ErrClosed):
		e.unavailable(CodeDraining, time.Second)
	case is[*batch.UnavailableError](err), lost(err):
		e.unavailable(CodeStageLost, 0)
	case is[*batch.FailedError](err):
		e.Code = CodeStageFailed
	case errors.Is(err, context.Canceled):
		e.Status, e.Message = statusClientGone, "the client has left"
	}
	return e
}

// firstLine leaves out the log lines of an executor that died: they are the operator's.
func firstLine(err error) string {
	line, _, more := strings.Cut(err.Error(), "\n")
	if more {
		line = strings.TrimSuffix(line, "; its last log lines:") + " (the server's log says more)"
	}
	return line
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

func lost(err error) bool {
	f, ok := errors.AsType[*batch.FailedError](err)
	return ok && f.Lost
}

func (e *Error) refuse(code, param string) {
	e.Status, e.Type, e.Code, e.Param = http.StatusBadRequest, TypeInvalidRequest, code, param
}

func (e *Error) unavailable(code string, retryAfter time.Duration) {
	e.Status, e.Type, e.Code, e.RetryAfter = http.StatusServiceUnavailable, TypeUnavailable, code, retryAfter
}
