package leakyrnn

import (
	"cmp"
	"math"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// seenToken is a token that the penalties count.
type seenToken struct {
	token  int32
	prompt bool
}

// candidate is a token with its adjusted logit, later its probability.
type candidate struct {
	token int32
	value float64
}

// sample chooses the token for position pos from raw logits.
func sample(s sdk.Sampler, logits []float32, history []seenToken, allowed []byte, pos int) (int32, error) {
	list := candidates(s, logits, history, allowed)
	if len(list) == 0 {
		return 0, sdk.Errorf(sdk.CodeInvalid, "the mask allows no token at position %d", pos)
	}
	slices.SortFunc(list, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.value, a.value), cmp.Compare(a.token, b.token))
	})
	if s.Temperature == 0 {
		return list[0].token, nil
	}
	if s.TopK > 0 && s.TopK < len(list) {
		list = list[:s.TopK]
	}
	probabilities(list, float64(s.Temperature))
	return draw(nucleus(list, s), uniform(s.Seed, s.Choice, pos)), nil
}

// candidates applies the bias, the penalties and the mask.
func candidates(s sdk.Sampler, logits []float32, history []seenToken, allowed []byte) []candidate {
	seen := map[int32]bool{}
	generated := map[int32]int{}
	for _, h := range history {
		seen[h.token] = true
		if !h.prompt {
			generated[h.token]++
		}
	}
	var list []candidate
	for i, logit := range logits {
		token := int32(i)
		if len(allowed) != 0 && allowed[i/8]>>(i%8)&1 == 0 {
			continue
		}
		if seen[token] && s.RepetitionPenalty > 0 {
			if logit > 0 {
				logit /= s.RepetitionPenalty
			} else {
				logit *= s.RepetitionPenalty
			}
		}
		if n := generated[token]; n > 0 {
			logit -= s.PresencePenalty + float32(n)*s.FrequencyPenalty
		}
		logit += s.LogitBias[token]
		list = append(list, candidate{token, float64(logit)})
	}
	return list
}

// probabilities turns logits, the greatest first, into a distribution.
func probabilities(list []candidate, temperature float64) {
	top, sum := list[0].value, 0.0
	for i := range list {
		list[i].value = math.Exp((list[i].value - top) / temperature)
		sum += list[i].value
	}
	for i := range list {
		list[i].value /= sum
	}
}

// nucleus cuts the tail that top-p and min-p drop. The most probable token always stays.
func nucleus(list []candidate, s sdk.Sampler) []candidate {
	sum := 0.0
	for i, c := range list {
		if i > 0 && (s.TopP > 0 && sum >= float64(s.TopP) || c.value < float64(s.MinP)*list[0].value) {
			return list[:i]
		}
		sum += c.value
	}
	return list
}

// draw picks the token at u, in 0..1, of the distribution's mass.
func draw(list []candidate, u float64) int32 {
	sum := 0.0
	for _, c := range list {
		sum += c.value
	}
	for _, c := range list {
		if u -= c.value / sum; u < 0 {
			return c.token
		}
	}
	return list[len(list)-1].token
}

// uniform is a counter-based generator: the same numbers give the same draw, alone, batched or split. The mixing
// function is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
func uniform(seed uint64, choice uint32, pos int) float64 {
	x := mix(seed)
	x = mix(x ^ uint64(choice))
	x = mix(x ^ uint64(pos))
	return float64(x>>11) / (1 << 53)
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// logprobs returns the natural log-probability of every token.
func logprobs(logits []float32) []float32 {
	top := slices.Max(logits)
	sum := 0.0
	for _, v := range logits {
		sum += math.Exp(float64(v - top))
	}
	shift := float64(top) + math.Log(sum)
	out := make([]float32, len(logits))
	for i, v := range logits {
		out[i] = float32(float64(v) - shift)
	}
	return out
}

// topTokens returns the n most probable tokens, the first token first among equals.
func topTokens(logits, logprobs []float32, n int) []sdk.TokenScore {
	list := make([]sdk.TokenScore, len(logits))
	for i := range logits {
		list[i] = sdk.TokenScore{Token: int32(i), Logit: logits[i], Logprob: logprobs[i]}
	}
	slices.SortStableFunc(list, func(a, b sdk.TokenScore) int { return cmp.Compare(b.Logit, a.Logit) })
	return list[:min(n, len(list))]
}
