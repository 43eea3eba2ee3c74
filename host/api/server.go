// Package api owns the HTTP interface: OpenAI's chat and completion endpoints and what an operator asks a server.
package api

import (
	"crypto/rand"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/metrics"
	"github.com/mlxcel/mlxcel/sdk"
)

// openAPIDescription is what /openapi.json serves.
//
//go:embed openapi.json
var openAPIDescription []byte

// Config is what a server is made of.
type Config struct {
	Version string

	// Host is the name or address that the listener was given; requests may name it in their Host header.
	Host string
	// AllowedOrigins may call from a browser besides the server's own origin, such as "https://chat.example.com"; "*" allows
	// every one, and every Host header.
	AllowedOrigins []string
	APIKeys        []string // one of which each request must carry; none means that no key is asked for

	Sampling         sdk.Sampler   // where a request does not say; OpenAI's default is temperature 1
	DefaultMaxTokens int           // where a request does not say; 0 means 1,024
	Timeout          time.Duration // for a whole request; 0 means none

	MaxBody      int64         // bytes of a request's body at most; 0 means 16 MiB
	BodyTimeout  time.Duration // for reading it; 0 means 30 s
	WriteTimeout time.Duration // for a client to take an event of a stream; 0 means 30 s
	KeepAlive    time.Duration // between comments in a stream that is quiet; 0 means 10 s

	LogPrompts bool
	Metrics    *metrics.Metrics // nil counts nothing
	Expose     bool             // serve Metrics under /metrics, which is 404 without

	Now    func() time.Time // default time.Now
	NewID  func() string    // default 24 random hexadecimal digits
	Seed   func() uint64    // for requests without one; default random
	Logger hclog.Logger     // default none
}

const (
	defaultMaxTokens    = 1024
	defaultMaxBody      = 16 << 20
	defaultBodyTimeout  = 30 * time.Second
	defaultWriteTimeout = 30 * time.Second
	defaultKeepAlive    = 10 * time.Second
)

func (c Config) withDefaults() Config {
	orDefault(&c.DefaultMaxTokens, defaultMaxTokens)
	orDefault(&c.MaxBody, defaultMaxBody)
	orDefault(&c.BodyTimeout, defaultBodyTimeout)
	orDefault(&c.WriteTimeout, defaultWriteTimeout)
	orDefault(&c.KeepAlive, defaultKeepAlive)
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.NewID == nil {
		c.NewID = randomID
	}
	if c.Seed == nil {
		c.Seed = randomSeed
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	return c
}

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func randomBytes() (b [12]byte) {
	_, _ = rand.Read(b[:]) // never fails
	return b
}

func randomID() string {
	b := randomBytes()
	return hex.EncodeToString(b[:])
}

func randomSeed() uint64 {
	b := randomBytes()
	var seed uint64
	for _, c := range b[:8] {
		seed = seed<<8 | uint64(c)
	}
	return seed
}

// Server answers HTTP requests. It is an http.Handler; the listener is its owner's. Before SetModel it says that it is loading.
type Server struct {
	cfg      Config
	log      hclog.Logger
	keys     [][sha256.Size]byte
	routes   *http.ServeMux
	model    atomic.Pointer[Model]
	draining atomic.Bool

	unknownMu sync.Mutex
	unknown   map[string]bool // fields that were logged
}

// New makes a server.
func New(cfg Config) *Server {
	cfg = cfg.withDefaults()
	s := &Server{cfg: cfg, log: cfg.Logger, routes: http.NewServeMux(), unknown: map[string]bool{}}
	for _, key := range cfg.APIKeys {
		s.keys = append(s.keys, sha256.Sum256([]byte(key)))
	}
	for _, route := range s.table() {
		s.routes.HandleFunc(route.path, func(w http.ResponseWriter, r *http.Request) { s.dispatch(w, r, route.methods) })
	}
	return s
}

// SetModel makes the server ready.
func (s *Server) SetModel(m *Model) {
	m.speller = newSpeller(m.Tokenizer)
	s.model.Store(m)
}

// Drain makes the server refuse new work. What runs goes on.
func (s *Server) Drain() { s.draining.Store(true) }

func (s *Server) now() time.Time { return s.cfg.Now() }
func (s *Server) newID() string  { return s.cfg.NewID() }

// handler answers a request, or says why not as long as nothing was written.
type handler func(w http.ResponseWriter, r *http.Request) *Error

// route is a path and what it takes.
type route struct {
	path    string
	methods map[string]handler
}

func (s *Server) table() []route {
	get := func(h handler) map[string]handler { return map[string]handler{http.MethodGet: h, http.MethodHead: h} }
	post := func(h handler) map[string]handler { return map[string]handler{http.MethodPost: h} }
	routes := []route{
		{"/v1/chat/completions", post(s.chatCompletions)},
		{"/chat/completions", post(s.chatCompletions)},
		{"/v1/completions", post(s.completions)},
		{"/completions", post(s.completions)},
		{"/v1/models", get(s.models)},
		{"/v1/models/{id}", get(s.oneModel)},
		{"/tokenize", post(s.tokenizeText)},
		{"/detokenize", post(s.detokenize)},
		{"/apply-template", post(s.applyTemplate)},
		{pathHealth, get(s.health)},
		{pathHealthV1, get(s.health)},
		{pathLive, get(s.live)},
		{"/props", get(s.props)},
		{"/slots", get(s.slots)},
		{"/version", get(s.version)},
		{"/openapi.json", get(s.openAPI)},
		{"/", nil},
	}
	if s.cfg.Metrics != nil && s.cfg.Expose {
		routes = append(routes, route{"/metrics", get(s.metrics)})
	}
	return routes
}

// dispatch picks the handler for the method. Paths without methods are those that nobody has.
func (s *Server) dispatch(w http.ResponseWriter, r *http.Request, methods map[string]handler) {
	recordOf(r.Context()).route = strings.TrimPrefix(r.Pattern, "/")
	h := methods[r.Method]
	switch {
	case methods == nil:
		s.fail(w, r, &Error{Status: http.StatusNotFound, Type: TypeNotFound, Message: "there is nothing at " + r.URL.Path + "; see /openapi.json"})
	case h == nil:
		w.Header().Set("Allow", strings.Join(slices.Sorted(maps.Keys(methods)), ", "))
		s.fail(w, r, &Error{
			Status: http.StatusMethodNotAllowed, Type: TypeInvalidRequest,
			Message: fmt.Sprintf("%s does not take %s; see /openapi.json", r.URL.Path, r.Method),
		})
	default:
		if e := h(w, r); e != nil {
			s.fail(w, r, e)
		}
	}
}

// fail answers with an error, unless an answer has begun.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, e *Error) {
	record := recordOf(r.Context())
	record.err = e
	if record.status == 0 && e.Status != statusClientGone {
		e.write(w)
	}
}

// ServeHTTP is http.Handler's.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	record := &record{ResponseWriter: w, id: "req_" + s.newID(), started: s.now()}
	r = r.WithContext(withRecord(r.Context(), record))
	record.Header().Set("X-Request-Id", record.id)
	defer s.account(record, r)
	defer s.recover(record, r)
	if e := s.admit(record, r); e != nil {
		s.fail(record, r, e)
		return
	}
	if r.Method == http.MethodOptions && r.Header.Get("Origin") != "" {
		preflight(record, r)
		return
	}
	s.routes.ServeHTTP(record, r)
}

// recover makes an answer of a fault of ours. It costs this request, not the server.
func (s *Server) recover(w *record, r *http.Request) {
	fault := recover()
	if fault == nil {
		return
	}
	if err, ok := fault.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(fault)
	}
	s.log.Error("fault in a request", "request", w.id, "fault", fault, "stack", string(debug.Stack()))
	s.fail(w, r, &Error{Status: http.StatusInternalServerError, Type: TypeServer, Message: "the server failed on this request; its log says more under " + w.id})
}

// loaded returns the model, or that there is none yet.
func (s *Server) loaded() (*Model, *Error) {
	m := s.model.Load()
	if m == nil {
		return nil, &Error{
			Status: http.StatusServiceUnavailable, Type: TypeUnavailable, Code: CodeLoading, RetryAfter: time.Second,
			Message: "the model is being loaded; try again soon",
		}
	}
	return m, nil
}

// serves tells whether the model goes by this name.
func (m *Model) serves(name string) *Error {
	if name == "" || slices.Contains(m.IDs, name) {
		return nil
	}
	return &Error{
		Status: http.StatusNotFound, Type: TypeNotFound, Code: CodeModelNotFound, Param: "model",
		Message: fmt.Sprintf("the model %q does not exist here; this server has %s (--alias gives it further names)", name, strings.Join(m.IDs, ", ")),
	}
}

// MetricsOnly returns a handler for a listener of its own, which has /metrics and nothing else. Who may call is the same.
func (s *Server) MetricsOnly() http.Handler {
	only := &Server{cfg: s.cfg, log: s.log, keys: s.keys, routes: http.NewServeMux()}
	metrics := map[string]handler{http.MethodGet: only.metrics, http.MethodHead: only.metrics}
	only.routes.HandleFunc("/metrics", func(w http.ResponseWriter, r *http.Request) { only.dispatch(w, r, metrics) })
	only.routes.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { only.dispatch(w, r, nil) })
	return only
}
