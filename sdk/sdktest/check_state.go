package sdktest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// Checks of states that leave an executor and come into another.

// scratch makes a file without a name. The caller closes it.
func scratch(content []byte) (*os.File, error) {
	f, err := os.CreateTemp("", "sdktest-state-")
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.Remove(f.Name()), write(f, content)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func write(f *os.File, content []byte) error {
	_, err := f.WriteAt(content, 0)
	return err
}

// export returns what an executor writes of a sequence's layers.
func (s *stage) export(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange) (raw []byte, report sdk.StateReport, err error) {
	f, err := scratch(nil)
	if err != nil {
		return nil, report, err
	}
	defer f.Close()
	number, err := s.client.Hand(sdk.PurposeState, f)
	if err != nil {
		return nil, report, err
	}
	report, err = s.move(ctx, sdk.StateExport{Seq: seq, Layers: layers, Descriptor: number})
	if err != nil {
		return nil, report, err
	}
	raw, err = io.ReadAll(io.NewSectionReader(f, 0, 1<<40))
	return raw, report, err
}

// importState lets an executor read layers of a sequence.
func (s *stage) importState(ctx context.Context, seq sdk.SeqID, layers sdk.LayerRange, raw []byte) (report sdk.StateReport, err error) {
	f, err := scratch(raw)
	if err != nil {
		return report, err
	}
	defer f.Close()
	number, err := s.client.Hand(sdk.PurposeState, f)
	if err != nil {
		return report, err
	}
	return s.move(ctx, sdk.StateImport{Seq: seq, Layers: layers, Descriptor: number})
}

func (s *stage) move(ctx context.Context, op sdk.Op) (sdk.StateReport, error) {
	answer, err := s.stream.Send(op)
	if err != nil {
		return sdk.StateReport{}, err
	}
	return answer.WaitState(ctx)
}

// exportAll exports a sequence from every stage.
func (p *pipe) exportAll(ctx context.Context, seq sdk.SeqID, positions int) (files [][]byte, err error) {
	for _, s := range p.stages {
		raw, report, err := s.export(ctx, seq, s.layers)
		if err != nil {
			return nil, fmt.Errorf("export layers [%d, %d): %w", s.layers.Start, s.layers.End, err)
		}
		if report.Positions != positions || report.Bytes != int64(len(raw)) {
			return nil, fmt.Errorf("the export reports %d positions and %d bytes, there are %d and %d", report.Positions, report.Bytes, positions, len(raw))
		}
		if err := checkSections(raw, s.layers, positions); err != nil {
			return nil, err
		}
		files = append(files, raw)
	}
	return files, nil
}

// importAll imports into every stage what the files hold of its layers.
func (p *pipe) importAll(ctx context.Context, seq sdk.SeqID, files [][]byte) error {
	for _, s := range p.stages {
		for _, raw := range files {
			r, err := sdk.NewStateReader(bytes.NewReader(raw), "")
			if err != nil {
				return err
			}
			layers := r.Header().Layers
			layers.Start, layers.End = max(layers.Start, s.layers.Start), min(layers.End, s.layers.End)
			if layers.Start >= layers.End {
				continue
			}
			report, err := s.importState(ctx, seq, layers, raw)
			if err != nil {
				return fmt.Errorf("import layers [%d, %d): %w", layers.Start, layers.End, err)
			}
			if report.Positions != r.Header().Positions {
				return fmt.Errorf("the import reports %d positions of %d", report.Positions, r.Header().Positions)
			}
		}
	}
	return nil
}

// checkSections reads an export as the contract lays it out.
func checkSections(raw []byte, layers sdk.LayerRange, positions int) error {
	header, sections, err := parse(raw)
	if err != nil {
		return fmt.Errorf("an export can't be read: %w", err)
	}
	if header.Layers != layers || header.Positions != positions {
		return fmt.Errorf("the export says %+v, want layers [%d, %d) of %d positions", header, layers.Start, layers.End, positions)
	}
	for _, s := range sections {
		if s.Kind != sdk.StateRecurrent && s.First+s.Rows != positions {
			return fmt.Errorf("section %+v ends at position %d of %d", s.StateSection, s.First+s.Rows, positions)
		}
	}
	return nil
}

// section is one of an export, with its rows.
type section struct {
	sdk.StateSection
	rows []byte
}

func parse(raw []byte) (sdk.StateHeader, []section, error) {
	r, err := sdk.NewStateReader(bytes.NewReader(raw), "")
	if err != nil {
		return sdk.StateHeader{}, nil, err
	}
	var list []section
	for {
		s, rows, err := r.Next()
		if errors.Is(err, io.EOF) {
			return r.Header(), list, nil
		}
		if err != nil {
			return r.Header(), nil, err
		}
		list = append(list, section{s, bytes.Clone(rows)})
	}
}

// compose is the reverse of parse.
func compose(header sdk.StateHeader, sections []section) ([]byte, error) {
	var out bytes.Buffer
	w := sdk.NewStateWriter(&out, header.Family, header.Layers)
	if err := w.Begin(header.Positions); err != nil {
		return nil, err
	}
	for _, s := range sections {
		to, err := w.Section(s.StateSection)
		if err != nil {
			return nil, err
		}
		if _, err := to.Write(s.rows); err != nil {
			return nil, err
		}
	}
	_, err := w.Close()
	return out.Bytes(), err
}

// all is the range of all layers.
func (r *rig) all() sdk.LayerRange { return sdk.LayerRange{End: len(r.profile.Layers)} }

// checkState moves sequences into another executor, under the same split and under others, and lets both go on.
func checkState(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityState); err != nil {
		return err
	}
	whole, err := r.open(ctx)
	if err != nil {
		return err
	}
	pipes := []*pipe{whole}
	for _, cuts := range r.otherSplits() {
		p, err := r.open(ctx, cuts...)
		if err != nil {
			return err
		}
		pipes = append(pipes, p)
	}
	for _, length := range append(r.lengths(), 0) {
		for i, from := range pipes {
			for k, to := range pipes {
				// Through the whole and back covers every split.
				if i != k && (i == 0 || k == 0) {
					if err := r.moveState(ctx, from, to, length); err != nil {
						return fmt.Errorf("%d positions from %d stages to %d: %w", length, len(from.stages), len(to.stages), err)
					}
				}
			}
		}
	}
	return nil
}

// otherSplits are those that a state is moved between beside the whole: into another whole, and into two stages.
func (r *rig) otherSplits() [][]int {
	splits := [][]int{nil}
	if cuts := r.cuts(); len(cuts) > 0 {
		splits = append(splits, cuts[len(cuts)/2:len(cuts)/2+1])
	}
	return splits
}

func (r *rig) moveState(ctx context.Context, from, to *pipe, length int) error {
	tokens := r.madeUp(length+ownPrompt, 3)
	res := sdk.Reservation{Seq: r.seq(), Prompt: tokens, Sampler: hot}
	for _, p := range []*pipe{from, to} {
		if err := p.do(ctx, res); err != nil {
			return err
		}
	}
	if err := r.prefill(ctx, from, res.Seq, tokens[:length]); err != nil {
		return err
	}
	files, err := from.exportAll(ctx, res.Seq, length)
	if err != nil {
		return err
	}
	again, err := from.exportAll(ctx, res.Seq, length)
	if err != nil {
		return err
	}
	if !slices.EqualFunc(files, again, bytes.Equal) {
		return errors.New("two exports of the same state differ")
	}
	if err := to.importAll(ctx, res.Seq, files); err != nil {
		return err
	}
	want, err := r.walk(from, res.Seq, length, tokens[length:]).goOn(ctx, r.cfg.Generate)
	if err != nil {
		return fmt.Errorf("after the export: %w", err)
	}
	got, err := r.walk(to, res.Seq, length, tokens[length:]).goOn(ctx, r.cfg.Generate)
	if err != nil {
		return fmt.Errorf("after the import: %w", err)
	}
	if err := want.equal(got); err != nil {
		return err
	}
	return errors.Join(release(ctx, from, res.Seq), release(ctx, to, res.Seq))
}

// checkStateLayers moves a sequence layer by layer. It is whole when all have come, and not before.
func checkStateLayers(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityState); err != nil {
		return err
	}
	n := len(r.profile.Layers)
	if n < 2 {
		return fmt.Errorf("%w: the model has one layer", errSkipped)
	}
	from, err := r.open(ctx)
	if err != nil {
		return err
	}
	to, err := r.open(ctx)
	if err != nil {
		return err
	}
	const length = 20
	tokens := r.madeUp(length+ownPrompt, 3)
	res := sdk.Reservation{Seq: r.seq(), Prompt: tokens}
	short := res
	short.Seq = r.seq()
	for _, seq := range []sdk.Reservation{res, short} {
		if err := from.do(ctx, seq); err != nil {
			return err
		}
	}
	if err := to.do(ctx, res); err != nil {
		return err
	}
	if err := r.prefill(ctx, from, res.Seq, tokens[:length]); err != nil {
		return err
	}
	if err := r.prefill(ctx, from, short.Seq, tokens[:length-1]); err != nil {
		return err
	}
	source, target := from.stages[0], to.stages[0]
	whole, _, err := source.export(ctx, res.Seq, r.all())
	if err != nil {
		return err
	}
	shorter, _, err := source.export(ctx, short.Seq, r.all())
	if err != nil {
		return err
	}
	// The last layer comes first, from an export of its own; the others come out of one that holds all.
	last := sdk.LayerRange{Start: n - 1, End: n}
	lastAlone, _, err := source.export(ctx, res.Seq, last)
	if err != nil {
		return fmt.Errorf("export one layer: %w", err)
	}
	if _, err := target.importState(ctx, res.Seq, last, lastAlone); err != nil {
		return fmt.Errorf("import one layer: %w", err)
	}
	if err := r.halfImported(ctx, to, res, whole, shorter, last); err != nil {
		return err
	}
	for l := range n - 1 {
		if _, err := target.importState(ctx, res.Seq, sdk.LayerRange{Start: l, End: l + 1}, whole); err != nil {
			return fmt.Errorf("import layer %d out of an export of all: %w", l, err)
		}
	}
	want, err := r.walk(from, res.Seq, length, tokens[length:]).goOn(ctx, r.cfg.Generate)
	if err != nil {
		return err
	}
	got, err := r.walk(to, res.Seq, length, tokens[length:]).goOn(ctx, r.cfg.Generate)
	if err != nil {
		return fmt.Errorf("after all layers have come: %w", err)
	}
	if err := want.equal(got); err != nil {
		return fmt.Errorf("a state that came layer by layer: %w", err)
	}
	_, err = target.importState(ctx, res.Seq, r.all(), whole)
	return wantCode("an import into a sequence with a state", err, sdk.CodeInvalid)
}

// halfImported looks at a sequence of whose layers the last has come alone.
func (r *rig) halfImported(ctx context.Context, to *pipe, res sdk.Reservation, whole, shorter []byte, last sdk.LayerRange) error {
	header, _, err := parse(whole)
	if err != nil {
		return err
	}
	for _, pos := range []int{header.Positions, 0} {
		_, err = to.ask(ctx, sdk.SeqStep{Seq: res.Seq, Pos: pos, Tokens: res.Prompt[:1], Prompt: true, Want: sdk.WantToken})
		codes := []sdk.Code{sdk.CodeInvalid}
		if pos < header.Positions && !r.has(sdk.CapabilityRewind) {
			codes = append(codes, sdk.CodeUnsupported)
		}
		if err := wantCode(fmt.Sprintf("a step at position %d before all layers have come", pos), err, codes...); err != nil {
			return err
		}
	}
	target := to.stages[0]
	_, err = target.importState(ctx, res.Seq, last, whole)
	if err := wantCode("a layer that comes twice", err, sdk.CodeInvalid); err != nil {
		return err
	}
	_, err = target.importState(ctx, res.Seq, sdk.LayerRange{End: last.Start}, shorter)
	return wantCode("layers with fewer positions than those that came before", err, sdk.CodeInvalid, sdk.CodeCorrupt)
}

// damage is a way to spoil an export.
type damage struct {
	what  string
	spoil func(raw []byte, header sdk.StateHeader, sections []section) ([]byte, error)
}

// cut keeps the beginning of the file.
func cut(at func(size int) int) func([]byte, sdk.StateHeader, []section) ([]byte, error) {
	return func(raw []byte, _ sdk.StateHeader, _ []section) ([]byte, error) { return raw[:at(len(raw))], nil }
}

// flip turns a bit over.
func flip(at func(size int) int) func([]byte, sdk.StateHeader, []section) ([]byte, error) {
	return func(raw []byte, _ sdk.StateHeader, _ []section) ([]byte, error) {
		raw[at(len(raw))] ^= 1
		return raw, nil
	}
}

// another composes the file anew, sound but not what the model has.
func another(change func(h *sdk.StateHeader, list []section) []section) func([]byte, sdk.StateHeader, []section) ([]byte, error) {
	return func(_ []byte, h sdk.StateHeader, list []section) ([]byte, error) {
		list = change(&h, list)
		return compose(h, list)
	}
}

// lastOf changes the last section.
func lastOf(change func(s *section)) func(*sdk.StateHeader, []section) []section {
	return func(_ *sdk.StateHeader, list []section) []section {
		change(&list[len(list)-1])
		return list
	}
}

// endBytes are behind a file's last row: its checksum and the empty part.
const endBytes = 4 + 8

func damages() []damage {
	return []damage{
		{"an empty file", cut(func(int) int { return 0 })},
		{"a file that is cut off in its header", cut(func(int) int { return 20 })},
		{"a file that is cut off in the middle", cut(func(n int) int { return n / 2 })},
		{"a file whose last row is cut off", cut(func(n int) int { return n - endBytes - 1 })},
		{"a file of another kind", flip(func(int) int { return 0 })},
		{"a file with a wrong bit in its header", flip(func(int) int { return 14 })},
		{"a file with a wrong bit in the middle", flip(func(n int) int { return n / 2 })},
		{"a file with a wrong bit in its last row", flip(func(n int) int { return n - endBytes - 1 })},
		{"a state of another family", another(func(h *sdk.StateHeader, list []section) []section { h.Family = "no such family"; return list })},
		{"a state without its last section", another(func(_ *sdk.StateHeader, list []section) []section { return list[:len(list)-1] })},
		{"a state without its first section", another(func(_ *sdk.StateHeader, list []section) []section { return list[1:] })},
		{"a state with twice the width", another(lastOf(func(s *section) {
			s.KeyWidth, s.ValueWidth = 2*s.KeyWidth, 2*s.ValueWidth
			s.rows = append(s.rows, s.rows...)
		}))},
		{"a state with a row too many", another(lastOf(func(s *section) {
			row := len(s.rows) / s.Rows
			s.Rows++
			s.rows = append(s.rows, s.rows[:row]...)
		}))},
		{"a state of another kind", another(lastOf(func(s *section) {
			if s.First = 0; s.Kind == sdk.StateRecurrent {
				s.Kind = sdk.StateLatent
				return
			}
			s.Kind, s.KeyWidth, s.ValueWidth = sdk.StateRecurrent, s.KeyWidth+s.ValueWidth, 0
		}))},
		{"a state of another dtype", another(lastOf(func(s *section) {
			// The same bytes, or each element's first half.
			other := map[int]sdk.Dtype{4: sdk.DtypeFloat16, 2: sdk.DtypeFloat32}[s.Dtype.Size()]
			if other.Size() > s.Dtype.Size() {
				s.rows = append(s.rows, s.rows...)
			} else {
				s.rows = s.rows[:len(s.rows)/2]
			}
			s.Dtype = other
		}))},
		{"a state with a section of no layer's", another(lastOf(func(s *section) { s.Index += 7 }))},
	}
}

// checkStateErrors imports what is damaged, or is no state of the model. Each must be refused, and leave the sequence as it was.
func checkStateErrors(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityState); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	s := p.stages[0]
	const length = 20
	tokens := r.madeUp(length+ownPrompt, 3)
	res := sdk.Reservation{Seq: r.seq(), Prompt: tokens}
	if err := p.do(ctx, res); err != nil {
		return err
	}
	if err := r.prefill(ctx, p, res.Seq, tokens[:length]); err != nil {
		return err
	}
	raw, _, err := s.export(ctx, res.Seq, r.all())
	if err != nil {
		return err
	}
	want, err := r.walk(p, res.Seq, length, tokens[length:]).goOn(ctx, r.cfg.Generate)
	if err != nil {
		return err
	}
	unknown := r.seq()
	_, _, err = s.export(ctx, unknown, r.all())
	if err := wantCode("an export of an unknown sequence", err, sdk.CodeUnknownSequence); err != nil {
		return err
	}
	_, err = s.importState(ctx, unknown, r.all(), raw)
	if err := wantCode("an import into an unknown sequence", err, sdk.CodeUnknownSequence); err != nil {
		return err
	}
	res.Seq = r.seq()
	if err := p.do(ctx, res); err != nil {
		return err
	}
	before, _, err := p.held(ctx)
	if err != nil {
		return err
	}
	if err := r.importDamaged(ctx, s, res.Seq, raw); err != nil {
		return err
	}
	if err := r.importWrongLayers(ctx, s, res.Seq, raw); err != nil {
		return err
	}
	after, _, err := p.held(ctx)
	if err != nil {
		return err
	}
	if after != before {
		return fmt.Errorf("imports that were refused took the stats from %d to %d bytes of state", before, after)
	}
	if _, err := s.importState(ctx, res.Seq, r.all(), raw); err != nil {
		return fmt.Errorf("a good import after bad ones: %w", err)
	}
	got, err := r.walk(p, res.Seq, length, tokens[length:]).goOn(ctx, r.cfg.Generate)
	if err != nil {
		return fmt.Errorf("after a good import that follows bad ones: %w", err)
	}
	if err := want.equal(got); err != nil {
		return fmt.Errorf("a good import after bad ones: %w", err)
	}
	return nil
}

func (r *rig) importDamaged(ctx context.Context, s *stage, seq sdk.SeqID, raw []byte) error {
	for _, d := range damages() {
		header, sections, err := parse(raw)
		if err != nil {
			return err
		}
		spoiled, err := d.spoil(bytes.Clone(raw), header, sections)
		if err != nil {
			return fmt.Errorf("%s can't be made: %w", d.what, err)
		}
		_, err = s.importState(ctx, seq, r.all(), spoiled)
		if err := wantCode("an import of "+d.what, err, sdk.CodeCorrupt, sdk.CodeInvalid); err != nil {
			return err
		}
	}
	return nil
}

// importWrongLayers asks for layers that the state or the stage does not have.
func (r *rig) importWrongLayers(ctx context.Context, s *stage, seq sdk.SeqID, raw []byte) error {
	n := len(r.profile.Layers)
	_, err := s.importState(ctx, seq, sdk.LayerRange{End: n + 1}, raw)
	if err := wantCode("an import of layers that the stage does not hold", err, sdk.CodeInvalid); err != nil || n < 2 {
		return err
	}
	header, sections, err := parse(raw)
	if err != nil {
		return err
	}
	header.Layers.End--
	kept := slices.DeleteFunc(sections, func(s section) bool { return s.Layer >= header.Layers.End })
	if len(kept) == len(sections) {
		return nil // the last layer has no state
	}
	short, err := compose(header, kept)
	if err != nil {
		return err
	}
	_, err = s.importState(ctx, seq, r.all(), short)
	return wantCode("an import of more layers than the state has", err, sdk.CodeInvalid, sdk.CodeCorrupt)
}
