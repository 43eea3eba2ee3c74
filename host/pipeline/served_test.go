package pipeline

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// These tests run the toy model over the real contract: its messages, its step stream and its shared memory.

// contractToy is the toy as an executor program would offer it.
type contractToy struct{ *toyExecutor }

func (c contractToy) Describe(context.Context) (*sdk.Description, error) {
	return &sdk.Description{Name: "toy", ContractVersion: sdk.ContractVersion, Capabilities: []string{sdk.CapabilityMasks}}, nil
}

func (c contractToy) Inspect(context.Context, sdk.InspectRequest) (*sdk.ModelProfile, error) {
	return toyProfile(), nil
}

func (c contractToy) Import(context.Context, sdk.ImportRequest) (*sdk.ImportPlan, error) {
	return nil, sdk.Errorf(sdk.CodeUnsupported, "the toy imports nothing")
}

func (c contractToy) Unload(context.Context) error              { return nil }
func (c contractToy) Stats(context.Context) (*sdk.Stats, error) { return &sdk.Stats{Loaded: true}, nil }

func (c contractToy) Reserve(_ context.Context, r sdk.Reservation) error {
	_, err := c.carryOut(r)
	return err
}

func (c contractToy) Release(_ context.Context, seq sdk.SeqID) error {
	_, err := c.carryOut(sdk.Release{Seq: seq})
	return err
}

func (c contractToy) ExportState(context.Context, sdk.SeqID, sdk.LayerRange, *sdk.StateWriter) error {
	return sdk.Errorf(sdk.CodeUnsupported, "the toy exports nothing")
}

func (c contractToy) ImportState(context.Context, sdk.SeqID, sdk.LayerRange, *sdk.StateReader) error {
	return sdk.Errorf(sdk.CodeUnsupported, "the toy imports nothing")
}

func (c contractToy) Step(_ context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	return c.carryOut(s)
}

// servedLauncher serves toys in this process.
type servedLauncher struct {
	prepare func(*toyExecutor)
	mu      sync.Mutex
	toys    []*toyExecutor
}

func (l *servedLauncher) Launch(_ context.Context, a partition.StageAssignment) (Executor, error) {
	toy := newToyExecutor(a.StageIndex)
	if l.prepare != nil {
		l.prepare(toy)
	}
	client, stop, err := sdk.InProcess(contractToy{toy})
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.toys = append(l.toys, toy)
	return &servedToy{client: client, stop: stop, toy: toy, done: make(chan struct{})}, nil
}

type servedToy struct {
	client *sdk.Client
	stop   func() error
	toy    *toyExecutor
	done   chan struct{}
}

func (s *servedToy) Plugin() string          { return "toy" }
func (s *servedToy) Region() *sdk.Region     { return s.client.Region() }
func (s *servedToy) Enter(Phase)             {}
func (s *servedToy) Done() <-chan struct{}   { return s.done }
func (s *servedToy) Err() error              { return nil }
func (s *servedToy) Kill() error             { return nil }
func (s *servedToy) Explain(err error) error { return err }

func (s *servedToy) Health(ctx context.Context) error { return s.client.Ping(ctx) }

func (s *servedToy) Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	return s.client.Load(ctx, req, progress)
}

func (s *servedToy) OpenSteps(ctx context.Context) (sdk.StepClient, error) {
	steps, err := s.client.OpenSteps(ctx)
	if err != nil {
		return nil, err
	}
	return steps, nil
}

func (s *servedToy) Stop(context.Context) error {
	close(s.done)
	if err := s.stop(); err != nil {
		return err
	}
	return s.toy.region.Close()
}

func TestServedExecutorsEqualSolo(t *testing.T) {
	l := &servedLauncher{}
	cfg := toyConfig(t, 3, &toyLauncher{})
	cfg.Launcher, cfg.MicroBatch = l, 3
	p := startToy(t, cfg)
	defer closeToy(t, p)
	rng := rand.New(rand.NewPCG(1, 2))
	var requests []*request
	for range 8 {
		r := newRequest(p, rng, 1+rng.IntN(40))
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		requests = append(requests, r)
	}
	for range 20 {
		if err := advance(t.Context(), p, 16, requests...); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range requests {
		r.check(t)
		if err := p.Release(t.Context(), r.id); err != nil {
			t.Fatal(err)
		}
	}
	for _, toy := range l.toys {
		toy.locked(func() {
			if len(toy.seqs) > 0 {
				t.Errorf("stage %d still holds %d sequences", toy.stage, len(toy.seqs))
			}
		})
	}
}

// A failed step over the contract costs its sequence and nothing else.
func TestServedFailureIsTyped(t *testing.T) {
	l := &servedLauncher{}
	cfg := toyConfig(t, 2, &toyLauncher{})
	cfg.Launcher = l
	p := startToy(t, cfg)
	defer closeToy(t, p)
	rng := rand.New(rand.NewPCG(1, 2))
	bad, good := newRequest(p, rng, 4), newRequest(p, rng, 4)
	for _, r := range []*request{bad, good} {
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	bad.fed = 1 // the wrong position
	err := advance(t.Context(), p, 16, bad, good)
	if sdk.CodeOf(err) != sdk.CodeInvalid {
		t.Errorf("got %v, want the executor's own code", err)
	}
	for len(good.tokens) < 5 {
		if err := advance(t.Context(), p, 16, good); err != nil {
			t.Fatal(err)
		}
	}
	good.check(t)
	if !slices.Equal(bad.tokens, nil) {
		t.Errorf("the failed sequence has tokens %v", bad.tokens)
	}
}
