package kvledger

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// TestSpecification runs the files of testdata. A ledger is opened with
//
//	open [block=<n>] [context=<n>] [preemption] [threshold=<f>]
//	<budget> [cap=<n>] layers=<count>x<bytes per position>[b<block>][w<window>][s<fixed bytes>],…      one line a stage
//
// where block stands for all layers that have none of their own, and used with check, admit, grow, release and rejected;
// each prints what it came to and the books after it.
func TestSpecification(t *testing.T) {
	datadriven.Walk(t, "testdata/spec", func(t *testing.T, path string) {
		var l *Ledger
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "open" {
				var err error
				if l, err = open(t, d); err != nil {
					return err.Error() + "\n"
				}
				return fmt.Sprintf("limit %s\n", positions(l.Limit()))
			}
			if err := carryOut(t, l, d); err != nil {
				return describe(err)
			}
			return books(l)
		})
	})
}

func open(t *testing.T, d *datadriven.TestData) (*Ledger, error) {
	var cfg Config
	threshold := ""
	block := 0
	d.MaybeScanArgs(t, "block", &block)
	d.MaybeScanArgs(t, "context", &cfg.ContextLength)
	d.MaybeScanArgs(t, "threshold", &threshold)
	if threshold != "" {
		if _, err := fmt.Sscan(threshold, &cfg.Threshold); err != nil {
			t.Fatal(err)
		}
	}
	cfg.Preemption = d.HasArg("preemption")
	for line := range strings.Lines(d.Input) {
		cfg.Stages = append(cfg.Stages, parseStage(t, line, block))
	}
	return New(cfg)
}

func parseStage(t *testing.T, line string, block int) Stage {
	var s Stage
	for i, field := range strings.Fields(line) {
		value, isCap := strings.CutPrefix(field, "cap=")
		layers, isLayers := strings.CutPrefix(field, "layers=")
		switch {
		case i == 0:
			s.Budget = bytesOf(t, field)
		case isCap:
			s.MaxSequences = int(bytesOf(t, value))
		case isLayers:
			for layer := range strings.SplitSeq(layers, ",") {
				s.Layers = append(s.Layers, parseLayers(t, layer, block)...)
			}
		default:
			t.Fatalf("stage field %q", field)
		}
	}
	return s
}

func parseLayers(t *testing.T, text string, block int) []sdk.LayerProfile {
	count, rest, _ := strings.Cut(text, "x")
	rest, state, _ := strings.Cut(rest, "s")
	rest, window, _ := strings.Cut(rest, "w")
	perPosition, own, _ := strings.Cut(rest, "b")
	if own != "" {
		block = int(bytesOf(t, own))
	}
	l := layer(sdk.StateProfile{BytesPerPosition: bytesOf(t, perPosition), Window: int(bytesOf(t, window)), Fixed: bytesOf(t, state), Block: block})
	return slices.Repeat([]sdk.LayerProfile{l}, int(bytesOf(t, count)))
}

func layer(states ...sdk.StateProfile) sdk.LayerProfile {
	return sdk.LayerProfile{States: states}
}

// bytesOf reads 12, 12K, 12M or 12G; 0 where there is nothing.
func bytesOf(t *testing.T, text string) int64 {
	if text == "" {
		return 0
	}
	var n int64
	var unit string
	if _, err := fmt.Sscanf(text+" ", "%d%s", &n, &unit); err != nil && unit == "" && n == 0 && text != "0" {
		t.Fatalf("number %q: %v", text, err)
	}
	return n << map[string]int{"": 0, "K": 10, "M": 20, "G": 30}[unit]
}

func carryOut(t *testing.T, l *Ledger, d *datadriven.TestData) error {
	var seq, length, maxLen, stage, from, keep, snapshots int
	d.MaybeScanArgs(t, "seq", &seq)
	d.MaybeScanArgs(t, "length", &length)
	d.MaybeScanArgs(t, "max", &maxLen)
	d.MaybeScanArgs(t, "stage", &stage)
	d.MaybeScanArgs(t, "from", &from)
	d.MaybeScanArgs(t, "keep", &keep)
	d.MaybeScanArgs(t, "snapshots", &snapshots)
	switch d.Cmd {
	case "check":
		return l.Check(length, maxLen)
	case "admit":
		return l.Admit(Sequence{Seq: sdk.SeqID(seq), Length: length, MaxLen: maxLen, From: sdk.SeqID(from), Keep: keep, Snapshots: snapshots})
	case "grow":
		return l.Grow(sdk.SeqID(seq), length)
	case "release":
		l.Release(sdk.SeqID(seq))
	case "rejected":
		return l.Rejected(sdk.SeqID(seq), stage, sdk.Errorf(sdk.CodeOutOfMemory, "out of device memory"))
	case "books":
	default:
		t.Fatalf("unknown command %q", d.Cmd)
	}
	return nil
}

func describe(err error) string {
	var b strings.Builder
	if d, ok := errors.AsType[*AdmissionDiagnostic](err); ok {
		fmt.Fprintf(&b, "stage=%d reason=%s used=%d budget=%d required=%d active=%d\n", d.Stage, d.Reason, d.Used, d.Budget, d.Required, d.ActiveSequences)
	}
	if e, ok := errors.AsType[*TooLongError](err); ok {
		fmt.Fprintf(&b, "too long: prompt=%d max=%d limit=%d stage=%d\n", e.Prompt, e.MaxTokens, e.Limit, e.Stage)
	}
	return b.String() + err.Error() + "\n"
}

func books(l *Ledger) string {
	var b strings.Builder
	for i, u := range l.Usage() {
		fmt.Fprintf(&b, "stage %d: %d of %d bytes, %d sequences", i, u.Used, u.Budget, u.Sequences)
		if u.Pressure {
			b.WriteString(", under pressure")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func positions(n int) string {
	if n == math.MaxInt {
		return "none"
	}
	return fmt.Sprint(n)
}

func TestStagesPricesAPlan(t *testing.T) {
	profile := &sdk.ModelProfile{Layers: []sdk.LayerProfile{
		layer(sdk.StateProfile{BytesPerPosition: 10}), layer(sdk.StateProfile{BytesPerPosition: 20, Window: 128}), layer(sdk.StateProfile{Fixed: 7}),
	}}
	plan := &partition.Plan{Stages: []partition.StageAssignment{{LayerRange: sdk.LayerRange{Start: 0, End: 2}}, {LayerRange: sdk.LayerRange{Start: 2, End: 3}}}}
	stages := Stages(profile, plan, []int64{1000}, 4)
	if len(stages) != 2 || stages[0].Budget != 1000 || stages[1].Budget != 0 || stages[1].MaxSequences != 4 {
		t.Fatalf("got %+v", stages)
	}
	for _, c := range []struct {
		stage, positions int
		want             int64
	}{{0, 0, 0}, {0, 100, 3000}, {0, 1000, 10_000 + 20*128}, {1, 0, 7}, {1, 500, 7}} {
		if got := stages[c.stage].Bytes(c.positions, 0); got != c.want {
			t.Errorf("stage %d at %d positions: %d bytes, want %d", c.stage, c.positions, got, c.want)
		}
	}
}

func TestValidateNamesEveryFault(t *testing.T) {
	_, err := New(Config{ContextLength: -1, Threshold: 2, Stages: []Stage{{Budget: -1}, {Layers: []sdk.LayerProfile{layer(sdk.StateProfile{Window: -1})}}}})
	for _, want := range []string{"context length -1", "threshold 2", "stage 0", "stage 1"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %q", err, want)
		}
	}
}

// Whatever happens, no stage is over its budget or cap, the books are the sum of what the sequences hold, and what is
// refused changes nothing.
func TestBooksAlwaysBalance(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		l, err := New(randomConfig(rng))
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			before := books(l)
			if refused := randomEvent(rng, l); refused && books(l) != before {
				t.Fatalf("seed %d: a refusal changed the books from\n%sto\n%s", seed, before, books(l))
			}
			balance(t, l, seed)
		}
		for seq := range sdk.SeqID(20) {
			l.Release(seq)
		}
		for i, used := range l.used {
			if used != 0 {
				t.Fatalf("seed %d: stage %d has %d bytes with no sequence", seed, i, used)
			}
		}
	}
}

func randomConfig(rng *rand.Rand) Config {
	cfg := Config{Preemption: rng.IntN(2) == 0}
	blocks := []int{1 + rng.IntN(64), 1 + rng.IntN(64)}
	if rng.IntN(2) == 0 {
		cfg.ContextLength = 1 + rng.IntN(5000)
	}
	for range 1 + rng.IntN(4) {
		s := Stage{Budget: rng.Int64N(200_000), MaxSequences: rng.IntN(8)}
		for range rng.IntN(5) {
			s.Layers = append(s.Layers, layer(sdk.StateProfile{
				BytesPerPosition: rng.Int64N(10), Window: rng.IntN(3) * 100, Fixed: rng.Int64N(500), Block: blocks[rng.IntN(2)],
			}))
		}
		cfg.Stages = append(cfg.Stages, s)
	}
	return cfg
}

func randomEvent(rng *rand.Rand, l *Ledger) (refused bool) {
	seq, n := sdk.SeqID(rng.IntN(20)), rng.IntN(3000)
	switch rng.IntN(5) {
	case 0, 1:
		s := Sequence{Seq: seq, Length: n, MaxLen: n + rng.IntN(1000), Snapshots: rng.IntN(3)}
		if rng.IntN(2) == 0 {
			s.From, s.Keep = sdk.SeqID(rng.IntN(20)), rng.IntN(n+1)
		}
		return l.Admit(s) != nil
	case 2, 3:
		return l.Grow(seq, n) != nil
	}
	l.Release(seq)
	return false
}

func balance(t *testing.T, l *Ledger, seed uint64) {
	t.Helper()
	for i, stage := range l.cfg.Stages {
		var sum int64
		owners := map[*segment]int{}
		for seq, e := range l.seqs {
			sum += e.own[i]
			held, end := e.own[i], 0
			for _, g := range e.shared {
				if g.start != end || g.end <= g.start || g.bytes[i] < 0 {
					t.Fatalf("seed %d: sequence %d shares a segment [%d, %d) of %d bytes after position %d", seed, seq, g.start, g.end, g.bytes[i], end)
				}
				held, end = held+g.bytes[i], g.end
				if owners[g]++; owners[g] == 1 {
					sum += g.bytes[i]
				}
			}
			if want := stage.Bytes(e.positions, e.snapshots); held != want || e.own[i] < 0 {
				t.Fatalf("seed %d: sequence %d holds %d bytes on stage %d, its %d positions take %d", seed, seq, held, i, e.positions, want)
			}
		}
		for g, n := range owners {
			if g.owners != n {
				t.Fatalf("seed %d: a segment [%d, %d) of %d sequences counts %d owners", seed, g.start, g.end, n, g.owners)
			}
		}
		if sum != l.used[i] {
			t.Fatalf("seed %d: stage %d books %d bytes, its sequences hold %d", seed, i, l.used[i], sum)
		}
		if stage.Budget > 0 && sum > stage.Budget || stage.MaxSequences > 0 && len(l.seqs) > stage.MaxSequences {
			t.Fatalf("seed %d: stage %d holds %d of %d bytes and %d of %d sequences", seed, i, sum, stage.Budget, len(l.seqs), stage.MaxSequences)
		}
	}
}

// A request that Check lets pass is admitted by empty books, and then can grow to its end.
func TestWhatPassesCheckFitsAlone(t *testing.T) {
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 2))
		l, err := New(randomConfig(rng))
		if err != nil {
			t.Fatal(err)
		}
		prompt, most := 1+rng.IntN(3000), rng.IntN(2000)
		admitted := l.Admit(Sequence{Seq: 1, Length: prompt, MaxLen: prompt + most})
		if admitted == nil {
			admitted = l.Grow(1, prompt+most)
		}
		long := l.Check(prompt, most)
		context := l.cfg.ContextLength
		if tooLong := context > 0 && prompt+most > context; long == nil && (admitted != nil || tooLong) {
			t.Errorf("seed %d: %d+%d passes, but: %v", seed, prompt, most, admitted)
		} else if long != nil && admitted == nil && (context == 0 || prompt+most < context) {
			t.Errorf("seed %d: %d+%d fits, but: %v", seed, prompt, most, long)
		}
	}
}
