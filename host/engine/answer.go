package engine

import (
	"context"

	"github.com/mlxcel/mlxcel/host/generate"
	"github.com/mlxcel/mlxcel/host/stopseq"
	"github.com/mlxcel/mlxcel/sdk"
)

// Request is one prompt and how to answer it.
type Request struct {
	Prompt    []int32
	MaxTokens int // generated tokens at most; 0 means as many as the context has room for
	Sampler   sdk.Sampler
	Stop      []string // texts that end the answer before them
	IgnoreEOS bool
	TopN      int     // most probable tokens to report with each token
	Forced    []int32 // tokens fed in place of the model's own choice
}

// Answer runs one request; emit gets each token as it comes.
func (e *Engine) Answer(ctx context.Context, r Request, emit func(generate.Event) error) (*generate.Result, error) {
	req := generate.Request{
		Prompt: r.Prompt, MaxTokens: r.MaxTokens, ContextLength: e.Profile.ContextLength, VocabSize: e.Profile.VocabSize,
		EOS: e.Model.EOS, IgnoreEOS: r.IgnoreEOS, Sampler: r.Sampler, TopN: r.TopN, Forced: r.Forced,
		Decoder: e.Tokenizer.NewStream(true),
	}
	if len(r.Stop) > 0 {
		stop, err := stopseq.New(r.Stop...)
		if err != nil {
			return nil, err
		}
		req.Stop = stopMatcher{stop}
	}
	g := generate.Generator{Runtime: e.Pipeline, Now: e.cfg.Now}
	return g.Run(ctx, req, emit)
}

// stopMatcher leaves out which text matched.
type stopMatcher struct{ *stopseq.Matcher }

func (m stopMatcher) Push(text string) (string, bool) {
	emit, _, done := m.Matcher.Push(text)
	return emit, done
}
