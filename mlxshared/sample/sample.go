// Package sample owns the choice of one token from one row of logits, and the log-probabilities reported with it.
//
// The order is fixed: the repetition penalty, the presence and frequency penalties and the logit bias change the raw
// logits; the mask of allowed tokens removes candidates; then temperature, top-k, top-p and min-p act in this order on
// the distribution that the step before left, renormalized. Temperature 0 takes the largest changed logit, the
// lowest id among equals. Log-probabilities are always those of the raw logits.
package sample

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// ErrNoCandidate reports that no token is left to choose: the mask allows none, or the model gives all minus infinity.
var ErrNoCandidate = errors.New("no token may be chosen: the mask of allowed tokens and the logits leave none")

// LogitError reports a logit that no choice can be made with.
type LogitError struct {
	Token int
	Value float32
}

func (e *LogitError) Error() string {
	return fmt.Sprintf("logit of token %d is %v: the model's weights or activations overflowed; try --dtype float32", e.Token, e.Value)
}

// History is what a sequence has seen so far, for the penalties.
type History struct {
	counts map[int32]seen
}

type seen struct {
	prompt    int32
	generated int32
}

// NewHistory returns the history of a sequence that has only its prompt.
func NewHistory(prompt []int32) *History {
	h := &History{counts: make(map[int32]seen, len(prompt))}
	for _, t := range prompt {
		c := h.counts[t]
		c.prompt++
		h.counts[t] = c
	}
	return h
}

// Add counts a generated token.
func (h *History) Add(token int32) { h.change(token, 1) }

// Remove takes back a generated token.
func (h *History) Remove(token int32) { h.change(token, -1) }

func (h *History) change(token, by int32) {
	c := h.counts[token]
	c.generated += by
	if c == (seen{}) {
		delete(h.counts, token)
		return
	}
	h.counts[token] = c
}

// Clone returns an independent copy.
func (h *History) Clone() *History {
	c := &History{counts: make(map[int32]seen, len(h.counts))}
	for t, n := range h.counts {
		c.counts[t] = n
	}
	return c
}

// Request is one choice to make.
type Request struct {
	Sampler  *sdk.Sampler
	History  *History // nil when the sampler has no penalties
	Position int      // absolute position that the chosen token will have
	Allowed  []byte   // bit i of byte i/8 allows token i; empty allows all
	TopN     int      // most probable tokens to report
	Logprob  bool     // report the token's log-probability; TopN > 0 implies it
}

// Result is the choice made.
type Result struct {
	Token   int32
	Logprob float32          // of Token, under the raw logits; 0 where not asked for
	Top     []sdk.TokenScore // most probable first, the lower id first among equals
}

// Chooser makes choices. It keeps buffers between them, so it serves one goroutine.
type Chooser struct {
	changed    []float32
	weights    []float64
	candidates []candidate
}

// Choose picks a token from raw logits [vocabulary], which stay as they are. A NaN or +Inf logit is an error, never
// a token.
func (c *Chooser) Choose(logits []float32, r *Request) (Result, error) {
	token, err := largest(logits)
	if err != nil {
		return Result{}, err
	}
	m := logits[token]
	changed, err := c.change(logits, r)
	if err != nil {
		return Result{}, err
	}
	if changed != nil {
		if token, err = largest(changed); err != nil {
			return Result{}, err
		}
	} else {
		changed = logits
	}
	if r.Sampler.Temperature > 0 {
		token = c.draw(changed, changed[token], r)
	}
	result := Result{Token: token}
	if r.Logprob || r.TopN > 0 { // a sum over the vocabulary, so only who asks pays for it
		norm := logSumExp(logits, m)
		result.Logprob, result.Top = float32(float64(logits[token])-norm), top(logits, r.TopN, norm)
	}
	return result, nil
}

// Logprob returns the log-probability of token under raw logits.
func Logprob(logits []float32, token int32) (float32, error) {
	if token < 0 || int(token) >= len(logits) {
		return 0, fmt.Errorf("target token %d is outside the vocabulary of %d", token, len(logits))
	}
	m, err := largest(logits)
	if err != nil {
		return 0, err
	}
	return float32(float64(logits[token]) - logSumExp(logits, logits[m])), nil
}

// Validate reports settings that make no sense.
func Validate(s *sdk.Sampler) error {
	switch {
	case !(s.Temperature >= 0) || math.IsInf(float64(s.Temperature), 0):
		return fmt.Errorf("temperature %v: want 0 or more", s.Temperature)
	case !(s.TopP >= 0 && s.TopP <= 1):
		return fmt.Errorf("top_p %v: want 0 to 1", s.TopP)
	case s.TopK < 0:
		return fmt.Errorf("top_k %d: want 0 or more", s.TopK)
	case !(s.MinP >= 0 && s.MinP <= 1):
		return fmt.Errorf("min_p %v: want 0 to 1", s.MinP)
	case !(s.RepetitionPenalty >= 0) || math.IsInf(float64(s.RepetitionPenalty), 0):
		return fmt.Errorf("repetition_penalty %v: want above 0, or 0 for none", s.RepetitionPenalty)
	case !finite(s.PresencePenalty):
		return fmt.Errorf("presence_penalty %v: want a finite number", s.PresencePenalty)
	case !finite(s.FrequencyPenalty):
		return fmt.Errorf("frequency_penalty %v: want a finite number", s.FrequencyPenalty)
	}
	for t, b := range s.LogitBias {
		if !finite(b) {
			return fmt.Errorf("logit_bias of token %d is %v: want a finite number", t, b)
		}
	}
	return nil
}

func finite(f float32) bool { return !math.IsNaN(float64(f)) && !math.IsInf(float64(f), 0) }

// change returns a copy of the logits with penalties, bias and mask applied, nil where there is nothing to change.
func (c *Chooser) change(logits []float32, r *Request) ([]float32, error) {
	s := r.Sampler
	penalized := s.CountsTokens() && r.History != nil
	if !penalized && len(s.LogitBias) == 0 && len(r.Allowed) == 0 {
		return nil, nil
	}
	c.changed = append(c.changed[:0], logits...)
	if penalized {
		penalize(c.changed, s, r.History)
	}
	for token, bias := range s.LogitBias {
		if token < 0 || int(token) >= len(logits) {
			return nil, fmt.Errorf("logit_bias names token %d, outside the vocabulary of %d", token, len(logits))
		}
		c.changed[token] += bias
	}
	if len(r.Allowed) > 0 {
		mask(c.changed, r.Allowed)
	}
	return c.changed, nil
}

// penalize divides positive and multiplies negative logits of tokens seen in the prompt or since (Keskar et al. 2019,
// "CTRL"), then subtracts the presence penalty once and the frequency penalty per occurrence of generated tokens.
func penalize(logits []float32, s *sdk.Sampler, h *History) {
	for token, n := range h.counts {
		if token < 0 || int(token) >= len(logits) {
			continue
		}
		x := &logits[token]
		if p := s.RepetitionPenalty; p != 0 {
			if *x > 0 {
				*x /= p
			} else {
				*x *= p
			}
		}
		if n.generated > 0 {
			*x -= s.PresencePenalty + s.FrequencyPenalty*float32(n.generated)
		}
	}
}

// mask removes the tokens whose bit is not set; tokens past the mask's end are not allowed.
func mask(logits []float32, allowed []byte) {
	removed := float32(math.Inf(-1))
	for i := range logits {
		if i/8 >= len(allowed) || allowed[i/8]>>(i%8)&1 == 0 {
			logits[i] = removed
		}
	}
}

// largest returns the lowest id among the largest logits and refuses what is no number.
func largest(logits []float32) (int32, error) {
	best, at := float32(math.Inf(-1)), -1
	for i, x := range logits {
		if x <= best { // one comparison for nearly all; a NaN fails it
			continue
		}
		if !(x <= math.MaxFloat32) {
			return 0, &LogitError{Token: i, Value: x}
		}
		best, at = x, i
	}
	if at < 0 {
		return 0, ErrNoCandidate
	}
	return int32(at), nil
}

// logSumExp returns ln Σ exp(logit), m being the largest logit, by summing float64 terms in the order of ids.
func logSumExp(logits []float32, m float32) float64 {
	sum := 0.0
	for _, x := range logits {
		if d := float64(x - m); d > -negligible {
			sum += expNegative(d)
		}
	}
	return float64(m) + math.Log(sum)
}

// top returns the n most probable tokens.
func top(logits []float32, n int, norm float64) []sdk.TokenScore {
	n = min(n, len(logits))
	if n <= 0 {
		return nil
	}
	best := make([]sdk.TokenScore, 0, n+1)
	for i, x := range logits {
		if len(best) == n && x <= best[n-1].Logit {
			continue
		}
		at, _ := slices.BinarySearchFunc(best, x, func(s sdk.TokenScore, x float32) int {
			if s.Logit >= x {
				return -1
			}
			return 1
		})
		best = slices.Insert(best, at, sdk.TokenScore{Token: int32(i), Logit: x})
		best = best[:min(len(best), n)]
	}
	for i := range best {
		best[i].Logprob = float32(float64(best[i].Logit) - norm)
	}
	return best
}
