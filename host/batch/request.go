package batch

import (
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// Request is one prompt and how to answer it. What it points at must not change until the answer has ended.
type Request struct {
	Prompt     []int32
	MaxTokens  int // generated tokens at most; 0 generates none, which makes sense with WantScores only
	Sampler    sdk.Sampler
	EOS        []int32 // tokens that end the answer
	IgnoreEOS  bool    // EOS tokens are then ordinary ones
	TopN       int     // most probable tokens to report with each token
	Logprob    bool    // report each token's log-probability; TopN > 0 implies it
	WantScores bool    // report the log-probability of each prompt token but the first
	Priority   int     // higher goes first; requests of one priority go in the order of arrival

	// Deadline ends the request with a *DeadlineError; zero means none.
	Deadline time.Time
}

// Token is one token of an answer.
type Token struct {
	ID      int32
	Logprob float32          // under the raw logits; 0 where not asked for
	Top     []sdk.TokenScore // the TopN most probable
	EOS     bool             // it ended the answer, and its text is no part of it
	At      time.Time        // when it came
}

// FinishReason tells why an answer ended.
type FinishReason string

const (
	FinishStop   FinishReason = "stop"   // an EOS token, or Stream.Stop
	FinishLength FinishReason = "length" // MaxTokens
	// FinishCancelled comes with the error that says why.
	FinishCancelled FinishReason = "cancelled"
)

// Result is what a request came to. With an error it tells how far the request had come.
type Result struct {
	Tokens       []Token
	PromptScores []float32    // with WantScores: of Prompt[1:], under the raw logits
	FinishReason FinishReason // empty where the request failed
	PromptTokens int
	Timings      Timings
}

// Timings tells where the time of a request went.
type Timings struct {
	Queued     time.Duration // from Submit until the request joined; all of it where it never did
	FirstToken time.Duration // from Submit to the first token; 0 where none came
	Decode     time.Duration // from the first token to the last
	Total      time.Duration // from Submit to the end
	Preempted  int           // times that the request lost its place and was prefilled again
}

// TokensPerSecond returns the speed of the n tokens of an answer after the first; 0 when nothing was measured.
func (t Timings) TokensPerSecond(n int) float64 {
	if n < 2 || t.Decode <= 0 {
		return 0
	}
	return float64(n-1) / t.Decode.Seconds()
}
