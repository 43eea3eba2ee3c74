package api

import (
	"encoding/json"
	"math"
	"unicode/utf8"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/tokenize"
)

// head is what every object of a response begins with.
type head struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	Model       string `json:"model"`
	Fingerprint string `json:"system_fingerprint"`
}

// envelope is a response, or an event of one that is streamed.
type envelope struct {
	head
	Choices []any           `json:"choices"`
	Usage   json.RawMessage `json:"usage,omitempty"`
}

func (h head) response(choices []any, u usage) any {
	raw, _ := json.Marshal(u) // numbers always have a JSON form
	return envelope{h, choices, raw}
}

// chunk has a usage only where that was asked for: null in all events but the last.
func (h head) chunk(choice any, u *usage, includeUsage bool) any {
	e := envelope{head: h, Choices: []any{}}
	if choice != nil {
		e.Choices = append(e.Choices, choice)
	}
	if includeUsage {
		e.Usage, _ = json.Marshal(u)
	}
	return e
}

// chatFormat is that of /v1/chat/completions.
type chatFormat struct {
	head
	speller      *speller
	logprobs     bool
	includeUsage bool
}

type (
	chatMessage struct {
		Role    string  `json:"role"`
		Content string  `json:"content"`
		Refusal *string `json:"refusal"`
	}
	chatDelta struct {
		Role    string  `json:"role,omitempty"`
		Content *string `json:"content,omitempty"`
	}
	chatChoice struct {
		Index    int                `json:"index"`
		Message  chatMessage        `json:"message"`
		Logprobs *chatLogprobs      `json:"logprobs"`
		Reason   batch.FinishReason `json:"finish_reason"`
	}
	chatChunk struct {
		Index    int                 `json:"index"`
		Delta    chatDelta           `json:"delta"`
		Logprobs *chatLogprobs       `json:"logprobs"`
		Reason   *batch.FinishReason `json:"finish_reason"`
	}
	chatLogprobs struct {
		Content []chatLogprob `json:"content"`
		Refusal *struct{}     `json:"refusal"`
	}
	tokenLogprob struct {
		Token   string  `json:"token"`
		Logprob float64 `json:"logprob"`
		Bytes   []int   `json:"bytes"`
	}
	chatLogprob struct {
		tokenLogprob
		Top []tokenLogprob `json:"top_logprobs"`
	}
)

func (f chatFormat) open(c *choice) any {
	empty := ""
	return chatChunk{Index: c.index, Delta: chatDelta{Role: roleAssistant, Content: &empty}}
}

func (f chatFormat) delta(c *choice, p piece) any {
	if p.text == "" && len(p.tokens) == 0 {
		return nil
	}
	return chatChunk{Index: c.index, Delta: chatDelta{Content: &p.text}, Logprobs: f.scores(p.tokens)}
}

func (f chatFormat) end(c *choice) any { return chatChunk{Index: c.index, Reason: &c.reason} }

func (f chatFormat) chunk(choice any, u *usage) any { return f.head.chunk(choice, u, f.includeUsage) }

func (f chatFormat) whole(c *choice) any {
	return chatChoice{c.index, chatMessage{Role: roleAssistant, Content: c.text}, f.scores(c.tokens), c.reason}
}

func (f chatFormat) scores(tokens []scoredToken) *chatLogprobs {
	if !f.logprobs {
		return nil
	}
	out := &chatLogprobs{Content: []chatLogprob{}}
	for _, t := range tokens {
		l := chatLogprob{f.score(t.ID, t.Logprob), []tokenLogprob{}}
		for _, top := range t.Top {
			l.Top = append(l.Top, f.score(top.Token, top.Logprob))
		}
		out.Content = append(out.Content, l)
	}
	return out
}

func (f chatFormat) score(id int32, logprob float32) tokenLogprob {
	s := f.speller.spell(id)
	return tokenLogprob{s.text, finite(logprob), s.bytes}
}

// leastLogprob stands for minus infinity, which JSON does not have; OpenAI sends the same.
const leastLogprob = -9999

func finite(logprob float32) float64 {
	if l := float64(logprob); l > leastLogprob && !math.IsInf(l, 1) {
		return l
	}
	return leastLogprob
}

// completionFormat is that of /v1/completions.
type completionFormat struct {
	head
	speller      *speller
	tokenizer    *tokenize.Tokenizer
	logprobs     bool
	topN         int
	includeUsage bool
}

type (
	completionChoice struct {
		Index    int                 `json:"index"`
		Text     string              `json:"text"`
		Logprobs *completionLogprobs `json:"logprobs"`
		Reason   *batch.FinishReason `json:"finish_reason"`
	}
	completionLogprobs struct {
		Tokens   []string             `json:"tokens"`
		Logprobs []*float64           `json:"token_logprobs"` // null for the first token of a prompt
		Top      []map[string]float64 `json:"top_logprobs"`   // null where none are asked for
		Offsets  []int                `json:"text_offset"`    // characters
	}
)

func (f completionFormat) open(c *choice) any {
	if c.echo == "" {
		return nil
	}
	return completionChoice{Index: c.index, Text: c.echo, Logprobs: f.scores(c, nil, true)}
}

func (f completionFormat) delta(c *choice, p piece) any {
	if p.text == "" && len(p.tokens) == 0 {
		return nil
	}
	return completionChoice{Index: c.index, Text: p.text, Logprobs: f.scores(c, p.tokens, false)}
}

func (f completionFormat) end(c *choice) any {
	return completionChoice{Index: c.index, Reason: &c.reason}
}

func (f completionFormat) chunk(choice any, u *usage) any {
	return f.head.chunk(choice, u, f.includeUsage)
}

func (f completionFormat) whole(c *choice) any {
	return completionChoice{c.index, c.echo + c.text, f.scores(c, c.tokens, c.echo != ""), &c.reason}
}

// scores reports tokens of an answer, after those of its prompt where that is echoed here.
func (f completionFormat) scores(c *choice, tokens []scoredToken, prompt bool) *completionLogprobs {
	if !f.logprobs {
		return nil
	}
	out := &completionLogprobs{Tokens: []string{}, Logprobs: []*float64{}, Offsets: []int{}}
	if prompt {
		f.promptScores(out, c)
	}
	before := utf8.RuneCountInString(c.echo)
	for _, t := range tokens {
		text, logprob := f.speller.spell(t.ID).text, finite(t.Logprob)
		out.add(text, &logprob, before+t.offset)
		if f.topN == 0 {
			continue
		}
		top := map[string]float64{text: logprob} // the token itself is always there
		for _, candidate := range t.Top {
			text := f.speller.spell(candidate.Token).text
			if l, seen := top[text]; !seen || l < finite(candidate.Logprob) { // tokens may read alike
				top[text] = finite(candidate.Logprob)
			}
		}
		out.Top = append(out.Top, top)
	}
	return out
}

func (f completionFormat) promptScores(out *completionLogprobs, c *choice) {
	decoder, offset := f.tokenizer.NewStream(true), 0
	for i, id := range c.ids {
		var logprob *float64
		if i > 0 && i <= len(c.scores) {
			l := finite(c.scores[i-1])
			logprob = &l
		}
		out.add(f.speller.spell(id).text, logprob, offset)
		offset += utf8.RuneCountInString(decoder.Push(id))
	}
}

func (l *completionLogprobs) add(text string, logprob *float64, offset int) {
	l.Tokens = append(l.Tokens, text)
	l.Logprobs = append(l.Logprobs, logprob)
	l.Offsets = append(l.Offsets, offset)
}
