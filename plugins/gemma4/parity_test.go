package main

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

const parityRoot = "../../testdata/parity"

// This executor's checkpoints. In bfloat16 rounding alone takes a few logits of the sharp ones further from the golden than
// stagetest.Tolerance, which TestFloat16NearFloat32 shows to be rounding, and flips the experts of the routed ones.
var (
	smooth = []string{"gemma3-*", "gemma4-e2b-*", "gemma4_vlm-*"}
	sharp  = []string{"gemma4-text-*"}
	routed = []string{"gemma4-moe-*"}
)

func eachCheckpoint(t *testing.T, f func(t *testing.T, dir string)) {
	stagetest.Each(t, parityRoot, slices.Concat(smooth, sharp, routed), f)
}

func TestTokensEqualGoldens(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Tokens(t, families(), dir) })
}

// The tiny mixture is chaotic in bfloat16: its tokens in float32 are the test.
func TestLogitsNearGoldens(t *testing.T) {
	stagetest.Each(t, parityRoot, smooth, func(t *testing.T, dir string) {
		t.Logf("largest difference: %.3f standard deviations", stagetest.Logits(t, families(), dir))
	})
	stagetest.Each(t, parityRoot, sharp, func(t *testing.T, dir string) {
		t.Logf("flipped at %d steps", stagetest.RoutedLogits(t, families(), dir))
	})
}

// The three bits more of float16 bring every logit close to the golden in float32.
func TestFloat16NearFloat32(t *testing.T) {
	const tolerance = 0.1 // standard deviations
	stagetest.Each(t, parityRoot, slices.Concat(smooth, sharp), func(t *testing.T, dir string) {
		golden := stagetest.ReadGolden(t, dir, "golden_f32.json")
		p := stagetest.Open(t, families(), dir, stagetest.Options{Dtype: sdk.DtypeFloat16})
		worst := 0.0
		for i, run := range golden.Runs {
			seq := sdk.SeqID(i + 1)
			p.Reserve(sdk.Reservation{Seq: seq, Prompt: run.IDs})
			for step, raw := range p.Logits(seq, run.IDs, run.Tokens, 512) {
				for _, top := range run.Steps[step].Top5 {
					logit := math.Float32frombits(binary.LittleEndian.Uint32(raw[4*int(top[0]):]))
					worst = max(worst, math.Abs(float64(logit)-top[1])/run.LogitStd)
				}
			}
		}
		if t.Logf("largest difference: %.4f standard deviations", worst); worst > tolerance {
			t.Errorf("%.4f standard deviations, want at most %v", worst, tolerance)
		}
	})
}

func TestBitsDoNotDependOnTheRun(t *testing.T) {
	eachCheckpoint(t, func(t *testing.T, dir string) { stagetest.Bits(t, families(), dir, sdk.DtypeAuto) })
}
