package main

import (
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

const parityRoot = "../../testdata/parity"

// dense and routed are this executor's checkpoints, those with experts apart.
var (
	dense  = []string{"llama-*", "mistral-*", "qwen3-*", "glm4-*"}
	routed = []string{"mixtral-*", "llama4-*", "gpt_oss-*", "glm4_moe-*"}
)

func eachCheckpoint(t *testing.T, f func(t *testing.T, dir string)) {
	stagetest.Each(t, parityRoot, slices.Concat(dense, routed), f)
}

func TestTokensEqualGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Tokens(t, families(), dir) })
}

func TestLogitsNearGoldens(t *testing.T) {
	stagetest.Each(t, parityRoot, dense, func(t *testing.T, dir string) {
		t.Logf("largest difference: %.3f standard deviations", stagetest.Logits(t, families(), dir))
	})
	stagetest.Each(t, parityRoot, routed, func(t *testing.T, dir string) {
		t.Logf("flipped at %d steps", stagetest.RoutedLogits(t, families(), dir))
	})
}

func TestBitsDoNotDependOnTheRun(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Bits(t, families(), dir, sdk.DtypeAuto) })
}

// Families that are published in block-scaled float8 take it.
func TestFloat8(t *testing.T) {
	stagetest.Each(t, parityRoot, []string{"qwen3-tied-q4", "glm4_moe-base-q4"}, func(t *testing.T, dir string) { stagetest.Float8(t, families(), dir) })
}
