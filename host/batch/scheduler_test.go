package batch

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// stagesOf makes stages on which a position takes one byte.
func stagesOf(n int, budget int64, block int) []kvledger.Stage {
	stages := make([]kvledger.Stage, n)
	for i := range stages {
		stages[i] = kvledger.Stage{Layers: []sdk.LayerProfile{{States: []sdk.StateProfile{{BytesPerPosition: 1, Block: block}}}}, Budget: budget}
	}
	return stages
}

func configFor(rt *fakeRuntime) Config {
	return Config{Runtime: rt, VocabSize: fakeVocab, Ledger: kvledger.Config{Stages: stagesOf(len(rt.stages), 0, 8)}}
}

// bubble runs a test on a scheduler in fake time, and finds what was left behind. Its channels must be made within.
func bubble(t *testing.T, config func() Config, f func(t *testing.T, s *Scheduler)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		s, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		f(t, s)
		s.Close()
		if rt, ok := cfg.Runtime.(*fakeRuntime); ok {
			rt.verify(t)
		}
		if list := s.Status().Active; len(list) > 0 {
			t.Errorf("active after the end: %v", list)
		}
		for i, u := range s.Status().KV {
			if u.Used != 0 || u.Sequences != 0 {
				t.Errorf("stage %d has %d bytes of %d sequences on its books after the end", i, u.Used, u.Sequences)
			}
		}
	})
}

func (f *fakeRuntime) verify(t *testing.T) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fault := range f.faults {
		t.Error(fault)
	}
	for seq := range f.seqs {
		t.Errorf("sequence %d was never released", seq)
	}
}

func randomRequest(rng *rand.Rand) Request {
	req := Request{MaxTokens: 1 + rng.IntN(40), IgnoreEOS: rng.IntN(2) == 0, TopN: rng.IntN(3), WantScores: rng.IntN(4) == 0}
	for range 1 + rng.IntN(200) {
		req.Prompt = append(req.Prompt, rng.Int32N(fakeVocab))
	}
	req.Logprob = len(req.Prompt)%2 == 0
	for range 20 {
		req.EOS = append(req.EOS, rng.Int32N(fakeVocab))
	}
	if rng.IntN(2) == 0 {
		req.Sampler = sdk.Sampler{Temperature: 1, Seed: rng.Uint64(), Choice: rng.Uint32N(3)}
	}
	return req
}

// equalsSolo compares an answer with what the request is answered alone.
func equalsSolo(t *testing.T, req Request, r *Result) {
	t.Helper()
	tokens, scores, reason := solo(req)
	if !slices.Equal(ids(r.Tokens), tokens) || r.FinishReason != reason {
		t.Errorf("answer %v (%s), alone it is %v (%s)", ids(r.Tokens), r.FinishReason, tokens, reason)
	}
	if !slices.Equal(r.PromptScores, scores) {
		t.Errorf("prompt scores %v, alone %v", r.PromptScores, scores)
	}
	for _, token := range r.Tokens {
		logprob := float32(0)
		if req.Logprob || req.TopN > 0 {
			logprob = -float32(token.ID)
		}
		if token.Logprob != logprob || len(token.Top) != req.TopN {
			t.Errorf("token %d has log-probability %g and %d candidates", token.ID, token.Logprob, len(token.Top))
		}
	}
}

func TestConcurrentEqualsSolo(t *testing.T) {
	for _, c := range []struct {
		name   string
		stages int
		change func(*Config)
	}{
		{"one stage", 1, func(*Config) {}},
		{"two stages", 2, func(c *Config) { c.MaxActive = 32 }},
		{"groups", 3, func(c *Config) { c.MaxActive, c.Speeds = 32, linearSpeeds(3, 4, 1, 0.1) }},
		{"micro-batch 1", 2, func(c *Config) { c.MicroBatch, c.Runtime.(*fakeRuntime).cuts = 1, true }},
		{"micro-batch 3", 2, func(c *Config) { c.MicroBatch, c.Runtime.(*fakeRuntime).cuts = 3, true }},
		{"batch 1", 2, func(c *Config) { c.MaxBatch = 1 }},
		{"batch 5 of 12", 2, func(c *Config) { c.MaxBatch, c.MaxActive = 5, 12 }},
		{"chunk 3", 2, func(c *Config) { c.DecodeChunk = 3 }},
		{"little memory", 2, func(c *Config) { c.Ledger.Stages = stagesOf(2, 600, 8) }},
		{"preempt lru", 2, func(c *Config) { c.Ledger.Stages, c.Preemption = stagesOf(2, 400, 8), PreemptLRU }},
		{"preempt longest", 3, func(c *Config) { c.Ledger.Stages, c.Preemption = stagesOf(3, 400, 8), PreemptLongest }},
		{"preempt lowest priority", 2, func(c *Config) { c.Ledger.Stages, c.Preemption = stagesOf(2, 400, 8), PreemptLowestPriority }},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := func() Config {
				cfg := configFor(newFake(c.stages))
				c.change(&cfg)
				return cfg
			}
			bubble(t, config, func(t *testing.T, s *Scheduler) {
				rng := rand.New(rand.NewPCG(1, 2))
				var wait sync.WaitGroup
				for range 32 {
					req := randomRequest(rng)
					stream, err := s.Submit(t.Context(), req)
					if err != nil {
						t.Fatal(err)
					}
					wait.Go(func() {
						r, err := stream.Wait(nil)
						if err != nil {
							t.Errorf("%v", err)
							return
						}
						equalsSolo(t, req, r)
					})
				}
				wait.Wait()
				if s.cfg.Preemption != PreemptNone && s.Status().Counters.Preemptions == 0 {
					t.Error("nothing was preempted: the memory is too large for this test")
				}
			})
		})
	}
}

// linearSpeeds is what stages of time fixed + row·b and hops between them would measure, in ms.
func linearSpeeds(stages int, fixed, row, hop float64) *Speeds {
	s := &Speeds{}
	ms := func(f float64) time.Duration { return time.Duration(f * float64(time.Millisecond)) }
	for b := 1; b <= 32; b *= 2 {
		t := fixed + row*float64(b)
		s.Steps = append(s.Steps, Speed{Batch: b, Interval: ms(t), Latency: ms(float64(stages) * (t + hop))})
	}
	return s
}

var errKernel = errors.New("kernel failed")

func stageError(stage int) *pipeline.StageError {
	return &pipeline.StageError{Place: sdk.Place{Stage: stage}, Plugin: "fake", Phase: pipeline.PhaseDecode, Err: errKernel}
}

// Requests come, leave, are cancelled, reach deadlines, are stopped and fail; those that are not touched get what they
// get alone.
func FuzzChaos(f *testing.F) {
	for seed := range uint64(12) {
		f.Add(seed)
	}
	f.Fuzz(chaos)
}

func chaos(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	config := func() Config { return chaoticConfig(rng, seed) }
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		var wait sync.WaitGroup
		for range 60 {
			time.Sleep(time.Duration(rng.IntN(60)) * time.Millisecond) // of the bubble's time
			act(t, s, rng, &wait)
		}
		wait.Wait()
		synctest.Wait()
		for i, u := range s.Status().KV {
			if u.Used != 0 {
				t.Errorf("stage %d has %d bytes on its books with nothing active", i, u.Used)
			}
		}
	})
}

func chaoticConfig(rng *rand.Rand, seed uint64) Config {
	stages := 1 + rng.IntN(3)
	rt := newFake(stages)
	rt.chunk = 8 + rng.IntN(64)
	cfg := configFor(rt)
	cfg.MaxActive, cfg.MaxQueue = 1+rng.IntN(16), 64
	cfg.MicroBatch = []int{0, 0, 1, 2}[rng.IntN(4)]
	rt.cuts = cfg.MicroBatch > 0
	rt.back = []int{0, -1, 20}[rng.IntN(3)] // full, recurrent and sliding
	cfg.Ledger.Stages = stagesOf(stages, int64(300+rng.IntN(600)), 8)
	cfg.Preemption = []PreemptionPolicy{PreemptNone, PreemptLRU, PreemptLongest, PreemptLowestPriority}[rng.IntN(4)]
	if rng.IntN(2) == 0 {
		cfg.Speeds = linearSpeeds(stages, 4, 1, 0.1)
	}
	var failing sync.Mutex
	failRng := rand.New(rand.NewPCG(seed, 8))
	rt.onStep = func(steps []sdk.SeqStep) error {
		failing.Lock()
		defer failing.Unlock()
		rare := 60
		if slices.ContainsFunc(steps, func(q sdk.SeqStep) bool { return q.Want == sdk.WantNothing }) {
			rare = 12 // a failed piece has the most to spoil
		}
		if failRng.IntN(rare) > 0 {
			return nil
		}
		return &pipeline.StepError{Failures: []pipeline.StepFailure{{Seqs: []sdk.SeqID{steps[failRng.IntN(len(steps))].Seq}, Err: stageError(stages - 1)}}}
	}
	return cfg
}

// act sends one request and does something to it.
func act(t *testing.T, s *Scheduler, rng *rand.Rand, wait *sync.WaitGroup) {
	req := randomRequest(rng)
	req.Priority = rng.IntN(3)
	ctx, cancel := context.WithCancel(t.Context())
	patience := time.Duration(rng.IntN(2000)) * time.Millisecond
	what := rng.IntN(4)
	if what == 1 {
		req.Deadline = time.Now().Add(patience)
	}
	stopAt := 0
	if what == 2 {
		stopAt = 1 + rng.IntN(req.MaxTokens)
	}
	n := max(1, rng.IntN(8)-3)
	streams, err := s.SubmitChoices(ctx, req, n)
	if err != nil {
		if _, full := errors.AsType[*QueueFullError](err); !full {
			t.Errorf("submit: %v", err)
		}
		cancel()
		return
	}
	if what == 0 {
		time.AfterFunc(patience, cancel)
	}
	var choices sync.WaitGroup
	for i, stream := range streams {
		req, stopAt := req, stopAt
		req.Sampler.Choice += uint32(i)
		if i%2 == 1 {
			stopAt = 0 // the others go on
		}
		choices.Go(func() {
			seen := 0
			r, err := stream.Wait(func(Token) bool { seen++; return seen == stopAt })
			judge(t, req, stopAt, r, err)
		})
	}
	wait.Go(func() {
		choices.Wait()
		cancel()
	})
}

// judge checks that an answer is what it is alone, or an untouched beginning of it with a reason to have ended there.
func judge(t *testing.T, req Request, stopAt int, r *Result, err error) {
	tokens, _, _ := solo(req)
	var late *DeadlineError
	var failed *FailedError
	var stage *pipeline.StageError
	switch {
	case err == nil && stopAt > 0 && len(tokens) >= stopAt:
		if !slices.Equal(ids(r.Tokens), tokens[:stopAt]) || r.FinishReason != FinishStop {
			t.Errorf("stopped at %d: %v (%s), alone it begins %v", stopAt, ids(r.Tokens), r.FinishReason, tokens[:stopAt])
		}
	case err == nil:
		equalsSolo(t, req, r)
	case errors.Is(err, context.Canceled), errors.As(err, &late), errors.As(err, &failed) && errors.As(err, &stage):
		if n := len(r.Tokens); n > len(tokens) || !slices.Equal(ids(r.Tokens), tokens[:n]) {
			t.Errorf("after %v: %v, alone it begins %v", err, ids(r.Tokens), tokens)
		}
	default:
		t.Errorf("unexpected: %v", err)
	}
}
