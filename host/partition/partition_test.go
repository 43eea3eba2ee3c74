package partition

import (
	"errors"
	"fmt"
	"math/rand/v2"
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
//	plan    [size=N] [layers="…"] [micro=N] [actual=a,b,…]     against the model
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
	p := &sdk.ModelProfile{Family: "toy", Tied: d.HasArg("tied")}
	var layers int
	var each int64
	d.MaybeScanArgs(t, "layers", &layers)
	d.MaybeScanArgs(t, "each", &each)
	d.MaybeScanArgs(t, "embedding", &p.Embedding)
	d.MaybeScanArgs(t, "head", &p.Head)
	for range layers {
		p.Layers = append(p.Layers, sdk.LayerProfile{Weights: each})
	}
	for _, arg := range d.CmdArgs {
		switch arg.Key {
		case "weights":
			for _, w := range arg.Vals {
				p.Layers = append(p.Layers, sdk.LayerProfile{Weights: number(t, w)})
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

func plan(t *testing.T, d *datadriven.TestData, profile *sdk.ModelProfile) string {
	p, err := flags(t, d).Plan(profile)
	if err != nil {
		return faults(err)
	}
	var actual []int64
	for _, arg := range d.CmdArgs {
		if arg.Key == "actual" {
			for _, v := range arg.Vals {
				actual = append(actual, number(t, v))
			}
		}
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
		b.WriteByte('\n')
	}
	return b.String() + p.Report(actual) + "\n"
}

// Every layer is on exactly one stage, in order, for any number of layers and stages; uneven counts lose none.
func TestEveryLayerExactlyOnce(t *testing.T) {
	for layers := 1; layers <= 70; layers++ {
		for stages := 1; stages <= min(layers, 9); stages++ {
			profile := &sdk.ModelProfile{Layers: make([]sdk.LayerProfile, layers), Embedding: 7, Head: 9}
			for i := range profile.Layers {
				profile.Layers[i].Weights = 10
			}
			p, err := Even(profile, stages)
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

// The dynamic programme finds what trying every cut finds: the smallest maximum, then the largest minimum, then the
// earliest cuts; and it never cuts a group.
func TestEvenEqualsBruteForce(t *testing.T) {
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 3))
		profile := randomModel(rng)
		k := 1 + rng.IntN(len(profile.Layers))
		want := bruteForce(profile, k)
		got, err := Even(profile, k)
		if want == nil {
			var tooMany *TooManyStagesError
			if !errors.As(err, &tooMany) {
				t.Fatalf("seed %d: got %v, %v, but no legal cut exists", seed, got, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		checkCover(t, got, len(profile.Layers), k)
		if !slices.Equal(got.Stages, want.Stages) {
			t.Fatalf("seed %d:\n got %+v\nwant %+v", seed, got.Stages, want.Stages)
		}
	}
}

func randomModel(rng *rand.Rand) *sdk.ModelProfile {
	n := 1 + rng.IntN(9)
	p := &sdk.ModelProfile{Embedding: rng.Int64N(30), Head: rng.Int64N(40), Tied: rng.IntN(2) == 0}
	for range n {
		p.Layers = append(p.Layers, sdk.LayerProfile{Weights: rng.Int64N(5) * 7})
	}
	for range rng.IntN(3) {
		if source := rng.IntN(n); source+1 < n {
			p.Adjacency = append(p.Adjacency, sdk.AdjacencyGroup{Source: source, Consumer: source + 1 + rng.IntN(n-source-1), Reason: "test"})
		}
	}
	return p
}

// bruteForce tries the cuts in ascending order and keeps the first of the best.
func bruteForce(profile *sdk.ModelProfile, k int) (best *Plan) {
	n := len(profile.Layers)
	var try func(ranges []sdk.LayerRange, start int)
	try = func(ranges []sdk.LayerRange, start int) {
		if len(ranges) == k {
			if start != n || len(checkAdjacency(profile.Adjacency, ranges)) > 0 {
				return
			}
			p := newPlan(profile, slices.Clone(ranges))
			if best == nil || evener(p, best) {
				best = p
			}
			return
		}
		for end := start + 1; end <= n; end++ {
			try(append(ranges, sdk.LayerRange{Start: start, End: end}), end)
		}
	}
	try(nil, 0)
	return best
}

func evener(a, b *Plan) bool {
	lowA, highA := a.bounds()
	lowB, highB := b.bounds()
	return highA < highB || highA == highB && lowA > lowB
}

func TestEvenRefusesNonsense(t *testing.T) {
	if _, err := Even(&sdk.ModelProfile{Family: "toy"}, 1); err == nil || !strings.Contains(err.Error(), "no layers") {
		t.Errorf("no layers: %v", err)
	}
	if _, err := (PipelineConfig{Size: new(2)}).Plan(&sdk.ModelProfile{Family: "toy"}); err == nil {
		t.Error("--pp-size 2 of no layers: no error")
	}
	if _, err := Even(&sdk.ModelProfile{Layers: make([]sdk.LayerProfile, 2)}, 0); err == nil {
		t.Error("no stages: no error")
	}
}

func TestManualChecksRangesThatNoFlagMade(t *testing.T) {
	profile := &sdk.ModelProfile{Layers: make([]sdk.LayerProfile, 4)}
	for name, ranges := range map[string][]sdk.LayerRange{
		"none":     nil,
		"empty":    {{Start: 0, End: 0}, {Start: 0, End: 4}},
		"negative": {{Start: -1, End: 4}},
		"past":     {{Start: 0, End: 9}},
	} {
		if p, err := Manual(profile, ranges); err == nil {
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
