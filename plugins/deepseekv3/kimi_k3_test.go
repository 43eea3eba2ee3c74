package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
)

const kimiTiny = parityRoot + "/kimi_k3-tiny-q4"

// One process: tokens in float32 equal the golden's in every chunking.
func TestKimiK3Tokens(t *testing.T) {
	golden := stagetest.ReadGolden(t, kimiTiny, "golden_f32.json")
	p := stagetest.Open(t, families(), kimiTiny, stagetest.Options{Dtype: sdk.DtypeFloat32})
	seq := sdk.SeqID(0)
	for _, chunk := range []int{1, 7, 512} {
		for i, run := range golden.Runs {
			seq++
			p.Reserve(sdk.Reservation{Seq: seq, Prompt: run.IDs})
			if got := p.Generate(seq, run.IDs, len(run.Tokens), chunk); !slices.Equal(got, run.Tokens) {
				t.Errorf("chunk %d, prompt %d: %v, golden %v", chunk, i, got, run.Tokens)
			}
			p.Release(seq)
		}
	}
}

// In 16 bits rounding alone flips its experts at most steps, and mlx-lm's too.
func TestKimiK3Logits(t *testing.T) {
	stagetest.Float32Logits(t, families(), kimiTiny)
	stagetest.Noise(t, families(), kimiTiny)
}

func TestKimiK3BitsDoNotDependOnTheRun(t *testing.T) {
	golden := stagetest.ReadGolden(t, kimiTiny, "golden_f32.json")
	run := golden.Runs[1]
	logits := func(threads, chunk int) [][]byte {
		p := stagetest.Open(t, families(), kimiTiny, stagetest.Options{Threads: threads})
		p.Reserve(sdk.Reservation{Seq: 1, Prompt: run.IDs})
		return p.Logits(1, run.IDs, run.Tokens[:4], chunk)
	}
	want := logits(1, 512)
	for _, c := range [][2]int{{2, 512}, {1, 1}, {3, 7}, {1, 64}} {
		if !slices.EqualFunc(logits(c[0], c[1]), want, slices.Equal) {
			t.Errorf("%d threads, chunks of %d: other logits", c[0], c[1])
		}
	}
	p := stagetest.Open(t, families(), kimiTiny, stagetest.Options{})
	var batch []sdk.SeqStep
	for i, r := range golden.Runs {
		p.Reserve(sdk.Reservation{Seq: sdk.SeqID(i), Prompt: r.IDs})
		batch = append(batch, sdk.SeqStep{Seq: sdk.SeqID(i), Rows: len(r.IDs), Tokens: r.IDs, Prompt: true, Want: sdk.WantLogits})
	}
	if got := p.Step(batch...)[1].Logits.Data; !slices.Equal(got, want[0]) {
		t.Error("beside other sequences: other logits")
	}
}

// A copy with fewer layers than the weights hold loads and runs: the layers past the end are left aside.
func TestKimiK3WithFewerLayers(t *testing.T) {
	dir := stagetest.Bare(t, stagetest.ReadConfig(t, kimiTiny, map[string]any{"num_hidden_layers": 5}))
	weights, err := filepath.Abs(filepath.Join(kimiTiny, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(weights, filepath.Join(dir, "model.safetensors")); err != nil {
		t.Fatal(err)
	}
	p := stagetest.Open(t, families(), dir, stagetest.Options{Dtype: sdk.DtypeFloat32})
	if n := len(inspect(t, dir).Layers); n != 5 {
		t.Errorf("%d layers, want 5", n)
	}
	p.Reserve(sdk.Reservation{Seq: 1})
	whole := stagetest.Open(t, families(), kimiTiny, stagetest.Options{Dtype: sdk.DtypeFloat32})
	whole.Reserve(sdk.Reservation{Seq: 1})
	ids := []int32{312, 5, 6, 7}
	if got, all := p.Generate(1, ids, 8, 512), whole.Generate(1, ids, 8, 512); len(got) != 8 || fmt.Sprint(got) == fmt.Sprint(all) {
		t.Errorf("5 layers give %v, all of them %v", got, all)
	}
}
