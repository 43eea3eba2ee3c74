package api

import (
	"net/http"

	"github.com/mlxcel/mlxcel/host/api/jsonbody"
	"github.com/mlxcel/mlxcel/host/chat"
)

// chatCompletions is POST /v1/chat/completions.
func (s *Server) chatCompletions(w http.ResponseWriter, r *http.Request) *Error {
	m, rd, e := s.open(w, r)
	if e != nil {
		return e
	}
	g, c := rd.chat()
	if e := s.closeBody(rd, m, g.model); e != nil {
		return e
	}
	text, ids, e := m.prompt(c)
	if e != nil {
		return e
	}
	s.logPrompt(r, text)
	return s.answer(w, r, &job{
		generation: g, model: m, param: "messages", prompts: []input{{ids: ids}},
		format: chatFormat{
			head: s.head(m, "chatcmpl-", chatObject(g.stream)), speller: m.speller, logprobs: g.logprobs, includeUsage: g.includeUsage,
		},
	})
}

// chat reads the body of a chat request.
func (r *reader) chat() (generation, conversation) {
	g := r.generation()
	if v, ok := r.Get("logprobs"); ok {
		g.logprobs = v.Bool()
	}
	if v, ok := r.Get("top_logprobs"); ok {
		g.topN = int(v.Int(0, maxTopLogprobs))
		if !g.logprobs {
			v.Fail("is only for requests with logprobs: true")
		}
	}
	return g, r.conversation()
}

func chatObject(stream bool) string {
	if stream {
		return "chat.completion.chunk"
	}
	return "chat.completion"
}

// completions is POST /v1/completions.
func (s *Server) completions(w http.ResponseWriter, r *http.Request) *Error {
	m, rd, e := s.open(w, r)
	if e != nil {
		return e
	}
	g, in := rd.completion()
	if e := s.closeBody(rd, m, g.model); e != nil {
		return e
	}
	prompts, e := m.inputs(in)
	if e != nil {
		return e
	}
	for _, text := range in.texts {
		s.logPrompt(r, text)
	}
	return s.answer(w, r, &job{
		generation: g, model: m, param: "prompt", prompts: prompts, scores: in.echo && g.logprobs,
		format: completionFormat{
			head: s.head(m, "cmpl-", "text_completion"), speller: m.speller, tokenizer: m.Tokenizer,
			logprobs: g.logprobs, topN: g.topN, includeUsage: g.includeUsage,
		},
	})
}

// prompts is what a completion goes on from: texts or lists of token ids.
type prompts struct {
	texts []string
	ids   [][]int32
	echo  bool // each answer begins with its prompt
}

// completion reads the body of a completion request.
func (r *reader) completion() (generation, prompts) {
	g := r.generation()
	if v, ok := r.Get("logprobs"); ok {
		g.logprobs, g.topN = true, int(v.Int(0, maxTopLogprobs))
	}
	var p prompts
	if v, ok := r.Get("echo"); ok {
		p.echo = v.Bool()
		if p.echo && g.topN > 0 {
			v.Fail("goes with logprobs of at most 0: alternatives to the prompt's own tokens are not reported")
		}
	}
	p.texts, p.ids = r.prompts(g.choices)
	return g, p
}

// prompts reads a text, several, token ids, or several lists of those.
func (r *reader) prompts(n int) (texts []string, ids [][]int32) {
	v, ok := r.Need("prompt")
	switch {
	case !ok:
		return nil, nil
	case v.IsString():
		return []string{v.Text()}, nil
	case !v.IsArray():
		v.Want("a string, an array of strings, or an array of token ids")
		return nil, nil
	}
	list := v.Array()
	if len(list) == 0 {
		v.Fail("is empty")
		return nil, nil
	}
	if list[0].IsNumber() {
		return nil, [][]int32{r.ids(list)}
	}
	if len(list)*n > maxChoices {
		v.Fail("asks for %d answers, at most %d are given at once", len(list)*n, maxChoices)
		return nil, nil
	}
	for _, p := range list {
		switch {
		case p.IsArray() && len(texts) == 0:
			ids = append(ids, r.ids(p.Array()))
		case p.IsString() && len(ids) == 0:
			texts = append(texts, p.Text())
		default:
			p.Want("prompts of one kind, strings or arrays of token ids")
		}
	}
	return texts, ids
}

func (r *reader) ids(list []jsonbody.Value) []int32 {
	out := make([]int32, len(list))
	for i, v := range list {
		out[i] = int32(v.Int(0, int64(r.vocabSize)-1))
	}
	return out
}

func (m *Model) inputs(p prompts) ([]input, *Error) {
	var out []input
	for _, text := range p.texts {
		ids, err := m.encode("prompt", text, true)
		if err != nil {
			return nil, err
		}
		out = append(out, input{ids: ids, echo: text})
	}
	for _, ids := range p.ids {
		out = append(out, input{ids: ids, echo: m.Tokenizer.Decode(ids, true)})
	}
	if !p.echo {
		for i := range out {
			out[i].echo = ""
		}
	}
	return out, nil
}

// tokenizeText is POST /tokenize.
func (s *Server) tokenizeText(w http.ResponseWriter, r *http.Request) *Error {
	m, rd, e := s.open(w, r)
	if e != nil {
		return e
	}
	text, special, pieces := "", false, false
	if v, ok := rd.Need("content"); ok {
		text = v.Text()
	}
	if v, ok := rd.Get("add_special"); ok {
		special = v.Bool()
	}
	if v, ok := rd.Get("with_pieces"); ok {
		pieces = v.Bool()
	}
	if v, ok := rd.Get("parse_special"); ok && !v.Bool() {
		v.Fail("is false; special tokens that are spelled out in a text are always read as such")
	}
	if e := s.closeBody(rd, m, ""); e != nil {
		return e
	}
	ids, e := m.encode("content", text, special)
	if e != nil {
		return e
	}
	type piece struct {
		ID    int32  `json:"id"`
		Piece string `json:"piece"`
	}
	tokens := make([]any, len(ids))
	for i, id := range ids {
		if tokens[i] = id; pieces {
			tokens[i] = piece{id, m.speller.spell(id).text}
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"tokens": tokens, "count": len(ids)})
	return nil
}

// detokenize is POST /detokenize.
func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) *Error {
	m, rd, e := s.open(w, r)
	if e != nil {
		return e
	}
	var ids []int32
	if v, ok := rd.Need("tokens"); ok {
		ids = rd.ids(v.Array())
	}
	if e := s.closeBody(rd, m, ""); e != nil {
		return e
	}
	writeJSON(w, http.StatusOK, map[string]string{"content": m.Tokenizer.Decode(ids, false)})
	return nil
}

// applyTemplate is POST /apply-template.
func (s *Server) applyTemplate(w http.ResponseWriter, r *http.Request) *Error {
	m, rd, e := s.open(w, r)
	if e != nil {
		return e
	}
	c := rd.conversation()
	if e := s.closeBody(rd, m, ""); e != nil {
		return e
	}
	text, e := m.render(c)
	if e != nil {
		return e
	}
	writeJSON(w, http.StatusOK, map[string]string{"prompt": text})
	return nil
}

// modelObject is one entry of /v1/models.
type modelObject struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	MaxModelLen int    `json:"max_model_len"` // positions, prompt and answer together
}

func (m *Model) object(id string) modelObject {
	return modelObject{id, "model", m.Created.Unix(), "mlxcel", m.Scheduler.Limit()}
}

// models is GET /v1/models.
func (s *Server) models(w http.ResponseWriter, _ *http.Request) *Error {
	m, e := s.loaded()
	if e != nil {
		return e
	}
	data := []modelObject{}
	for _, id := range m.IDs {
		data = append(data, m.object(id))
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": data})
	return nil
}

// oneModel is GET /v1/models/{id}.
func (s *Server) oneModel(w http.ResponseWriter, r *http.Request) *Error {
	m, e := s.loaded()
	if e != nil {
		return e
	}
	id := r.PathValue("id")
	if e := m.serves(id); e != nil {
		e.Param = "id"
		return e
	}
	writeJSON(w, http.StatusOK, m.object(id))
	return nil
}

// props is GET /props.
func (s *Server) props(w http.ResponseWriter, _ *http.Request) *Error {
	m, e := s.loaded()
	if e != nil {
		return e
	}
	d := s.cfg.Sampling
	out := map[string]any{
		"model": m.IDs[0], "context_length": m.Scheduler.Limit(), "total_slots": m.Scheduler.Status().MaxActive, "vocab_size": m.VocabSize,
		"chat_template": templateSource(m.Template), "stages": m.Stages, "numerics": m.numerics(), "version": s.cfg.Version,
		"default_generation_settings": map[string]any{
			"temperature": d.Temperature, "top_p": d.TopP, "top_k": d.TopK, "min_p": d.MinP, "repetition_penalty": d.RepetitionPenalty,
			"presence_penalty": d.PresencePenalty, "frequency_penalty": d.FrequencyPenalty, "max_tokens": s.cfg.DefaultMaxTokens,
		},
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// templateSource returns the template of conversations without tools; null where there is none.
func templateSource(t *chat.Template) any {
	if t == nil || len(t.Names()) == 0 {
		return nil
	}
	if source, ok := t.Source("default"); ok {
		return source
	}
	source, _ := t.Source(t.Names()[0])
	return source
}

// slot is one entry of /slots.
type slot struct {
	ID           int     `json:"id"`
	Processing   bool    `json:"is_processing"`
	Context      int     `json:"n_ctx"`
	Request      uint64  `json:"request,omitempty"`
	PromptTokens int     `json:"prompt_tokens"`
	Prefilled    int     `json:"prefilled_tokens"`
	Generated    int     `json:"generated_tokens"`
	MaxTokens    int     `json:"max_tokens"`
	Priority     int     `json:"priority"`
	Seconds      float64 `json:"seconds"` // since the request came
}

// slots is GET /slots: the requests that run, and how many more could.
func (s *Server) slots(w http.ResponseWriter, _ *http.Request) *Error {
	m, e := s.loaded()
	if e != nil {
		return e
	}
	status, limit := m.Scheduler.Status(), m.Scheduler.Limit()
	list := make([]slot, max(status.MaxActive, len(status.Active)))
	for i := range list {
		list[i] = slot{ID: i, Context: limit}
	}
	for i, a := range status.Active {
		list[i] = slot{
			ID: i, Processing: true, Context: limit, Request: a.ID, PromptTokens: a.PromptTokens, Prefilled: a.Prefilled,
			Generated: a.Generated, MaxTokens: a.MaxTokens, Priority: a.Priority, Seconds: s.now().Sub(a.Since).Seconds(),
		}
	}
	writeJSON(w, http.StatusOK, list)
	return nil
}

// version is GET /version.
func (s *Server) version(w http.ResponseWriter, _ *http.Request) *Error {
	writeJSON(w, http.StatusOK, map[string]string{"version": s.cfg.Version})
	return nil
}

// openAPI is GET /openapi.json.
func (s *Server) openAPI(w http.ResponseWriter, _ *http.Request) *Error {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(openAPIDescription)
	return nil
}

func (s *Server) head(m *Model, prefix, object string) head {
	return head{
		ID: prefix + s.newID(), Object: object, Created: s.now().Unix(), Model: m.IDs[0],
		Fingerprint: "mlxcel-" + s.cfg.Version,
	}
}
