package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

// A sequence goes on from what it shares, whatever the other does; a recurrent state can't go back, and saying so costs
// the sequence nothing.
func TestShareAndRewind(t *testing.T) {
	for _, name := range []string{"jamba-base-q4", "nemotron_h-dense-q4", "qwen3_5-base-q4"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(parityRoot, name)
			run := stagetest.ReadGolden(t, dir, "golden_f32.json").Runs[1]
			p := stagetest.Open(t, families(), dir, stagetest.Options{Stages: 2, Dtype: sdk.DtypeFloat32})
			p.Reserve(sdk.Reservation{Seq: 1, Prompt: run.IDs})
			last := p.Prefill(1, run.IDs, 512)
			p.Reserve(sdk.Reservation{Seq: 2, Prompt: run.IDs, From: 1, Keep: last.Pos})
			p.Step(sdk.SeqStep{Seq: 1, Pos: last.Pos, Rows: 3, Tokens: []int32{1, 2, 3}, Prompt: true})
			back := sdk.SeqStep{Seq: 2, Pos: last.Pos - 1, Rows: 1, Tokens: []int32{1}}
			if _, err := p.TryStep(t.Context(), back); !stagetest.Is(err, sdk.CodeUnsupported, fmt.Sprintf("the nearest that it can go to are 0 and %d", last.Pos)) {
				t.Errorf("going back gave %v", err)
			}
			last.Seq = 2
			if got := p.Continue(last, len(run.Tokens)); !slices.Equal(got, run.Tokens) {
				t.Errorf("the fork goes on with %v, want %v", got, run.Tokens)
			}
		})
	}
}

// A sequence holds what the profile says, from its first position on.
func TestStateBytes(t *testing.T) {
	parity().Each(t, func(t *testing.T, dir string) {
		p := stagetest.Open(t, families(), dir, stagetest.Options{})
		fixed, perToken := int64(0), int64(0)
		for _, l := range inspect(t, dir).Layers {
			fixed += l.StateBytes(0, 0)
			perToken += l.PositionBytes()
		}
		held := func(want int64) {
			t.Helper()
			if s, err := p.Stages[0].Stats(t.Context()); err != nil || s.StateBytes != want {
				t.Errorf("%d bytes of state (%v), want %d", s.StateBytes, err, want)
			}
		}
		p.Reserve(sdk.Reservation{Seq: 1})
		held(fixed)
		p.Step(sdk.SeqStep{Seq: 1, Rows: 3, Tokens: []int32{1, 2, 3}, Prompt: true})
		held(fixed + 64*perToken) // caches grow by blocks
		p.Reserve(sdk.Reservation{Seq: 2, From: 1, Keep: 3})
		held(2*fixed + 64*perToken) // blocks that both hold count once
		p.Release(1)
		p.Release(2)
		held(0)
	})
}

// A stage holds its own blocks' tensors and no others.
func TestStagesHoldTheirOwn(t *testing.T) {
	parity().Each(t, func(t *testing.T, dir string) {
		profile := inspect(t, dir)
		n := len(profile.Layers)
		for cut := 1; cut < n; cut++ {
			e := stagetest.New(t, families())
			report, err := e.Load(t.Context(), sdk.LoadRequest{
				Dir: dir, Family: profile.Family, Layers: sdk.LayerRange{Start: cut, End: n}, HasHead: true, Threads: 1,
			}, nil)
			if err != nil {
				t.Fatal(err)
			}
			want := profile.Head
			for _, l := range profile.Layers[cut:] {
				want += l.Weights
			}
			if report.WeightBytes != want {
				t.Errorf("layers from %d: %d bytes, want %d", cut, report.WeightBytes, want)
			}
		}
	})
}
