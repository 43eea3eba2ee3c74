package stagetest

import (
	"encoding/binary"
	"math"
	"path/filepath"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
)

// Tolerance is how far top-5 logits may be from golden_acc32.json, in standard deviations of the run's logits.
const Tolerance = 0.35

// exactTolerance is the same for float32, where mlx-lm and the kernels differ in the order of their sums alone. The largest
// that was measured is 3.5e-5.
const exactTolerance = 1e-4

// Logits compares the checkpoint's own dtype, fed the tokens of golden_acc32.json, with its top-5 logits: every one must
// come out within Tolerance. Checkpoints named in flips are compared by Flipped, with that many steps.
//
// Stages of tests run on the CPU, also where MLX has Metal or CUDA, and there the kernels give equal bits on every
// instruction set: what was measured once needs no room for other machines. A kernel that rounds elsewhere moves the
// figures, and they are taken anew.
func Logits(t *testing.T, families []stage.Family, dir string, flips map[string]int) {
	if most, ok := flips[filepath.Base(dir)]; ok {
		Flipped(t, families, dir, most)
		return
	}
	worst := Near(t, families, dir, "golden_acc32.json", sdk.DtypeAuto, Tolerance)
	t.Logf("largest difference: %.3f standard deviations", worst)
}

// Float32Logits compares logits in float32 with golden_f32.json, fed its tokens.
func Float32Logits(t *testing.T, families []stage.Family, dir string) {
	worst := Near(t, families, dir, "golden_f32.json", sdk.DtypeFloat32, exactTolerance)
	t.Logf("largest difference: %.1e standard deviations", worst)
}

// Near compares a golden's top-5 logits with those of a run in dtype that is fed the golden's tokens. It returns the largest
// difference, in standard deviations.
func Near(t *testing.T, families []stage.Family, dir, name string, dtype sdk.Dtype, tolerance float64) float64 {
	golden := ReadGolden(t, dir, name)
	got, worst := forced(t, families, dir, golden, dtype), 0.0
	for run, steps := range golden.top5() {
		for step, want := range steps {
			off := largest(got[run][step], want)
			if worst = max(worst, off); !(off <= tolerance) {
				t.Errorf("prompt %d, step %d: %.4f, golden %.4f: %.2g standard deviations apart", run, step, got[run][step], want, off)
			}
		}
	}
	return worst
}

// Flipped is Logits for checkpoints that rounding alone takes further than Tolerance: where two experts' scores lie within a
// rounding, or a sharp softmax or a recurrent state enlarges it, a right answer and the golden may part. A step passes that
// is within Tolerance of the golden, or of the float32 run fed the same tokens, which shows that the golden's rounding has
// flipped. What is near neither has flipped here; that may be at most so many steps.
func Flipped(t *testing.T, families []stage.Family, dir string, most int) {
	golden := ReadGolden(t, dir, "golden_acc32.json")
	own, exact := forced(t, families, dir, golden, sdk.DtypeAuto), forced(t, families, dir, golden, sdk.DtypeFloat32)
	flipped, missed, worst := 0, 0, 0.0
	for run, steps := range golden.top5() {
		for step, want := range steps {
			apart := largest(exact[run][step], want)
			if worst = max(worst, apart); apart > Tolerance {
				missed++
			}
			if off := min(largest(own[run][step], want), largest(own[run][step], exact[run][step])); !(off <= Tolerance) {
				flipped++
				t.Logf("prompt %d, step %d: %.2f standard deviations from the golden and the float32 run", run, step, off)
			}
		}
	}
	t.Logf("flipped at %d steps; float32 misses the golden at %d, by up to %.2f standard deviations", flipped, missed, worst)
	if flipped > most {
		t.Errorf("%d steps are near neither the golden nor the float32 run, want at most %d", flipped, most)
	}
}

// Noise compares how far the checkpoint's own dtype and golden_acc32.json are from the float32 run, fed the same tokens:
// means over the top-5 logits, in standard deviations. Ours must not exceed mlx-lm's, which rounds more often; an error
// beyond rounding shows even where rounding flips most steps.
func Noise(t *testing.T, families []stage.Family, dir string) {
	golden := ReadGolden(t, dir, "golden_acc32.json")
	exact := forced(t, families, dir, golden, sdk.DtypeFloat32)
	own := meanDifference(forced(t, families, dir, golden, sdk.DtypeAuto), exact)
	reference := meanDifference(golden.top5(), exact)
	if t.Logf("%.4f standard deviations from float32, mlx-lm %.4f", own, reference); !(own <= reference) {
		t.Errorf("16 bits are %.4f standard deviations from float32, mlx-lm's are %.4f", own, reference)
	}
}

// top5 are logits of a golden's top-5 tokens by run and step, in standard deviations of the run's logits.
type top5 [][][5]float64

func (g *Golden) top5() top5 {
	all := make(top5, len(g.Runs))
	for i, run := range g.Runs {
		all[i] = make([][5]float64, len(run.Steps))
		for step, s := range run.Steps {
			for k, top := range s.Top5 {
				all[i][step][k] = top[1] / run.LogitStd
			}
		}
	}
	return all
}

// forced runs the checkpoint in one stage, fed the golden's tokens.
func forced(t *testing.T, families []stage.Family, dir string, golden *Golden, dtype sdk.Dtype) top5 {
	p := Open(t, families, dir, Options{Dtype: dtype})
	all := make(top5, len(golden.Runs))
	for i, run := range golden.Runs {
		seq := sdk.SeqID(i + 1)
		p.Reserve(sdk.Reservation{Seq: seq, Prompt: run.IDs})
		all[i] = make([][5]float64, len(run.Steps))
		for step, raw := range p.Logits(seq, run.IDs, run.Tokens, 512) {
			for k, top := range run.Steps[step].Top5 {
				all[i][step][k] = float64(float32At(raw, int(top[0]))) / run.LogitStd
			}
		}
	}
	return all
}

func float32At(raw []byte, i int) float32 {
	return math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
}

func largest(a, b [5]float64) float64 {
	off := 0.0
	for k := range a {
		off = max(off, math.Abs(a[k]-b[k]))
	}
	return off
}

func meanDifference(a, b top5) float64 {
	sum, n := 0.0, 0
	for run := range a {
		for step := range a[run] {
			for k := range a[run][step] {
				sum += math.Abs(a[run][step][k] - b[run][step][k])
				n++
			}
		}
	}
	return sum / float64(n)
}
