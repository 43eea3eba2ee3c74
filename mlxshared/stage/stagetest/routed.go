package stagetest

import (
	"math"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
)

// FlippedShare is the share of steps at which rounding may have flipped a router's choice.
const FlippedShare = 0.05

// RoutedLogits is Logits for mixtures of experts. Where two experts' scores lie within a rounding, a right answer and the
// golden may choose apart, and their logits then have nothing in common. So a step passes that is within Tolerance of the
// golden, or of the float32 run fed the same tokens, which shows that it was the golden's rounding that flipped. What is
// near neither counts as flipped here; that may be FlippedShare of all steps. It returns how many steps were.
func RoutedLogits(t *testing.T, families []stage.Family, dir string) int {
	golden := ReadGolden(t, dir, "golden_acc32.json")
	if golden == nil {
		t.Skip("a checkpoint in float32 has no golden in another dtype")
	}
	run := func(dtype sdk.Dtype) [][][]byte {
		p := Open(t, families, dir, Options{Stages: 1, Dtype: dtype})
		var all [][][]byte
		for i, r := range golden.Runs {
			seq := sdk.SeqID(i + 1)
			p.Reserve(sdk.Reservation{Seq: seq, Prompt: r.IDs})
			all = append(all, p.Logits(seq, r.IDs, r.Tokens, 512))
		}
		return all
	}
	own, wide := run(sdk.DtypeAuto), run(sdk.DtypeFloat32)
	steps, flipped := 0, 0
	for i, r := range golden.Runs {
		for s := range r.Tokens {
			var fromGolden, fromWide float64
			for _, top := range r.Steps[s].Top5 {
				logit := float64(float32At(own[i][s], int(top[0])))
				fromGolden = max(fromGolden, math.Abs(logit-top[1])/r.LogitStd)
				fromWide = max(fromWide, math.Abs(logit-float64(float32At(wide[i][s], int(top[0]))))/r.LogitStd)
			}
			steps++
			if min(fromGolden, fromWide) > Tolerance {
				flipped++
				t.Logf("prompt %d, step %d: %.2f standard deviations from the golden, %.2f from the float32 run", i, s, fromGolden, fromWide)
			}
		}
	}
	if float64(flipped) > FlippedShare*float64(steps) {
		t.Errorf("%d of %d steps are near neither the golden nor the float32 run", flipped, steps)
	}
	return flipped
}
