package stagetest

import (
	"math"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
)

// Noise compares how far from the float32 run, fed the same tokens, the checkpoint's own dtype and golden_acc32.json are:
// means over the golden's top-5 logits, in standard deviations. It is the test of models whose choices flip so often in
// 16 bits that single steps can't be compared: an error beyond rounding shows as more noise than mlx-lm has, which rounds
// more often. It returns both means.
func Noise(t *testing.T, families []stage.Family, dir string) (own, reference float64) {
	golden := ReadGolden(t, dir, "golden_acc32.json")
	if golden == nil {
		t.Skip("a checkpoint in float32 has no golden in another dtype")
	}
	narrow, wide := Open(t, families, dir, Options{}), Open(t, families, dir, Options{Dtype: sdk.DtypeFloat32})
	n := 0.0
	for i, r := range golden.Runs {
		seq := sdk.SeqID(i + 1)
		narrow.Reserve(sdk.Reservation{Seq: seq, Prompt: r.IDs})
		wide.Reserve(sdk.Reservation{Seq: seq, Prompt: r.IDs})
		a, b := narrow.Logits(seq, r.IDs, r.Tokens, 512), wide.Logits(seq, r.IDs, r.Tokens, 512)
		for step := range r.Tokens {
			for _, top := range r.Steps[step].Top5 {
				truth := float64(float32At(b[step], int(top[0])))
				own += math.Abs(float64(float32At(a[step], int(top[0])))-truth) / r.LogitStd
				reference += math.Abs(top[1]-truth) / r.LogitStd
				n++
			}
		}
	}
	own, reference = own/n, reference/n
	if !(own <= reference) {
		t.Errorf("16 bits are %.3f standard deviations from float32, mlx-lm's are %.3f", own, reference)
	}
	return own, reference
}
