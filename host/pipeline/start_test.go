package pipeline

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// A stage that dies while another still loads ends the start.
func TestDeathBeforeTheStartEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		loading := make(chan struct{})
		l.prepare = onStage(1, func(e *toyExecutor) { e.loading = loading })
		ended := make(chan error)
		go func() {
			_, err := Start(t.Context(), toyConfig(t, 2, l))
			ended <- err
		}()
		synctest.Wait() // stage 0 is loaded
		l.executor(0).die()
		synctest.Wait()
		close(loading)
		checkLost(t, <-ended, 0, PhaseIdle)
	})
}

func TestStartReportsWhatEachStageHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		cfg := toyConfig(t, 2, l)
		cfg.MicroBatch, cfg.Threads, cfg.KVBudgets, cfg.Dtype = 3, 4, []int64{1000, 500}, sdk.DtypeFloat32
		var mu sync.Mutex
		told := map[int]int64{}
		cfg.Progress = func(stage int, p sdk.LoadProgress) {
			mu.Lock()
			defer mu.Unlock()
			told[stage] = p.Loaded
		}
		p := startToy(t, cfg)
		defer closeToy(t, p)
		if told[0] != 1 || told[1] != 1 {
			t.Errorf("progress told: %v", told)
		}
		infos := p.Stages()
		if len(infos) != 2 || infos[1].Plugin != "toy" || infos[1].LayerRange.End != toyLayers || infos[0].Loaded.WeightBytes != 305 {
			t.Errorf("stages: %+v", infos)
		}
		if got, want := p.Report(), "actual=305"; !strings.Contains(got, want) {
			t.Errorf("report %q lacks %q", got, want)
		}
		if p.PrefillChunk() != 16 {
			t.Errorf("prefill chunk %d", p.PrefillChunk())
		}
		hidden := 16 * toyWidth * 4
		wants := []sdk.LoadRequest{
			{Dir: "toy", Family: "toy", Layers: sdk.LayerRange{Start: 0, End: 3}, HasEmbedding: true, Dtype: sdk.DtypeFloat32, Threads: 4, KVBudget: 1000, Region: sdk.RegionLayout{Slots: 2, OutBytes: hidden}},
			{Dir: "toy", Family: "toy", Layers: sdk.LayerRange{Start: 3, End: 7}, HasHead: true, Dtype: sdk.DtypeFloat32, Threads: 4, KVBudget: 500, Region: sdk.RegionLayout{Slots: 2, InBytes: hidden, OutBytes: 1216, MaskBytes: 64}},
		}
		for i, want := range wants {
			if got := l.executor(i).req; got != want {
				t.Errorf("stage %d was loaded with\n%+v, want\n%+v", i, got, want)
			}
		}
	})
}

// When one stage does not come up, none does, and all that came up is stopped.
func TestStartIsAllOrNothing(t *testing.T) {
	corrupt := &sdk.Error{Code: sdk.CodeCorrupt, Message: "model.safetensors is cut short", File: "model.safetensors"}
	for name, c := range map[string]struct {
		launcher *toyLauncher
		phase    Phase
		text     string
	}{
		"launch":      {&toyLauncher{launchErr: map[int]error{1: errors.New("exec format error")}}, PhaseLaunch, "exec format error"},
		"load":        {&toyLauncher{prepare: onStage(1, func(e *toyExecutor) { e.loadErr = corrupt })}, PhaseLoad, "cut short"},
		"death":       {&toyLauncher{prepare: onStage(1, func(e *toyExecutor) { e.loadErr = errDie })}, PhaseLoad, "boom"},
		"step stream": {&toyLauncher{prepare: onStage(1, func(e *toyExecutor) { e.openErr = errors.New("no stream") })}, PhaseLoad, "no stream"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, err := Start(t.Context(), toyConfig(t, 3, c.launcher))
				if p != nil || err == nil {
					t.Fatal("it started")
				}
				if e, ok := errors.AsType[*StageError](err); !ok || e.Place.Stage != 1 || e.Phase != c.phase || !strings.Contains(e.Error(), c.text) {
					t.Errorf("got %v, want stage 1 failing in %s with %q", err, c.phase, c.text)
				}
				for _, e := range c.launcher.made {
					if !e.stopped {
						t.Errorf("stage %d runs on", e.stage)
					}
				}
			})
		})
	}
}

// An executor that holds something else than its profile said would read and write beyond its areas.
func TestStartRefusesAnotherShape(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*sdk.ModelProfile)
		want   []string
	}{
		"width": {func(p *sdk.ModelProfile) { p.Boundary.Width++ }, []string{"width 4", "width 5"}},
		"dtype": {func(p *sdk.ModelProfile) { p.Boundary.Dtype = sdk.DtypeFloat16 }, []string{"float32", "float16"}},
		"vocab": {func(p *sdk.ModelProfile) { p.VocabSize = 100 }, []string{"101", "100"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := toyConfig(t, 2, &toyLauncher{})
				c.change(cfg.Profile)
				_, err := Start(t.Context(), cfg)
				for _, want := range c.want {
					if err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("got %v, want %q in it", err, want)
					}
				}
			})
		})
	}
}

func TestStartOnAnEndedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		l := &toyLauncher{}
		if _, err := Start(ctx, toyConfig(t, 2, l)); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

func TestConfigFaultsComeTogether(t *testing.T) {
	_, err := Start(t.Context(), Config{Profile: &sdk.ModelProfile{}, PrefillChunk: -1, MicroBatch: -2, Threads: -3, Slots: -4})
	for _, want := range []string{"launcher", "plan", "boundary", "--prefill-chunk-size -1", "--pp-micro-batch-size -2", "--threads -3", "slots -4"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
	if err := (Config{Launcher: &toyLauncher{}, Plan: &partition.Plan{Stages: make([]partition.StageAssignment, 1)}}).Validate(); err == nil || !strings.Contains(err.Error(), "profile") {
		t.Errorf("no profile: %v", err)
	}
}
