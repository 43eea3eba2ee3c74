// Package generate owns one request: from prompt ids through prefill and decode to the end of its answer.
package generate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// Runtime is what requests run on; *pipeline.Pipeline is one.
type Runtime interface {
	NewSeq() sdk.SeqID
	// PromptPieces returns the rows of the pieces in which a prompt best goes through the stages, and how many to have under
	// way.
	PromptPieces(rows int) (size, inFlight int)
	Reserve(ctx context.Context, r sdk.Reservation) error
	Release(ctx context.Context, seq sdk.SeqID) error
	// Begin orders a step; wait, to be called once, brings its results.
	Begin(ctx context.Context, seqs []sdk.SeqStep) (wait func() ([]sdk.SeqResult, error))
}

// Decoder turns tokens into text as they come. It holds back what can't be shown yet, such as half a character.
type Decoder interface {
	Push(token int32) string
	Flush() string // what was held back at the end
}

// StopMatcher looks for stop strings in text as it comes. It holds back only what can still become one.
type StopMatcher interface {
	Push(text string) (emit string, stopped bool) // once stopped, emit ends before the stop string
	Flush() string                                // what was held back at the end
}

// FinishReason tells why an answer ended.
type FinishReason string

const (
	FinishStop      FinishReason = "stop"      // an EOS token or a stop string
	FinishLength    FinishReason = "length"    // the most tokens that were asked for
	FinishCancelled FinishReason = "cancelled" // the context ended; comes with its error
	FinishError     FinishReason = "error"     // something failed; comes with the error
)

// Request is one prompt and how to answer it.
type Request struct {
	Prompt        []int32
	MaxTokens     int // generated tokens at most; 0 means as many as the context has room for
	ContextLength int // positions of the model; 0 means no limit
	VocabSize     int // token ids must lie below it; 0 leaves that to the executor
	EOS           []int32
	IgnoreEOS     bool // EOS tokens are then ordinary ones
	Sampler       sdk.Sampler
	Adapter       string
	TopN          int // most probable tokens to report with each token

	// Forced, where set, is fed in place of the model's own choice. The answer has exactly these tokens; EOS and
	// stop strings do not end it, and MaxTokens is not used.
	Forced []int32

	Decoder Decoder     // nil means that no text is wanted
	Stop    StopMatcher // nil means none
}

// Event is one token of an answer.
type Event struct {
	Token   int32            // of the answer
	Choice  int32            // the model's own; another than Token only where that was forced
	Logprob float32          // of Choice; only where TopN asks for more than 0
	Top     []sdk.TokenScore // the TopN most probable
	Text    string           // what has become showable with this token; empty for an EOS, and often for others
}

// Result is an answer.
type Result struct {
	TokenIDs     []int32 // ends with the EOS token where one ended it
	Text         string
	FinishReason FinishReason
	Timings      Timings
}

// Timings tells how long an answer took.
type Timings struct {
	PromptTokens    int
	GeneratedTokens int
	FirstToken      time.Duration // from the start of the request to its first token
	Prefill         time.Duration // of FirstToken, the time in the model
	Decode          time.Duration // from the first token to the last
}

// PromptTokensPerSecond returns the speed of the prefill; 0 when nothing was measured.
func (t Timings) PromptTokensPerSecond() float64 { return perSecond(t.PromptTokens, t.Prefill) }

// DecodeTokensPerSecond returns the speed of the tokens after the first; 0 when nothing was measured.
func (t Timings) DecodeTokensPerSecond() float64 { return perSecond(t.GeneratedTokens-1, t.Decode) }

func perSecond(n int, d time.Duration) float64 {
	if n < 1 || d <= 0 {
		return 0
	}
	return float64(n) / d.Seconds()
}

// ContextLengthError is a request that does not fit the model's context. Nothing of it is ever cut silently.
type ContextLengthError struct {
	Prompt    int // tokens
	MaxTokens int // asked for; 0 when not given
	Limit     int // positions of the model
}

func (e *ContextLengthError) Error() string {
	if e.Prompt >= e.Limit {
		return fmt.Sprintf("the prompt has %d tokens, but the model's context holds %d, answer included: shorten the prompt", e.Prompt, e.Limit)
	}
	return fmt.Sprintf("the prompt has %d tokens and %d more were asked for, but the model's context holds %d: lower --max-tokens to %d or shorten the prompt",
		e.Prompt, e.MaxTokens, e.Limit, e.Limit-e.Prompt)
}

// TokenRangeError is a token id that the model does not have.
type TokenRangeError struct {
	Token     int32
	VocabSize int
}

func (e *TokenRangeError) Error() string {
	return fmt.Sprintf("token id %d: the model has ids 0 to %d", e.Token, e.VocabSize-1)
}

// ErrEmptyPrompt is a prompt without tokens.
var ErrEmptyPrompt = errors.New("the prompt has no tokens: give some text, or at least the model's BOS token")

// releaseTimeout bounds the wait for a sequence's release, so that a stage that stands still can't hold a caller
// that is done.
const releaseTimeout = 5 * time.Second

// Generator answers requests on a runtime. It is safe for concurrent use.
type Generator struct {
	Runtime Runtime
	Now     func() time.Time
}

// Run answers one request. emit is called with each token as it comes; nil means that nobody looks. An error of
// emit ends the request. When an answer was begun and did not come to its end, the Result comes with the error.
func (g *Generator) Run(ctx context.Context, req Request, emit func(Event) error) (*Result, error) {
	most, err := req.check()
	if err != nil {
		return nil, err
	}
	if emit == nil {
		emit = func(Event) error { return nil }
	}
	r := &run{g: g, req: &req, emit: emit, most: most, seq: g.Runtime.NewSeq(), start: g.Now()}
	r.result.Timings.PromptTokens = len(req.Prompt)
	reservation := sdk.Reservation{Seq: r.seq, Prompt: req.Prompt, Sampler: req.Sampler, Adapter: req.Adapter}
	if most > 0 {
		reservation.MaxLen = len(req.Prompt) + most
	}
	if err := g.Runtime.Reserve(ctx, reservation); err != nil {
		return nil, err
	}
	defer r.release(ctx)
	if err := r.generate(ctx); err != nil {
		r.result.FinishReason = FinishError
		if ctx.Err() != nil {
			r.result.FinishReason = FinishCancelled
		}
		return r.finish(), err
	}
	return r.finish(), nil
}

// check validates the request and returns how many tokens it may generate, 0 for any number.
func (req *Request) check() (most int, err error) {
	if len(req.Prompt) == 0 {
		return 0, ErrEmptyPrompt
	}
	if req.MaxTokens < 0 {
		return 0, fmt.Errorf("--max-tokens %d: want at least 1, or 0 for as many as the context has room for", req.MaxTokens)
	}
	for _, ids := range [][]int32{req.Prompt, req.Forced} {
		for _, id := range ids {
			if req.VocabSize > 0 && (id < 0 || int(id) >= req.VocabSize) {
				return 0, &TokenRangeError{Token: id, VocabSize: req.VocabSize}
			}
		}
	}
	most = req.MaxTokens
	if len(req.Forced) > 0 {
		most = len(req.Forced)
	}
	if limit := req.ContextLength; limit > 0 {
		if len(req.Prompt) >= limit || len(req.Prompt)+most > limit {
			return 0, &ContextLengthError{Prompt: len(req.Prompt), MaxTokens: most, Limit: limit}
		}
		if most == 0 {
			most = limit - len(req.Prompt)
		}
	}
	return most, nil
}

// run is a request on its way.
type run struct {
	g     *Generator
	req   *Request
	emit  func(Event) error
	most  int // tokens to generate at most; 0 means any number
	seq   sdk.SeqID
	start time.Time

	length int           // positions that the stages hold
	step   []sdk.SeqStep // used again for each decode step
	token  []int32
	text   strings.Builder
	result Result
	first  time.Time // of the first token
	last   time.Time // of the latest token
}

func (r *run) generate(ctx context.Context) error {
	began := r.g.Now()
	next, err := r.prefill(ctx)
	if err != nil {
		return err
	}
	r.first = r.g.Now()
	r.last = r.first
	r.result.Timings.Prefill, r.result.Timings.FirstToken = r.first.Sub(began), r.first.Sub(r.start)
	r.step, r.token = make([]sdk.SeqStep, 1), make([]int32, 1)
	for {
		if err := r.accept(next); err != nil || r.result.FinishReason != "" {
			return err
		}
		if next, err = r.decode(ctx); err != nil {
			return err
		}
		r.last = r.g.Now()
	}
}

// prefill feeds the prompt in pieces that follow each other through the stages. The last row of the last yields the first
// token.
func (r *run) prefill(ctx context.Context) (sdk.SeqResult, error) {
	size, inFlight := r.g.Runtime.PromptPieces(len(r.req.Prompt))
	pieces := slices.Collect(slices.Chunk(r.req.Prompt, size))
	var last []sdk.SeqResult
	var failed error
	var waits []func() ([]sdk.SeqResult, error)
	for ended := 0; ended < len(pieces); ended++ {
		for failed == nil && len(waits) < min(len(pieces), ended+inFlight) {
			waits = append(waits, r.feed(ctx, pieces[len(waits)]))
		}
		if ended == len(waits) { // one has failed, and those after it
			break
		}
		results, err := waits[ended]()
		if last = results; failed == nil {
			failed = err
		}
	}
	if failed != nil {
		return sdk.SeqResult{}, failed
	}
	return last[0], nil
}

// feed begins a step with the next piece of the prompt.
func (r *run) feed(ctx context.Context, piece []int32) (wait func() ([]sdk.SeqResult, error)) {
	step := sdk.SeqStep{Seq: r.seq, Pos: r.length, Rows: len(piece), Tokens: piece, Prompt: true}
	r.length += len(piece)
	if r.length == len(r.req.Prompt) {
		step.Want, step.TopN = sdk.WantToken, r.req.TopN
	}
	return r.g.Runtime.Begin(ctx, []sdk.SeqStep{step})
}

// decode feeds the latest token and returns the next.
func (r *run) decode(ctx context.Context) (sdk.SeqResult, error) {
	r.token[0] = r.result.TokenIDs[len(r.result.TokenIDs)-1]
	r.step[0] = sdk.SeqStep{Seq: r.seq, Pos: r.length, Rows: 1, Tokens: r.token, Want: sdk.WantToken, TopN: r.req.TopN}
	r.length++
	results, err := r.g.Runtime.Begin(ctx, r.step)()
	if err != nil {
		return sdk.SeqResult{}, err
	}
	return results[0], nil
}

// accept appends a token to the answer, decides whether that ends it, and emits it.
func (r *run) accept(s sdk.SeqResult) error {
	e := Event{Token: s.Token, Choice: s.Token, Logprob: s.Logprob, Top: s.Top}
	n := len(r.result.TokenIDs)
	forced := len(r.req.Forced) > 0
	if forced {
		e.Token = r.req.Forced[n]
	}
	r.result.TokenIDs = append(r.result.TokenIDs, e.Token)
	eos := !forced && !r.req.IgnoreEOS && slices.Contains(r.req.EOS, e.Token)
	switch {
	case eos:
		r.result.FinishReason = FinishStop
	case n+1 == r.most:
		r.result.FinishReason = FinishLength
	}
	e.Text = r.showable(e.Token, eos, forced)
	r.text.WriteString(e.Text)
	return r.emit(e)
}

// showable returns the text that a token adds. The end of the answer brings what was held back; a stop string may
// end it here. The text of an EOS token is never part of it.
func (r *run) showable(token int32, eos, forced bool) string {
	if r.req.Decoder == nil {
		return ""
	}
	var text string
	if !eos {
		text = r.req.Decoder.Push(token)
	}
	ends := r.result.FinishReason != ""
	if ends {
		text += r.req.Decoder.Flush()
	}
	if r.req.Stop == nil || forced {
		return text
	}
	text, stopped := r.req.Stop.Push(text)
	switch {
	case stopped:
		r.result.FinishReason = FinishStop
	case ends:
		text += r.req.Stop.Flush()
	}
	return text
}

func (r *run) finish() *Result {
	r.result.Text = r.text.String()
	t := &r.result.Timings
	if t.GeneratedTokens = len(r.result.TokenIDs); t.GeneratedTokens > 0 {
		t.Decode = r.last.Sub(r.first)
	}
	return &r.result
}

// release frees the sequence on every stage, also when ctx has ended. Its failure does not touch the answer: a
// runtime that is gone says so on its own.
func (r *run) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	_ = r.g.Runtime.Release(ctx, r.seq)
}
