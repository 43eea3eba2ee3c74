package batch

import (
	"context"
	"errors"
	"reflect"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

func TestMeasure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rt := newFake(2)
		speeds, err := Measure(t.Context(), rt, MeasureConfig{Stages: 2, MaxBatch: 8, VocabSize: fakeVocab})
		if err != nil {
			t.Fatal(err)
		}
		rt.verify(t)
		if len(speeds.Steps) != 4 {
			t.Fatalf("measured %+v", speeds.Steps)
		}
		for _, s := range speeds.Steps {
			stage := rt.fixed + time.Duration(s.Batch)*rt.perRow
			if want := 2 * (stage + rt.hop); s.Latency != want {
				t.Errorf("batch %d: latency %v, want %v", s.Batch, s.Latency, want)
			}
			if s.Interval < stage || s.Interval > stage+rt.hop {
				t.Errorf("batch %d: interval %v, a stage takes %v", s.Batch, s.Interval, stage)
			}
		}
		if row := 2*rt.perRow + 2*(rt.fixed+rt.hop)/measureRows; speeds.Row < 2*rt.perRow || speeds.Row > row {
			t.Errorf("a row takes %v, want %v", speeds.Row, row)
		}
		if g := speeds.Groups(8, 2); g < 2 {
			t.Errorf("%d groups for two stages that overlap", g)
		}
	})
}

// What else the machine does for a while makes no difference.
func TestMeasureDisturbed(t *testing.T) {
	measure := func(disturbed int32) (speeds *Speeds) {
		synctest.Test(t, func(t *testing.T) {
			rt := newFake(2)
			var steps atomic.Int32
			rt.onStep = func([]sdk.SeqStep) error {
				if n := steps.Add(1); n > 8 && n <= disturbed { // the first eight are the prompts
					time.Sleep(50 * time.Millisecond)
				}
				return nil
			}
			var err error
			if speeds, err = Measure(t.Context(), rt, MeasureConfig{Stages: 2, MaxBatch: 8}); err != nil {
				t.Fatal(err)
			}
		})
		return speeds
	}
	if quiet, disturbed := measure(0), measure(20); !reflect.DeepEqual(quiet, disturbed) {
		t.Errorf("measured %+v, disturbed %+v", quiet, disturbed)
	}
}

func TestMeasureKeepsToItsBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rt := newFake(1)
		rt.fixed = time.Second
		speeds, err := Measure(t.Context(), rt, MeasureConfig{Stages: 1, MaxBatch: 64})
		if err != nil {
			t.Fatal(err)
		}
		if len(speeds.Steps) != 1 || speeds.Steps[0].Batch != 1 {
			t.Errorf("measured %+v", speeds.Steps)
		}
		rt.verify(t)
	})
}

func TestMeasureWithLittleMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rt := newFake(2)
		cfg := MeasureConfig{Stages: 2, MaxBatch: 8}
		rt.capacity = 3 * cfg.Length()
		speeds, err := Measure(t.Context(), rt, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if len(speeds.Steps) != 2 {
			t.Errorf("measured %+v", speeds.Steps)
		}
		rt.verify(t)
	})
}

func TestMeasureWithoutRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rt := newFake(2)
		cfg := MeasureConfig{Stages: 2, MaxBatch: 8}
		rt.capacity = cfg.Length() - 1
		if speeds, err := Measure(t.Context(), rt, cfg); speeds != nil || err != nil {
			t.Errorf("measured %+v, %v", speeds, err)
		}
		rt.verify(t)
	})
}

func TestMeasureFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rt := newFake(2)
		steps := 0
		rt.onStep = func([]sdk.SeqStep) error {
			steps++
			if steps == 10 {
				return errKernel
			}
			return nil
		}
		if _, err := Measure(t.Context(), rt, MeasureConfig{Stages: 2, MaxBatch: 8}); !errors.Is(err, errKernel) {
			t.Errorf("got %v", err)
		}
		rt.verify(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Measure(ctx, rt, MeasureConfig{Stages: 2, MaxBatch: 8}); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}
