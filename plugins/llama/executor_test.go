package main

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/stage/stagetest"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

func isFault(err error, code sdk.Code, tensor string) bool {
	e, ok := errors.AsType[*sdk.Error](err)
	return ok && e.Code == code && e.Tensor == tensor && strings.Contains(e.Message, tensor)
}

// What a config alone tells is what the headers tell, and both are what the checkpoint holds.
func TestPlanFromConfigAlone(t *testing.T) {
	parity().Each(t, func(t *testing.T, dir string) {
		stagetest.PlanFromConfig(t, families(), dir, 0)
		c, err := safetensors.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		if total := stagetest.Weights(stagetest.Inspect(t, families(), dir)); total != c.Bytes() {
			t.Errorf("the parts add up to %d bytes, the checkpoint has %d", total, c.Bytes())
		}
	})
}

func TestProfile(t *testing.T) {
	e := stagetest.New(t, families())
	p, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: filepath.Join(parityRoot, "mistral-swa-q4"), Dtype: sdk.DtypeFloat32})
	if err != nil {
		t.Fatal(err)
	}
	if p.Family != "mistral" || p.ModelType != "mistral" || p.Tied || p.ContextLength != 4096 || p.VocabSize != 320 || p.HiddenSize != 128 ||
		p.Boundary != (sdk.Boundary{Width: 128, Dtype: sdk.DtypeFloat32}) || p.Quantization != "affine 4-bit group 64" || len(p.Layers) != 6 {
		t.Errorf("%+v", p)
	}
	if l := p.Layers[0]; l.Kind != "sliding-attention" || l.PositionBytes() != 2*2*32*4 || l.States[0].Window < 16 || l.StateBytes(0, 0) != 0 {
		t.Errorf("sliding layer %+v", l)
	}
	if l := p.Layers[2]; l.Kind != "attention" || l.States[0].Window != 0 {
		t.Errorf("full layer %+v", l)
	}
}

func TestInspectFaults(t *testing.T) {
	dir := t.TempDir()
	write := func(text string) {
		if err := os.WriteFile(filepath.Join(dir, config.FileName), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e := stagetest.New(t, families())
	inspect := func(dir string) error {
		_, err := e.Inspect(t.Context(), sdk.InspectRequest{Dir: dir})
		return err
	}
	if err := inspect(filepath.Join(dir, "absent")); !stagetest.Is(err, sdk.CodeNotFound, "absent") {
		t.Errorf("no folder: %v", err)
	}
	if err := inspect(dir); !stagetest.Is(err, sdk.CodeNotFound, "no config.json") {
		t.Errorf("no config: %v", err)
	}
	write(`{"model_type": "gpt2"}`)
	if err := inspect(dir); !stagetest.Is(err, sdk.CodeUnsupported, `model_type "gpt2" of config.json is not built; built are [llama mistral mixtral `) {
		t.Errorf("unknown model type: %v", err)
	}
	write(`{"model_type": "llama"}`)
	if err := inspect(dir); !stagetest.Is(err, sdk.CodeInvalid, "hidden_size: is missing") {
		t.Errorf("missing keys: %v", err)
	}
}

func TestLoadRequestFaults(t *testing.T) {
	e := stagetest.New(t, families())
	good := sdk.LoadRequest{Dir: filepath.Join(parityRoot, "llama-tied-q4"), Family: "llama", Layers: sdk.LayerRange{End: 6}, HasEmbedding: true, HasHead: true, Threads: 1}
	for name, c := range map[string]struct {
		change func(*sdk.LoadRequest)
		code   sdk.Code
		want   string
	}{
		"reversed range":      {func(r *sdk.LoadRequest) { r.Layers = sdk.LayerRange{Start: 3, End: 3} }, sdk.CodeInvalid, "layers [3, 3)"},
		"beyond the model":    {func(r *sdk.LoadRequest) { r.Layers.End = 7 }, sdk.CodeInvalid, "model of 6 layers"},
		"embedding elsewhere": {func(r *sdk.LoadRequest) { r.Layers.Start = 1 }, sdk.CodeInvalid, "embedding"},
		"head elsewhere":      {func(r *sdk.LoadRequest) { r.Layers.End = 5 }, sdk.CodeInvalid, "head"},
		"other family":        {func(r *sdk.LoadRequest) { r.Family = "mistral" }, sdk.CodeUnsupported, `family "mistral" does not take model_type "llama"`},
		"tensor parallel":     {func(r *sdk.LoadRequest) { r.TPSize = 2 }, sdk.CodeUnsupported, "tensor parallelism"},
		"adapter":             {func(r *sdk.LoadRequest) { r.Adapter = "lora" }, sdk.CodeUnsupported, "adapter"},
		"threads":             {func(r *sdk.LoadRequest) { r.Threads = -1 }, sdk.CodeInvalid, "threads is -1"},
		"dtype":               {func(r *sdk.LoadRequest) { r.Dtype = sdk.DtypeInt32 }, sdk.CodeInvalid, "int32"},
	} {
		req := good
		c.change(&req)
		if _, err := e.Load(t.Context(), req, nil); !stagetest.Is(err, c.code, c.want) {
			t.Errorf("%s: %v, want %v with %q", name, err, c.code, c.want)
		}
	}
	if _, err := e.Load(t.Context(), good, nil); err != nil {
		t.Errorf("after all those faults: %v", err)
	}
	if _, err := e.Load(t.Context(), good, nil); !stagetest.Is(err, sdk.CodeInvalid, "loaded already") {
		t.Errorf("a second load: %v", err)
	}
}

func TestStepFaults(t *testing.T) {
	p := stagetest.Open(t, families(), filepath.Join(parityRoot, "llama-tied-q4"), stagetest.Options{Stages: 2})
	p.Reserve(sdk.Reservation{Seq: 1})
	p.Reserve(sdk.Reservation{Seq: 2})
	ids := []int32{312, 51, 259}
	hidden := sdk.Tensor{Dtype: sdk.DtypeBFloat16, Rows: 3, Width: 128, Data: make([]byte, 3*128*2)}
	out := make([]byte, 1<<16)
	for name, c := range map[string]struct {
		stage int
		step  sdk.Step
		code  sdk.Code
		want  string
	}{
		"no sequence":        {0, sdk.Step{}, sdk.CodeInvalid, "no sequence"},
		"unknown":            {0, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 9, Rows: len(ids), Tokens: ids}}, Out: out}, sdk.CodeUnknownSequence, "no sequence 9"},
		"no token":           {0, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1}}, Out: out}, sdk.CodeInvalid, "has 0 rows and 0 tokens"},
		"position":           {0, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Pos: 2, Rows: len(ids), Tokens: ids}}, Out: out}, sdk.CodeInvalid, "starts at position 2, its state ends at 0"},
		"twice":              {0, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: len(ids), Tokens: ids}, {Seq: 1, Rows: len(ids), Tokens: ids}}, Out: out}, sdk.CodeInvalid, "twice"},
		"token too large":    {0, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: 1, Tokens: []int32{320}}}, Out: out}, sdk.CodeInvalid, "token 320 is outside the vocabulary of 320"},
		"negative token":     {0, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: 1, Tokens: []int32{-1}}}, Out: out}, sdk.CodeInvalid, "token -1"},
		"slot too small":     {0, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: len(ids), Tokens: ids}}, Out: out[:767]}, sdk.CodeInvalid, "takes 768 bytes, the slot has 767"},
		"no hidden rows":     {1, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: len(ids), Tokens: ids}}, Out: out}, sdk.CodeInvalid, "hidden rows are"},
		"rows missing":       {1, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: 2, Tokens: ids[:2]}}, Hidden: hidden, Out: out}, sdk.CodeInvalid, "bfloat16 [3, 128]"},
		"logits do not fit":  {1, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: len(ids), Tokens: ids, Want: sdk.WantLogits}}, Hidden: hidden, Out: out[:1279]}, sdk.CodeInvalid, "takes 1280 bytes"},
		"targets missing":    {1, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: len(ids), Tokens: ids, Want: sdk.WantScores, Targets: ids[:1]}}, Hidden: hidden, Out: out}, sdk.CodeInvalid, "1 targets for 3 rows"},
		"unknown want":       {1, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: len(ids), Tokens: ids, Want: 77}}, Hidden: hidden, Out: out}, sdk.CodeUnsupported, "wants 77"},
		"second is at fault": {0, sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: len(ids), Tokens: ids}, {Seq: 2, Pos: 1, Rows: len(ids), Tokens: ids}}, Out: out}, sdk.CodeInvalid, "sequence 2"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := p.Stages[c.stage].Step(t.Context(), &c.step); !stagetest.Is(err, c.code, c.want) {
				t.Errorf("%v, want %v with %q", err, c.code, c.want)
			}
		})
	}
	// A refused step changes nothing.
	if got := p.Step(sdk.SeqStep{Seq: 1, Rows: len(ids), Tokens: ids, Prompt: true, Want: sdk.WantToken}); got[0].Token < 0 {
		t.Errorf("%+v", got)
	}
}

func TestStepBeforeLoad(t *testing.T) {
	e := stagetest.New(t, families())
	if err := e.Reserve(t.Context(), sdk.Reservation{Seq: 1}); !stagetest.Is(err, sdk.CodeNotLoaded, "no model") {
		t.Errorf("reserve: %v", err)
	}
	if _, err := e.Step(t.Context(), &sdk.Step{}); !stagetest.Is(err, sdk.CodeNotLoaded, "no model") {
		t.Errorf("step: %v", err)
	}
	if err := e.Unload(t.Context()); err != nil {
		t.Errorf("unload: %v", err)
	}
}

// Hidden rows that are no numbers must end in an error, never in a token.
func TestNaNLogitsAreAnError(t *testing.T) {
	p := stagetest.Open(t, families(), filepath.Join(parityRoot, "llama-tied-q4"), stagetest.Options{Stages: 2, Dtype: sdk.DtypeFloat32})
	p.Reserve(sdk.Reservation{Seq: 1})
	hidden := make([]byte, 128*4)
	nan := math.Float32bits(float32(math.NaN()))
	for i := range 4 {
		hidden[i] = byte(nan >> (8 * i))
	}
	s := &sdk.Step{Seqs: []sdk.SeqStep{{Seq: 1, Rows: 1, Tokens: []int32{5}, Want: sdk.WantToken}}, Hidden: sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: 1, Width: 128, Data: hidden}}
	if _, err := p.Stages[1].Step(t.Context(), s); !stagetest.Is(err, sdk.CodeInternal, "NaN") {
		t.Fatalf("%v, want an error about NaN", err)
	}
	s.Seqs[0].Pos = 1
	if _, err := p.Stages[1].Step(t.Context(), s); !stagetest.Is(err, sdk.CodeInvalid, "broke in an earlier step") {
		t.Errorf("%v, want the sequence refused", err)
	}
}

// A context that ends within a chunk stops the step between two layers.
func TestCancelWithinAStep(t *testing.T) {
	p := stagetest.Open(t, families(), filepath.Join(parityRoot, "llama-tied-q4"), stagetest.Options{})
	p.Reserve(sdk.Reservation{Seq: 1})
	ids := slices.Repeat([]int32{7}, 64)
	ctx := &endsAfter{Context: t.Context(), checks: 3}
	if _, err := p.TryStep(ctx, sdk.SeqStep{Seq: 1, Rows: len(ids), Tokens: ids, Prompt: true}); sdk.CodeOf(err) != sdk.CodeCanceled {
		t.Fatalf("%v, want it canceled", err)
	}
	p.Release(1)
	stats, err := p.Stages[0].Stats(t.Context())
	if err != nil || stats.Sequences != 0 || stats.StateBytes != 0 || stats.Steps != 0 {
		t.Errorf("%+v %v", stats, err)
	}
}

// endsAfter is a context that ends once it was asked a number of times.
type endsAfter struct {
	context.Context
	checks int
}

func (c *endsAfter) Err() error {
	if c.checks--; c.checks < 0 {
		return context.Canceled
	}
	return nil
}

func TestKVBudget(t *testing.T) {
	dir := filepath.Join(parityRoot, "llama-tied-q4")
	const block = 6 * 64 * (2 * 2 * 32 * 2) // 64 positions in 6 layers: 2 heads of 32, keys and values, 2 bytes each
	p := stagetest.Open(t, families(), dir, stagetest.Options{KVBudget: 3 * block})
	e := p.Stages[0]
	ids := slices.Repeat([]int32{7}, 64)
	bytes := func(want int64) {
		t.Helper()
		if s, err := e.Stats(t.Context()); err != nil || s.StateBytes != want {
			t.Errorf("%d bytes of state (%v), want %d", s.StateBytes, err, want)
		}
	}
	p.Reserve(sdk.Reservation{Seq: 1, MaxLen: 128})
	bytes(0)
	p.Reserve(sdk.Reservation{Seq: 2})
	if err := e.Reserve(t.Context(), sdk.Reservation{Seq: 3, MaxLen: 65}); !stagetest.Is(err, sdk.CodeOutOfMemory, "196608 of the budget of 294912") {
		t.Errorf("beyond what is promised: %v", err)
	}
	p.Step(sdk.SeqStep{Seq: 2, Rows: len(ids), Tokens: ids})
	bytes(block)
	if _, err := p.TryStep(t.Context(), sdk.SeqStep{Seq: 2, Pos: 64, Rows: 1, Tokens: ids[:1]}); !stagetest.Is(err, sdk.CodeOutOfMemory, "sequence 2 needs 98304 bytes more") {
		t.Errorf("into another's promise: %v", err)
	}
	p.Step(sdk.SeqStep{Seq: 1, Rows: len(ids), Tokens: ids})
	p.Step(sdk.SeqStep{Seq: 1, Pos: 64, Rows: len(ids), Tokens: ids})
	bytes(3 * block)
	p.Step(sdk.SeqStep{Seq: 1, Pos: 63, Rows: 1, Tokens: ids[:1]}) // goes back
	bytes(2 * block)
	p.Release(1)
	p.Step(sdk.SeqStep{Seq: 2, Pos: 64, Rows: 1, Tokens: ids[:1]})
	bytes(2 * block)
	p.Reserve(sdk.Reservation{Seq: 4, From: 2, Keep: 65})
	bytes(2 * block) // what both hold counts once
	p.Step(sdk.SeqStep{Seq: 4, Pos: 65, Rows: 1, Tokens: ids[:1]})
	bytes(3 * block)
	p.Reserve(sdk.Reservation{Seq: 5, From: 4, Keep: 66})
	if _, err := p.TryStep(t.Context(), sdk.SeqStep{Seq: 5, Pos: 66, Rows: 1, Tokens: ids[:1]}); !stagetest.Is(err, sdk.CodeOutOfMemory, "sequence 5") {
		t.Errorf("a copy of a shared block beyond the budget: %v", err)
	}
	p.Release(4)
	p.Release(5)
	p.Release(2)
	bytes(0)
}

// Scores of a whole prompt go through the head in groups; they equal those asked for one by one.
func TestScoresOfManyRows(t *testing.T) {
	dir := filepath.Join(parityRoot, "llama-untied-q4")
	ids := stagetest.ReadGolden(t, dir, "golden_f32.json").Runs[1].IDs
	p := stagetest.Open(t, families(), dir, stagetest.Options{})
	n := len(ids) - 1
	p.Reserve(sdk.Reservation{Seq: 1})
	all := p.Step(sdk.SeqStep{Seq: 1, Rows: n, Tokens: ids[:n], Prompt: true, Want: sdk.WantScores, Targets: ids[1:]})[0].Scores
	if len(all) != n {
		t.Fatalf("%d scores for %d rows", len(all), n)
	}
	p.Reserve(sdk.Reservation{Seq: 2})
	for i := range n {
		one := p.Step(sdk.SeqStep{Seq: 2, Pos: i, Rows: 1, Tokens: ids[i : i+1], Prompt: true, Want: sdk.WantScores, Targets: ids[i+1 : i+2]})[0].Scores
		if len(one) != 1 || one[0] != all[i] {
			t.Fatalf("row %d: %v alone, %v together", i, one, all[i])
		}
	}
}

// Penalties forget what going back takes, and a sequence that begins with what another holds has a count of its own: the same
// continuation comes again.
func TestPenaltiesFollowRewindAndShare(t *testing.T) {
	dir := filepath.Join(parityRoot, "llama-untied-q4")
	ids := stagetest.ReadGolden(t, dir, "golden_f32.json").Runs[0].IDs
	p := stagetest.Open(t, families(), dir, stagetest.Options{Stages: 2})
	sampler := sdk.Sampler{FrequencyPenalty: 2, RepetitionPenalty: 1.3}
	p.Reserve(sdk.Reservation{Seq: 1, Prompt: ids, Sampler: sampler})
	p.Reserve(sdk.Reservation{Seq: 3, Prompt: ids})
	want := p.Generate(1, ids, 24, 512)
	if plain := p.Generate(3, ids, 24, 512); slices.Equal(plain, want) {
		t.Fatal("the penalties change nothing, so this test shows nothing")
	}
	last := len(ids) - 1
	p.Reserve(sdk.Reservation{Seq: 2, Prompt: ids, Sampler: sampler, From: 1, Keep: len(ids) + 23, Generated: want[:23]})
	p.Reserve(sdk.Reservation{Seq: 4, Prompt: ids, Sampler: sampler, From: 1, Keep: last})
	for _, seq := range []sdk.SeqID{1, 2, 4} {
		step := sdk.SeqStep{Seq: seq, Pos: last, Rows: len(ids[last:]), Tokens: ids[last:], Prompt: true, Want: sdk.WantToken}
		if got := p.Continue(step, 24); !slices.Equal(got, want) {
			t.Errorf("sequence %d: %v, before %v", seq, got, want)
		}
	}
}

func TestDescribe(t *testing.T) {
	d, err := stagetest.New(t, families()).Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d.Name != "test" || d.Devices[0].Kind != "cpu" || d.Devices[0].TotalMemory <= 0 ||
		d.Devices[0].Numerics != (sdk.Numerics{BatchInvariant: true, ChunkInvariant: true}) || !strings.HasPrefix(d.Runtime, "mlx 0.") || len(d.Families) != len(families()) {
		t.Errorf("%+v", d)
	}
}

func TestImportOfUnknownContainer(t *testing.T) {
	_, err := stagetest.New(t, families()).Import(t.Context(), sdk.ImportRequest{Format: "gguf", Architecture: "falcon"})
	if !stagetest.Is(err, sdk.CodeUnsupported, "can't import gguf:falcon; it imports [gguf:llama]") {
		t.Errorf("%v", err)
	}
}

// Ten thousand steps with joins and leaves leave nothing behind.
func TestMemoryStaysFlat(t *testing.T) {
	stagetest.Memory(t, families(), filepath.Join(parityRoot, "llama-tied-q4"), 4<<20)
}
