package pipeline

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/mlxcel/mlxcel/sdk"
)

// chaos makes steps fail, or their caller leave, at random moments on random stages.
type chaos struct {
	mu      sync.Mutex
	rng     *rand.Rand
	leave   map[sdk.SeqID]context.CancelFunc
	refused map[sdk.SeqID]bool
}

func (c *chaos) before(op sdk.Op) error {
	s, ok := op.(*sdk.Step)
	if !ok {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, q := range s.Seqs {
		switch c.rng.IntN(60) {
		case 0:
			c.leave[q.Seq]()
		case 1:
			for _, all := range s.Seqs { // the micro-batch fails as a whole
				c.refused[all.Seq] = true
			}
			return sdk.Errorf(sdk.CodeInternal, "chaos")
		}
	}
	return nil
}

// Whatever fails and whoever leaves, nobody else notices: every answer that comes to its end is the solo answer, every
// failure was one of its own, and nothing is left on any stage.
func TestChaos(t *testing.T) {
	for seed := range uint64(6) {
		synctest.Test(t, func(t *testing.T) {
			c := &chaos{rng: rand.New(rand.NewPCG(seed, 11)), leave: map[sdk.SeqID]context.CancelFunc{}, refused: map[sdk.SeqID]bool{}}
			l := &toyLauncher{prepare: func(e *toyExecutor) { e.before = c.before }}
			stages := 1 + int(seed)%4
			cfg := toyConfig(t, stages, l)
			cfg.MicroBatch = 2
			p := startToy(t, cfg)
			defer closeToy(t, p)
			var wait sync.WaitGroup
			for caller := range uint64(16) {
				wait.Go(func() { c.caller(t, p, rand.New(rand.NewPCG(seed, caller))) })
			}
			wait.Wait()
			if p.Err() != nil {
				t.Fatal(p.Err())
			}
			synctest.Wait() // releases that nobody waited for
			checkEmpty(t, p, l)
		})
	}
}

// caller runs a few batches of sequences, each until it breaks or ends.
func (c *chaos) caller(t *testing.T, p *Pipeline, rng *rand.Rand) {
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		var requests []*request
		for range 1 + rng.IntN(4) {
			r := newRequest(p, rng, 1+rng.IntN(30))
			c.mu.Lock()
			c.leave[r.id] = cancel
			c.mu.Unlock()
			if err := r.reserve(t.Context(), p); err != nil {
				t.Error(err)
			}
			requests = append(requests, r)
		}
		for range 12 {
			if err := advance(ctx, p, 16, requests...); err != nil {
				c.checkCause(t, ctx, requests, err)
				break
			}
			for _, r := range requests {
				r.check(t)
			}
		}
		cancel()
		for _, r := range requests {
			if err := p.Release(t.Context(), r.id); err != nil {
				t.Error(err)
			}
		}
	}
}

// checkCause: an error is the caller's own leaving, or that of exactly the sequences that chaos refused.
func (c *chaos) checkCause(t *testing.T, ctx context.Context, requests []*request, err error) {
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return
	}
	stepErr, ok := errors.AsType[*StepError](err)
	if !ok {
		t.Errorf("got %v, want a *StepError", err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range requests {
		if failed := stepErr.Of(r.id) != nil; failed != c.refused[r.id] {
			t.Errorf("sequence %d: failed %v, refused %v", r.id, failed, c.refused[r.id])
		}
	}
}
