package batch

import (
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
)

// Eight answers to one prompt cost its rows once, and one row more each; every answer is what a single request gets.
func TestChoicesPrefillOnce(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(cfg *Config, rt *fakeRuntime)
		rows   int // of prompts
		alone  uint64
	}{
		{"together", func(*Config, *fakeRuntime) {}, 2007, 0},
		{"scores, one after the other", func(cfg *Config, _ *fakeRuntime) { cfg.MaxBatch = 1 }, 2007, 0},
		{"half of them late", func(cfg *Config, _ *fakeRuntime) { cfg.MaxActive = 4 }, 2007, 0},
		{"late with a snapshot", func(cfg *Config, rt *fakeRuntime) { cfg.MaxActive, rt.back = 7, -1 }, 2007, 0},
		{"alone each", func(cfg *Config, _ *fakeRuntime) { cfg.MaxActive = 1 }, 16000, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var rt *fakeRuntime
			config := func() Config {
				rt = newFake(2)
				cfg := configFor(rt)
				c.change(&cfg, rt)
				return cfg
			}
			bubble(t, config, func(t *testing.T, s *Scheduler) {
				req := Request{Prompt: prompt(2000), MaxTokens: 12, IgnoreEOS: true, Sampler: sdk.Sampler{Temperature: 1, Seed: 5}}
				streams, err := s.SubmitChoices(t.Context(), req, 8)
				if err != nil {
					t.Fatal(err)
				}
				for i, stream := range streams {
					r, err := stream.Wait(nil)
					if err != nil {
						t.Fatal(err)
					}
					one := req
					one.Sampler.Choice = uint32(i)
					equalsSolo(t, one, r)
				}
				n := s.Status().Counters
				if rt.prompts != c.rows || uint64(rt.prompts) != n.PromptTokens || n.Unshared != c.alone {
					t.Errorf("%d prompt rows computed, %d counted, want %d; %d choices unshared, want %d", rt.prompts, n.PromptTokens, c.rows, n.Unshared, c.alone)
				}
			})
		})
	}
}
