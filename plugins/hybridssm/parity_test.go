package main

import (
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

const parityRoot = "../../testdata/parity"

// This executor's checkpoints, by how 16 bits can be compared with the goldens: step by step, step by step but where rounding
// flips a router's choice or what a gated delta net's state carries along (the goldens are themselves more than the
// tolerance away from float32 at such steps), or in the mean only, since most steps have flips behind them.
var (
	steady  = []string{"nemotron_h-dense-*"}
	flips   = []string{"jamba-*", "nemotron_h-moe-*", "qwen3_next-*", "qwen3_5-*", "qwen3_5_vlm-*"}
	chaotic = []string{"qwen3_5_moe-*", "qwen3_5_moe_vlm-*"}
)

func eachCheckpoint(t *testing.T, f func(t *testing.T, dir string)) {
	stagetest.Each(t, parityRoot, slices.Concat(steady, flips, chaotic), f)
}

func TestTokensEqualGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Tokens(t, families(), dir) })
}

func TestLogitsNearGoldens(t *testing.T) {
	stagetest.Each(t, parityRoot, steady, func(t *testing.T, dir string) {
		t.Logf("largest difference: %.3f standard deviations", stagetest.Logits(t, families(), dir))
	})
	stagetest.Each(t, parityRoot, flips, func(t *testing.T, dir string) {
		t.Logf("flipped at %d steps", stagetest.RoutedLogits(t, families(), dir))
	})
}

func TestNoiseIsTheGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) {
		own, reference := stagetest.Noise(t, families(), dir)
		t.Logf("%.3f standard deviations from float32, mlx-lm %.3f", own, reference)
	})
}

func TestBitsDoNotDependOnTheRun(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Bits(t, families(), dir, sdk.DtypeAuto) })
}

// Families that are published in block-scaled float8 take it.
func TestFloat8(t *testing.T) {
	stagetest.Each(t, parityRoot, []string{"qwen3_next-base-q4", "qwen3_5-base-q4"}, func(t *testing.T, dir string) { stagetest.Float8(t, families(), dir) })
}
