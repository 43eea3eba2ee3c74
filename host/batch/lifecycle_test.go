package batch

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

func prompt(n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i * 7 % fakeVocab)
	}
	return ids
}

func submit(t *testing.T, s *Scheduler, req Request) *Stream {
	t.Helper()
	stream, err := s.Submit(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// answer runs a request that nothing may go wrong with.
func answer(t *testing.T, s *Scheduler, req Request) *Result {
	t.Helper()
	r, err := submit(t, s, req).Wait(nil)
	if err != nil {
		t.Fatal(err)
	}
	equalsSolo(t, req, r)
	return r
}

// The executor dies in the middle of requests: each fails with the stage's name, the pipeline is started again, and
// what waited is answered by the new one.
func TestLossAndRelaunch(t *testing.T) {
	var attempts []time.Time
	var second *fakeRuntime
	config := func() Config {
		first := newFake(2)
		second = newFake(2)
		cfg := configFor(first)
		cfg.MaxActive, cfg.RelaunchBackoff = 2, 3*time.Second
		cfg.Relaunch = func(context.Context) (Runtime, *kvledger.Config, error) {
			attempts = append(attempts, time.Now())
			if len(attempts) < 3 {
				return nil, nil, errors.New("the port is taken")
			}
			return second, nil, nil
		}
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		req := Request{Prompt: prompt(100), MaxTokens: 1000}
		running := []*Stream{submit(t, s, req), submit(t, s, req)}
		waiting := submit(t, s, Request{Prompt: prompt(5), MaxTokens: 5})
		time.Sleep(time.Second)
		s.cfg.Runtime.(*fakeRuntime).lose(stageError(1))
		for _, stream := range running {
			r, err := stream.Wait(nil)
			var failed *FailedError
			var stage *pipeline.StageError
			if !errors.As(err, &failed) || !failed.Lost || !errors.As(err, &stage) || stage.Stage != 1 || !strings.Contains(err.Error(), "stage 1 (fake)") {
				t.Errorf("got %v, want the loss of stage 1", err)
			}
			if n := len(r.Tokens); n == 0 || failed.Generated != n {
				t.Errorf("%d tokens, the error tells of %d", n, failed.Generated)
			}
		}
		if state := s.Status().State; state != StateRelaunching || s.Healthy(time.Now()) == nil {
			t.Errorf("state %s, healthy: %v", state, s.Healthy(time.Now()))
		}
		if _, err := waiting.Wait(nil); err != nil {
			t.Errorf("the waiting request: %v", err)
		}
		answer(t, s, Request{Prompt: prompt(30), MaxTokens: 10})
		if len(attempts) != 3 || attempts[1].Sub(attempts[0]) != 3*time.Second || attempts[2].Sub(attempts[1]) != 6*time.Second {
			t.Errorf("attempts at %v, want pauses of 3 s and 6 s", attempts)
		}
		if c := s.Status().Counters; c.Relaunches != 1 || c.Failed != 2 || c.Finished != 2 {
			t.Errorf("counters %+v", c)
		}
		if err := s.Healthy(time.Now()); err != nil {
			t.Errorf("not healthy again: %v", err)
		}
		second.verify(t)
	})
}

// Where nobody can promise that the stage comes back, nobody waits for it.
func TestLossRefusesUntilItIsBack(t *testing.T) {
	back := make(chan struct{})
	config := func() Config {
		cfg := configFor(newFake(2))
		cfg.MaxActive, cfg.RefuseWhileLost = 1, true
		cfg.Relaunch = func(context.Context) (Runtime, *kvledger.Config, error) {
			<-back
			// It comes back with less memory.
			return newFake(2), &kvledger.Config{Stages: []kvledger.Stage{{}, {}}, ContextLength: 50}, nil
		}
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		running := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 1000})
		waiting := submit(t, s, Request{Prompt: prompt(5), MaxTokens: 5})
		time.Sleep(time.Second)
		s.cfg.Runtime.(*fakeRuntime).lose(stageError(1))
		_, err := running.Wait(nil)
		if failed, ok := errors.AsType[*FailedError](err); !ok || !failed.Lost {
			t.Errorf("the running request: %v", err)
		}
		unavailable := func(who string, err error) {
			e, ok := errors.AsType[*UnavailableError](err)
			if stage, named := errors.AsType[*pipeline.StageError](err); !ok || !e.Relaunching || !named || stage.Stage != 1 {
				t.Errorf("the %s request: %v, want the loss of stage 1", who, err)
			}
		}
		_, err = waiting.Wait(nil)
		unavailable("waiting", err)
		_, err = s.Submit(context.Background(), Request{Prompt: prompt(5), MaxTokens: 5})
		unavailable("new", err)
		unavailable("health's", s.Healthy(time.Now()))
		close(back)
		synctest.Wait()
		answer(t, s, Request{Prompt: prompt(30), MaxTokens: 10})
		if _, err := s.Submit(context.Background(), Request{Prompt: prompt(60), MaxTokens: 10}); s.Limit() != 50 || !errors.As(err, new(*kvledger.TooLongError)) {
			t.Errorf("a prompt past the new limit of %d positions: %v", s.Limit(), err)
		}
	})
}

// Who drains and lets nobody wait has no use for another pipeline.
func TestLossEndsDrain(t *testing.T) {
	config := func() Config {
		cfg := configFor(newFake(2))
		cfg.RefuseWhileLost = true
		cfg.Relaunch = func(context.Context) (Runtime, *kvledger.Config, error) {
			t.Error("the pipeline is started again")
			return newFake(2), nil, nil
		}
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		running := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 1000})
		time.Sleep(time.Second)
		drained := make(chan error, 1)
		go func() { drained <- s.Drain(t.Context()) }()
		synctest.Wait()
		s.cfg.Runtime.(*fakeRuntime).lose(stageError(1))
		if _, err := running.Wait(nil); err == nil {
			t.Error("the request came to its end without its pipeline")
		}
		if err := <-drained; err != nil {
			t.Error(err)
		}
	})
}

func TestLossForGood(t *testing.T) {
	for _, c := range []struct {
		name     string
		relaunch func(context.Context) (Runtime, *kvledger.Config, error)
		attempts int
	}{
		{"no relaunch", nil, 0},
		{"it never comes up", func(context.Context) (Runtime, *kvledger.Config, error) { return nil, nil, errKernel }, 2},
		{"the relaunch panics", func(context.Context) (Runtime, *kvledger.Config, error) { panic("no") }, 2},
		{"no runtime", func(context.Context) (Runtime, *kvledger.Config, error) { return nil, nil, nil }, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := func() Config {
				cfg := configFor(newFake(1))
				cfg.MaxActive, cfg.Relaunch, cfg.RelaunchAttempts = 1, c.relaunch, 2
				return cfg
			}
			bubble(t, config, func(t *testing.T, s *Scheduler) {
				running := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 100})
				waiting := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 100})
				time.Sleep(100 * time.Millisecond)
				s.cfg.Runtime.(*fakeRuntime).lose(stageError(0))
				if _, err := running.Wait(nil); !errors.Is(err, errKernel) {
					t.Errorf("the running request: %v", err)
				}
				var gone *UnavailableError
				if _, err := waiting.Wait(nil); !errors.As(err, &gone) || gone.Attempts != c.attempts {
					t.Errorf("the waiting request: %v", err)
				}
				if _, err := s.Submit(t.Context(), Request{Prompt: prompt(1), MaxTokens: 1}); !errors.As(err, &gone) {
					t.Errorf("a new request: %v", err)
				}
				if s.Status().State != StateFailed || s.Healthy(time.Now()) == nil {
					t.Errorf("state %s", s.Status().State)
				}
			})
		})
	}
}

// panicky has a bug in a place where the scheduler itself calls it.
type panicky struct {
	*fakeRuntime
	armed atomic.Bool
}

func (p *panicky) NewSeq() sdk.SeqID {
	if p.armed.CompareAndSwap(true, false) {
		panic("no name left")
	}
	return p.fakeRuntime.NewSeq()
}

// A fault of the scheduler fails the requests that it had, and the next one works.
func TestPanicCostsRequestsOnly(t *testing.T) {
	var rt *panicky
	config := func() Config {
		rt = &panicky{fakeRuntime: newFake(2)}
		cfg := configFor(rt.fakeRuntime)
		cfg.Runtime = rt
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		running := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 1000})
		time.Sleep(50 * time.Millisecond)
		rt.armed.Store(true)
		struck := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 10})
		for _, stream := range []*Stream{running, struck} {
			var p *PanicError
			if _, err := stream.Wait(nil); !errors.As(err, &p) || p.Value != "no name left" || len(p.Stack) == 0 {
				t.Errorf("got %v, want the panic", err)
			}
		}
		answer(t, s, Request{Prompt: prompt(20), MaxTokens: 10})
		if c := s.Status().Counters; c.Panics != 1 || c.Failed != 2 {
			t.Errorf("counters %+v", c)
		}
		synctest.Wait()
		rt.verify(t)
	})
}

func TestPanicOfTheRuntimeCostsItsStep(t *testing.T) {
	var rt *fakeRuntime
	config := func() Config {
		rt = newFake(1)
		rt.onStep = func(steps []sdk.SeqStep) error {
			if len(steps[0].Tokens) == 13 {
				panic("unlucky")
			}
			return nil
		}
		return configFor(rt)
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		var p *PanicError
		if _, err := submit(t, s, Request{Prompt: prompt(13), MaxTokens: 2}).Wait(nil); !errors.As(err, &p) {
			t.Errorf("got %v", err)
		}
		answer(t, s, Request{Prompt: prompt(12), MaxTokens: 2})
	})
}

func TestQueueIsBounded(t *testing.T) {
	config := func() Config {
		cfg := configFor(newFake(1))
		cfg.MaxActive, cfg.MaxQueue = 1, 2
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		req := Request{Prompt: prompt(10), MaxTokens: 1000, IgnoreEOS: true} // some 5 s of work
		answer(t, s, req)
		for range 3 {
			submit(t, s, req)
		}
		var full *QueueFullError
		if _, err := s.Submit(t.Context(), req); !errors.As(err, &full) || full.Depth != 2 {
			t.Fatalf("got %v, want a full queue", err)
		}
		if full.RetryAfter < 4*time.Second || full.RetryAfter > 6*time.Second {
			t.Errorf("retry after %v, a place becomes free every 5 s", full.RetryAfter)
		}
		if c := s.Status().Counters; c.QueueFull != 1 || c.Requests != 4 {
			t.Errorf("counters %+v", c)
		}
	})
}

func TestRefusedAtOnce(t *testing.T) {
	config := func() Config {
		cfg := configFor(newFake(1))
		cfg.Ledger.ContextLength = 100
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		for _, c := range []struct {
			name string
			req  Request
			want any
		}{
			{"no prompt", Request{MaxTokens: 1}, nil},
			{"negative", Request{Prompt: prompt(1), MaxTokens: -1}, nil},
			{"foreign token", Request{Prompt: []int32{1, fakeVocab}, MaxTokens: 1}, new(*TokenRangeError)},
			{"negative token", Request{Prompt: []int32{-1}, MaxTokens: 1}, new(*TokenRangeError)},
			{"too long", Request{Prompt: prompt(90), MaxTokens: 11}, new(*kvledger.TooLongError)},
		} {
			_, err := s.Submit(t.Context(), c.req)
			if err == nil || c.want != nil && !errors.As(err, c.want) {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.Submit(ctx, Request{Prompt: prompt(1), MaxTokens: 1}); !errors.Is(err, context.Canceled) {
			t.Errorf("a client that has left: %v", err)
		}
		if s.Limit() != 100 {
			t.Errorf("limit %d", s.Limit())
		}
	})
}

// A request that waits for memory until its deadline says which stage has how much.
func TestDeadlineNamesTheMemory(t *testing.T) {
	config := func() Config {
		cfg := configFor(newFake(2))
		cfg.Ledger.Stages = stagesOf(2, 2000, 8)
		cfg.Ledger.Stages[1].Budget = 1500
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		submit(t, s, Request{Prompt: prompt(10), MaxTokens: 1000, IgnoreEOS: true})
		stream := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 800, Deadline: time.Now().Add(2 * time.Second)})
		_, err := stream.Wait(nil)
		var late *DeadlineError
		var d *kvledger.AdmissionDiagnostic
		if !errors.As(err, &late) || !late.Queued || late.Waited != 2*time.Second || !errors.As(err, &d) {
			t.Fatalf("got %v", err)
		}
		if d.Stage != 1 || d.Reason != kvledger.ReasonMemory || d.Used != 1016 || d.Budget != 1500 || d.Required != 816 || d.ActiveSequences != 1 {
			t.Errorf("diagnostic %+v", d)
		}
		if n := s.Status().Counters.Rejections[Rejection{1, kvledger.ReasonMemory}]; n != 1 {
			t.Errorf("%d rejections counted, want 1", n)
		}
	})
}

// A client leaves: its memory is free again within one step, also in the middle of a long prompt's step.
func TestCancelFreesWithinOneStep(t *testing.T) {
	var rt *fakeRuntime
	config := func() Config {
		rt = newFake(2)
		return configFor(rt)
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		other := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 200, IgnoreEOS: true})
		time.Sleep(500 * time.Millisecond)
		ctx, cancel := context.WithCancelCause(t.Context())
		stream, err := s.Submit(ctx, Request{Prompt: prompt(10), MaxTokens: 500, IgnoreEOS: true})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(500 * time.Millisecond)
		left := errors.New("connection reset")
		cancel(left)
		if r, err := stream.Wait(nil); !errors.Is(err, left) || r.FinishReason != FinishCancelled || len(r.Tokens) == 0 {
			t.Errorf("%v, %+v", err, r)
		}
		time.Sleep(2 * (rt.fixed + 2*rt.perRow + rt.hop)) // one step of two streams
		if used := s.Status().KV[0]; used.Sequences != 1 {
			t.Errorf("%d sequences a step later, want the other one", used.Sequences)
		}
		if _, err := other.Wait(nil); err != nil {
			t.Error(err)
		}
		// Alone in its step, which would take a second.
		rt.fixed = time.Second
		ctx, cancel = context.WithCancelCause(t.Context())
		if _, err := s.Submit(ctx, Request{Prompt: prompt(60), MaxTokens: 5}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(500 * time.Millisecond)
		cancel(left)
		synctest.Wait()
		if used := s.Status().KV[0]; used.Sequences != 0 {
			t.Error("the step of a client that has left goes on")
		}
	})
}

func TestDrain(t *testing.T) {
	config := func() Config {
		cfg := configFor(newFake(2))
		cfg.MaxActive = 1
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		running := submit(t, s, Request{Prompt: prompt(10), MaxTokens: 20})
		waiting := submit(t, s, Request{Prompt: prompt(12), MaxTokens: 20})
		time.Sleep(10 * time.Millisecond)
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := s.Drain(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("drain with little time: %v", err)
		}
		if _, err := s.Submit(t.Context(), Request{Prompt: prompt(1), MaxTokens: 1}); !errors.Is(err, ErrDraining) {
			t.Errorf("a new request: %v", err)
		}
		if s.Status().State != StateDraining || s.Healthy(time.Now()) == nil {
			t.Errorf("state %s", s.Status().State)
		}
		if err := s.Drain(t.Context()); err != nil {
			t.Error(err)
		}
		for _, stream := range []*Stream{running, waiting} {
			if r, err := stream.Result(); r == nil || err != nil {
				t.Errorf("a request that was there before: %v, %v", r, err)
			}
		}
	})
}

func TestCloseEndsEverything(t *testing.T) {
	config := func() Config {
		cfg := configFor(newFake(2))
		cfg.MaxActive = 1
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		streams := []*Stream{submit(t, s, Request{Prompt: prompt(10), MaxTokens: 500}), submit(t, s, Request{Prompt: prompt(12), MaxTokens: 20})}
		time.Sleep(100 * time.Millisecond)
		s.Close()
		for _, stream := range streams {
			if _, err := stream.Wait(nil); !errors.Is(err, ErrClosed) {
				t.Errorf("got %v", err)
			}
		}
		if _, err := s.Submit(t.Context(), Request{Prompt: prompt(1), MaxTokens: 1}); !errors.Is(err, ErrClosed) {
			t.Errorf("a new request: %v", err)
		}
		if err := s.Drain(t.Context()); !errors.Is(err, ErrClosed) && err != nil {
			t.Errorf("drain after the end: %v", err)
		}
	})
}

// Health is progress: a stage that stands still shows, one that is merely slow does not.
func TestHealthIsProgress(t *testing.T) {
	var rt *fakeRuntime
	config := func() Config {
		rt = newFake(2)
		return configFor(rt)
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		time.Sleep(time.Hour)
		if err := s.Healthy(time.Now()); err != nil {
			t.Errorf("without work: %v", err)
		}
		rt.fixed = 400 * time.Millisecond // a step takes 0.8 s
		answer(t, s, Request{Prompt: prompt(10), MaxTokens: 20})
		rt.fixed = time.Minute
		stream := submit(t, s, Request{Prompt: prompt(1), MaxTokens: 2})
		var stalled *UnhealthyError
		for _, c := range []struct {
			after   time.Duration
			healthy bool
		}{{4 * time.Second, true}, {2 * time.Second, true}, {4 * time.Second, false}} {
			time.Sleep(c.after)
			err := s.Healthy(time.Now())
			if (err == nil) != c.healthy || err != nil && (!errors.As(err, &stalled) || stalled.Waiting != 1 || stalled.Allowed < 5*time.Second) {
				t.Errorf("%v later: %v", c.after, err)
			}
		}
		if _, err := stream.Wait(nil); err != nil {
			t.Error(err)
		}
	})
}

// A reader that takes its time delays nobody, and gets its whole answer.
func TestSlowReader(t *testing.T) {
	bubble(t, func() Config { return configFor(newFake(1)) }, func(t *testing.T, s *Scheduler) {
		req := Request{Prompt: prompt(10), MaxTokens: 50, IgnoreEOS: true}
		slow := submit(t, s, req)
		done := make(chan *Result)
		go func() {
			r, _ := slow.Wait(func(Token) bool { time.Sleep(time.Minute); return false })
			done <- r
		}()
		began := time.Now()
		answer(t, s, Request{Prompt: prompt(11), MaxTokens: 50, IgnoreEOS: true})
		if took := time.Since(began); took > time.Second {
			t.Errorf("another answer took %v beside a slow reader", took)
		}
		equalsSolo(t, req, <-done)
	})
}

// What the model ran past a stop is dropped, however late the reader sees it, and so is what happened to the request
// since.
func TestStopDropsWhatCameLater(t *testing.T) {
	bubble(t, func() Config { return configFor(newFake(1)) }, func(t *testing.T, s *Scheduler) {
		req := Request{Prompt: prompt(10), MaxTokens: 50, IgnoreEOS: true, Deadline: time.Now().Add(100 * time.Millisecond)}
		stream := submit(t, s, req)
		time.Sleep(time.Minute)
		if _, err := stream.Result(); err == nil {
			t.Fatal("the request made its deadline")
		}
		tokens, _, _ := solo(req)
		r, err := stream.Wait(func(token Token) bool { return token.ID == tokens[2] })
		if err != nil || !slices.Equal(ids(r.Tokens), tokens[:3]) || r.FinishReason != FinishStop {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

func TestTimings(t *testing.T) {
	var rt *fakeRuntime
	config := func() Config {
		rt = newFake(1)
		rt.fixed, rt.perRow, rt.hop = 10*time.Millisecond, 0, 0
		cfg := configFor(rt)
		cfg.MaxActive = 1
		return cfg
	}
	bubble(t, config, func(t *testing.T, s *Scheduler) {
		first := submit(t, s, Request{Prompt: prompt(100), MaxTokens: 6, IgnoreEOS: true}) // two chunks
		second := submit(t, s, Request{Prompt: prompt(1), MaxTokens: 1})
		a, _ := first.Wait(nil)
		b, _ := second.Wait(nil)
		ms := time.Millisecond
		if want := (Timings{FirstToken: 20 * ms, Decode: 50 * ms, Total: 70 * ms}); a.Timings != want || a.Timings.TokensPerSecond(6) != 100 {
			t.Errorf("first: %+v", a.Timings)
		}
		if want := (Timings{Queued: 70 * ms, FirstToken: 80 * ms, Total: 80 * ms}); b.Timings != want || b.Timings.TokensPerSecond(1) != 0 {
			t.Errorf("second: %+v", b.Timings)
		}
	})
}

func TestValidateNamesEveryFault(t *testing.T) {
	_, err := New(Config{MaxActive: -1, MaxBatch: -2, MaxStall: 0.5, AdmissionWait: -1, Preemption: "random"})
	for _, want := range []string{"no stages", "no runtime", "--parallel -1", "--max-batch-size -2", "stall factor 0.5", "admission wait", `"random"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v\ndoes not name %q", err, want)
		}
	}
}
