package main

import (
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

const parityRoot = "../../testdata/parity"

func eachCheckpoint(t *testing.T, f func(t *testing.T, dir string)) {
	for _, dir := range stagetest.Checkpoints(t, parityRoot, "llama-*", "mistral-*") {
		t.Run(filepath.Base(dir), func(t *testing.T) { f(t, dir) })
	}
}

func TestTokensEqualGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Tokens(t, families(), dir) })
}

func TestLogitsNearGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) {
		t.Logf("largest difference: %.3f standard deviations", stagetest.Logits(t, families(), dir))
	})
}

func TestBitsDoNotDependOnTheRun(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Bits(t, families(), dir, sdk.DtypeAuto) })
}
