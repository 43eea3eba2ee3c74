package sdktest

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// Checks of the head: what tokens, log-probabilities and samplers mean.

// tolerance is for values that two right computations round differently: log-probabilities of logits.
const tolerance = 1e-3

// logprobsOf returns the natural log-probabilities of logits.
func logprobsOf(logits []float32) []float64 {
	top := float64(slices.Max(logits))
	sum := 0.0
	for _, v := range logits {
		sum += math.Exp(float64(v) - top)
	}
	out := make([]float64, len(logits))
	for i, v := range logits {
		out[i] = float64(v) - top - math.Log(sum)
	}
	return out
}

func near(a, b float64) bool { return math.Abs(a-b) <= tolerance*(1+math.Abs(b)) }

// logitsAfter returns the raw logits after each of tokens, the prompt's last one first.
func (r *rig) logitsAfter(ctx context.Context, p *pipe, tokens []int32) ([][]float32, error) {
	seq := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: r.prompt}); err != nil {
		return nil, err
	}
	a, err := p.ask(ctx, sdk.SeqStep{Seq: seq, Tokens: r.prompt, Prompt: true, Want: sdk.WantLogits})
	if err != nil {
		return nil, err
	}
	list := [][]float32{floats(a.Logits.Data)}
	for i, token := range tokens {
		raw, err := p.logits(ctx, seq, len(r.prompt)+i, []int32{token})
		if err != nil {
			return nil, err
		}
		list = append(list, floats(raw))
	}
	return list, p.do(ctx, sdk.Release{Seq: seq})
}

// checkGreedy compares greedy tokens, top tokens and log-probabilities with the raw logits.
func checkGreedy(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityLogits); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	t, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	all, err := r.logitsAfter(ctx, p, t.tokens)
	if err != nil {
		return err
	}
	for i := range t.answers {
		if err := checkTop(&t.answers[i], all[i]); err != nil {
			return fmt.Errorf("token %d: %w", i, err)
		}
	}
	return sameLogits(t.logits, asBytes(all[len(all)-1]))
}

func checkTop(a *sdk.SeqResult, logits []float32) error {
	best := slices.Max(logits)
	if logits[a.Token] != best {
		return fmt.Errorf("greedy chose token %d with the logit %v, the greatest is %v", a.Token, logits[a.Token], best)
	}
	logprobs := logprobsOf(logits)
	if !near(float64(a.Logprob), logprobs[a.Token]) {
		return fmt.Errorf("the log-probability is %v, the logits say %v", a.Logprob, logprobs[a.Token])
	}
	sorted := slices.Sorted(slices.Values(logits))
	for k, top := range a.Top {
		if top.Token < 0 || int(top.Token) >= len(logits) || top.Logit != logits[top.Token] || top.Logit != sorted[len(sorted)-1-k] {
			return fmt.Errorf("top token %d is %+v, want the logit %v", k, top, sorted[len(sorted)-1-k])
		}
		if !near(float64(top.Logprob), logprobs[top.Token]) {
			return fmt.Errorf("top token %d has the log-probability %v, the logits say %v", k, top.Logprob, logprobs[top.Token])
		}
	}
	return nil
}

func asBytes(values []float32) []byte {
	raw := make([]byte, 0, 4*len(values))
	for _, v := range values {
		bits := math.Float32bits(v)
		raw = append(raw, byte(bits), byte(bits>>8), byte(bits>>16), byte(bits>>24))
	}
	return raw
}

// checkLogprob asks for a token alone, with its log-probability, and with top tokens: the token is the same, and what is
// reported with it is there only where asked for.
func checkLogprob(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	for _, s := range []sdk.Sampler{{}, {Temperature: 3, TopP: 0.99, Seed: 1}} {
		full, err := r.first(ctx, p, s, sdk.SeqStep{TopN: topN})
		if err != nil {
			return err
		}
		for what, c := range map[string]struct {
			asked sdk.SeqStep
			want  sdk.SeqResult
		}{
			"nothing more":        {sdk.SeqStep{}, sdk.SeqResult{}},
			"its log-probability": {sdk.SeqStep{Logprob: true}, sdk.SeqResult{Logprob: full.Logprob}},
			"both":                {sdk.SeqStep{Logprob: true, TopN: topN}, sdk.SeqResult{Logprob: full.Logprob, Top: full.Top}},
		} {
			got, err := r.first(ctx, p, s, c.asked)
			if err != nil {
				return err
			}
			if got.Token != full.Token {
				return fmt.Errorf("under %+v a token and %s is token %d, with top tokens it is %d", s, what, got.Token, full.Token)
			}
			if err := sameAnswer(&c.want, got); err != nil {
				return fmt.Errorf("under %+v a token and %s: %w", s, what, err)
			}
		}
	}
	return nil
}

// first answers the prompt with one token, and what q asks for beside it.
func (r *rig) first(ctx context.Context, p *pipe, s sdk.Sampler, q sdk.SeqStep) (*sdk.SeqResult, error) {
	q.Seq, q.Tokens, q.Prompt, q.Want = r.seq(), r.prompt, true, sdk.WantToken
	if err := p.do(ctx, sdk.Reservation{Seq: q.Seq, Prompt: r.prompt, Sampler: s}); err != nil {
		return nil, err
	}
	a, err := p.ask(ctx, q)
	if err != nil {
		return nil, err
	}
	return a, p.do(ctx, sdk.Release{Seq: q.Seq})
}

// checkScores compares the scores of given tokens with the logits after each row.
func checkScores(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityLogits, sdk.CapabilityScores); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	tokens, targets := r.madeUp(4, 6), r.madeUp(4, 9)
	all, err := r.logitsAfter(ctx, p, tokens)
	if err != nil {
		return err
	}
	seq := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: r.prompt}); err != nil {
		return err
	}
	if err := p.feed(ctx, seq, 0, r.prompt, maxRows); err != nil {
		return err
	}
	a, err := p.ask(ctx, sdk.SeqStep{Seq: seq, Pos: len(r.prompt), Tokens: tokens, Want: sdk.WantScores, Targets: targets})
	if err != nil {
		return err
	}
	for i, score := range a.Scores {
		if want := logprobsOf(all[i+1])[targets[i]]; !near(float64(score), want) {
			return fmt.Errorf("the score of token %d after row %d is %v, the logits say %v", targets[i], i, score, want)
		}
	}
	return nil
}

// checkSeeds runs seeded requests twice, and looks whether the seed and the choice matter.
func checkSeeds(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	run := func(s sdk.Sampler) ([]int32, error) {
		t, err := r.run(ctx, p, plan{prompt: r.prompt, sampler: s, generate: r.cfg.Generate})
		if err != nil {
			return nil, err
		}
		return t.tokens, nil
	}
	// Hot enough for any model to be of several minds.
	hot := sdk.Sampler{Temperature: 3, TopP: 0.99, Seed: 1}
	first, err := run(hot)
	if err != nil {
		return err
	}
	again, err := run(hot)
	if err != nil {
		return err
	}
	if !slices.Equal(first, again) {
		return fmt.Errorf("the same seed gave %v, then %v", first, again)
	}
	for what, change := range map[string]func(s *sdk.Sampler, n int){
		"seed":   func(s *sdk.Sampler, n int) { s.Seed = uint64(n) },
		"choice": func(s *sdk.Sampler, n int) { s.Choice = uint32(n) },
	} {
		same := true
		for n := 2; n < 10 && same; n++ {
			s := hot
			change(&s, n)
			tokens, err := run(s)
			if err != nil {
				return err
			}
			same = slices.Equal(first, tokens)
		}
		if same {
			return fmt.Errorf("eight other values of the %s changed nothing", what)
		}
	}
	return r.checkNarrow(ctx, p, hot)
}

// checkNarrow looks whether samplers that leave one token choose greedily, however hot they are.
func (r *rig) checkNarrow(ctx context.Context, p *pipe, hot sdk.Sampler) error {
	greedy, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	for what, change := range map[string]func(*sdk.Sampler){
		"top-k 1":    func(s *sdk.Sampler) { s.TopK = 1 },
		"top-p 1e-6": func(s *sdk.Sampler) { s.TopP = 1e-6 },
		"min-p 1":    func(s *sdk.Sampler) { s.MinP = 1 },
	} {
		s := hot
		change(&s)
		t, err := r.run(ctx, p, plan{prompt: r.prompt, sampler: s, generate: r.cfg.Generate})
		if err != nil {
			return err
		}
		if !slices.Equal(t.tokens, greedy.tokens) {
			return fmt.Errorf("%s gave %v, the most probable tokens are %v", what, t.tokens, greedy.tokens)
		}
	}
	return nil
}

// checkMask allows one token only, by the mask and by the bias, which must be chosen whatever the logits say.
func checkMask(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	greedy, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	token := (greedy.tokens[0] + 1) % int32(r.profile.VocabSize)
	mask := make([]byte, (r.profile.VocabSize+7)/8)
	mask[token/8] |= 1 << (token % 8)
	for what, c := range map[string]struct {
		sampler sdk.Sampler
		mask    []byte
	}{
		"the mask":          {sdk.Sampler{}, mask},
		"the mask, sampled": {sdk.Sampler{Temperature: 1, Seed: 5}, mask},
		"the bias":          {sdk.Sampler{LogitBias: map[int32]float32{token: 1e4}}, nil},
	} {
		if c.mask != nil && !r.has(sdk.CapabilityMasks) {
			continue
		}
		seq := r.seq()
		if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: r.prompt, Sampler: c.sampler}); err != nil {
			return err
		}
		a, err := p.ask(ctx, sdk.SeqStep{Seq: seq, Tokens: r.prompt, Prompt: true, Want: sdk.WantToken, TopN: topN, Allowed: c.mask})
		if err != nil {
			return err
		}
		if a.Token != token {
			return fmt.Errorf("%s leaves token %d only, but %d was chosen", what, token, a.Token)
		}
		if err := sameAnswer(&sdk.SeqResult{Logprob: a.Logprob, Top: greedy.answers[0].Top}, a); err != nil {
			return fmt.Errorf("%s must not change what is reported of the raw logits: %w", what, err)
		}
		if err := p.do(ctx, sdk.Release{Seq: seq}); err != nil {
			return err
		}
	}
	return nil
}

// checkPenalties compares greedy tokens under penalties with the formulas, applied to the raw logits.
func checkPenalties(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityLogits); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	for _, s := range []sdk.Sampler{
		{RepetitionPenalty: 1.8},
		{PresencePenalty: 2},
		{FrequencyPenalty: 1.5},
		{RepetitionPenalty: 1.3, PresencePenalty: 0.5, FrequencyPenalty: 0.7},
	} {
		t, err := r.run(ctx, p, plan{prompt: r.prompt, sampler: s, generate: 2 * r.cfg.Generate})
		if err != nil {
			return err
		}
		all, err := r.logitsAfter(ctx, p, t.tokens)
		if err != nil {
			return err
		}
		for i, token := range t.tokens {
			adjusted := penalized(s, all[i], r.prompt, t.tokens[:i])
			if best := slices.Max(adjusted); !near(adjusted[token], best) {
				return fmt.Errorf("under %+v token %d is %d, whose logit becomes %v, but the greatest becomes %v", s, i, token, adjusted[token], best)
			}
		}
	}
	return nil
}

// penalized applies the penalties as sdk.Sampler defines them.
func penalized(s sdk.Sampler, logits []float32, prompt, generated []int32) []float64 {
	out := make([]float64, len(logits))
	for i, v := range logits {
		token := int32(i)
		x := float64(v)
		if s.RepetitionPenalty > 0 && (slices.Contains(prompt, token) || slices.Contains(generated, token)) {
			if x > 0 {
				x /= float64(s.RepetitionPenalty)
			} else {
				x *= float64(s.RepetitionPenalty)
			}
		}
		count := 0
		for _, g := range generated {
			if g == token {
				count++
			}
		}
		if count > 0 {
			x -= float64(s.PresencePenalty) + float64(count)*float64(s.FrequencyPenalty)
		}
		out[i] = x
	}
	return out
}
