package sdktest

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
)

// rowBytes is what the tiny model's caches keep of one position.
const rowBytes = int64(layers) * 2 * 4 * 12

// goesBack tells whether a step makes the sequence go back.
func (b *saboteur) goesBack(q *sdk.SeqStep) bool { return q.Pos < b.lengths[q.Seq] }

// renumber makes a before hook by which sequences continue elsewhere than the host says: shift tells by how much.
func renumber(shift func(q *sdk.SeqStep) int) func(context.Context, *sdk.Step) error {
	return func(_ context.Context, s *sdk.Step) error {
		for i := range s.Seqs {
			s.Seqs[i].Pos += shift(&s.Seqs[i])
		}
		return nil
	}
}

// forgiving makes a hook that takes errors with the text for success.
func forgiving(text string) func(error) error {
	return func(err error) error {
		if err != nil && strings.Contains(err.Error(), text) {
			return nil
		}
		return err
	}
}

// imported is a bring hook that changes the error of every import.
func (b *saboteur) imported(change func(error) error) {
	b.bring = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
		return change(b.Executor.ImportState(ctx, seq, layers, r))
	}
}

// rewritten is an export hook that changes every section on its way out.
func (b *saboteur) rewritten(change func(*section)) {
	b.export = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error {
		var raw bytes.Buffer
		own := sdk.NewStateWriter(&raw, leakyrnn.Family, layers)
		if err := b.Executor.ExportState(ctx, seq, layers, own); err != nil {
			return err
		}
		if _, err := own.Close(); err != nil {
			return err
		}
		header, sections, err := parse(raw.Bytes())
		if err != nil {
			return err
		}
		if err := w.Begin(header.Positions); err != nil {
			return err
		}
		for i := range sections {
			change(&sections[i])
			to, err := w.Section(sections[i].StateSection)
			if err != nil {
				return err
			}
			if _, err := to.Write(sections[i].rows); err != nil {
				return err
			}
		}
		return nil
	}
}

// without returns capabilities but for one.
func without(capabilities []string, lacking string) []string {
	return slices.DeleteFunc(slices.Clone(capabilities), func(c string) bool { return c == lacking })
}

// sabotageOfStates lists faults in what becomes of a sequence's state. The check must find each by what it says.
var sabotageOfStates = []struct {
	check string
	fault string
	says  string
	build func(b *saboteur)
}{
	{"share", "who it was kept of goes another way", "the sequence that it was kept of", func(b *saboteur) {
		lent := map[sdk.SeqID]bool{}
		b.reserve = func(r *sdk.Reservation) { lent[r.From] = r.Keep > 0 }
		b.after = answers(func(s *sdk.Step, i int, r *sdk.SeqResult) {
			if lent[s.Seqs[i].Seq] {
				r.Logprob--
			}
		})
	}},
	{"share", "what was kept can't be kept once more", "of one that had kept them", func(b *saboteur) {
		kept, twice := map[sdk.SeqID]bool{}, map[sdk.SeqID]bool{}
		b.reserve = func(r *sdk.Reservation) {
			kept[r.Seq] = r.Keep > 0
			twice[r.Seq] = r.Keep > 0 && kept[r.From]
		}
		b.after = answers(func(s *sdk.Step, i int, r *sdk.SeqResult) {
			if twice[s.Seqs[i].Seq] {
				r.Logprob--
			}
		})
	}},
	{"share errors", "nothing is kept of an unknown sequence", "unknown sequence", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) {
			if _, ok := b.lengths[r.From]; !ok {
				r.Keep = 0
			}
		}
	}},
	{"share errors", "a reservation that failed leaves the sequence", "is reserved already", func(b *saboteur) {
		b.reserved = func(r sdk.Reservation, err error) error {
			if err != nil {
				_ = b.Executor.Reserve(context.Background(), sdk.Reservation{Seq: r.Seq})
			}
			return err
		}
	}},
	{"share counts", "the books forget what the second owner holds", "the sequence that is left holds", func(b *saboteur) {
		lost := int64(0)
		pair := map[sdk.SeqID]sdk.SeqID{}
		b.reserve = func(r *sdk.Reservation) {
			if r.Keep > 0 {
				pair[r.Seq], pair[r.From] = r.From, r.Seq
			}
		}
		b.release = func(seq sdk.SeqID) bool {
			if other, ok := pair[seq]; ok {
				delete(pair, seq)
				if _, ok := pair[other]; ok {
					lost = rowBytes
				} else {
					lost = 0
				}
			}
			return false
		}
		b.stats = func(s *sdk.Stats) { s.StateBytes -= lost }
	}},
	{"rewind", "a snapshot serves once", "back by", func(b *saboteur) {
		back := map[sdk.SeqID]int{}
		b.before = func(_ context.Context, s *sdk.Step) error {
			for i := range s.Seqs {
				if b.goesBack(&s.Seqs[i]) {
					back[s.Seqs[i].Seq]++
				}
			}
			return nil
		}
		b.after = answers(func(s *sdk.Step, i int, r *sdk.SeqResult) {
			if back[s.Seqs[i].Seq] > 1 {
				r.Logprob--
			}
		})
	}},
	{"rewind penalties", "what comes after going back is not counted", "under penalties", func(b *saboteur) {
		back := map[sdk.SeqID]bool{}
		b.before = func(_ context.Context, s *sdk.Step) error {
			for i := range s.Seqs {
				q := &s.Seqs[i]
				back[q.Seq] = back[q.Seq] || b.goesBack(q)
				q.Prompt = q.Prompt || back[q.Seq]
			}
			return nil
		}
	}},
	{"rewind refused", "the sequence goes on at its end", "went well", func(b *saboteur) {
		b.before = renumber(func(q *sdk.SeqStep) int { return max(0, b.lengths[q.Seq]-q.Pos) })
	}},
	{"rewind refused", "more snapshots are held than were reserved", "going back to position 10", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Snapshots++ }
	}},
	{"rewind refused", "snapshots of what was dropped stay", "taken before the sequence went back", func(b *saboteur) {
		b.after = func(s *sdk.Step, r *sdk.StepResult, err error) (*sdk.StepResult, error) {
			if sdk.CodeOf(err) == sdk.CodeUnsupported && err != nil && len(s.Seqs) == 1 {
				again := *s
				again.Seqs = slices.Clone(s.Seqs)
				again.Seqs[0].Pos = b.lengths[s.Seqs[0].Seq]
				return b.Executor.Step(context.Background(), &again)
			}
			return r, err
		}
	}},
	{"generated", "it is forgotten where a state comes in", "were imported", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) {
			if r.Keep == 0 {
				r.Generated = nil
			}
		}
	}},
	{"generated", "it is taken for prompt", "under penalties", func(b *saboteur) {
		b.reserve = func(r *sdk.Reservation) { r.Prompt, r.Generated = slices.Concat(r.Prompt, r.Generated), nil }
	}},
	{"state", "a bit is lost on the way", "became", func(b *saboteur) {
		b.rewritten(func(s *section) {
			for i := 0; i < len(s.rows); i += 4 {
				nudge(s.rows[i:])
			}
		})
	}},
	{"state", "the last position is left out", "ends at position", func(b *saboteur) {
		b.rewritten(func(s *section) {
			if s.Kind == sdk.StateKV {
				s.Rows--
				s.rows = s.rows[:s.Rows*(s.KeyWidth+s.ValueWidth)*s.Dtype.Size()]
			}
		})
	}},
	{"state", "no two exports are the same", "two exports of the same state differ", func(b *saboteur) {
		n := byte(0)
		b.rewritten(func(s *section) { n++; s.rows[0] ^= n })
	}},
	{"state", "it must come from the same split", "stages to", func(b *saboteur) {
		b.bring = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
			if r.Header().Layers != layers {
				return sdk.Errorf(sdk.CodeInvalid, "another split")
			}
			return b.Executor.ImportState(ctx, seq, layers, r)
		}
	}},
	{"state layers", "lengths are not compared", "fewer positions", func(b *saboteur) { b.imported(forgiving("does not fit")) }},
	{"state layers", "a state is overwritten", "into a sequence with a state", func(b *saboteur) { b.imported(forgiving("has a state of")) }},
	{"state layers", "other layers in the file are taken for one's own", "import one layer", func(b *saboteur) {
		b.bring = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
			return b.Executor.ImportState(ctx, seq, sdk.LayerRange{Start: 0, End: layers.End}, r)
		}
	}},
	{"state errors", "shapes are not looked at", "went well", func(b *saboteur) { b.imported(forgiving("brings the section")) }},
	{"state errors", "missing layers are not noticed", "went well", func(b *saboteur) { b.imported(forgiving("the state lacks layer")) }},
	{"state errors", "damage is not noticed", "went well", func(b *saboteur) { b.imported(forgiving("damaged")) }},
	{"state errors", "the wrong code", "error has the code", func(b *saboteur) {
		b.imported(func(err error) error {
			if err != nil {
				return errors.New("something went wrong")
			}
			return nil
		})
	}},
	{"state errors", "a bad import spoils the sequence", "a good import after bad ones", func(b *saboteur) {
		spoiled := map[sdk.SeqID]bool{}
		b.bring = func(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
			if spoiled[seq] {
				return sdk.Errorf(sdk.CodeInvalid, "sequence %d took a state before", seq)
			}
			err := b.Executor.ImportState(ctx, seq, layers, r)
			spoiled[seq] = err != nil && sdk.CodeOf(err) != sdk.CodeUnknownSequence
			return err
		}
	}},
	{"split", "later stages want token ids", "no token ids", func(b *saboteur) {
		b.before = func(_ context.Context, s *sdk.Step) error {
			if s.Hidden.Rows > 0 && len(s.Seqs[0].Tokens) == 0 {
				return sdk.Errorf(sdk.CodeInvalid, "no token ids")
			}
			return nil
		}
	}},
	{"needs", "token ids beside hidden rows are not counted", "under penalties", func(b *saboteur) {
		b.before = func(_ context.Context, s *sdk.Step) error {
			for i := range s.Seqs {
				s.Seqs[i].Prompt = s.Seqs[i].Prompt || s.Hidden.Rows > 0
			}
			return nil
		}
	}},
	{"capabilities", "going back is refused for another reason", `must name the capability "rewind"`, func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Capabilities = without(d.Capabilities, sdk.CapabilityRewind) }
	}},
	{"capabilities", "the sequence goes on at its end", `"rewind", which is not described, went well`, func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Capabilities = without(d.Capabilities, sdk.CapabilityRewind) }
		b.before = renumber(func(q *sdk.SeqStep) int { return max(0, b.lengths[q.Seq]-q.Pos) })
	}},
	{"capabilities", "a name is empty", "is empty", func(b *saboteur) {
		b.describe = func(d *sdk.Description) { d.Capabilities = append(d.Capabilities, "") }
	}},
}

// TestSabotageOfStates breaks the executor in one way after the other; the check named must find each by what it says.
func TestSabotageOfStates(t *testing.T) {
	cfg := tinyConfig(t)
	for _, fault := range sabotageOfStates {
		t.Run(fault.check+": "+fault.fault, func(t *testing.T) {
			err := broken(t, cfg, fault.check, fault.build)
			if err == nil || errors.Is(err, errSkipped) || !strings.Contains(err.Error(), fault.says) {
				t.Errorf("the check found %v, want an error about %q", err, fault.says)
			}
		})
	}
}

// broken runs a check on the example with a fault.
func broken(t *testing.T, cfg Config, name string, build func(*saboteur)) error {
	t.Helper()
	cfg.New = func(logger hclog.Logger) sdk.Executor {
		b := &saboteur{Executor: leakyrnn.New(logger), lengths: map[sdk.SeqID]int{}}
		build(b)
		return b
	}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	m, err := learn(t.Context(), cfg, sdk.DtypeAuto)
	if err != nil {
		return err
	}
	return runCheck(t.Context(), cfg, byName(t, name), m)
}

// limited is the example's executor without a capability, or with one that no host knows.
type limited struct {
	sdk.Executor
	lacks   string
	unknown string
	lengths map[sdk.SeqID]int
}

func (l *limited) Describe(ctx context.Context) (*sdk.Description, error) {
	d, err := l.Executor.Describe(ctx)
	if err == nil {
		d.Capabilities = without(d.Capabilities, l.lacks)
		if l.unknown != "" {
			d.Capabilities = append(d.Capabilities, l.unknown)
		}
	}
	return d, err
}

func (l *limited) Reserve(ctx context.Context, r sdk.Reservation) error {
	err := l.Executor.Reserve(ctx, r)
	if err == nil {
		l.lengths[r.Seq] = r.Keep
	}
	return err
}

func (l *limited) ImportState(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
	err := l.Executor.ImportState(ctx, seq, layers, r)
	if err == nil {
		l.lengths[seq] = r.Header().Positions
	}
	return err
}

func (l *limited) Step(ctx context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	for i := range s.Seqs {
		if q := &s.Seqs[i]; l.lacks == sdk.CapabilityRewind && q.Pos < l.lengths[q.Seq] {
			return nil, sdk.Errorf(sdk.CodeUnsupported, "this executor lacks the capability %q", sdk.CapabilityRewind)
		}
	}
	r, err := l.Executor.Step(ctx, s)
	for i := 0; err == nil && i < len(s.Seqs); i++ {
		l.lengths[s.Seqs[i].Seq] = s.Seqs[i].End()
	}
	return r, err
}

// TestLimited lets executors that lack a capability, and say so, pass every check that does not need it.
func TestLimited(t *testing.T) {
	for _, c := range []struct{ lacks, unknown string }{
		{lacks: sdk.CapabilityShare}, {lacks: sdk.CapabilityRewind}, {lacks: sdk.CapabilitySnapshots}, {lacks: sdk.CapabilityState},
		{lacks: sdk.CapabilityMasks}, {lacks: sdk.CapabilityScores}, {lacks: sdk.CapabilityLogits}, {unknown: "telepathy"},
	} {
		t.Run(c.lacks+c.unknown, func(t *testing.T) {
			cfg := tinyConfig(t)
			cfg.MemorySteps, cfg.Cuts = 40, 1
			cfg.New = func(logger hclog.Logger) sdk.Executor {
				return &limited{leakyrnn.New(logger), c.lacks, c.unknown, map[sdk.SeqID]int{}}
			}
			Run(t, cfg)
		})
	}
}
