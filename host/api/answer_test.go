package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/metrics"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

func testMetrics() *metrics.Metrics {
	return metrics.New("test", metrics.Source{
		Status: func() (batch.Status, bool) { return batch.Status{}, false }, Busy: func() []time.Duration { return nil },
	})
}

// events reads a stream: the data of each event, with the event's name before it where it has one.
func events(t *testing.T, body string) []string {
	t.Helper()
	var out []string
	for block := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		name := ""
		for line := range strings.Lines(block) {
			line = strings.TrimSuffix(line, "\n")
			switch {
			case strings.HasPrefix(line, "event: "):
				name = strings.TrimPrefix(line, "event: ") + " "
			case strings.HasPrefix(line, "data: "):
				out = append(out, name+strings.TrimPrefix(line, "data: "))
			case strings.HasPrefix(line, ":"):
				out = append(out, line)
			default:
				t.Fatalf("line %q in %q", line, body)
			}
		}
	}
	return out
}

// chunkText reads the text that an event adds.
func chunkText(t *testing.T, data string) (text string, finish string) {
	t.Helper()
	var c struct {
		Choices []struct {
			Text  string `json:"text"`
			Delta struct {
				Content string `json:"content"`
			} `json:"delta"`
			Finish *string `json:"finish_reason"`
		} `json:"choices"`
	}
	if err := json.Unmarshal([]byte(data), &c); err != nil {
		t.Fatalf("%s: %v", data, err)
	}
	if len(c.Choices) != 1 {
		return "", ""
	}
	if c.Choices[0].Finish != nil {
		finish = *c.Choices[0].Finish
	}
	return c.Choices[0].Text + c.Choices[0].Delta.Content, finish
}

func TestStreamOfChat(t *testing.T) {
	r := newRig(t)
	got := events(t, r.post("/v1/chat/completions", chatBody(`"stream":true,"stream_options":{"include_usage":true}`)).Body.String())
	const head = `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1000,"model":"tiny","system_fingerprint":"mlxcel-test","choices":[`
	want := []string{
		head + `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}`,
		head + `{"index":0,"delta":{"content":"o"},"logprobs":null,"finish_reason":null}],"usage":null}`,
		head + `{"index":0,"delta":{"content":"k"},"logprobs":null,"finish_reason":null}],"usage":null}`,
		head + `{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}`,
		head + `],"usage":{"prompt_tokens":13,"completion_tokens":2,"total_tokens":15}}`,
		"[DONE]",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if w := r.post("/v1/chat/completions", chatBody(`"stream":true`)); strings.Contains(w.Body.String(), "usage") {
		t.Error("usage without include_usage")
	}
}

func TestWholeAnswers(t *testing.T) {
	r := newRig(t)
	r.scheduler.answer = func(batch.Request) *fakeStream {
		s := script(batch.FinishStop, append(spelled(t, "é!"), batch.Token{ID: tinyEOS, EOS: true}))
		s.scores = []float32{-2}
		return s
	}
	for _, tc := range []struct{ path, body, want string }{
		{"/v1/chat/completions", chatBody(""), `{"id":"chatcmpl-1","object":"chat.completion","created":1000,"model":"tiny","system_fingerprint":"mlxcel-test",
			"choices":[{"index":0,"message":{"role":"assistant","content":"é!","refusal":null},"logprobs":null,"finish_reason":"stop"}],
			"usage":{"prompt_tokens":13,"completion_tokens":4,"total_tokens":17}}`},
		{"/chat/completions", chatBody(`"logprobs":true,"top_logprobs":2`), `{"id":"chatcmpl-1","object":"chat.completion","created":1000,"model":"tiny","system_fingerprint":"mlxcel-test",
			"choices":[{"index":0,"message":{"role":"assistant","content":"é!","refusal":null},"logprobs":{"refusal":null,"content":[
			{"token":"\ufffd","logprob":-0.5,"bytes":[195],"top_logprobs":[{"token":"\ufffd","logprob":-0.5,"bytes":[195]},{"token":"B","logprob":-1.5,"bytes":[66]}]},
			{"token":"\ufffd","logprob":-0.5,"bytes":[169],"top_logprobs":[{"token":"\ufffd","logprob":-0.5,"bytes":[169]},{"token":"B","logprob":-1.5,"bytes":[66]}]},
			{"token":"!","logprob":-0.5,"bytes":[33],"top_logprobs":[{"token":"!","logprob":-0.5,"bytes":[33]},{"token":"B","logprob":-1.5,"bytes":[66]}]}]},
			"finish_reason":"stop"}],"usage":{"prompt_tokens":13,"completion_tokens":4,"total_tokens":17}}`},
		{"/chat/completions", chatBody(`"logprobs":true`), `{"id":"chatcmpl-1","object":"chat.completion","created":1000,"model":"tiny","system_fingerprint":"mlxcel-test",
			"choices":[{"index":0,"message":{"role":"assistant","content":"é!","refusal":null},"logprobs":{"refusal":null,"content":[
			{"token":"\ufffd","logprob":-0.5,"bytes":[195],"top_logprobs":[]},{"token":"\ufffd","logprob":-0.5,"bytes":[169],"top_logprobs":[]},
			{"token":"!","logprob":-0.5,"bytes":[33],"top_logprobs":[]}]},
			"finish_reason":"stop"}],"usage":{"prompt_tokens":13,"completion_tokens":4,"total_tokens":17}}`},
		{"/completions", `{"prompt":[0,1],"logprobs":1}`, `{"id":"cmpl-1","object":"text_completion","created":1000,"model":"tiny","system_fingerprint":"mlxcel-test",
			"choices":[{"index":0,"text":"é!","logprobs":{"tokens":["\ufffd","\ufffd","!"],"token_logprobs":[-0.5,-0.5,-0.5],
			"top_logprobs":[{"\ufffd":-0.5,"B":-1.5},{"\ufffd":-0.5,"B":-1.5},{"!":-0.5,"B":-1.5}],"text_offset":[0,0,1]},"finish_reason":"stop"}],
			"usage":{"prompt_tokens":2,"completion_tokens":4,"total_tokens":6}}`},
		{"/v1/completions", `{"prompt":[0,1],"echo":true,"logprobs":0}`, `{"id":"cmpl-1","object":"text_completion","created":1000,"model":"tiny","system_fingerprint":"mlxcel-test",
			"choices":[{"index":0,"text":"!\"é!","logprobs":{"tokens":["!","\"","\ufffd","\ufffd","!"],"token_logprobs":[null,-2,-0.5,-0.5,-0.5],
			"top_logprobs":null,"text_offset":[0,1,2,2,3]},"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":4,"total_tokens":6}}`},
	} {
		w := r.post(tc.path, tc.body)
		var got, want any
		if err := errors.Join(json.Unmarshal(w.Body.Bytes(), &got), json.Unmarshal([]byte(tc.want), &want)); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s %s:\ngot  %s\nwant %s", tc.path, tc.body, w.Body, tc.want)
		}
	}
}

// However the tokens come, the client gets the same text, whole characters only, and nothing of a stop string.
func TestTextAtEverySplit(t *testing.T) {
	const answer = "aé€𝄞 END|OF\u00df!"
	for _, tc := range []struct {
		stop, want, finish string
		generated          int
	}{
		{"", answer, "length", len(answer)},
		{`,"stop":"END|"`, "aé€𝄞 ", "stop", strings.Index(answer, "|") + 1},
		{`,"stop":["END OF","𝄞 E"]`, "aé€", "stop", strings.Index(answer, "E") + 1},
		{`,"stop":["!?","OFß!"]`, "aé€𝄞 END|", "stop", len(answer)},
		{`,"stop":"!!"`, answer, "length", len(answer)},
	} {
		tokens := spelled(t, answer)
		for i := range tokens {
			for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
				for _, logprobs := range []bool{false, true} {
					r := newRig(t)
					r.scheduler.answer = func(batch.Request) *fakeStream { return script(batch.FinishLength, tokens[:i], tokens[i:]) }
					body := `{"stream":true,"prompt":"x",` + hello + tc.stop
					if logprobs {
						body += `,"logprobs":` + map[string]string{"/v1/chat/completions": "true", "/v1/completions": "1"}[path]
					}
					text, finish := "", ""
					list := events(t, r.post(path, body+"}").Body.String())
					for _, e := range list[:len(list)-1] {
						piece, reason := chunkText(t, e)
						if !utf8.ValidString(piece) {
							t.Errorf("a piece is %q", piece)
						}
						text, finish = text+piece, finish+reason
					}
					if text != tc.want || finish != tc.finish || list[len(list)-1] != "[DONE]" {
						t.Errorf("%s%s split at %d: %q (%s), want %q (%s)", path, tc.stop, i, text, finish, tc.want, tc.finish)
					}
					if s := r.scheduler.streams[0]; tc.finish == "stop" && s.stopped != tc.generated && tc.generated != len(answer) {
						t.Errorf("stopped after %d tokens, want %d", s.stopped, tc.generated)
					}
				}
			}
		}
	}
}

// Half a character at the end of an answer is told as U+FFFD, once, at the end.
func TestAnswerEndsWithinACharacter(t *testing.T) {
	r := newRig(t)
	r.scheduler.answer = func(batch.Request) *fakeStream {
		return script(batch.FinishLength, each(spelled(t, "x\xe2\x82"))...)
	}
	w := r.post("/v1/completions", `{"prompt":"x"}`)
	if !strings.Contains(w.Body.String(), `"text":"x`+"\ufffd"+`"`) {
		t.Error(w.Body)
	}
}

func TestErrorsOfTheScheduler(t *testing.T) {
	stage := &pipeline.StageError{Place: sdk.Place{Stage: 1}, Plugin: "llama", Phase: pipeline.PhaseDecode, Err: errors.New("died\n  secret log line")}
	diagnostic := &kvledger.AdmissionDiagnostic{Stage: 2, Reason: kvledger.ReasonMemory, Used: 10, Budget: 16, Required: 8, ActiveSequences: 3}
	for _, tc := range []struct {
		err      error
		status   int
		code     string
		stage    string
		retry    string
		says     string
		onlyLate bool
	}{
		{err: &kvledger.TooLongError{Prompt: 5000, MaxTokens: 1, Limit: 4096, Stage: -1}, status: 400, code: CodeContextLength, says: "5000 tokens, but the model's context holds 4096"},
		{err: batch.ErrEmptyPrompt, status: 400, code: CodeInvalidValue, says: "no tokens"},
		{err: &batch.QueueFullError{Depth: 7, RetryAfter: 1500 * time.Millisecond}, status: 429, code: CodeQueueFull, retry: "2", says: "7 requests wait"},
		{err: diagnostic, status: 503, code: CodeAdmission, stage: "2", retry: "1", says: "10 of 16 bytes reserved by 3 active sequences"},
		{err: &batch.DeadlineError{Waited: time.Second, Admission: diagnostic}, status: 503, code: CodeAdmission, stage: "2", retry: "1", says: "10 of 16 bytes"},
		{err: &batch.DeadlineError{Waited: time.Second, Generated: 4}, status: 504, code: CodeTimeout, says: "4 tokens generated"},
		{err: &batch.FailedError{Generated: 2, Lost: true, Err: stage}, status: 503, code: CodeStageLost, stage: "1", says: "stage 1 (llama) failed in decode"},
		{err: &batch.FailedError{Generated: 2, Err: stage}, status: 500, code: CodeStageFailed, stage: "1", says: "stage 1"},
		{err: &batch.UnavailableError{Attempts: 5, Err: stage}, status: 503, code: CodeStageLost, stage: "1", says: "after 5 attempts"},
		{err: batch.ErrDraining, status: 503, code: CodeDraining, retry: "1", says: "takes no new ones"},
		{err: batch.ErrClosed, status: 503, code: CodeDraining, retry: "1", says: "stopped"},
		{err: &batch.PanicError{Value: "x"}, status: 500, says: "scheduler failed"},
	} {
		t.Run(fmt.Sprintf("%T %s", tc.err, tc.code), func(t *testing.T) {
			r := newRig(t)
			check := func(body string, w *httptest.ResponseRecorder) {
				t.Helper()
				e := errorIn(t, []byte(body))
				got := ""
				if e.Stage != nil {
					got = fmt.Sprint(*e.Stage)
				}
				if text(e.Code) != tc.code || got != tc.stage || !strings.Contains(e.Message, tc.says) || strings.Contains(e.Message, "secret") {
					t.Errorf("got %s", body)
				}
				if w != nil && (w.Code != tc.status || w.Header().Get("Retry-After") != tc.retry) {
					t.Errorf("status %d, retry after %q, want %d and %q", w.Code, w.Header().Get("Retry-After"), tc.status, tc.retry)
				}
			}
			for _, stream := range []string{"false", "true"} {
				r.scheduler.refuse = tc.err // at once
				w := r.post("/v1/chat/completions", chatBody(`"stream":`+stream))
				check(w.Body.String(), w)
				r.scheduler.refuse = nil
				r.scheduler.answer = func(batch.Request) *fakeStream { return broken(tc.err) } // before the first token
				w = r.post("/v1/chat/completions", chatBody(`"stream":`+stream))
				if stream == "false" {
					check(w.Body.String(), w)
				}
			}
			r.scheduler.answer = func(batch.Request) *fakeStream { return broken(tc.err, each(spelled(t, "ab"))...) }
			w := r.post("/v1/completions", `{"prompt":"x","stream":true}`)
			list := events(t, w.Body.String())
			last, isError := strings.CutPrefix(list[len(list)-1], "error ")
			if w.Code != http.StatusOK || !isError || strings.Contains(w.Body.String(), "[DONE]") {
				t.Fatalf("%d %s", w.Code, w.Body)
			}
			check(last, nil)
			if piece, _ := chunkText(t, list[0]); piece != "a" {
				t.Errorf("begins with %s", list[0])
			}
		})
	}
}

// Of several choices, one that fails ends the request; the others are cancelled.
func TestOneFailedChoiceEndsTheRequest(t *testing.T) {
	r := newRig(t)
	r.scheduler.answer = func(req batch.Request) *fakeStream {
		if req.Sampler.Choice == 1 {
			return broken(&batch.PanicError{Value: "x"})
		}
		return silent()
	}
	if w := r.post("/v1/completions", `{"prompt":"x","n":3}`); w.Code != http.StatusInternalServerError {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	for i, s := range r.scheduler.streams {
		if s.ctx.Err() == nil {
			t.Errorf("choice %d goes on", i)
		}
	}
}

// A queue that fills up between the choices of one request gives back those that were queued.
func TestChoicesAreQueuedAllOrNone(t *testing.T) {
	r := newRig(t)
	r.scheduler.answer = func(batch.Request) *fakeStream {
		r.scheduler.refuse = &batch.QueueFullError{Depth: 1, RetryAfter: time.Second}
		return silent()
	}
	if w := r.post("/v1/completions", `{"prompt":["x","y"],"n":3}`); w.Code != http.StatusTooManyRequests {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if len(r.scheduler.streams) != 3 {
		t.Errorf("%d choices queued before the refusal, want 3", len(r.scheduler.streams))
	}
	for i, stream := range r.scheduler.streams {
		if stream.ctx.Err() == nil {
			t.Errorf("choice %d of the first prompt stays in the queue", i)
		}
	}
}

func TestClientThatLeavesIsCancelled(t *testing.T) {
	for _, stream := range []string{"false", "true"} {
		r := newRig(t)
		submitted := make(chan *fakeStream, 1)
		r.scheduler.answer = func(batch.Request) *fakeStream {
			s := silent()
			submitted <- s
			return s
		}
		server := httptest.NewServer(r.server)
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL+"/v1/chat/completions", strings.NewReader(chatBody(`"stream":`+stream)))
		if err != nil {
			t.Fatal(err)
		}
		gone := make(chan error, 1)
		go func() {
			_, err := http.DefaultClient.Do(req)
			gone <- err
		}()
		s := <-submitted
		leave()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		r.scheduler.mu.Lock() // Submit has set the context
		cancelled := s.ctx.Done()
		r.scheduler.mu.Unlock()
		<-cancelled
		server.Close() // waits for the handler
	}
}

// A client that stops reading is given up, and holds nobody up.
func TestSlowClientIsGivenUp(t *testing.T) {
	r := newRig(t, func(c *Config) { c.WriteTimeout = 50 * time.Millisecond })
	long := spelled(t, strings.Repeat("x", 1000))
	var stream *fakeStream
	r.scheduler.answer = func(batch.Request) *fakeStream {
		var batches [][]batch.Token
		for range 100 {
			batches = append(batches, each(long)...)
		}
		stream = script(batch.FinishLength, batches...)
		return stream
	}
	server := httptest.NewUnstartedServer(r.server)
	server.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		_ = c.(*net.TCPConn).SetWriteBuffer(4096)
		return ctx
	}
	server.Start()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetReadBuffer(4096)
	body := `{"prompt":"x","stream":true,"max_tokens":100000}`
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	if _, err := conn.Read(make([]byte, 1)); err != nil { // it has begun
		t.Fatal(err)
	}
	server.Close() // waits for the handler, which can end only by giving up
	if stream.ctx.Err() == nil || len(stream.batches) == 0 {
		t.Error("the answer was written to its end")
	}
}

// A body that does not come is not waited for without end.
func TestSlowBody(t *testing.T) {
	r := newRig(t, func(c *Config) { c.BodyTimeout = 20 * time.Millisecond })
	server := httptest.NewServer(r.server)
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 408 ") || !strings.Contains(string(answer), CodeSlowBody) {
		t.Errorf("%s, %v", answer, err)
	}
}

// While nothing comes, comments keep the stream alive; an error that comes then is an event.
func TestKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.KeepAlive = 10 * time.Second })
		s := silent()
		r.scheduler.answer = func(batch.Request) *fakeStream { return s }
		w, ended := httptest.NewRecorder(), make(chan struct{})
		go func() {
			defer close(ended)
			r.server.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":"x","stream":true}`)))
		}()
		time.Sleep(25 * time.Second) // of the bubble's clock
		s.err = batch.ErrClosed
		s.signal <- struct{}{}
		<-ended
		got := events(t, w.Body.String())
		if len(got) != 3 || got[0] != ": keep-alive" || got[1] != ": keep-alive" || !strings.HasPrefix(got[2], "error {") {
			t.Errorf("got %q", got)
		}
	})
}

func TestAccessLog(t *testing.T) {
	var log strings.Builder
	r := newRig(t, func(c *Config) {
		c.Logger = hclog.New(&hclog.LoggerOptions{Output: &log, JSONFormat: true, Level: hclog.Info})
		c.APIKeys = []string{"sesame-open"}
	})
	r.do(http.MethodPost, "/v1/chat/completions", chatBody(`"unheard_of":1`), "Authorization", "Bearer sesame-open")
	r.do(http.MethodPost, "/v1/chat/completions", chatBody(`"unheard_of":2`), "Authorization", "Bearer sesame-open")
	r.do(http.MethodGet, "/props", "", "Authorization", "Bearer wrong-key")
	r.do(http.MethodGet, "/health", "")
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	if len(lines) != 4 { // the unknown field once, three requests
		t.Fatalf("got %s", log.String())
	}
	var entry map[string]any
	if err := json.Unmarshal([]byte(lines[1]), &entry); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]any{
		"request": "req_1", "model": "tiny", "status": 200.0, "prompt_tokens": 13.0, "completion_tokens": 2.0, "queue_ms": 1.0, "first_token_ms": 2.0,
	} {
		if entry[key] != want {
			t.Errorf("%s is %v, want %v", key, entry[key], want)
		}
	}
	for _, secret := range []string{"sesame", "wrong-key", "hi[", "\"hi\""} {
		if strings.Contains(log.String(), secret) {
			t.Errorf("the log has %q: %s", secret, log.String())
		}
	}
}

func TestPromptsAreLoggedOnlyWhenAskedFor(t *testing.T) {
	var log strings.Builder
	r := newRig(t, func(c *Config) {
		c.Logger, c.LogPrompts = hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Info}), true
	})
	r.post("/v1/chat/completions", chatBody(""))
	if !strings.Contains(log.String(), "[user]hi[assistant]") {
		t.Errorf("got %s", log.String())
	}
}

func TestFaultOfOneRequest(t *testing.T) {
	r := newRig(t)
	r.scheduler.answer = func(batch.Request) *fakeStream { panic("bug") }
	w := r.post("/v1/completions", `{"prompt":"x"}`)
	if e := errorIn(t, w.Body.Bytes()); w.Code != http.StatusInternalServerError || strings.Contains(e.Message, "bug") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
