package api

import (
	"math"
	"strconv"
	"strings"

	"github.com/mlxcel/mlxcel/host/api/jsonbody"
	"github.com/mlxcel/mlxcel/sdk"
)

// Bounds of what one request may ask for.
const (
	maxChoices     = 128 // answers of one request: prompts times n
	maxStops       = 16
	maxTopLogprobs = 20
	maxTokensAsked = math.MaxInt32

	// Below these, the limit is meant: a float32 would round some of them to 0, which means something else to the sampler.
	leastTemperature = 1e-5
	leastTopP        = 1e-9
)

// generation is what every request for an answer says about how to generate it.
type generation struct {
	model        string // as the client named it; empty when it did not
	choices      int    // n
	stream       bool
	includeUsage bool
	maxTokens    int // 0 when not given
	stop         []string
	sampler      sdk.Sampler
	logprobs     bool
	topN         int // most probable tokens to report with each token
	ignoreEOS    bool
	priority     int
}

// reader reads one body. It holds what the fields are checked against.
type reader struct {
	*jsonbody.Object
	defaults  sdk.Sampler
	vocabSize int
	seed      func() uint64
}

// generation reads the fields that all endpoints share. logprobs differ, so each reads its own.
func (r *reader) generation() generation {
	g := generation{choices: 1, sampler: r.defaults}
	if v, ok := r.Get("model"); ok {
		g.model = v.Text()
	}
	if v, ok := r.Get("n"); ok {
		g.choices = int(v.Int(1, maxChoices))
	}
	if v, ok := r.Get("user"); ok {
		v.Text()
	}
	if v, ok := r.Get("ignore_eos"); ok {
		g.ignoreEOS = v.Bool()
	}
	if v, ok := r.Get("priority"); ok {
		g.priority = int(v.Int(math.MinInt32, math.MaxInt32))
	}
	g.maxTokens = r.maxTokens()
	g.stop = r.stops()
	r.streaming(&g)
	r.sampling(&g.sampler)
	return g
}

func (r *reader) maxTokens() int {
	n := 0
	for _, name := range []string{"max_tokens", "max_completion_tokens"} {
		v, ok := r.Get(name)
		if !ok {
			continue
		}
		asked := int(v.Int(1, maxTokensAsked))
		if n != 0 && n != asked {
			v.Fail("is %d, but max_tokens is %d; give one of the two", asked, n)
		}
		n = asked
	}
	return n
}

func (r *reader) stops() []string {
	v, ok := r.Get("stop")
	if !ok {
		return nil
	}
	if v.IsString() {
		return []string{stopText(v)}
	}
	if !v.IsArray() {
		v.Want("a string or an array of strings")
		return nil
	}
	list := v.Array()
	if len(list) > maxStops {
		v.Fail("has %d stop strings, at most %d are looked for", len(list), maxStops)
	}
	var out []string
	for _, s := range list {
		out = append(out, stopText(s))
	}
	return out
}

func stopText(v jsonbody.Value) string {
	s := v.Text()
	if s == "" {
		v.Fail("is empty; a stop string needs at least one character")
	}
	return s
}

func (r *reader) streaming(g *generation) {
	if v, ok := r.Get("stream"); ok {
		g.stream = v.Bool()
	}
	v, ok := r.Get("stream_options")
	if !ok {
		return
	}
	if !g.stream {
		v.Fail("is only for requests with stream: true")
		return
	}
	o := v.Object()
	if v, ok := o.Get("include_usage"); ok {
		g.includeUsage = v.Bool()
	}
	if v, ok := o.Get("include_obfuscation"); ok {
		v.Bool()
	}
}

// sampling reads the fields over the server's defaults.
func (r *reader) sampling(s *sdk.Sampler) {
	number := func(name string, into *float32, low, high float64) {
		if v, ok := r.Get(name); ok {
			*into = float32(v.Number(low, high))
		}
	}
	number("temperature", &s.Temperature, 0, 2)
	number("min_p", &s.MinP, 0, 1)
	number("presence_penalty", &s.PresencePenalty, -2, 2)
	number("frequency_penalty", &s.FrequencyPenalty, -2, 2)
	number("repetition_penalty", &s.RepetitionPenalty, 0.01, 100)
	if v, ok := r.Get("top_p"); ok {
		s.TopP = max(float32(v.Number(0, 1)), leastTopP)
	}
	if s.Temperature < leastTemperature {
		s.Temperature = 0
	}
	if v, ok := r.Get("top_k"); ok {
		s.TopK = max(0, int(v.Int(-1, math.MaxInt32))) // -1 keeps all in other servers
	}
	s.Seed = r.seed()
	if v, ok := r.Get("seed"); ok {
		s.Seed = uint64(v.Int(math.MinInt64, math.MaxInt64))
	}
	s.LogitBias = r.logitBias()
}

func (r *reader) logitBias() map[int32]float32 {
	v, ok := r.Get("logit_bias")
	if !ok {
		return nil
	}
	o := v.Object()
	bias := make(map[int32]float32, len(o.Names()))
	for _, name := range o.Names() {
		b, ok := o.Get(name)
		if !ok {
			continue
		}
		id, err := strconv.ParseInt(name, 10, 32)
		if err != nil || id < 0 || int(id) >= r.vocabSize {
			b.Fail("is no token id; the model has ids 0 to %d", r.vocabSize-1)
			return nil
		}
		bias[int32(id)] = float32(b.Number(-100, 100))
	}
	return bias
}

// Fields that have no effect here and change nothing about the answer.
var withoutEffect = []string{
	"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
	"parallel_tool_calls", "prediction", "cache_prompt",
}

// neutral holds the fields that would change the answer and are not built, each with the values that ask for nothing.
var neutral = map[string][]string{
	"tools":                  {`[]`},
	"tool_choice":            {`"none"`, `"auto"`},
	"functions":              {`[]`},
	"function_call":          {`"none"`, `"auto"`},
	"response_format":        {`{"type":"text"}`},
	"modalities":             {`["text"]`},
	"audio":                  {},
	"web_search_options":     {},
	"moderation":             {},
	"verbosity":              {`"medium"`},
	"suffix":                 {`""`},
	"best_of":                {`1`},
	"min_tokens":             {`0`},
	"stop_token_ids":         {`[]`},
	"bad_words":              {`[]`},
	"grammar":                {`""`},
	"json_schema":            {`{}`},
	"structured_outputs":     {},
	"guided_json":            {},
	"guided_regex":           {},
	"guided_choice":          {},
	"guided_grammar":         {},
	"typical_p":              {`1`, `1.0`},
	"top_a":                  {`0`, `0.0`},
	"mirostat":               {`0`},
	"dry_multiplier":         {`0`, `0.0`},
	"xtc_probability":        {`0`, `0.0`},
	"prompt_logprobs":        {`0`},
	"truncate_prompt_tokens": {`-1`},
	"chat_template":          {},
	"documents":              {`[]`},
	"adapter":                {`""`},
	"lora":                   {`[]`},
	"add_generation_prompt":  {`true`},
	"continue_final_message": {`false`},
	"echo":                   {`false`}, // completions read it before
	"use_beam_search":        {`false`},
	"length_penalty":         {`1`, `1.0`},
}

// close reads what is left. It returns the names that nobody knows, which change nothing, and the first error of the body.
func (r *reader) close() (unknown []string, err error) {
	for _, name := range withoutEffect {
		r.Get(name)
	}
	var refused *Error
	for _, name := range r.Unread() {
		values, known := neutral[name]
		switch {
		case !known:
			unknown = append(unknown, name)
		case refused == nil && !r.isNeutral(name, values):
			refused = unsupported(name, "is not supported by this server%s", advice[name])
		}
	}
	if err := r.Err(); err != nil {
		return nil, fieldError(err)
	}
	if refused != nil {
		return nil, refused
	}
	return unknown, nil
}

// advice says what to do about some of the fields that are refused.
var advice = map[string]string{
	"chat_template":   "; templates come from the model or from --chat-template-file",
	"response_format": " other than {\"type\": \"text\"}",
}

func (r *reader) isNeutral(name string, values []string) bool {
	v, _ := r.Get(name)
	raw := v.Raw().Clone()
	if raw.Compact() != nil {
		return false
	}
	for _, neutral := range values {
		if string(raw) == neutral {
			return true
		}
	}
	return false
}

// fieldError turns an error of the body into an answer.
func fieldError(err error) *Error {
	e := invalid("", "%v", err)
	if f, ok := err.(*jsonbody.Error); ok {
		e.Param = f.Path
		if strings.HasPrefix(f.Message, "the body") {
			e.Code = CodeInvalidJSON
		}
	}
	return e
}
