package main

import (
	"path/filepath"
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
	eachOf(t, slices.Concat(dense, routed), f)
}

func eachOf(t *testing.T, patterns []string, f func(t *testing.T, dir string)) {
	for _, dir := range stagetest.Checkpoints(t, parityRoot, patterns...) {
		t.Run(filepath.Base(dir), func(t *testing.T) { f(t, dir) })
	}
}

func TestTokensEqualGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Tokens(t, families(), dir) })
}

func TestLogitsNearGoldens(t *testing.T) {
	eachOf(t, dense, func(t *testing.T, dir string) {
		t.Logf("largest difference: %.3f standard deviations", stagetest.Logits(t, families(), dir))
	})
	eachOf(t, routed, func(t *testing.T, dir string) {
		t.Logf("flipped at %d steps", stagetest.RoutedLogits(t, families(), dir))
	})
}

func TestBitsDoNotDependOnTheRun(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Bits(t, families(), dir, sdk.DtypeAuto) })
}
