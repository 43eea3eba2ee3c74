package api

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/mlxcel/mlxcel/host/api/jsonbody"
)

// open reads the body of a request for work.
func (s *Server) open(w http.ResponseWriter, r *http.Request) (*Model, *reader, *Error) {
	m, e := s.loaded()
	if e != nil {
		return nil, nil, e
	}
	if s.draining.Load() {
		return nil, nil, &Error{
			Status: http.StatusServiceUnavailable, Type: TypeUnavailable, Code: CodeDraining, RetryAfter: time.Second,
			Message: "the server is finishing its running requests and takes no new ones",
		}
	}
	body, e := s.readBody(w, r)
	if e != nil {
		return nil, nil, e
	}
	o, err := jsonbody.Parse(body)
	if err != nil {
		return nil, nil, fieldError(err)
	}
	return m, &reader{Object: o, defaults: s.cfg.Sampling, vocabSize: m.VocabSize, seed: s.cfg.Seed}, nil
}

func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, *Error) {
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return nil, &Error{
			Status: http.StatusUnsupportedMediaType, Type: TypeInvalidRequest,
			Message: fmt.Sprintf("content encoding %q is not supported; send the body as it is", encoding),
		}
	}
	control := http.NewResponseController(w)
	// Not every connection has deadlines; one without is a test's.
	_ = control.SetReadDeadline(time.Now().Add(s.cfg.BodyTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.cfg.MaxBody))
	switch {
	case is[*http.MaxBytesError](err):
		return nil, &Error{
			Status: http.StatusRequestEntityTooLarge, Type: TypeInvalidRequest, Code: CodeBodyTooLarge,
			Message: fmt.Sprintf("the body is larger than %d bytes", s.cfg.MaxBody),
		}
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close") // what is left of the body is not waited for
		return nil, &Error{
			Status: http.StatusRequestTimeout, Type: TypeInvalidRequest, Code: CodeSlowBody,
			Message: fmt.Sprintf("the body did not arrive within %v", s.cfg.BodyTimeout),
		}
	case err != nil:
		return nil, invalid("", "the body can't be read: %v", err)
	}
	_ = control.SetReadDeadline(time.Time{}) // from here on reading only tells whether the client is still there
	return body, nil
}

// closeBody ends the reading of a body: its first error, fields that nobody knows, and a model that is not ours.
func (s *Server) closeBody(r *reader, m *Model, model string) *Error {
	unknown, err := r.close()
	if err != nil {
		return errorOf(err, "")
	}
	for _, name := range unknown {
		s.noteUnknown(name)
	}
	return m.serves(model)
}

const (
	maxUnknown     = 256 // names remembered
	maxUnknownName = 64  // bytes
)

// noteUnknown logs a field that has no meaning here, the first time that it comes.
func (s *Server) noteUnknown(name string) {
	if len(name) > maxUnknownName {
		name = name[:maxUnknownName]
	}
	s.unknownMu.Lock()
	seen := s.unknown[name] || len(s.unknown) >= maxUnknown
	if !seen {
		s.unknown[name] = true
	}
	s.unknownMu.Unlock()
	if !seen {
		s.log.Warn("a request has a field that this server does not know; it is ignored, and not mentioned again", "field", fmt.Sprintf("%q", name))
	}
}
