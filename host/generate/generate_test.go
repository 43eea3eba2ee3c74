package generate

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// scripted is a runtime whose model answers the tokens of a script, whatever it is fed. It notes what it is asked.
type scripted struct {
	chunk      int
	script     []int32
	failAt     int // the step that fails, from 1
	reserveErr error
	onStep     func(n int)
	clock      *clock

	reserved sdk.Reservation
	released []sdk.SeqID
	steps    []sdk.SeqStep
	answered int

	inFlight int // pieces to have under way; 0 means 1
	under    int // steps begun and not waited for
	most     int // under was at most
}

var errModel = errors.New("model failed")

func (s *scripted) NewSeq() sdk.SeqID                     { return 7 }
func (s *scripted) PromptPieces(int) (size, inFlight int) { return s.chunk, max(1, s.inFlight) }

func (s *scripted) Reserve(_ context.Context, r sdk.Reservation) error {
	s.reserved = r
	return s.reserveErr
}

func (s *scripted) Release(ctx context.Context, seq sdk.SeqID) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.released = append(s.released, seq)
	return nil
}

func (s *scripted) Begin(ctx context.Context, seqs []sdk.SeqStep) func() ([]sdk.SeqResult, error) {
	s.under++
	s.most = max(s.most, s.under)
	results, err := s.step(ctx, seqs)
	return func() ([]sdk.SeqResult, error) {
		s.under--
		return results, err
	}
}

func (s *scripted) step(ctx context.Context, seqs []sdk.SeqStep) ([]sdk.SeqResult, error) {
	step := seqs[0]
	step.Tokens = slices.Clone(step.Tokens)
	s.steps = append(s.steps, step)
	if s.onStep != nil {
		s.onStep(len(s.steps))
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(s.steps) == s.failAt {
		return nil, errModel
	}
	s.clock.now = s.clock.now.Add(10 * time.Millisecond)
	r := sdk.SeqResult{Seq: step.Seq, Token: -1}
	if step.Want == sdk.WantToken {
		r.Token = s.script[s.answered]
		if step.TopN > 0 {
			r.Logprob = -float32(r.Token)
		}
		for i := range step.TopN {
			r.Top = append(r.Top, sdk.TokenScore{Token: r.Token + int32(i)})
		}
		s.answered++
	}
	return []sdk.SeqResult{r}, nil
}

type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

// letters decodes token 0 as "a", 1 as "b", …; 26 and 27 are the two halves of "é"; EOS is 30.
type letters struct{ half bool }

func (d *letters) Push(token int32) string {
	switch {
	case token == 26:
		d.half = true
		return ""
	case token == 27:
		d.half = false
		return "é"
	case token == 30:
		return "<eos>"
	}
	return string(rune('a' + token))
}

func (d *letters) Flush() string {
	if d.half {
		return "\uFFFD"
	}
	return ""
}

// stopAt stops at a string, and holds back as much as it is long less one.
type stopAt struct{ stop, held string }

func (m *stopAt) Push(text string) (string, bool) {
	m.held += text
	if before, _, found := strings.Cut(m.held, m.stop); found {
		return before, true
	}
	n := max(0, len(m.held)-len(m.stop)+1)
	emit := m.held[:n]
	m.held = m.held[n:]
	return emit, false
}

func (m *stopAt) Flush() string { return m.held }

func TestRun(t *testing.T) {
	prompt := []int32{1, 2, 3, 4, 5}
	for name, c := range map[string]struct {
		req    Request
		script []int32
		ids    []int32
		text   string
		reason FinishReason
	}{
		"ends with the tokens asked for": {
			Request{MaxTokens: 3}, []int32{0, 1, 2, 3}, []int32{0, 1, 2}, "abc", FinishLength},
		"one token": {
			Request{MaxTokens: 1}, []int32{0}, []int32{0}, "a", FinishLength},
		"EOS ends it, in the ids and not in the text": {
			Request{MaxTokens: 9, EOS: []int32{30}}, []int32{0, 1, 30}, []int32{0, 1, 30}, "ab", FinishStop},
		"any of several EOS": {
			Request{MaxTokens: 9, EOS: []int32{30, 3}}, []int32{0, 3}, []int32{0, 3}, "a", FinishStop},
		"EOS first": {
			Request{MaxTokens: 9, EOS: []int32{30}}, []int32{30}, []int32{30}, "", FinishStop},
		"EOS as the last token asked for": {
			Request{MaxTokens: 2, EOS: []int32{30}}, []int32{0, 30}, []int32{0, 30}, "a", FinishStop},
		"ignored EOS is an ordinary token": {
			Request{MaxTokens: 3, EOS: []int32{30}, IgnoreEOS: true}, []int32{0, 30, 1}, []int32{0, 30, 1}, "a<eos>b", FinishLength},
		"a stop string over two tokens": {
			Request{MaxTokens: 9, Stop: &stopAt{stop: "cd"}}, []int32{0, 2, 2, 3, 4}, []int32{0, 2, 2, 3}, "ac", FinishStop},
		"half a stop string at the end is text": {
			Request{MaxTokens: 2, Stop: &stopAt{stop: "cd"}}, []int32{0, 2}, []int32{0, 2}, "ac", FinishLength},
		"a stop string with the last token asked for": {
			Request{MaxTokens: 2, Stop: &stopAt{stop: "ab"}}, []int32{0, 1}, []int32{0, 1}, "", FinishStop},
		"half a stop string before EOS is text": {
			Request{MaxTokens: 9, EOS: []int32{30}, Stop: &stopAt{stop: "cd"}}, []int32{2, 30}, []int32{2, 30}, "c", FinishStop},
		"a character over two tokens": {
			Request{MaxTokens: 2}, []int32{26, 27}, []int32{26, 27}, "é", FinishLength},
		"half a character at the end": {
			Request{MaxTokens: 2}, []int32{0, 26}, []int32{0, 26}, "a\uFFFD", FinishLength},
		"no limit but the context": {
			Request{ContextLength: 8}, []int32{0, 1, 2, 3}, []int32{0, 1, 2}, "abc", FinishLength},
		"no limit at all": {
			Request{EOS: []int32{30}}, []int32{0, 1, 2, 30}, []int32{0, 1, 2, 30}, "abc", FinishStop},
		"context filled to the last position": {
			Request{MaxTokens: 3, ContextLength: 8}, []int32{0, 1, 2}, []int32{0, 1, 2}, "abc", FinishLength},
		"forced tokens in place of the model's own": {
			Request{Forced: []int32{5, 30, 6}, EOS: []int32{30}, Stop: &stopAt{stop: "f"}}, []int32{0, 1, 2}, []int32{5, 30, 6}, "f<eos>g", FinishLength},
	} {
		t.Run(name, func(t *testing.T) {
			clk := &clock{}
			rt := &scripted{chunk: 2, script: c.script, clock: clk}
			c.req.Prompt, c.req.TopN, c.req.Decoder = prompt, 2, &letters{}
			c.req.Sampler, c.req.Adapter = sdk.Sampler{Seed: 9}, "adapter"
			var events []Event
			g := &Generator{Runtime: rt, Now: clk.read}
			res, err := g.Run(t.Context(), c.req, func(e Event) error { events = append(events, e); return nil })
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(res.TokenIDs, c.ids) || res.Text != c.text || res.FinishReason != c.reason {
				t.Errorf("got %v %q %s, want %v %q %s", res.TokenIDs, res.Text, res.FinishReason, c.ids, c.text, c.reason)
			}
			checkEvents(t, events, res, c.script)
			checkSteps(t, rt.steps, prompt, res.TokenIDs)
			if !slices.Equal(rt.released, []sdk.SeqID{7}) {
				t.Errorf("released %v, want sequence 7 once", rt.released)
			}
			most := c.req.MaxTokens + len(c.req.Forced)
			if most == 0 && c.req.ContextLength > 0 {
				most = 3
			}
			want := sdk.Reservation{Seq: 7, Prompt: prompt, Sampler: sdk.Sampler{Seed: 9}, Adapter: "adapter"}
			if most > 0 {
				want.MaxLen = len(prompt) + most
			}
			if !reflect.DeepEqual(rt.reserved, want) {
				t.Errorf("reserved %+v, want %+v", rt.reserved, want)
			}
		})
	}
}

// checkEvents: one event a token, in order, with the model's own choice and its scores; the texts make the text.
func checkEvents(t *testing.T, events []Event, res *Result, script []int32) {
	t.Helper()
	var text strings.Builder
	for i, e := range events {
		text.WriteString(e.Text)
		if e.Token != res.TokenIDs[i] || e.Choice != script[i] || e.Logprob != -float32(script[i]) || len(e.Top) != 2 || e.Top[0].Token != script[i] {
			t.Errorf("event %d: %+v", i, e)
		}
	}
	if len(events) != len(res.TokenIDs) || text.String() != res.Text {
		t.Errorf("%d events with text %q, want %d with %q", len(events), text.String(), len(res.TokenIDs), res.Text)
	}
}

// checkSteps: the prompt in chunks of two, the token wanted with its last row only, then each token but the last.
func checkSteps(t *testing.T, steps []sdk.SeqStep, prompt, ids []int32) {
	t.Helper()
	want := []sdk.SeqStep{
		{Seq: 7, Pos: 0, Rows: len(prompt[:2]), Tokens: prompt[:2], Prompt: true},
		{Seq: 7, Pos: 2, Rows: len(prompt[2:4]), Tokens: prompt[2:4], Prompt: true},
		{Seq: 7, Pos: 4, Rows: len(prompt[4:]), Tokens: prompt[4:], Prompt: true, Want: sdk.WantToken, TopN: 2},
	}
	for i, id := range ids[:len(ids)-1] {
		want = append(want, sdk.SeqStep{Seq: 7, Pos: len(prompt) + i, Rows: 1, Tokens: []int32{id}, Want: sdk.WantToken, TopN: 2})
	}
	if !reflect.DeepEqual(steps, want) {
		t.Errorf("steps\n%+v, want\n%+v", steps, want)
	}
}

func TestTimings(t *testing.T) {
	clk := &clock{}
	rt := &scripted{chunk: 2, script: []int32{0, 1, 2, 3, 4}, clock: clk}
	g := &Generator{Runtime: rt, Now: clk.read}
	res, err := g.Run(t.Context(), Request{Prompt: []int32{1, 2, 3, 4, 5}, MaxTokens: 5}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := Timings{PromptTokens: 5, GeneratedTokens: 5, FirstToken: 30 * time.Millisecond, Prefill: 30 * time.Millisecond, Decode: 40 * time.Millisecond}
	if res.Timings != want {
		t.Errorf("got %+v, want %+v", res.Timings, want)
	}
	if got := res.Timings.PromptTokensPerSecond(); int(got+.5) != 167 {
		t.Errorf("prompt: %v tokens per second, want 5 in 30 ms", got)
	}
	if got := res.Timings.DecodeTokensPerSecond(); got != 100 {
		t.Errorf("decode: %v tokens per second, want 4 in 40 ms", got)
	}
	one := Timings{PromptTokens: 1, GeneratedTokens: 1}
	if one.DecodeTokensPerSecond() != 0 || one.PromptTokensPerSecond() != 0 {
		t.Errorf("speeds without a measure: %v, %v", one.DecodeTokensPerSecond(), one.PromptTokensPerSecond())
	}
}

func TestBadRequests(t *testing.T) {
	for name, c := range map[string]struct {
		req  Request
		want error
		text string
	}{
		"empty prompt": {Request{MaxTokens: 1}, ErrEmptyPrompt, "no tokens"},
		"negative max": {Request{Prompt: []int32{1}, MaxTokens: -1}, nil, "--max-tokens -1"},
		"prompt over the context": {Request{Prompt: make([]int32, 12), MaxTokens: 1, ContextLength: 10},
			&ContextLengthError{12, 1, 10}, "the prompt has 12 tokens, but the model's context holds 10"},
		"prompt fills the context": {Request{Prompt: make([]int32, 10), ContextLength: 10},
			&ContextLengthError{10, 0, 10}, "shorten the prompt"},
		"answer over the context": {Request{Prompt: make([]int32, 6), MaxTokens: 5, ContextLength: 10},
			&ContextLengthError{6, 5, 10}, "6 tokens and 5 more were asked for, but the model's context holds 10: lower --max-tokens to 4"},
		"forced over the context": {Request{Prompt: make([]int32, 6), Forced: make([]int32, 5), ContextLength: 10},
			&ContextLengthError{6, 5, 10}, "holds 10"},
		"prompt id too large":  {Request{Prompt: []int32{99, 100}, VocabSize: 100}, &TokenRangeError{100, 100}, "ids 0 to 99"},
		"negative prompt id":   {Request{Prompt: []int32{-1}, VocabSize: 100}, &TokenRangeError{-1, 100}, "token id -1"},
		"forced id too large":  {Request{Prompt: []int32{1}, Forced: []int32{500}, VocabSize: 100}, &TokenRangeError{500, 100}, "500"},
		"everything in a step": {Request{Prompt: []int32{1}, MaxTokens: 1}, errModel, "model failed"},
	} {
		t.Run(name, func(t *testing.T) {
			clk := &clock{}
			rt := &scripted{chunk: 2, script: []int32{0}, reserveErr: errModel, clock: clk}
			g := &Generator{Runtime: rt, Now: clk.read}
			res, err := g.Run(t.Context(), c.req, nil)
			if res != nil || err == nil || !strings.Contains(err.Error(), c.text) {
				t.Fatalf("got %v, %v, want an error with %q", res, err, c.text)
			}
			if c.want != nil && !errors.Is(err, c.want) && !reflect.DeepEqual(err, c.want) {
				t.Errorf("got %#v, want %#v", err, c.want)
			}
			if len(rt.steps) > 0 {
				t.Error("the model was stepped all the same")
			}
		})
	}
}

// An answer that breaks off comes with what there is of it, and its sequence is released.
func TestBrokenOff(t *testing.T) {
	left := errors.New("client left")
	for name, c := range map[string]struct {
		failAt, cancelAt, emitErrAt int
		want                        error
		reason                      FinishReason
		ids                         int
	}{
		"failure in prefill":    {failAt: 1, want: errModel, reason: FinishError},
		"failure in decode":     {failAt: 4, want: errModel, reason: FinishError, ids: 2},
		"cancelled in prefill":  {cancelAt: 1, want: left, reason: FinishCancelled},
		"cancelled in decode":   {cancelAt: 5, want: left, reason: FinishCancelled, ids: 3},
		"nobody takes a token":  {emitErrAt: 2, want: left, reason: FinishError, ids: 2},
		"nor takes the last":    {emitErrAt: 6, want: left, reason: FinishError, ids: 6},
		"cancelled, then fails": {cancelAt: 3, failAt: 3, want: left, reason: FinishCancelled, ids: 1},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			clk := &clock{}
			rt := &scripted{chunk: 2, script: []int32{0, 1, 2, 3, 4, 5}, failAt: c.failAt, clock: clk}
			rt.onStep = func(n int) {
				if n == c.cancelAt {
					cancel(left)
				}
			}
			taken := 0
			g := &Generator{Runtime: rt, Now: clk.read}
			res, err := g.Run(ctx, Request{Prompt: []int32{1, 2, 3}, MaxTokens: 6, Decoder: &letters{}}, func(Event) error {
				if taken++; taken == c.emitErrAt {
					return left
				}
				return nil
			})
			if !errors.Is(err, c.want) || res == nil || res.FinishReason != c.reason || len(res.TokenIDs) != c.ids || len(res.Text) != c.ids {
				t.Errorf("got %+v, %v, want %d tokens, %s and %v", res, err, c.ids, c.reason, c.want)
			}
			if !slices.Equal(rt.released, []sdk.SeqID{7}) {
				t.Errorf("released %v, want sequence 7 once, on a context that lives", rt.released)
			}
		})
	}
}

// The pieces of a prompt follow each other, as many under way as the runtime wants; after one that fails no more begin, and
// those that have are waited for.
func TestPiecesOfAPrompt(t *testing.T) {
	for name, c := range map[string]struct {
		inFlight, failAt int
		most, begun      int
	}{
		"one at a time":        {inFlight: 1, most: 1, begun: 5},
		"three under way":      {inFlight: 3, most: 3, begun: 5},
		"more than there are":  {inFlight: 9, most: 5, begun: 5},
		"the first fails":      {inFlight: 3, failAt: 1, most: 3, begun: 3},
		"one in between fails": {inFlight: 2, failAt: 3, most: 2, begun: 4},
	} {
		t.Run(name, func(t *testing.T) {
			clk := &clock{}
			rt := &scripted{chunk: 2, inFlight: c.inFlight, script: []int32{0}, failAt: c.failAt, clock: clk}
			g := &Generator{Runtime: rt, Now: clk.read}
			prompt := []int32{1, 2, 3, 4, 5, 6, 7, 8, 9}
			_, err := g.Run(t.Context(), Request{Prompt: prompt, MaxTokens: 1}, func(Event) error { return nil })
			if failed := err != nil; failed != (c.failAt > 0) {
				t.Errorf("got %v", err)
			}
			if rt.most != c.most || len(rt.steps) != c.begun || rt.under != 0 {
				t.Errorf("%d pieces begun, %d under way at most, %d never waited for, want %d, %d and none", len(rt.steps), rt.most, rt.under, c.begun, c.most)
			}
			for i, step := range rt.steps {
				end := min(2*i+2, len(prompt))
				if !slices.Equal(step.Tokens, prompt[2*i:end]) || step.Pos != 2*i || (step.Want == sdk.WantToken) != (end == len(prompt)) {
					t.Errorf("piece %d is %+v", i, step)
				}
			}
		})
	}
}
