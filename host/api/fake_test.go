package api

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/mlxcel/mlxcel/host/tokenize"
	"github.com/mlxcel/mlxcel/sdk"
)

// fakeScheduler answers with what a test has written down.
type fakeScheduler struct {
	mu       sync.Mutex
	requests []batch.Request
	streams  []*fakeStream
	answer   func(r batch.Request) *fakeStream
	refuse   error
	limit    int
	status   batch.Status
	sick     error
}

func (f *fakeScheduler) SubmitChoices(ctx context.Context, r batch.Request, n int) ([]Stream, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		return nil, f.refuse
	}
	var streams []Stream
	for range n {
		f.requests = append(f.requests, r)
		s := f.answer(r)
		s.report(r)
		s.ctx = ctx
		f.streams = append(f.streams, s)
		streams = append(streams, s)
		r.Sampler.Choice++
	}
	return streams, nil
}

func (f *fakeScheduler) Limit() int              { return f.limit }
func (f *fakeScheduler) Status() batch.Status    { return f.status }
func (f *fakeScheduler) Healthy(time.Time) error { return f.sick }

// fakeStream hands out its batches one by one, then its end.
type fakeStream struct {
	ctx     context.Context
	signal  chan struct{}
	batches [][]batch.Token
	scores  []float32
	reason  batch.FinishReason
	err     error
	stopped int // -1 while nobody has
	ended   bool
}

// script makes a stream of token batches.
func script(reason batch.FinishReason, batches ...[]batch.Token) *fakeStream {
	s := &fakeStream{signal: make(chan struct{}, 1), batches: batches, reason: reason, stopped: -1}
	s.signal <- struct{}{}
	return s
}

// broken is a stream that fails after its batches.
func broken(err error, batches ...[]batch.Token) *fakeStream {
	s := script("", batches...)
	s.err = err
	return s
}

// report leaves of the tokens' scores what r asks for.
func (s *fakeStream) report(r batch.Request) {
	for i, b := range s.batches {
		b = slices.Clone(b)
		for k := range b {
			if r.TopN == 0 {
				b[k].Top = nil
			}
			if r.TopN == 0 && !r.Logprob {
				b[k].Logprob = 0
			}
		}
		s.batches[i] = b
	}
}

// silent is a stream of which nothing is heard.
func silent() *fakeStream { return &fakeStream{signal: make(chan struct{}), stopped: -1} }

func (s *fakeStream) Signal() <-chan struct{} { return s.signal }

func (s *fakeStream) Take() ([]batch.Token, bool) {
	if s.ended || len(s.batches) == 0 {
		s.ended = true
		return nil, true
	}
	b := s.batches[0]
	s.batches = s.batches[1:]
	s.signal <- struct{}{}
	return b, false
}

func (s *fakeStream) PromptScores() []float32 { return s.scores }

func (s *fakeStream) Stop(n int) {
	s.stopped, s.ended, s.reason, s.err = n, true, batch.FinishStop, nil
}

func (s *fakeStream) Result() (*batch.Result, error) {
	return &batch.Result{FinishReason: s.reason, Timings: batch.Timings{Queued: time.Millisecond, FirstToken: 2 * time.Millisecond}}, s.err
}

// The tokenizer of the tiny checkpoints: tokens 0 to 255 are bytes, so that characters can be split over tokens.
var tinyTokenizer = sync.OnceValues(func() (*tokenize.Tokenizer, error) {
	return tokenize.Open("../../testdata/parity/llama-tied-q4")
})

const (
	tinyVocab = 320
	tinyEOS   = 313
)

// byteToken returns the token of one byte.
func byteToken(t testing.TB, b byte) int32 {
	t.Helper()
	tokenizer, err := tinyTokenizer()
	if err != nil {
		t.Fatal(err)
	}
	for id := range int32(tokenizer.VocabSize()) {
		if raw, ok := tokenizer.Bytes(id); ok && len(raw) == 1 && raw[0] == b {
			return id
		}
	}
	t.Fatalf("no token for byte %#x", b)
	return 0
}

// spelled returns text as tokens of one byte each.
func spelled(t testing.TB, text string) []batch.Token {
	var out []batch.Token
	for _, b := range []byte(text) {
		id := byteToken(t, b)
		out = append(out, batch.Token{ID: id, Logprob: -0.5, Top: []sdk.TokenScore{{Token: id, Logprob: -0.5}, {Token: 33, Logprob: -1.5}}})
	}
	return out
}

// each returns every token as a batch of its own.
func each(tokens []batch.Token) [][]batch.Token {
	var out [][]batch.Token
	for i := range tokens {
		out = append(out, tokens[i:i+1])
	}
	return out
}

const template = `{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}[{{ m.role }}{% if m.name %}:{{ m.name }}{% endif %}]{{ m.content if m.content else '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.x }}>{% endfor %}{% endfor %}{{ suffix }}[assistant]`

// rig is a server with a fake scheduler.
type rig struct {
	t         testing.TB
	scheduler *fakeScheduler
	server    *Server
	model     *Model
}

func newRig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	tokenizer, err := tinyTokenizer()
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := chat.New(template, nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Version: "test", Host: "127.0.0.1", Sampling: sdk.Sampler{Temperature: 1, TopP: 1},
		Now: func() time.Time { return time.Unix(1000, 0) }, NewID: func() string { return "1" }, Seed: func() uint64 { return 77 },
	}
	for _, f := range change {
		f(&cfg)
	}
	r := &rig{t: t, scheduler: &fakeScheduler{limit: 4096, status: batch.Status{State: batch.StateReady, MaxActive: 2}}, server: New(cfg)}
	r.says("ok")
	r.model = &Model{
		IDs: []string{"tiny", "alias"}, Created: time.Unix(5, 0), VocabSize: tinyVocab, EOS: []int32{tinyEOS},
		Tokenizer: tokenizer, Template: tmpl, Scheduler: r.scheduler,
	}
	r.server.SetModel(r.model)
	return r
}

// says has every request answered with text, a byte at a time.
func (r *rig) says(text string) {
	r.scheduler.answer = func(batch.Request) *fakeStream { return script(batch.FinishLength, each(spelled(r.t, text))...) }
}

// do sends a request and returns the whole answer.
func (r *rig) do(method, path, body string, header ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(method, path, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	r.server.ServeHTTP(w, req)
	return w
}

func (r *rig) post(path, body string) *httptest.ResponseRecorder {
	return r.do(http.MethodPost, path, body)
}

// last returns the latest request that reached the scheduler.
func (r *rig) last() batch.Request {
	r.t.Helper()
	if len(r.scheduler.requests) == 0 {
		r.t.Fatal("no request reached the scheduler")
	}
	return r.scheduler.requests[len(r.scheduler.requests)-1]
}

const hello = `"messages":[{"role":"user","content":"hi"}]`

func chatBody(fields string, args ...any) string {
	if fields != "" {
		fields = "," + fmt.Sprintf(fields, args...)
	}
	return "{" + hello + fields + "}"
}
