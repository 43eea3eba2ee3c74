package sample

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
)

// The known answers that Random123 publishes with philox4x32-10 (kat_vectors).
func TestPhiloxKnownAnswers(t *testing.T) {
	cases := []struct {
		counter [4]uint32
		key     [2]uint32
		want    [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, [2]uint32{0xffffffff, 0xffffffff}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0}, [4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	}
	for _, c := range cases {
		if got := philox(c.counter, c.key); got != c.want {
			t.Errorf("philox(%x, %x) = %x, want %x", c.counter, c.key, got, c.want)
		}
	}
}

func TestUniformDependsOnEveryCoordinate(t *testing.T) {
	base := Uniform(1, 2, 3)
	if base != Uniform(1, 2, 3) {
		t.Error("the same coordinates give two values")
	}
	for name, u := range map[string]float64{
		"seed": Uniform(2, 2, 3), "high half of the seed": Uniform(1+1<<32, 2, 3), "choice": Uniform(1, 3, 3), "position": Uniform(1, 2, 4),
	} {
		if u == base || u < 0 || u >= 1 {
			t.Errorf("another %s gives %v, base %v", name, u, base)
		}
	}
}

func choose(t *testing.T, logits []float32, r Request) Result {
	t.Helper()
	var c Chooser
	before := slices.Clone(logits)
	got, err := c.Choose(logits, &r)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(before, logits) {
		t.Error("the raw logits were changed")
	}
	return got
}

func TestGreedy(t *testing.T) {
	logits := []float32{1, 3, -2, 3, 0}
	history := NewHistory([]int32{1})
	history.Add(3)
	history.Add(3)
	cases := []struct {
		name    string
		sampler sdk.Sampler
		allowed []byte
		want    int32
	}{
		{"lowest id wins a tie", sdk.Sampler{}, nil, 1},
		{"mask", sdk.Sampler{}, []byte{0b11001}, 3},
		{"mask shorter than the vocabulary", sdk.Sampler{}, []byte{0b1}, 0},
		{"bias", sdk.Sampler{LogitBias: map[int32]float32{4: 3.5}}, nil, 4},
		{"repetition counts the prompt and what followed", sdk.Sampler{RepetitionPenalty: 4}, nil, 0},
		{"presence counts generated tokens only", sdk.Sampler{PresencePenalty: 2.5, LogitBias: map[int32]float32{3: 1}}, nil, 1},
		{"frequency counts each time", sdk.Sampler{FrequencyPenalty: 0.6, LogitBias: map[int32]float32{3: 1}}, nil, 1},
		{"frequency too small", sdk.Sampler{FrequencyPenalty: 0.4, LogitBias: map[int32]float32{3: 1}}, nil, 3},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := choose(t, logits, Request{Sampler: &c.sampler, History: history, Allowed: c.allowed})
			if got.Token != c.want {
				t.Errorf("token %d, want %d", got.Token, c.want)
			}
		})
	}
}

func TestPenaltyMultipliesNegativeLogits(t *testing.T) {
	s := sdk.Sampler{RepetitionPenalty: 2}
	got := choose(t, []float32{-1, -1.5}, Request{Sampler: &s, History: NewHistory([]int32{0})})
	if got.Token != 1 {
		t.Errorf("token %d, want 1: -1·2 < -1.5", got.Token)
	}
}

func TestHistoryRemoveUndoesAdd(t *testing.T) {
	h := NewHistory([]int32{5})
	copied := h.Clone()
	h.Add(5)
	h.Add(9)
	h.Remove(5)
	h.Remove(9)
	if len(h.counts) != 1 || h.counts[5] != (seen{prompt: 1}) {
		t.Errorf("counts are %v", h.counts)
	}
	copied.Add(7)
	if _, shared := h.counts[7]; shared {
		t.Error("a clone shares counts")
	}
}

func TestLogprobs(t *testing.T) {
	logits := []float32{2, 5, 1, 5, -3}
	norm := 0.0
	for _, x := range logits {
		norm += math.Exp(float64(x))
	}
	norm = math.Log(norm)
	// Penalties, bias, temperature and mask must not show in what is reported.
	s := sdk.Sampler{Temperature: 0.3, LogitBias: map[int32]float32{0: 100}, RepetitionPenalty: 3}
	got := choose(t, logits, Request{Sampler: &s, History: NewHistory([]int32{1}), TopN: 3, Allowed: []byte{1}})
	if got.Token != 0 || !near(got.Logprob, 2-norm) {
		t.Errorf("token %d with %v, want 0 with %v", got.Token, got.Logprob, 2-norm)
	}
	want := []int32{1, 3, 0}
	for i, top := range got.Top {
		if top.Token != want[i] || top.Logit != logits[want[i]] || !near(top.Logprob, float64(logits[want[i]])-norm) {
			t.Errorf("top %d is %+v, want token %d", i, top, want[i])
		}
	}
	if n := len(choose(t, logits, Request{Sampler: &sdk.Sampler{}, TopN: 20}).Top); n != len(logits) {
		t.Errorf("%d top tokens of a vocabulary of %d", n, len(logits))
	}
	lp, err := Logprob(logits, 4)
	if err != nil || !near(lp, -3-norm) {
		t.Errorf("Logprob %v %v, want %v", lp, err, -3-norm)
	}
	if _, err := Logprob(logits, 5); err == nil {
		t.Error("a target outside the vocabulary is no error")
	}
}

// What is reported of a token does not change which it is, and is there only where asked for.
func TestLogprobOnlyWhereAskedFor(t *testing.T) {
	logits := make([]float32, 300)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range logits {
		logits[i] = float32(rng.NormFloat64())
	}
	for name, s := range map[string]sdk.Sampler{
		"greedy": {}, "drawn": {Temperature: 1}, "restricted": {Temperature: 2, TopK: 50, TopP: 0.9, MinP: 0.01},
		"changed": {Temperature: 1, RepetitionPenalty: 1.5, LogitBias: map[int32]float32{7: 2}},
	} {
		for seed := range uint64(20) {
			s.Seed = seed
			r := Request{Sampler: &s, History: NewHistory([]int32{1, 2}), Position: 9}
			alone := choose(t, logits, r)
			if alone.Logprob != 0 || alone.Top != nil {
				t.Errorf("%s, nothing asked for: %+v", name, alone)
			}
			r.Logprob = true
			scored := choose(t, logits, r)
			r.Logprob, r.TopN = false, 2
			listed := choose(t, logits, r)
			want, err := Logprob(logits, alone.Token)
			if err != nil {
				t.Fatal(err)
			}
			if scored.Token != alone.Token || scored.Logprob != want || scored.Top != nil {
				t.Errorf("%s, log-probability asked for: %+v, want token %d at %v", name, scored, alone.Token, want)
			}
			if listed.Token != alone.Token || listed.Logprob != want || len(listed.Top) != 2 {
				t.Errorf("%s, top tokens asked for: %+v, want token %d at %v", name, listed, alone.Token, want)
			}
		}
	}
}

func near(got float32, want float64) bool { return math.Abs(float64(got)-want) < 1e-5 }

func TestBadLogitsAreErrors(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	var c Chooser
	for name, logits := range map[string][]float32{"NaN": {0, nan, 1}, "NaN first": {nan}, "+Inf": {0, inf}} {
		for _, s := range []sdk.Sampler{{}, {Temperature: 1}, {Temperature: 1, TopK: 1}} {
			var bad *LogitError
			if _, err := c.Choose(logits, &Request{Sampler: &s}); !errors.As(err, &bad) {
				t.Errorf("%s with %+v: %v", name, s, err)
			}
		}
	}
	for name, r := range map[string]Request{
		"greedy": {Sampler: &sdk.Sampler{}, Allowed: []byte{0}}, "drawn": {Sampler: &sdk.Sampler{Temperature: 1}, Allowed: []byte{0}},
	} {
		if _, err := c.Choose([]float32{1, 2}, &r); !errors.Is(err, ErrNoCandidate) {
			t.Errorf("nothing allowed, %s: %v", name, err)
		}
	}
	s := sdk.Sampler{LogitBias: map[int32]float32{2: 1}}
	if _, err := c.Choose([]float32{1, 2}, &Request{Sampler: &s}); err == nil {
		t.Error("a bias outside the vocabulary is no error")
	}
}

func TestExpNegative(t *testing.T) {
	if expNegative(0) != 1 {
		t.Errorf("e^0 is %v", expNegative(0))
	}
	for d := -float64(negligible); d <= 0; d += 0.00137 {
		if got, want := expNegative(d), math.Exp(d); math.Abs(got-want) > 1e-9*want {
			t.Fatalf("e^%v is %v, want %v", d, got, want)
		}
	}
}

func TestValidate(t *testing.T) {
	nan := float32(math.NaN())
	for _, s := range []sdk.Sampler{
		{Temperature: -1}, {Temperature: nan}, {TopP: 1.1}, {TopP: nan}, {TopK: -1}, {MinP: -0.1}, {RepetitionPenalty: -1},
		{PresencePenalty: nan}, {FrequencyPenalty: nan}, {LogitBias: map[int32]float32{1: nan}},
	} {
		if Validate(&s) == nil {
			t.Errorf("%+v is no error", s)
		}
	}
	if err := Validate(&sdk.Sampler{Temperature: 0.7, TopP: 0.9, TopK: 40, MinP: 0.05, RepetitionPenalty: 1.1, PresencePenalty: -1}); err != nil {
		t.Error(err)
	}
}

// keptByDefinition applies top-k, top-p and min-p to a full sort.
func keptByDefinition(logits []float32, s *sdk.Sampler) []int32 {
	order := make([]candidate, len(logits))
	m := slices.Max(logits)
	for i, x := range logits {
		order[i] = candidate{math.Exp(float64(x-m) / float64(s.Temperature)), int32(i)}
	}
	slices.SortFunc(order, func(a, b candidate) int {
		if a.before(b) {
			return -1
		}
		return 1
	})
	if s.TopK > 0 && s.TopK < len(order) {
		order = order[:s.TopK]
	}
	if s.TopP > 0 && s.TopP < 1 {
		mass, n := 0.0, 0
		for mass < float64(s.TopP)*sum(order) && n < len(order) {
			mass += order[n].weight
			n++
		}
		order = order[:max(n, 1)]
	}
	kept := []int32{}
	for _, c := range order {
		if c.weight >= float64(s.MinP) && c.weight > math.Exp(-negligible) {
			kept = append(kept, c.token)
		}
	}
	slices.Sort(kept)
	return kept
}

func TestFiltersAgainstDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var c Chooser
	for trial := range 3000 {
		logits := make([]float32, 1+rng.IntN(200))
		for i := range logits {
			logits[i] = float32(rng.NormFloat64() * 3)
			if trial%3 == 0 {
				logits[i] = float32(math.Round(float64(logits[i]))) // many ties
			}
		}
		s := sdk.Sampler{Temperature: 0.2 + rng.Float32()*2, TopK: rng.IntN(20) * rng.IntN(2), TopP: rng.Float32() * float32(rng.IntN(2)), MinP: rng.Float32() * 0.3 * float32(rng.IntN(2))}
		total := c.weigh(logits, slices.Max(logits), 1/float64(s.Temperature))
		last := c.restrict(&s, total)
		got := []int32{}
		for i, w := range c.weights {
			if w > 0 && !last.before(candidate{w, int32(i)}) {
				got = append(got, int32(i))
			}
		}
		if want := keptByDefinition(logits, &s); !slices.Equal(got, want) {
			t.Fatalf("trial %d, %+v: kept %v, want %v", trial, s, got, want)
		}
	}
}

// The draws of 20,000 positions under one seed against the distribution asked for, by Pearson's chi-square. The seed is
// fixed, so the outcome is too; the bound is the 99.9th percentile.
func TestDrawsFollowTheDistribution(t *testing.T) {
	logits := []float32{0.5, 2, -1, 1, 0, 1.5, -0.5, 0.2}
	cases := []struct {
		sampler sdk.Sampler
		bound   float64 // of chi-square with the kept tokens - 1 degrees of freedom
	}{
		{sdk.Sampler{Temperature: 1, Seed: 7}, 24.32},                      // 8 kept
		{sdk.Sampler{Temperature: 0.5, Seed: 8, TopK: 4}, 16.27},           // 4 kept
		{sdk.Sampler{Temperature: 1.5, Seed: 9, MinP: 0.3}, 20.52},         // 6 kept
		{sdk.Sampler{Temperature: 1, Seed: 10, TopP: 0.75}, 13.82},         // 3 kept
		{sdk.Sampler{Temperature: 2, Seed: 11, Choice: 3}, 24.32},          // 8 kept
		{sdk.Sampler{Temperature: 1, Seed: 12, TopK: 5, TopP: 0.8}, 13.82}, // 3 kept
	}
	var c Chooser
	for _, tc := range cases {
		kept := keptByDefinition(logits, &tc.sampler)
		weight := func(token int32) float64 { return math.Exp(float64(logits[token]) / float64(tc.sampler.Temperature)) }
		total := 0.0
		for _, k := range kept {
			total += weight(k)
		}
		const draws = 20000
		counts := map[int32]int{}
		for p := range draws {
			r, err := c.Choose(logits, &Request{Sampler: &tc.sampler, Position: p})
			if err != nil {
				t.Fatal(err)
			}
			counts[r.Token]++
		}
		chi, n := 0.0, 0
		for _, k := range kept {
			want := weight(k) / total * draws
			chi += (float64(counts[k]) - want) * (float64(counts[k]) - want) / want
			n += counts[k]
		}
		if n != draws || chi > tc.bound {
			t.Errorf("%+v: chi-square %.1f over %d tokens, bound %.1f; %d of %d draws among the kept", tc.sampler, chi, len(kept), tc.bound, n, draws)
		}
	}
}

func BenchmarkChoose(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	logits := make([]float32, 49152)
	for i := range logits {
		logits[i] = float32(rng.NormFloat64() * 3)
	}
	for name, s := range map[string]sdk.Sampler{
		"greedy": {}, "temperature": {Temperature: 1}, "top-p": {Temperature: 1, TopP: 0.95}, "top-k": {Temperature: 1, TopK: 50, TopP: 0.95, MinP: 0.05},
	} {
		b.Run(name, func(b *testing.B) {
			var c Chooser
			for i := 0; b.Loop(); i++ {
				if _, err := c.Choose(logits, &Request{Sampler: &s, Position: i}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
