package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

const parityRoot = "../../testdata/parity"

func eachCheckpoint(t *testing.T, f func(t *testing.T, dir string)) {
	for _, dir := range stagetest.Checkpoints(t, parityRoot, "deepseek_v3-*", "glm4_moe_lite-*", "glm_moe_dsa-*") {
		t.Run(filepath.Base(dir), func(t *testing.T) { f(t, dir) })
	}
}

func TestTokensEqualGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Tokens(t, families(), dir) })
}

func TestLogitsNearGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) {
		if strings.HasPrefix(filepath.Base(dir), "glm_moe_dsa-") {
			t.Skip("in 16 bits rounding alone flips which positions are picked; the tokens in float32 are the test")
		}
		t.Logf("largest difference: %.3f standard deviations", stagetest.Logits(t, families(), dir))
	})
}

func TestBitsDoNotDependOnTheRun(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Bits(t, families(), dir, sdk.DtypeAuto) })
}
