package api

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/sdk"
)

func TestPaths(t *testing.T) {
	for _, tc := range []struct {
		method, path, body string
		status             int
		says               string
	}{
		{"GET", "/v1/models", "", 200, `{"data":[{"id":"tiny","object":"model","created":5,"owned_by":"mlxcel","max_model_len":4096},{"id":"alias"`},
		{"GET", "/v1/models/alias", "", 200, `{"id":"alias",`},
		{"GET", "/v1/models/other", "", 404, CodeModelNotFound},
		{"GET", "/health", "", 200, `{"status":"ok"}`},
		{"HEAD", "/v1/health", "", 200, ``},
		{"GET", "/health/live", "", 200, `{"status":"ok"}`},
		{"GET", "/version", "", 200, `{"version":"test"}`},
		{"GET", "/openapi.json", "", 200, `"openapi": "3.1.0"`},
		{"GET", "/props", "", 200, `"context_length":4096`},
		{"GET", "/slots", "", 200, `[{"id":0,"is_processing":true,"n_ctx":4096,"request":9,"prompt_tokens":5,`},
		{"GET", "/metrics", "", 404, "nothing at /metrics"},
		{"GET", "/", "", 404, "/openapi.json"},
		{"GET", "/v1/chat/completions", "", 405, "does not take GET"},
		{"DELETE", "/health", "", 405, "does not take DELETE"},
		{"POST", "/tokenize", `{"content":"hi there","add_special":true,"with_pieces":true}`, 200, `{"count":5,"tokens":[{"id":312,"piece":"\u003c|bos|\u003e"},`},
		{"POST", "/tokenize", `{"content":"!\""}`, 200, `{"count":2,"tokens":[0,1]}`},
		{"POST", "/detokenize", `{"tokens":[0,1,316]}`, 200, `{"content":"!\"\u003c|im_end|\u003e"}`},
		{"POST", "/v1/completions", "zzz", 415, "gzip"},
	} {
		t.Run(tc.method+" "+tc.path, func(t *testing.T) {
			r := newRig(t)
			r.scheduler.status.Active = []batch.ActiveRequest{{ID: 9, PromptTokens: 5}}
			var header []string
			if tc.status == 415 {
				header = []string{"Content-Encoding", "gzip"}
			}
			w := r.do(tc.method, tc.path, tc.body, header...)
			if w.Code != tc.status || !strings.Contains(w.Body.String(), tc.says) {
				t.Errorf("%d %s", w.Code, w.Body)
			}
			if w.Header().Get("X-Request-Id") != "req_1" || w.Header().Get("Content-Type") != "application/json" {
				t.Errorf("header %v", w.Header())
			}
			if tc.status >= 400 {
				errorIn(t, w.Body.Bytes())
			}
			if tc.status == 405 && w.Header().Get("Allow") == "" {
				t.Error("405 without Allow")
			}
		})
	}
}

// What is not promised on a device must not be claimed.
func TestPropsTellWhatIsPromised(t *testing.T) {
	for _, tc := range []struct {
		promised     []sdk.Numerics // by stage
		batch, chunk bool
	}{
		{[]sdk.Numerics{{BatchInvariant: true, ChunkInvariant: true}}, true, true},
		{[]sdk.Numerics{{BatchInvariant: true, ChunkInvariant: true}, {BatchInvariant: true, ChunkInvariant: true}}, true, true},
		{[]sdk.Numerics{{}}, false, false},
		{[]sdk.Numerics{{BatchInvariant: true}}, true, false},
		{[]sdk.Numerics{{BatchInvariant: true, ChunkInvariant: true}, {ChunkInvariant: true}}, false, true},
		{nil, false, false},
	} {
		r := newRig(t)
		r.model.Stages = nil
		var shown []Stage
		for i, promised := range tc.promised {
			shown = append(shown, Stage{Stage: i, Device: "cuda"})
			r.model.Stages = append(r.model.Stages, Stage{Stage: i, Device: "cuda", Numerics: promised})
		}
		var got struct {
			Stages   []Stage
			Numerics numerics
		}
		w := r.do(http.MethodGet, "/props", "")
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || !slices.Equal(got.Stages, shown) || got.Numerics != (numerics{true, tc.batch, tc.chunk}) {
			t.Errorf("%+v: %s", tc.promised, w.Body)
		}
	}
}

func TestMetricsWhereTheyAreAskedFor(t *testing.T) {
	m := testMetrics()
	both := newRig(t, func(c *Config) { c.Metrics, c.Expose = m, true })
	both.post("/v1/completions", `{"prompt":"x"}`)
	w := both.do(http.MethodGet, "/metrics", "")
	for _, line := range []string{`mlxcel_http_requests_total{route="v1/completions",status="200"} 1`, "mlxcel_completion_tokens_total 2", "mlxcel_token_gap_seconds_count 0", "go_goroutines"} {
		if !strings.Contains(w.Body.String(), line) {
			t.Errorf("no %s in %s", line, w.Body)
		}
	}
	apart := newRig(t, func(c *Config) { c.Metrics, c.APIKeys = m, []string{"k"} })
	get := func(path, key string) int {
		w := httptest.NewRecorder()
		req := httptest.NewRequest(http.MethodGet, path, nil)
		req.Header.Set("Authorization", "Bearer "+key)
		apart.server.MetricsOnly().ServeHTTP(w, req)
		return w.Code
	}
	if a, b, c := get("/metrics", "k"), get("/metrics", "x"), get("/v1/models", "k"); a != 200 || b != 401 || c != 404 {
		t.Errorf("status %d, %d without the key, %d elsewhere", a, b, c)
	}
	if w := apart.do(http.MethodGet, "/metrics", "", "Authorization", "Bearer k"); w.Code != 404 {
		t.Errorf("status %d on the main listener", w.Code)
	}
}

func TestHealth(t *testing.T) {
	sick := errors.New("no step for 7 s")
	for _, tc := range []struct {
		name        string
		loaded      bool
		draining    bool
		state       batch.State
		sick        error
		ready, live int
		status      string
	}{
		{"loading", false, false, "", nil, 503, 200, CodeLoading},
		{"ready", true, false, batch.StateReady, nil, 200, 200, "ok"},
		{"stands still", true, false, batch.StateReady, sick, 503, 503, CodeNoProgress},
		{"draining", true, true, batch.StateDraining, sick, 503, 200, CodeDraining},
		{"starts again", true, false, batch.StateRelaunching, sick, 503, 200, CodeStageLost},
		{"lost for good", true, false, batch.StateFailed, sick, 503, 503, CodeStageLost},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t)
			r.scheduler.status.State, r.scheduler.sick = tc.state, tc.sick
			if !tc.loaded {
				r.server = New(Config{})
			}
			if tc.draining {
				r.server.Drain()
			}
			for path, want := range map[string]int{"/health": tc.ready, "/v1/health": tc.ready, "/health/live": tc.live} {
				w := r.do(http.MethodGet, path, "")
				var body healthBody
				if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil || w.Code != want {
					t.Errorf("%s: %d %s, want %d", path, w.Code, w.Body, want)
				}
				if want == tc.ready && path == "/health" && body.Status != tc.status {
					t.Errorf("status %q, want %q", body.Status, tc.status)
				}
			}
			wants := http.StatusServiceUnavailable
			if tc.loaded && !tc.draining {
				wants = http.StatusOK
			}
			if w := r.post("/v1/completions", `{"prompt":"x"}`); w.Code != wants {
				t.Errorf("a completion: %d %s", w.Code, w.Body)
			}
		})
	}
}

func TestWhoMayCall(t *testing.T) {
	loopback, wide := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8080}, &net.TCPAddr{IP: net.IPv4(192, 168, 1, 5), Port: 8080}
	allowed := []string{"https://chat.example.com"}
	for _, tc := range []struct {
		name           string
		local          net.Addr
		host, origin   string
		allowed        []string
		status         int
		code, isOrigin string
	}{
		{name: "plain", local: loopback, host: "127.0.0.1:8080", status: 200},
		{name: "localhost", local: loopback, host: "localhost:8080", status: 200},
		{name: "a name under localhost", local: loopback, host: "app.localhost", status: 200},
		{name: "IPv6", local: &net.TCPAddr{IP: net.IPv6loopback, Port: 8080}, host: "[::1]:8080", status: 200},
		{name: "an address", local: loopback, host: "[::]:8080", status: 200},
		{name: "rebinding", local: loopback, host: "evil.example:8080", status: 403, code: CodeHostNotAllowed},
		{name: "rebinding to a look-alike", local: loopback, host: "localhost.evil.example", status: 403, code: CodeHostNotAllowed},
		{name: "a proxy's name", local: loopback, host: "chat.example.com", allowed: allowed, status: 200},
		{name: "any name on a wide address", local: wide, host: "box.lan:8080", status: 200},
		{name: "own origin", local: loopback, host: "localhost:8080", origin: "http://localhost:8080", status: 200, isOrigin: "http://localhost:8080"},
		{name: "another port", local: loopback, host: "localhost:8080", origin: "http://localhost:3000", status: 403, code: CodeOriginRefused},
		{name: "another origin", local: wide, host: "box.lan:8080", origin: "https://evil.example", status: 403, code: CodeOriginRefused},
		{name: "no origin to name", local: loopback, host: "localhost:8080", origin: "null", status: 403, code: CodeOriginRefused},
		{name: "allowed origin", local: loopback, host: "localhost:8080", origin: allowed[0], allowed: allowed, status: 200, isOrigin: allowed[0]},
		{name: "of an allowed host, another scheme", local: loopback, host: "localhost:8080", origin: "http://chat.example.com", allowed: allowed, status: 403, code: CodeOriginRefused},
		{name: "everyone", local: loopback, host: "x.example", origin: "https://x.example", allowed: []string{"*"}, status: 200, isOrigin: "https://x.example"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, func(c *Config) { c.AllowedOrigins = tc.allowed })
			for _, method := range []string{http.MethodGet, http.MethodOptions} {
				req := httptest.NewRequest(method, "/v1/models", nil)
				req = req.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, tc.local))
				req.Host = tc.host
				if tc.origin != "" {
					req.Header.Set("Origin", tc.origin)
					req.Header.Set("Access-Control-Request-Headers", "authorization,x-stainless-os")
				}
				w := httptest.NewRecorder()
				r.server.ServeHTTP(w, req)
				want := tc.status
				if method == http.MethodOptions && want == 200 {
					if want = http.StatusNoContent; tc.origin == "" {
						want = http.StatusMethodNotAllowed
					}
				}
				if w.Code != want {
					t.Fatalf("%s: %d %s, want %d", method, w.Code, w.Body, want)
				}
				if tc.status != 200 {
					if e := errorIn(t, w.Body.Bytes()); text(e.Code) != tc.code {
						t.Errorf("code %q, want %q", text(e.Code), tc.code)
					}
				}
				if got := w.Header().Get("Access-Control-Allow-Origin"); got != tc.isOrigin {
					t.Errorf("%s: allowed origin %q, want %q", method, got, tc.isOrigin)
				}
				if h := w.Header().Get("Access-Control-Allow-Headers"); want == http.StatusNoContent && h != "authorization,x-stainless-os" {
					t.Errorf("allowed headers %q", h)
				}
			}
		})
	}
}

func TestKeys(t *testing.T) {
	r := newRig(t, func(c *Config) { c.APIKeys = []string{"first", "second"} })
	for header, want := range map[string]int{
		"": 401, "Bearer": 401, "Bearer ": 401, "Bearer third": 401, "Bearer firs": 401, "Basic first": 401,
		"Bearer first": 200, "bearer second": 200,
	} {
		w := r.do(http.MethodGet, "/v1/models", "", "Authorization", header)
		if w.Code != want {
			t.Errorf("%q: %d", header, w.Code)
		}
		if want == 401 && (w.Header().Get("WWW-Authenticate") != "Bearer" || text(errorIn(t, w.Body.Bytes()).Code) != CodeInvalidKey) {
			t.Errorf("%q: %s", header, w.Body)
		}
	}
	for path, want := range map[string]int{"/health": 200, "/v1/health": 200, "/health/live": 200, "/props": 401, "/slots": 401, "/version": 401, "/nothing": 401} {
		if w := r.do(http.MethodGet, path, ""); w.Code != want {
			t.Errorf("%s without a key: %d", path, w.Code)
		}
	}
}
