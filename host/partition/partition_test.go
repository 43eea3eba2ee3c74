package partition

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/mlxcel/mlxcel/sdk"
)

// The files in testdata/spec read as the specification; -rewrite regenerates their expectations.
//
//	model   layers=N each=BYTES [weights=a,b,…] [embedding=B] [head=B] [tied] [join=SOURCE-CONSUMER]…
//	        [kv=B] [window=N] [state=B] [block=N] [context=N] [packed=QUANTIZATION, "_" for a blank]
//	plan    [size=N] [layers] [micro=N] [actual=a,b,…] [ctx=N] [par=N] [budgets=a,b,…] [shared=N] [advisory]
//	        [speeds=a,b,…]     against the model; with shared, all stages share N bytes; with speeds, by speed
//	check   the same, without a model
func TestSpecification(t *testing.T) {
	datadriven.Walk(t, "testdata/spec", func(t *testing.T, path string) {
		var profile *sdk.ModelProfile
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "model":
				profile = model(t, d)
				return "ok\n"
			case "check":
				return faults(flags(t, d).Validate(nil))
			case "plan":
				return plan(t, d, profile)
			}
			t.Fatalf("unknown command %q", d.Cmd)
			return ""
		})
	})
}

func model(t *testing.T, d *datadriven.TestData) *sdk.ModelProfile {
	p := &sdk.ModelProfile{Family: "toy", Tied: d.HasArg("tied"), Boundary: sdk.Boundary{Dtype: sdk.DtypeBFloat16}}
	var layers int
	var each int64
	state := sdk.StateProfile{Kind: sdk.StateKV}
	d.MaybeScanArgs(t, "kv", &state.BytesPerPosition)
	d.MaybeScanArgs(t, "window", &state.Window)
	d.MaybeScanArgs(t, "state", &state.Fixed)
	d.MaybeScanArgs(t, "block", &state.Block)
	layer := sdk.LayerProfile{States: []sdk.StateProfile{state}}
	d.MaybeScanArgs(t, "context", &p.ContextLength)
	if d.MaybeScanArgs(t, "packed", &p.Quantization); p.Quantization != "" {
		p.Quantization = strings.ReplaceAll(p.Quantization, "_", " ")
	}
	d.MaybeScanArgs(t, "layers", &layers)
	d.MaybeScanArgs(t, "each", &each)
	d.MaybeScanArgs(t, "embedding", &p.Embedding)
	d.MaybeScanArgs(t, "head", &p.Head)
	if p.Tied {
		p.TiedBytes = min(p.Embedding, p.Head)
	}
	for range layers {
		layer.Weights = each
		p.Layers = append(p.Layers, layer)
	}
	for _, arg := range d.CmdArgs {
		switch arg.Key {
		case "weights":
			for _, w := range arg.Vals {
				layer.Weights = number(t, w)
				p.Layers = append(p.Layers, layer)
			}
		case "join":
			from, to, _ := strings.Cut(arg.Vals[0], "-")
			p.Adjacency = append(p.Adjacency, sdk.AdjacencyGroup{Source: int(number(t, from)), Consumer: int(number(t, to)), Reason: "shared keys and values"})
		}
	}
	return p
}

func number(t *testing.T, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// flags reads the flags of a command; the input holds --pp-layers, so that it can be blank.
func flags(t *testing.T, d *datadriven.TestData) (c PipelineConfig) {
	if d.HasArg("size") {
		c.Size = new(int)
		d.ScanArgs(t, "size", c.Size)
	}
	if d.HasArg("micro") {
		c.MicroBatchSize = new(int)
		d.ScanArgs(t, "micro", c.MicroBatchSize)
	}
	if d.HasArg("layers") {
		c.Layers = &d.Input
	}
	return c
}

func faults(err error) string {
	if err == nil {
		return "ok\n"
	}
	return err.Error() + "\n"
}

// request reads what a plan is asked for beside the flags.
func request(t *testing.T, d *datadriven.TestData, profile *sdk.ModelProfile) Request {
	r := Request{Profile: profile}
	d.MaybeScanArgs(t, "ctx", &r.Demand.Context)
	d.MaybeScanArgs(t, "par", &r.Demand.Sequences)
	stages := flags(t, d).Stages()
	shared := Memory{Name: "local", Advisory: d.HasArg("advisory")}
	if d.MaybeScanArgs(t, "shared", &shared.Budget) {
		r.Hardware = Local(stages, shared)
	}
	if budgets := numbers(t, d, "budgets"); budgets != nil {
		r.Hardware = Separate(budgets)
	}
	for _, v := range numbers(t, d, "speeds") {
		r.Objective, r.Speeds = ObjectiveSpeed, append(r.Speeds, float64(v))
	}
	return r
}

// numbers returns the values of an argument, nil where it is not given.
func numbers(t *testing.T, d *datadriven.TestData, key string) (out []int64) {
	for _, arg := range d.CmdArgs {
		if arg.Key == key {
			for _, v := range arg.Vals {
				out = append(out, number(t, v))
			}
		}
	}
	return out
}

func plan(t *testing.T, d *datadriven.TestData, profile *sdk.ModelProfile) string {
	r := request(t, d, profile)
	p, err := flags(t, d).Plan(r)
	if err != nil {
		return faults(err)
	}
	var b strings.Builder
	for _, s := range p.Stages {
		fmt.Fprintf(&b, "%d-%d", s.LayerRange.Start, s.LayerRange.End-1)
		if s.HasEmbedding {
			b.WriteString(" embedding")
		}
		if s.HasLMHead {
			b.WriteString(" head")
		}
		if s.Limited() {
			fmt.Fprintf(&b, " %d of %d", s.EstimatedMemoryBytes, s.BudgetBytes)
		}
		b.WriteByte('\n')
	}
	for _, w := range p.Warnings {
		b.WriteString("warning: " + w + "\n")
	}
	if r.Hardware.Stages != nil {
		return b.String()
	}
	return b.String() + p.Report(numbers(t, d, "actual")) + "\n"
}

// even cuts a model into k stages without a thought to memory.
func even(profile *sdk.ModelProfile, k int) (*Plan, error) {
	return New(Request{Profile: profile, Hardware: Local(k, Memory{Budget: Unlimited})})
}

// Every layer is on exactly one stage, in order, for any number of layers and stages; uneven counts lose none.
func TestEveryLayerExactlyOnce(t *testing.T) {
	for layers := 1; layers <= 70; layers++ {
		for stages := 1; stages <= min(layers, 9); stages++ {
			profile := &sdk.ModelProfile{Layers: make([]sdk.LayerProfile, layers), Embedding: 7, Head: 9}
			for i := range profile.Layers {
				profile.Layers[i].Weights = 10
			}
			p, err := even(profile, stages)
			if err != nil {
				t.Fatalf("%d layers, %d stages: %v", layers, stages, err)
			}
			checkCover(t, p, layers, stages)
			ranges := make([]sdk.LayerRange, stages)
			for i, s := range p.Stages {
				ranges[i] = s.LayerRange
			}
			again, err := ParseRanges(FormatRanges(ranges))
			if err != nil || !slices.Equal(again, ranges) {
				t.Fatalf("%v read back as %v, %v", ranges, again, err)
			}
		}
	}
}

func checkCover(t *testing.T, p *Plan, layers, stages int) {
	t.Helper()
	if len(p.Stages) != stages {
		t.Fatalf("%d layers: %d stages, want %d", layers, len(p.Stages), stages)
	}
	next := 0
	for i, s := range p.Stages {
		if s.StageIndex != i || s.LayerRange.Start != next || s.LayerRange.End <= next {
			t.Fatalf("%d layers, %d stages: stage %d is %+v, want a start at %d", layers, stages, i, s, next)
		}
		if s.HasEmbedding != (i == 0) || s.HasLMHead != (i == stages-1) {
			t.Fatalf("stage %d of %d: embedding %v, head %v", i, stages, s.HasEmbedding, s.HasLMHead)
		}
		next = s.LayerRange.End
	}
	if next != layers {
		t.Fatalf("%d stages end at layer %d of %d", stages, next, layers)
	}
}

func TestNewRefusesNonsense(t *testing.T) {
	if _, err := even(&sdk.ModelProfile{Family: "toy"}, 1); err == nil || !strings.Contains(err.Error(), "no layers") {
		t.Errorf("no layers: %v", err)
	}
	if _, err := (PipelineConfig{Size: new(2)}).Plan(Request{Profile: &sdk.ModelProfile{Family: "toy"}}); err == nil {
		t.Error("--pp-size 2 of no layers: no error")
	}
	if _, err := even(&sdk.ModelProfile{Layers: make([]sdk.LayerProfile, 2)}, 0); err == nil {
		t.Error("no stages: no error")
	}
}

func TestManualChecksRangesThatNoFlagMade(t *testing.T) {
	profile := &sdk.ModelProfile{Layers: make([]sdk.LayerProfile, 4)}
	for name, ranges := range map[string][]sdk.LayerRange{
		"none":     {},
		"empty":    {{Start: 0, End: 0}, {Start: 0, End: 4}},
		"negative": {{Start: -1, End: 4}},
		"past":     {{Start: 0, End: 9}},
	} {
		p, err := New(Request{Profile: profile, Hardware: Local(max(1, len(ranges)), Memory{Budget: Unlimited}), Ranges: ranges})
		if err == nil {
			t.Errorf("%s: got %+v, want an error", name, p)
		}
	}
}

func TestMicroBatchDefault(t *testing.T) {
	if got := (PipelineConfig{}).MicroBatch(); got != 1 {
		t.Errorf("not given: %d, want 1", got)
	}
	if got := (PipelineConfig{MicroBatchSize: new(6)}).MicroBatch(); got != 6 {
		t.Errorf("6 given: %d", got)
	}
}

// What ParseRanges accepts is contiguous from layer 0 and survives a round trip.
func FuzzParseRanges(f *testing.F) {
	f.Fuzz(func(t *testing.T, value string) {
		ranges, err := ParseRanges(value)
		if err != nil {
			return
		}
		next := 0
		for _, r := range ranges {
			if r.Start != next || r.End <= r.Start {
				t.Fatalf("%q gives %v", value, ranges)
			}
			next = r.End
		}
		if again, err := ParseRanges(FormatRanges(ranges)); err != nil || !slices.Equal(again, ranges) {
			t.Fatalf("%q gives %v, which reads back as %v, %v", value, ranges, again, err)
		}
	})
}
