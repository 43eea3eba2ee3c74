package api

import (
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/api/jsonbody"
	"github.com/mlxcel/mlxcel/sdk"
)

// errorIn reads an error answer.
func errorIn(t *testing.T, body []byte) errorObject {
	t.Helper()
	var e errorBody
	if err := json.Unmarshal(body, &e); err != nil || e.Error.Message == "" || e.Error.Type == "" {
		t.Fatalf("%s is no error: %v", body, err)
	}
	return e.Error
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func TestRefusedRequests(t *testing.T) {
	const chat, completion = "/v1/chat/completions", "/v1/completions"
	big := `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 2000) + `"}]}`
	for _, tc := range []struct {
		name, path, body string
		status           int
		code, param      string
		says             string
	}{
		{"no JSON", chat, `{"messages": [`, 400, CodeInvalidJSON, "messages", "not valid JSON"},
		{"empty body", chat, ``, 400, CodeInvalidJSON, "", "empty"},
		{"no UTF-8", chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"\xc3\"}]}", 400, CodeInvalidJSON, "messages[0].content", "UTF-8"},
		{"huge body", chat, big, 413, CodeBodyTooLarge, "", "larger than 1500 bytes"},
		{"no messages", chat, `{}`, 400, CodeInvalidValue, "messages", "missing"},
		{"null messages", chat, `{"messages":null}`, 400, CodeInvalidValue, "messages", "missing"},
		{"no message", chat, `{"messages":[]}`, 400, CodeInvalidValue, "messages", "at least one"},
		{"a message that is none", chat, `{"messages":["hi"]}`, 400, CodeInvalidValue, "messages[0]", "wanted an object, got a string"},
		{"no role", chat, `{"messages":[{"content":"x"}]}`, 400, CodeInvalidValue, "messages[0].role", "missing"},
		{"unknown role", chat, `{"messages":[{"role":"king","content":"x"}]}`, 400, CodeInvalidValue, "messages[0].role", "wanted system"},
		{"content of a wrong type", chat, `{"messages":[{"role":"user","content":"x"},{"role":"user","content":5}]}`, 400, CodeInvalidValue, "messages[1].content", "wanted a string or an array of parts, got the number 5"},
		{"no content", chat, `{"messages":[{"role":"user"}]}`, 400, CodeInvalidValue, "messages[0].content", "missing"},
		{"assistant without anything", chat, `{"messages":[{"role":"assistant","content":null}]}`, 400, CodeInvalidValue, "messages[0].content", "missing"},
		{"a picture", chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"data:"}}]}]}`, 400, CodeInvalidValue, "messages[0].content[1].type", "text only"},
		{"a sound", chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"input_audio","input_audio":{"data":"","format":"wav"}}]}]}`, 400, CodeInvalidValue, "messages[0].content[1].type", "text only"},
		{"part without text", chat, `{"messages":[{"role":"user","content":[{"type":"text"}]}]}`, 400, CodeInvalidValue, "messages[0].content[0].text", "missing"},
		{"tool without id", chat, `{"messages":[{"role":"tool","content":"x"}]}`, 400, CodeInvalidValue, "messages[0].tool_call_id", "missing"},
		{"calls of the user", chat, `{"messages":[{"role":"user","content":"x","tool_calls":[]}]}`, 400, CodeInvalidValue, "messages[0].tool_calls", "assistant"},
		{"call without arguments", chat, `{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f"}}]}]}`, 400, CodeInvalidValue, "messages[0].tool_calls[0].function.arguments", "missing"},
		{"template refuses", chat, `{"messages":[{"role":"user","content":"x"},{"role":"system","content":"y"}]}`, 400, CodeTemplateRefused, "messages", "system must come first"},
		{"template variable taken", chat, chatBody(`"chat_template_kwargs":{"tools":1}`), 400, CodeInvalidValue, "chat_template_kwargs.tools", "taken"},
		{"another model", chat, chatBody(`"model":"gpt-9"`), 404, CodeModelNotFound, "model", "gpt-9"},
		{"temperature too high", chat, chatBody(`"temperature":2.5`), 400, CodeInvalidValue, "temperature", "from 0 to 2, got the number 2.5"},
		{"temperature as text", chat, chatBody(`"temperature":"1"`), 400, CodeInvalidValue, "temperature", "wanted a number"},
		{"n of 0", chat, chatBody(`"n":0`), 400, CodeInvalidValue, "n", "from 1 to 128"},
		{"max_tokens of 0", chat, chatBody(`"max_tokens":0`), 400, CodeInvalidValue, "max_tokens", "from 1"},
		{"two lengths", chat, chatBody(`"max_tokens":5,"max_completion_tokens":6`), 400, CodeInvalidValue, "max_completion_tokens", "one of the two"},
		{"empty stop", chat, chatBody(`"stop":["a",""]`), 400, CodeInvalidValue, "stop[1]", "empty"},
		{"stop of a wrong type", chat, chatBody(`"stop":{"a":1}`), 400, CodeInvalidValue, "stop", "string or an array"},
		{"bias of no token", chat, chatBody(`"logit_bias":{"320":1}`), 400, CodeInvalidValue, "logit_bias.320", "ids 0 to 319"},
		{"bias too high", chat, chatBody(`"logit_bias":{"3":101}`), 400, CodeInvalidValue, "logit_bias.3", "-100 to 100"},
		{"top_logprobs alone", chat, chatBody(`"top_logprobs":2`), 400, CodeInvalidValue, "top_logprobs", "logprobs: true"},
		{"too many top_logprobs", chat, chatBody(`"logprobs":true,"top_logprobs":21`), 400, CodeInvalidValue, "top_logprobs", "0 to 20"},
		{"options without a stream", chat, chatBody(`"stream_options":{"include_usage":true}`), 400, CodeInvalidValue, "stream_options", "stream: true"},
		{"tools", chat, chatBody(`"tools":[{"type":"function","function":{"name":"f"}}]`), 400, CodeUnsupported, "tools", "not supported"},
		{"JSON mode", chat, chatBody(`"response_format":{"type":"json_object"}`), 400, CodeUnsupported, "response_format", "not supported"},
		{"audio", chat, chatBody(`"modalities":["text","audio"]`), 400, CodeUnsupported, "modalities", "not supported"},
		{"template in a request", chat, chatBody(`"chat_template":"{{ x }}"`), 400, CodeUnsupported, "chat_template", "--chat-template-file"},
		{"reasoning effort", chat, chatBody(`"reasoning_effort":"low"`), 400, CodeUnsupported, "reasoning_effort", "template"},
		{"no prompt", completion, `{}`, 400, CodeInvalidValue, "prompt", "missing"},
		{"prompt of a wrong type", completion, `{"prompt":{}}`, 400, CodeInvalidValue, "prompt", "wanted a string, an array"},
		{"no prompts", completion, `{"prompt":[]}`, 400, CodeInvalidValue, "prompt", "empty"},
		{"mixed prompts", completion, `{"prompt":["a",[1]]}`, 400, CodeInvalidValue, "prompt[1]", "of one kind"},
		{"token id past the vocabulary", completion, `{"prompt":[1,320]}`, 400, CodeInvalidValue, "prompt[1]", "0 to 319"},
		{"too many answers", completion, `{"prompt":["a","b"],"n":100}`, 400, CodeInvalidValue, "prompt", "200 answers"},
		{"suffix", completion, `{"prompt":"a","suffix":"b"}`, 400, CodeUnsupported, "suffix", "not supported"},
		{"best_of", completion, `{"prompt":"a","best_of":2}`, 400, CodeUnsupported, "best_of", "not supported"},
		{"echo with alternatives", completion, `{"prompt":"a","echo":true,"logprobs":2}`, 400, CodeInvalidValue, "echo", "alternatives"},
		{"logprobs as in chat", completion, `{"prompt":"a","logprobs":true}`, 400, CodeInvalidValue, "logprobs", "whole number"},
		{"tokenize nothing", "/tokenize", `{}`, 400, CodeInvalidValue, "content", "missing"},
		{"tokenize as plain text", "/tokenize", `{"content":"x","parse_special":false}`, 400, CodeInvalidValue, "parse_special", "always"},
		{"detokenize a fraction", "/detokenize", `{"tokens":[1.5]}`, 400, CodeInvalidValue, "tokens[0]", "whole number"},
		{"template of nothing", "/apply-template", `{"messages":[]}`, 400, CodeInvalidValue, "messages", "at least one"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, func(c *Config) { c.MaxBody = 1500 })
			for _, stream := range []bool{false, true} {
				body := tc.body
				if stream && strings.HasPrefix(body, `{"`) && !strings.Contains(tc.path, "tok") && !strings.Contains(tc.name, "stream") {
					body = `{"stream":true,` + body[1:]
				}
				w := r.post(tc.path, body)
				e := errorIn(t, w.Body.Bytes())
				if w.Code != tc.status || text(e.Code) != tc.code || text(e.Param) != tc.param || !strings.Contains(e.Message, tc.says) {
					t.Errorf("%d %+v (code %q, param %q), want %d, %q, %q and %q", w.Code, e, text(e.Code), text(e.Param), tc.status, tc.code, tc.param, tc.says)
				}
			}
			if len(r.scheduler.requests) > 0 {
				t.Error("the request reached the scheduler")
			}
		})
	}
}

func TestRequestReachesTheScheduler(t *testing.T) {
	r := newRig(t)
	w := r.post("/v1/chat/completions", chatBody(`"model":"alias","max_completion_tokens":9,"temperature":0.5,"top_p":0,"top_k":-1,"min_p":0.1,
		"presence_penalty":1,"frequency_penalty":-1,"repetition_penalty":1.1,"seed":-1,"logit_bias":{"5":-100,"6":null},"ignore_eos":true,
		"priority":3,"logprobs":true,"top_logprobs":4,"user":"u","metadata":{"a":"b"},"store":true,"tools":[],"response_format":{"type" : "text"},
		"stop":null,"unheard_of":1`))
	if w.Code != http.StatusOK {
		t.Fatal(w.Body)
	}
	got := r.last()
	want := sdk.Sampler{
		Temperature: 0.5, TopP: leastTopP, MinP: 0.1, PresencePenalty: 1, FrequencyPenalty: -1, RepetitionPenalty: 1.1,
		Seed: 1<<64 - 1, LogitBias: map[int32]float32{5: -100},
	}
	if !reflect.DeepEqual(got.Sampler, want) {
		t.Errorf("sampler %+v, want %+v", got.Sampler, want)
	}
	if got.MaxTokens != 9 || got.TopN != 4 || !got.IgnoreEOS || got.Priority != 3 || !slices.Equal(got.EOS, []int32{tinyEOS}) {
		t.Errorf("request %+v", got)
	}
	if text := r.model.Tokenizer.Decode(got.Prompt, false); text != "[user]hi[assistant]" {
		t.Errorf("prompt %q", text)
	}
}

// The scheduler is asked for log-probabilities by requests that report them, and by no others.
func TestLogprobsAreForWhoAsks(t *testing.T) {
	for _, tc := range []struct {
		path, body string
		logprob    bool
		topN       int
	}{
		{"/v1/chat/completions", chatBody(""), false, 0},
		{"/v1/chat/completions", chatBody(`"logprobs":false`), false, 0},
		{"/v1/chat/completions", chatBody(`"logprobs":true`), true, 0},
		{"/v1/chat/completions", chatBody(`"logprobs":true,"top_logprobs":0`), true, 0},
		{"/v1/chat/completions", chatBody(`"logprobs":true,"top_logprobs":4`), true, 4},
		{"/v1/completions", `{"prompt":[1]}`, false, 0},
		{"/v1/completions", `{"prompt":[1],"echo":true,"logprobs":null}`, false, 0},
		{"/v1/completions", `{"prompt":[1],"logprobs":0}`, true, 0},
		{"/v1/completions", `{"prompt":[1],"logprobs":4}`, true, 4},
	} {
		r := newRig(t)
		if w := r.post(tc.path, tc.body); w.Code != http.StatusOK {
			t.Fatalf("%s %s: %s", tc.path, tc.body, w.Body)
		}
		if got := r.last(); got.Logprob != tc.logprob || got.TopN != tc.topN {
			t.Errorf("%s %s: log-probability %v and %d candidates, want %v and %d", tc.path, tc.body, got.Logprob, got.TopN, tc.logprob, tc.topN)
		}
	}
}

func TestDefaults(t *testing.T) {
	r := newRig(t, func(c *Config) {
		c.Sampling = sdk.Sampler{Temperature: 0.7, TopP: 0.9, TopK: 40}
		c.DefaultMaxTokens = 100
	})
	r.post("/v1/completions", `{"prompt":[1,2,3]}`)
	if got := r.last(); !reflect.DeepEqual(got.Sampler, sdk.Sampler{Temperature: 0.7, TopP: 0.9, TopK: 40, Seed: 77}) || got.MaxTokens != 100 {
		t.Errorf("request %+v", got)
	}
	r.scheduler.limit = 50
	r.post("/v1/completions", `{"prompt":[1,2,3]}`)
	if got := r.last(); got.MaxTokens != 47 {
		t.Errorf("%d tokens where the context has room for 47", got.MaxTokens)
	}
	r.post("/v1/completions", `{"prompt":[1,2,3],"temperature":1e-9,"max_tokens":60}`)
	if got := r.last(); got.Sampler.Temperature != 0 || got.MaxTokens != 60 {
		t.Errorf("request %+v: an explicit length is the scheduler's to refuse, never cut", got)
	}
}

// Each choice has its own random stream, of one seed.
func TestChoices(t *testing.T) {
	r := newRig(t)
	w := r.post("/v1/completions", `{"prompt":["a","b"],"n":3}`)
	var got struct {
		Choices []struct {
			Index int    `json:"index"`
			Text  string `json:"text"`
		} `json:"choices"`
		Usage usage `json:"usage"`
	}
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Choices) != 6 || got.Usage != (usage{4, 12, 16}) {
		t.Errorf("got %+v", got)
	}
	for i, req := range r.scheduler.requests {
		if got.Choices[i].Index != i || req.Sampler.Choice != uint32(i%3) || req.Sampler.Seed != 77 {
			t.Errorf("request %d: %+v, choice %+v", i, req.Sampler, got.Choices[i])
		}
	}
}

func TestMessagesReachTheTemplate(t *testing.T) {
	for _, tc := range []struct{ name, messages, want string }{
		{"parts are joined", `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]`, "[user]ab[assistant]"},
		{"developer is system", `[{"role":"developer","content":"x"}]`, "[system]x[assistant]"},
		{"null is absent", `[{"role":"user","content":"x","name":null,"tool_calls":null}]`, "[user]x[assistant]"},
		{"a name", `[{"role":"user","content":"x","name":"bob"}]`, "[user:bob]x[assistant]"},
		{"past tool calls", `[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\": 7}"}}]},{"role":"tool","tool_call_id":"1","content":"8"}]`,
			"[assistant]<f 7>[tool]8[assistant]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t)
			w := r.post("/apply-template", `{"messages":`+tc.messages+`}`)
			var got struct{ Prompt string }
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || got.Prompt != tc.want {
				t.Errorf("%s, want %q", w.Body, tc.want)
			}
		})
	}
}

// openAPIDoc is what tests look at.
type openAPIDoc struct {
	Paths      map[string]map[string]any `json:"paths"`
	Components struct {
		Schemas map[string]struct {
			Properties map[string]json.RawMessage `json:"properties"`
		} `json:"schemas"`
	} `json:"components"`
}

// The description names exactly the paths that there are, and the fields that are read.
func TestOpenAPITellsTheTruth(t *testing.T) {
	var doc openAPIDoc
	if err := json.Unmarshal(openAPIDescription, &doc); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *Config) { c.Expose, c.Metrics = true, testMetrics() })
	paths := map[string][]string{}
	for _, route := range r.server.table() {
		for method := range route.methods {
			if method != http.MethodHead {
				paths[route.path] = append(paths[route.path], strings.ToLower(method))
			}
		}
	}
	described := map[string][]string{}
	for path, methods := range doc.Paths {
		described[path] = slices.Sorted(maps.Keys(methods))
	}
	if !reflect.DeepEqual(paths, described) {
		t.Errorf("paths are %v, described are %v", paths, described)
	}
	for schema, read := range map[string]func(*reader){
		"ChatRequest":       func(r *reader) { r.chat(); r.close() },
		"CompletionRequest": func(r *reader) { r.completion(); r.close() },
		"TemplateRequest":   func(r *reader) { r.conversation() },
	} {
		o, err := jsonbody.Parse([]byte(`{"stream":true,"messages":[{"role":"user","content":"x"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		read(&reader{Object: o, vocabSize: 1, seed: func() uint64 { return 0 }})
		want := map[string]bool{}
		for _, name := range o.Asked() {
			want[name] = true
		}
		if schema != "TemplateRequest" {
			for name := range neutral {
				want[name] = true
			}
		}
		delete(want, "messages")
		got := map[string]bool{}
		for name := range doc.Components.Schemas[schema].Properties {
			got[name] = true
		}
		delete(got, "messages")
		if !maps.Equal(got, want) {
			t.Errorf("%s: described %v, read %v", schema, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
		}
	}
}

// What the description says of the codes of errors is what there is.
func TestOpenAPIHasEveryCode(t *testing.T) {
	source, err := os.ReadFile("errors.go")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(source)) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "= ")
		if ok && strings.HasPrefix(name, "Code") && !strings.Contains(string(openAPIDescription), value) {
			t.Errorf("%s is not described", value)
		}
	}
}

// FuzzRequests sends anything to the endpoints that read a body: what comes back is an answer or a 4xx.
func FuzzRequests(f *testing.F) {
	for _, seed := range []string{
		chatBody(`"stream":true,"stream_options":{"include_usage":true}`), `{"prompt":["a",[1]]}`, `{"prompt":[[1,2],[3]],"echo":true,"logprobs":0}`,
		chatBody(`"stop":["ab","b"],"n":2,"logit_bias":{"1":1}`), `{"content":"x","with_pieces":true}`, `{"tokens":[1,319]}`,
		`{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}]}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, body string) {
		r := newRig(t)
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template"} {
			w := r.post(path, body)
			if w.Code != http.StatusOK && (w.Code < 400 || w.Code > 499) {
				t.Errorf("%s: %d %s", path, w.Code, w.Body)
			}
			if w.Code != http.StatusOK {
				errorIn(t, w.Body.Bytes())
			}
		}
	})
}
