package main

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

// A fork goes on from where it was made, whatever the original does; a recurrent state can't go back, and saying so costs
// the sequence nothing.
func TestForkAndTruncate(t *testing.T) {
	for _, name := range []string{"jamba-base-q4", "nemotron_h-dense-q4", "qwen3_5-base-q4"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(parityRoot, name)
			run := stagetest.ReadGolden(t, dir, "golden_f32.json").Runs[1]
			p := stagetest.Open(t, families(), dir, stagetest.Options{Stages: 2, Dtype: sdk.DtypeFloat32})
			p.Reserve(sdk.Reservation{Seq: 1, Prompt: run.IDs})
			last := p.Prefill(1, run.IDs, 512)
			p.Fork(1, 2)
			p.Step(sdk.SeqStep{Seq: 1, Pos: last.Pos, Rows: 3, Tokens: []int32{1, 2, 3}, Prompt: true})
			for i, e := range p.Stages {
				if err := e.Truncate(t.Context(), 2, last.Pos-1); sdk.CodeOf(err) != sdk.CodeUnsupported {
					t.Errorf("stage %d: truncation gave %v", i, err)
				}
			}
			p.Truncate(2, last.Pos) // its length
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
			fixed += l.StateBytes
			perToken += l.KVBytesPerToken
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
		p.Fork(1, 2)
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
