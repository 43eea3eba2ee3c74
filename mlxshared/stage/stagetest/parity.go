package stagetest

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
)

// Checkpoints returns the parity checkpoints whose names match any of the patterns. root is the folder that holds them.
func Checkpoints(t testing.TB, root string, patterns ...string) []string {
	t.Helper()
	var dirs []string
	for _, p := range patterns {
		found, err := filepath.Glob(filepath.Join(root, p))
		if err != nil {
			t.Fatal(err)
		}
		if len(found) == 0 {
			t.Fatalf("no checkpoint %s in %s", p, root)
		}
		dirs = append(dirs, found...)
	}
	return dirs
}

// Each runs f as a subtest on every checkpoint that matches.
func Each(t *testing.T, root string, patterns []string, f func(t *testing.T, dir string)) {
	for _, dir := range Checkpoints(t, root, patterns...) {
		t.Run(filepath.Base(dir), func(t *testing.T) { f(t, dir) })
	}
}

// Parity are the checkpoints of an executor, and how they are compared with mlx-lm's goldens.
type Parity struct {
	Families    []stage.Family
	Root        string
	Checkpoints []string       // patterns
	Float32Only []string       // patterns of others, of which rounding alone flips most steps: no golden in 16 bits binds them
	Flips       map[string]int // checkpoints that 16 bits flip at so many steps; see Flipped
}

// Each runs f as a subtest on every checkpoint.
func (p Parity) Each(t *testing.T, f func(t *testing.T, dir string)) {
	Each(t, p.Root, slices.Concat(p.Checkpoints, p.Float32Only), f)
}

// Conformance runs the contract's own checks on checkpoints, each with its family, with as many of their cuts.
func (p Parity) Conformance(t *testing.T, cuts int, families map[string]string, dtypes ...sdk.Dtype) {
	for name, family := range families {
		t.Run(name, func(t *testing.T) {
			Conformance(t, p.Families, filepath.Join(p.Root, name), family, cuts, dtypes...)
		})
	}
}

// MissingTensors is the function of that name for every checkpoint.
func (p Parity) MissingTensors(t *testing.T, aside ...string) {
	p.Each(t, func(t *testing.T, dir string) { MissingTensors(t, p.Families, dir, aside...) })
}

// PlanFromConfig is the function of that name for every checkpoint.
func (p Parity) PlanFromConfig(t *testing.T, tolerance float64) {
	p.Each(t, func(t *testing.T, dir string) { PlanFromConfig(t, p.Families, dir, tolerance) })
}

// Float8 is the function of that name for the checkpoints.
func (p Parity) Float8(t *testing.T, checkpoints ...string) {
	Each(t, p.Root, checkpoints, func(t *testing.T, dir string) { Float8(t, p.Families, dir) })
}

// Run makes all comparisons.
func (p Parity) Run(t *testing.T) {
	compare := func(t *testing.T, dir string) {
		t.Run("tokens", func(t *testing.T) { Tokens(t, p.Families, dir) })
		t.Run("float32 logits", func(t *testing.T) { Float32Logits(t, p.Families, dir) })
		t.Run("noise", func(t *testing.T) { Noise(t, p.Families, dir) })
		t.Run("bits", func(t *testing.T) { Bits(t, p.Families, dir, sdk.DtypeAuto) })
	}
	Each(t, p.Root, p.Checkpoints, func(t *testing.T, dir string) {
		compare(t, dir)
		t.Run("logits", func(t *testing.T) { Logits(t, p.Families, dir, p.Flips) })
	})
	Each(t, p.Root, p.Float32Only, compare)
}

// Tokens compares greedy tokens in float32 with golden_f32.json, at 1, 2 and 3 stages and with prefill chunks of 1, 7
// and 512.
func Tokens(t *testing.T, families []stage.Family, dir string) {
	golden := ReadGolden(t, dir, "golden_f32.json")
	for stages := 1; stages <= 3; stages++ {
		p := Open(t, families, dir, Options{Stages: stages, Dtype: sdk.DtypeFloat32})
		seq := sdk.SeqID(0)
		for _, chunk := range []int{1, 7, 512} {
			for i, run := range golden.Runs {
				seq++
				p.Reserve(sdk.Reservation{Seq: seq, Prompt: run.IDs})
				if got := p.Generate(seq, run.IDs, len(run.Tokens), chunk); !slices.Equal(got, run.Tokens) {
					at := firstDifference(got, run.Tokens)
					t.Errorf("%d stages, chunk %d, prompt %d: token %d is %d, golden %d with a margin of %.4f", stages, chunk, i, at, got[at], run.Tokens[at], run.Steps[at].Margin)
				}
				p.Release(seq)
			}
		}
	}
}

func firstDifference(a, b []int32) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

// Bits compares logits bit for bit with those of one stage, one thread, one chunk and one sequence at a time: over 2 and
// 3 stages, other chunks, 2 and 3 threads, and all prompts in one batch.
func Bits(t *testing.T, families []stage.Family, dir string, dtype sdk.Dtype) {
	golden := ReadGolden(t, dir, "golden_f32.json")
	const steps = 6
	run := func(o Options, chunk int) [][][]byte {
		p := Open(t, families, dir, o)
		var all [][][]byte
		for i, r := range golden.Runs {
			seq := sdk.SeqID(i + 1)
			p.Reserve(sdk.Reservation{Seq: seq, Prompt: r.IDs})
			all = append(all, p.Logits(seq, r.IDs, r.Tokens[:steps], chunk))
		}
		return all
	}
	want := run(Options{Dtype: dtype}, 512)
	compare := func(name string, got [][][]byte) {
		for i := range want {
			for step := range want[i] {
				if !slices.Equal(got[i][step], want[i][step]) {
					t.Errorf("%s: logits of prompt %d, step %d differ from the plain run's", name, i, step)
					break
				}
			}
		}
	}
	for stages := 2; stages <= 3; stages++ {
		compare(fmt.Sprintf("%d stages", stages), run(Options{Dtype: dtype, Stages: stages}, 512))
	}
	for _, chunk := range []int{1, 7, 64} {
		compare(fmt.Sprintf("chunk %d", chunk), run(Options{Dtype: dtype}, chunk))
	}
	for threads := 2; threads <= 3; threads++ {
		compare(fmt.Sprintf("%d threads", threads), run(Options{Dtype: dtype, Threads: threads}, 512))
	}
	compare("one batch", batched(Open(t, families, dir, Options{Dtype: dtype, Stages: 2, Threads: 2}), golden, steps))
}

// batched runs all prompts side by side: each step holds a chunk of every prompt that is not through, and a generated token
// of those that are.
func batched(p *Pipeline, golden *Golden, steps int) [][][]byte {
	const chunk = 7
	all := make([][][]byte, len(golden.Runs))
	at := make([]int, len(golden.Runs))
	for i, r := range golden.Runs {
		p.Reserve(sdk.Reservation{Seq: sdk.SeqID(i + 1), Prompt: r.IDs})
	}
	for {
		var batch []sdk.SeqStep
		for i, r := range golden.Runs {
			tokens := slices.Concat(r.IDs, r.Tokens[:steps-1])
			if at[i] == len(tokens) {
				continue
			}
			s := sdk.SeqStep{Seq: sdk.SeqID(i + 1), Pos: at[i], Prompt: at[i] < len(r.IDs)}
			n := 1
			if s.Prompt {
				n = min(chunk, len(r.IDs)-at[i])
			}
			s.Rows, s.Tokens = n, tokens[at[i]:at[i]+n]
			if at[i] += n; at[i] >= len(r.IDs) {
				s.Want = sdk.WantLogits
			}
			batch = append(batch, s)
		}
		if len(batch) == 0 {
			return all
		}
		for _, r := range p.Step(batch...) {
			if r.Logits.Data != nil {
				i := int(r.Seq) - 1
				all[i] = append(all[i], r.Logits.Data)
			}
		}
	}
}
