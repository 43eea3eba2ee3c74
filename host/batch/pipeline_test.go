package batch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/mlxcel/mlxcel/host/generate"
	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// These tests run a tiny model on two stages, each in an executor process.
const tinyModel = "../../testdata/parity/llama-tied-q4"

var _ Runtime = (*pipeline.Pipeline)(nil)

// machine is what a pipeline of the tiny model is started from.
type machine struct {
	catalog *executor.Catalog
	plugin  string
	dir     string
	profile *sdk.ModelProfile
	plan    *partition.Plan
	epoch   uint64

	mu      sync.Mutex
	running map[int]pipeline.Executor // by stage
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	bin, err := filepath.Abs("../../bin/plugins")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(bin); err != nil {
		t.Fatalf("%v; run make build", err)
	}
	catalog, err := executor.Open(executor.Config{
		PluginDirs: []string{bin}, Environ: os.Environ(), UID: os.Getuid(), RunBase: executor.DefaultRunBase(os.TempDir(), os.Getuid()),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := catalog.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if _, err := catalog.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	choice, err := catalog.ForModelType("llama")
	if err != nil {
		t.Fatalf("%v; run make build", err)
	}
	m := &machine{catalog: catalog, plugin: choice.Entry.Path, running: map[int]pipeline.Executor{}}
	if m.dir, err = filepath.Abs(tinyModel); err != nil {
		t.Fatal(err)
	}
	p, err := catalog.Start(t.Context(), executor.Spec{Plugin: m.plugin})
	if err != nil {
		t.Fatal(err)
	}
	if m.profile, err = p.Client().Inspect(t.Context(), sdk.InspectRequest{Dir: m.dir}); err != nil {
		t.Fatal(err)
	}
	catalog.Return(p)
	n := len(m.profile.Layers)
	m.plan = &partition.Plan{Stages: []partition.StageAssignment{
		{StageIndex: 0, LayerRange: sdk.LayerRange{Start: 0, End: n / 2}, HasEmbedding: true},
		{StageIndex: 1, LayerRange: sdk.LayerRange{Start: n / 2, End: n}, HasLMHead: true},
	}}
	return m
}

// Launch is pipeline.Launcher's.
func (m *machine) Launch(ctx context.Context, stage partition.StageAssignment) (pipeline.Executor, error) {
	e, err := pipeline.Local{Catalog: m.catalog, Plugin: m.plugin}.Launch(ctx, stage)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.running[stage.StageIndex] = e
	return e, nil
}

func (m *machine) start(ctx context.Context, microBatch int) (*pipeline.Pipeline, error) {
	m.epoch++
	return pipeline.Start(ctx, pipeline.Config{
		Plan: m.plan, Profile: m.profile, Launcher: m, ModelDir: m.dir, Threads: 1,
		PrefillChunk: 64, MicroBatch: microBatch, Epoch: m.epoch,
		Device: sdk.Device{Numerics: sdk.Numerics{BatchInvariant: true, ChunkInvariant: true}}, // as the CPU executors say
	})
}

func closePipeline(t *testing.T, p *pipeline.Pipeline) {
	t.Helper()
	if err := p.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func (m *machine) requests(n int) []Request {
	rng := rand.New(rand.NewPCG(3, 4))
	reqs := make([]Request, n)
	for i := range reqs {
		r := &reqs[i]
		r.MaxTokens, r.EOS, r.TopN = 8+rng.IntN(24), []int32{313, 316}, 2
		for range 1 + rng.IntN(120) {
			r.Prompt = append(r.Prompt, rng.Int32N(300))
		}
		if i%2 == 1 {
			r.Sampler = sdk.Sampler{Temperature: 0.8, TopP: 0.95, Seed: rng.Uint64(), RepetitionPenalty: 1.1, FrequencyPenalty: 0.3}
		}
	}
	return reqs
}

// alone answers a request with nothing else running.
func alone(t *testing.T, p *pipeline.Pipeline, req Request) (tokens []Token) {
	t.Helper()
	g := &generate.Generator{Runtime: p, Now: time.Now}
	_, err := g.Run(t.Context(), generate.Request{
		Prompt: req.Prompt, MaxTokens: req.MaxTokens, EOS: req.EOS, Sampler: req.Sampler, TopN: req.TopN,
	}, func(e generate.Event) error {
		tokens = append(tokens, Token{ID: e.Token, Logprob: e.Logprob, Top: e.Top})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

func sameTokens(a, b []Token) bool {
	return slices.EqualFunc(a, b, func(x, y Token) bool {
		return x.ID == y.ID && x.Logprob == y.Logprob && slices.Equal(x.Top, y.Top)
	})
}

// Thirty-two distinct prompts together get bit for bit what each gets alone, with clients that leave in between, with
// memory so short that streams lose their place, and in groups.
func TestPipelineEqualsSolo(t *testing.T) {
	m := newMachine(t)
	p, err := m.start(t.Context(), 8)
	if err != nil {
		t.Fatal(err)
	}
	defer closePipeline(t, p)
	reqs := m.requests(32)
	want := make([][]Token, len(reqs))
	for i, req := range reqs {
		want[i] = alone(t, p, req)
	}
	speeds, err := Measure(t.Context(), p, MeasureConfig{Stages: 2, MaxBatch: 8, VocabSize: m.profile.VocabSize})
	if err != nil {
		t.Fatal(err)
	}
	fine := inSmallBlocks(m.profile)
	budget := 3 * kvledger.Stages(fine, m.plan, nil, 0)[0].Bytes(160, 0) // for three of the longest
	for _, c := range []struct {
		name   string
		change func(*Config)
	}{
		{"measured groups", func(c *Config) { c.Speeds = speeds }},
		{"two groups", func(c *Config) { c.Speeds = linearSpeeds(2, 0, 1, 0) }},
		{"micro-batch 1", func(c *Config) { c.MicroBatch = 1 }},
		{"preemption", func(c *Config) {
			c.Preemption = PreemptLRU
			c.Ledger.Stages = kvledger.Stages(fine, m.plan, []int64{budget, budget}, 0)
			c.DecodeChunk = 7
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := Config{
				Runtime: p, MaxActive: 8, VocabSize: m.profile.VocabSize,
				Ledger: kvledger.Config{Stages: kvledger.Stages(m.profile, m.plan, nil, 0), ContextLength: m.profile.ContextLength},
			}
			c.change(&cfg)
			together(t, cfg, reqs, want)
		})
	}
}

// inSmallBlocks prices states that grow by a few positions, so that short answers come to want more memory.
func inSmallBlocks(p *sdk.ModelProfile) *sdk.ModelProfile {
	fine := *p
	fine.Layers = slices.Clone(p.Layers)
	for i := range fine.Layers {
		l := &fine.Layers[i]
		l.States = slices.Clone(l.States)
		for j := range l.States {
			l.States[j].Block = 4
		}
	}
	return &fine
}

// together runs the requests at the same time; every fourth has a twin that leaves after its second token.
func together(t *testing.T, cfg Config, reqs []Request, want [][]Token) {
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var wait sync.WaitGroup
	defer wait.Wait()
	for i, req := range reqs {
		if i%4 == 0 {
			twin := submit(t, s, req)
			wait.Go(func() { _, _ = twin.Wait(func(Token) bool { return true }) })
		}
		stream := submit(t, s, req)
		wait.Go(func() {
			r, err := stream.Wait(nil)
			if err != nil {
				t.Errorf("request %d: %v", i, err)
			} else if !sameTokens(r.Tokens, want[i]) {
				t.Errorf("request %d, preempted %d times: %v, alone %v", i, r.Timings.Preempted, ids(r.Tokens), ids(want[i]))
			}
		})
	}
	wait.Wait()
	if cfg.Preemption != PreemptNone && s.Status().Counters.Preemptions == 0 {
		t.Error("nothing was preempted: the memory is too large for this test")
	}
}

// Choices that begin with what the first has prefilled answer bit for bit what each answers alone.
func TestPipelineChoices(t *testing.T) {
	m := newMachine(t)
	p, err := m.start(t.Context(), 8)
	if err != nil {
		t.Fatal(err)
	}
	defer closePipeline(t, p)
	s, err := New(Config{Runtime: p, VocabSize: m.profile.VocabSize, Ledger: kvledger.Config{Stages: kvledger.Stages(m.profile, m.plan, nil, 0)}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i, req := range m.requests(6) {
		before := s.Status().Counters.PromptTokens
		streams, err := s.SubmitChoices(t.Context(), req, 8)
		if err != nil {
			t.Fatal(err)
		}
		for n, stream := range streams {
			r, err := stream.Wait(nil)
			if err != nil {
				t.Fatal(err)
			}
			one := req
			one.Sampler.Choice = uint32(n)
			if want := alone(t, p, one); !sameTokens(r.Tokens, want) {
				t.Errorf("request %d, choice %d: %v, alone %v", i, n, ids(r.Tokens), ids(want))
			}
		}
		if rows := s.Status().Counters.PromptTokens - before; rows != uint64(len(req.Prompt)+7) {
			t.Errorf("request %d: %d prompt rows for a prompt of %d", i, rows, len(req.Prompt))
		}
	}
}

// An executor ends in the middle of requests: they fail with the stage's name, and the next one is answered by new
// executors.
func TestPipelineLosesAnExecutor(t *testing.T) {
	m := newMachine(t)
	p, err := m.start(t.Context(), 4)
	if err != nil {
		t.Fatal(err)
	}
	reqs := m.requests(6)
	want := alone(t, p, reqs[5])
	s, err := New(Config{
		Runtime: p, MaxActive: 4, Ledger: kvledger.Config{Stages: kvledger.Stages(m.profile, m.plan, nil, 0)},
		Relaunch: func(ctx context.Context) (Runtime, *kvledger.Config, error) {
			_ = p.Close(ctx) // of what is lost
			next, err := m.start(ctx, 4)
			p = next
			return next, nil, err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		s.Close()
		closePipeline(t, p)
	}()
	var streams []*Stream
	begun := make(chan struct{}, 4)
	var wait sync.WaitGroup
	for _, req := range reqs[:4] {
		req.MaxTokens, req.IgnoreEOS = 3000, true
		stream := submit(t, s, req)
		streams = append(streams, stream)
		wait.Go(func() {
			_, _ = stream.Wait(func(Token) bool {
				select {
				case begun <- struct{}{}:
				default:
				}
				return false
			})
		})
	}
	for range 4 {
		<-begun
	}
	m.mu.Lock()
	last := m.running[1]
	m.mu.Unlock()
	_ = last.Stop(t.Context()) // the process ends without the pipeline's wish
	wait.Wait()
	for _, stream := range streams {
		_, err := stream.Result()
		var stage *pipeline.StageError
		if !errors.As(err, &stage) || stage.Place.Stage != 1 {
			t.Errorf("got %v, want the loss of stage 1", err)
		}
	}
	r, err := submit(t, s, reqs[5]).Wait(nil)
	if err != nil {
		t.Fatal(err)
	}
	if !sameTokens(r.Tokens, want) {
		t.Errorf("after the loss %v, before %v", fmt.Sprint(ids(r.Tokens)), ids(want))
	}
}
