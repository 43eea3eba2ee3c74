package stage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/mlxshared/kernels/cpu"
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// remembering is a family whose layers are little more than their state: one layer for each of the kinds.
type remembering struct{ kinds []string }

const (
	keptWidth  = 32
	keptVocab  = 48
	keptWindow = 20
)

func (r remembering) Info() sdk.Family {
	return sdk.Family{Name: "remembering", ModelTypes: []string{"remembering"}, Pipeline: true, Quantizations: []string{"none"}}
}
func (r remembering) Model(*config.Object) Model { return r }
func (r remembering) Shape() Shape {
	return Shape{Layers: len(r.kinds), Width: keptWidth, Vocab: keptVocab, EmbeddingPath: "embed"}
}
func (r remembering) Embedding(b *nn.Builder) nn.Embedder {
	return nn.NewEmbedding(b, "embed", keptVocab, keptWidth)
}
func (r remembering) Head(b *nn.Builder) nn.Head {
	return nn.NewLMHead(b, nn.NewRMSNorm(b, "norm", keptWidth, 1e-5), "head", keptVocab, keptWidth)
}

func (r remembering) Layer(b *nn.Builder, i int) nn.Layer {
	l := &keptLayer{kind: r.kinds[i]}
	l.spec = mlx.AttentionSpec{Heads: 2, KVHeads: 2, HeadDim: 16, ValueDim: 16, Scale: 0.25}
	kv := nn.KVSpec{KVHeads: 2, KeyDim: 16, ValueDim: 16, Dtype: b.Dtype}
	switch l.kind {
	case "full":
		b.Share("full", len(b.States))
	case "reader": // of the last full layer's cache
		l.slot = b.Shared("full")
		return l
	case "sliding":
		l.spec.Window, kv.Sliding = keptWindow, keptWindow
	case "chunked":
		l.spec.Chunk = keptWindow
	case "latent":
		l.spec = mlx.AttentionSpec{Heads: 1, KVHeads: 1, HeadDim: 32, ValueDim: 16, Scale: 0.25}
		kv = nn.KVSpec{KVHeads: 1, KeyDim: 32, ValueDim: 16, Latent: true, Dtype: b.Dtype}
	case "conv":
		l.conv = nn.NewCausalConv(b, fmt.Sprintf("conv%d", i), keptWidth, 4, false)
		return l
	}
	l.slot = b.AddState(kv)
	return l
}

type keptLayer struct {
	kind string
	spec mlx.AttentionSpec
	conv *nn.CausalConv
	slot int
}

func (l *keptLayer) Kind() string { return l.kind }

func (l *keptLayer) Forward(p *nn.Pass, x mlx.Array) mlx.Array {
	switch l.kind {
	case "conv":
		return p.Add(x, l.conv.Forward(p, x))
	case "reader":
		return p.Add(x, p.Attend(x, mlx.Array{}, mlx.Array{}, &l.spec, l.slot))
	case "latent":
		y := p.Attend(x, x, mlx.Array{}, &l.spec, l.slot)
		return p.Add(x, p.Concat(1, y, y))
	}
	return p.Add(x, p.Attend(x, x, x, &l.spec, l.slot))
}

// keptModel writes a checkpoint of random weights.
func keptModel(t *testing.T, kinds []string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, config.FileName), []byte(`{"model_type": "remembering"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	random := func(name string, shape ...int64) safetensors.Entry {
		size := int64(1)
		for _, d := range shape {
			size *= d
		}
		data := make([]float32, size)
		for i := range data {
			data[i] = float32(r.NormFloat64())
		}
		return safetensors.Entry{Name: name + ".weight", Dtype: "F32", Shape: shape, Write: func(w io.Writer) error {
			_, err := w.Write(floatBytes(data))
			return err
		}}
	}
	entries := []safetensors.Entry{random("embed", keptVocab, keptWidth), random("norm", keptWidth), random("head", keptVocab, keptWidth)}
	for i, kind := range kinds {
		if kind == "conv" {
			entries = append(entries, random(fmt.Sprintf("conv%d", i), keptWidth, 4, 1))
		}
	}
	if err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), nil, entries); err != nil {
		t.Fatal(err)
	}
	return dir
}

// keptStage is a stage with some of the layers.
type keptStage struct {
	t *testing.T
	*Executor
}

func openKept(t *testing.T, kinds []string, dir string, layers sdk.LayerRange, budget int64) *keptStage {
	t.Helper()
	e := New(Options{Name: "test", Version: "test", Families: []Family{remembering{kinds}}, Device: mlx.DeviceCPU})
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	req := sdk.LoadRequest{
		Dir: dir, Family: "remembering", Layers: layers, HasEmbedding: layers.Start == 0, HasHead: layers.End == len(kinds), Threads: 1, KVBudget: budget,
	}
	if _, err := e.Load(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	return &keptStage{t, e}
}

func wholeKept(t *testing.T, kinds ...string) *keptStage {
	return openKept(t, kinds, keptModel(t, kinds), sdk.LayerRange{End: len(kinds)}, 0)
}

func (k *keptStage) reserve(r sdk.Reservation) error {
	return k.change(k.t.Context(), func(m *loaded) error { return m.reserve(&r) })
}

func (k *keptStage) mustReserve(r sdk.Reservation) {
	k.t.Helper()
	if err := k.reserve(r); err != nil {
		k.t.Fatal(err)
	}
}

// token is what stands at a position of the text that every sequence has.
func token(position int) int32 { return int32(position*7%keptVocab+position/5) % keptVocab }

func (k *keptStage) try(seq sdk.SeqID, pos, n int) ([]byte, error) {
	s := sdk.SeqStep{Seq: seq, Pos: pos, Rows: n, Want: sdk.WantLogits}
	for i := range n {
		s.Tokens = append(s.Tokens, token(pos+i))
	}
	r, err := k.Step(k.t.Context(), &sdk.Step{Seqs: []sdk.SeqStep{s}, Out: make([]byte, keptVocab*4)})
	if err != nil {
		return nil, err
	}
	return bytes.Clone(r.Seqs[0].Logits.Data), nil
}

// feed runs the text's positions [pos, pos+n) and returns the logits after them.
func (k *keptStage) feed(seq sdk.SeqID, pos, n int) []byte {
	k.t.Helper()
	out, err := k.try(seq, pos, n)
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

// snapshot makes the sequence able to go back to where it is.
func (k *keptStage) snapshot(seq sdk.SeqID) {
	k.t.Helper()
	err := k.change(k.t.Context(), func(m *loaded) error { s := m.sequences[seq]; return m.settle(s, s.length, true) })
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *keptStage) stateBytes() int64 {
	s, err := k.Stats(k.t.Context())
	if err != nil {
		k.t.Fatal(err)
	}
	return s.StateBytes
}

// everyKind is a model for each kind of cache, and one of all.
var everyKind = map[string][]string{
	"full": {"full"}, "sliding": {"sliding"}, "chunked": {"chunked"}, "shared": {"full", "reader"}, "latent": {"latent"}, "conv": {"conv"},
	"all": {"full", "sliding", "conv", "chunked", "reader", "latent", "conv"},
}

func eachKept(t *testing.T, f func(t *testing.T, k *keptStage, recurrent, windowed bool)) {
	for name, kinds := range everyKind {
		t.Run(name, func(t *testing.T) {
			f(t, wholeKept(t, kinds...), slices.Contains(kinds, "conv"), slices.Contains(kinds, "sliding"))
		})
	}
}

// From and Keep at every class of position give the bits of a fresh prefill, the source goes on as if nothing had been, and
// what both hold counts once and goes with its last owner.
func TestKeep(t *testing.T) {
	const length = 200
	eachKept(t, func(t *testing.T, k *keptStage, recurrent, windowed bool) {
		next := sdk.SeqID(1)
		fresh := func(upTo int) sdk.SeqID {
			next++
			k.mustReserve(sdk.Reservation{Seq: next, Snapshots: 1})
			k.feed(next, 0, upTo)
			return next
		}
		for _, keep := range []int{1, 63, 64, 65, 127, 128, 136, 150, 199, 200} {
			other := fresh(keep)
			alone := k.stateBytes()
			want := k.feed(other, keep, 3)
			if err := k.Release(t.Context(), other); err != nil {
				t.Fatal(err)
			}
			from := fresh(keep)
			k.snapshot(from)
			if keep < length {
				k.feed(from, keep, length-keep)
			}
			before := k.stateBytes()
			next++
			kept := next
			err := k.reserve(sdk.Reservation{Seq: kept, From: from, Keep: keep})
			if gone := windowed && keep < 64+keptWindow-1; gone {
				if sdk.CodeOf(err) != sdk.CodeUnsupported {
					t.Errorf("keep %d, gone from the window: %v", keep, err)
				}
				if err := k.Release(t.Context(), from); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("keep %d: %v", keep, err)
			}
			if grown := k.stateBytes() - before; !recurrent && grown != 0 {
				t.Errorf("keep %d: sharing takes %d bytes", keep, grown)
			}
			if got := k.feed(kept, keep, 3); !bytes.Equal(got, want) {
				t.Errorf("keep %d: other logits than after a fresh prefill", keep)
			}
			whole := fresh(length)
			if got, want := k.feed(from, length, 2), k.feed(whole, length, 2); !bytes.Equal(got, want) {
				t.Errorf("keep %d: the source goes on otherwise", keep)
			}
			for _, seq := range []sdk.SeqID{whole, from} {
				if err := k.Release(t.Context(), seq); err != nil {
					t.Fatal(err)
				}
			}
			if k.feed(kept, keep+3, 1); !windowed && k.stateBytes() < alone { // a window may have let go of more
				t.Errorf("keep %d: %d bytes are left for what alone takes %d", keep, k.stateBytes(), alone)
			}
			if err := k.Release(t.Context(), kept); err != nil {
				t.Fatal(err)
			}
			if n := k.stateBytes(); n != 0 {
				t.Errorf("keep %d: %d bytes are held for no sequence", keep, n)
			}
		}
	})
}

// A step that begins before the end of the state goes back first; what can't go back says where it could go.
func TestRewind(t *testing.T) {
	eachKept(t, func(t *testing.T, k *keptStage, recurrent, windowed bool) {
		k.mustReserve(sdk.Reservation{Seq: 1, Snapshots: 1})
		k.mustReserve(sdk.Reservation{Seq: 2})
		length := 0
		for _, back := range []int{1, 7, 64} {
			length += 150
			at := length - back
			k.feed(1, length-150, 150-back)
			k.snapshot(1)
			k.feed(1, at, back)
			k.feed(2, length-150, 150-back)
			if got, want := k.feed(1, at, 5), k.feed(2, at, 5); !bytes.Equal(got, want) {
				t.Errorf("%d back: other logits than those of one who did not go there", back)
			}
			k.feed(1, at+5, back-min(back, 5)+1)
			k.feed(2, at+5, back-min(back, 5)+1)
			length = at + 5 + back - min(back, 5) + 1
		}
		if _, err := k.try(1, length+1, 1); sdk.CodeOf(err) != sdk.CodeInvalid {
			t.Errorf("past the end: %v", err)
		}
		_, err := k.try(1, 100, 1)
		if able := !recurrent && !windowed; able != (err == nil) {
			t.Errorf("far back: %v", err)
		}
		if err != nil && (sdk.CodeOf(err) != sdk.CodeUnsupported || !strings.Contains(err.Error(), "the nearest that it can go to are 0 and ")) {
			t.Errorf("far back: %v", err)
		}
		k.mustReserve(sdk.Reservation{Seq: 3})
		if got, want := k.feed(1, 0, 9), k.feed(3, 0, 9); !bytes.Equal(got, want) {
			t.Error("from the beginning: other logits than a new sequence's")
		}
	})
}

// exported is a state, section by section, so that a test can change it.
type exported struct {
	sections []sdk.StateSection
	data     [][]byte
}

func (k *keptStage) export(seq sdk.SeqID, layers sdk.LayerRange) (x exported, positions int) {
	k.t.Helper()
	var b bytes.Buffer
	w := sdk.NewStateWriter(&b, "remembering", layers)
	if err := k.ExportState(k.t.Context(), seq, layers, w); err != nil {
		k.t.Fatal(err)
	}
	if _, err := w.Close(); err != nil {
		k.t.Fatal(err)
	}
	r, err := sdk.NewStateReader(&b, "remembering")
	if err != nil {
		k.t.Fatal(err)
	}
	for {
		section, rows, err := r.Next()
		if errors.Is(err, io.EOF) {
			return x, r.Header().Positions
		}
		if err != nil {
			k.t.Fatal(err)
		}
		x.sections, x.data = append(x.sections, section), append(x.data, bytes.Clone(rows))
	}
}

func (k *keptStage) importState(seq sdk.SeqID, layers sdk.LayerRange, length int, x exported) error {
	k.t.Helper()
	var b bytes.Buffer
	w := sdk.NewStateWriter(&b, "remembering", sdk.LayerRange{End: 100})
	if err := w.Begin(length); err != nil {
		k.t.Fatal(err)
	}
	for i, section := range x.sections {
		rows, err := w.Section(section)
		if err == nil {
			_, err = rows.Write(x.data[i])
		}
		if err != nil {
			k.t.Fatal(err)
		}
	}
	if _, err := w.Close(); err != nil {
		k.t.Fatal(err)
	}
	r, err := sdk.NewStateReader(&b, "remembering")
	if err != nil {
		k.t.Fatal(err)
	}
	return k.ImportState(k.t.Context(), seq, layers, r)
}

// An exported state goes on elsewhere with the same bits, layer by layer if need be.
func TestExportAndImport(t *testing.T) {
	kinds := everyKind["all"]
	dir := keptModel(t, kinds)
	all := sdk.LayerRange{End: len(kinds)}
	from, to := openKept(t, kinds, dir, all, 0), openKept(t, kinds, dir, all, 0)
	const length = 230
	from.mustReserve(sdk.Reservation{Seq: 1})
	from.feed(1, 0, length)
	whole, positions := from.export(1, all)
	if positions != length || len(whole.sections) != 6 {
		t.Fatalf("%d positions in %d sections", positions, len(whole.sections))
	}
	to.mustReserve(sdk.Reservation{Seq: 7})
	to.mustReserve(sdk.Reservation{Seq: 8})
	if err := to.importState(7, all, length, whole); err != nil {
		t.Fatal(err)
	}
	for i, layers := range []sdk.LayerRange{{Start: 3, End: 7}, {End: 2}, {Start: 2, End: 3}} {
		if i > 0 {
			if _, err := to.try(8, 0, 1); sdk.CodeOf(err) != sdk.CodeInvalid {
				t.Errorf("a step with the state of some layers: %v", err)
			}
		}
		part, _ := from.export(1, layers)
		if err := to.importState(8, layers, length, part); err != nil {
			t.Fatalf("layers %+v: %v", layers, err)
		}
	}
	if from.stateBytes() != to.stateBytes()/2 {
		t.Errorf("%d bytes became %d in two copies", from.stateBytes(), to.stateBytes())
	}
	for pos := length; pos < length+5; pos++ {
		want := from.feed(1, pos, 1)
		if !bytes.Equal(to.feed(7, pos, 1), want) || !bytes.Equal(to.feed(8, pos, 1), want) {
			t.Fatalf("position %d: other logits than where the state came from", pos)
		}
	}
	// Another cut of the layers: the second half alone.
	half := sdk.LayerRange{Start: 5, End: 7}
	last := openKept(t, kinds, dir, half, 0)
	last.mustReserve(sdk.Reservation{Seq: 1})
	if err := last.importState(1, half, length, whole); err != nil { // others' sections are passed over
		t.Errorf("of a longer list: %v", err)
	}
}

func TestImportRefuses(t *testing.T) {
	kinds := []string{"full", "conv", "full"}
	k := wholeKept(t, kinds...)
	all := sdk.LayerRange{End: 3}
	k.mustReserve(sdk.Reservation{Seq: 1})
	k.feed(1, 0, 30)
	good, _ := k.export(1, all)
	next := sdk.SeqID(1)
	for name, c := range map[string]struct {
		layers sdk.LayerRange
		length int
		maxLen int
		change func(*exported)
		says   string
	}{
		"a missing state": {all, 30, 0, func(x *exported) { x.sections, x.data = x.sections[:2], x.data[:2] }, "3 states of layers [0, 3) are expected"},
		"no such state":   {all, 30, 0, func(x *exported) { x.sections[0].Index = 1 }, "state 1 of 1"},
		"another length":  {all, 31, 0, func(*exported) {}, "of a state of 31"},
		"another kind": {all, 30, 0, func(x *exported) {
			x.sections[0], x.data[0] = x.sections[1], x.data[1]
			x.sections[0].Layer = 0
		}, "section"},
		"too long":        {all, 30, 29, func(*exported) {}, "which may have 29"},
		"no position":     {all, 0, 0, func(*exported) {}, "of a state of 0"},
		"a foreign layer": {sdk.LayerRange{End: 4}, 30, 0, func(*exported) {}, "[0, 4)"},
		"an empty range":  {sdk.LayerRange{Start: 1, End: 1}, 30, 0, func(*exported) {}, "[1, 1)"},
	} {
		next++
		k.mustReserve(sdk.Reservation{Seq: next, MaxLen: c.maxLen})
		x := exported{slices.Clone(good.sections), slices.Clone(good.data)}
		c.change(&x)
		if err := k.importState(next, c.layers, c.length, x); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
		if err := k.Release(t.Context(), next); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.importState(1, all, 30, good); sdk.CodeOf(err) != sdk.CodeInvalid {
		t.Errorf("into a full sequence: %v", err)
	}
	if err := k.importState(99, all, 30, good); sdk.CodeOf(err) != sdk.CodeUnknownSequence {
		t.Errorf("into no sequence: %v", err)
	}
	next++
	k.mustReserve(sdk.Reservation{Seq: next})
	first := sdk.LayerRange{End: 1}
	if err := k.importState(next, first, 30, good); err != nil {
		t.Fatal(err)
	}
	if err := k.importState(next, first, 30, good); sdk.CodeOf(err) != sdk.CodeInvalid || !strings.Contains(err.Error(), "already") {
		t.Errorf("a layer twice: %v", err)
	}
	if err := k.importState(next, sdk.LayerRange{Start: 1, End: 3}, 20, good); sdk.CodeOf(err) != sdk.CodeInvalid {
		t.Errorf("another length than the first layers': %v", err)
	}
	if err := k.reserve(sdk.Reservation{Seq: 1000, From: next, Keep: 1}); sdk.CodeOf(err) != sdk.CodeInvalid {
		t.Errorf("keeping of a half imported state: %v", err)
	}
	if got := k.feed(1, 30, 1); got == nil {
		t.Error("the source is gone")
	}
}

func TestReservationRefuses(t *testing.T) {
	k := wholeKept(t, "full", "conv")
	k.mustReserve(sdk.Reservation{Seq: 1, Snapshots: 1})
	k.feed(1, 0, 30)
	k.snapshot(1)
	k.feed(1, 30, 10)
	for name, c := range map[string]struct {
		r    sdk.Reservation
		code sdk.Code
	}{
		"no source":         {sdk.Reservation{From: 9, Keep: 1}, sdk.CodeUnknownSequence},
		"more than it has":  {sdk.Reservation{From: 1, Keep: 41}, sdk.CodeInvalid},
		"no snapshot there": {sdk.Reservation{From: 1, Keep: 31}, sdk.CodeUnsupported},
		"negative":          {sdk.Reservation{From: 1, Keep: -1}, sdk.CodeInvalid},
		"less than none":    {sdk.Reservation{Snapshots: -1}, sdk.CodeInvalid},
		"generated past it": {sdk.Reservation{From: 1, Keep: 30, Prompt: make([]int32, 29), Generated: []int32{1, 2}}, sdk.CodeInvalid},
	} {
		c.r.Seq = 5
		err := k.reserve(c.r)
		if sdk.CodeOf(err) != c.code {
			t.Errorf("%s: %v, want code %v", name, err, c.code)
		}
		if c.code == sdk.CodeUnsupported && !strings.Contains(err.Error(), "nearest that it can go to are 30 and 40") {
			t.Errorf("%s: %v", name, err)
		}
	}
	k.mustReserve(sdk.Reservation{Seq: 5, From: 1, Keep: 30})
	k.mustReserve(sdk.Reservation{Seq: 6, From: 1, Keep: 40})
}

// The budget counts what sequences share once, and for each what it may still need: no more is promised than there is.
func TestSharedBudget(t *testing.T) {
	kinds := []string{"full"}
	const block = 64 * 2 * (16 + 16) * 4 // of one layer in float32
	k := openKept(t, kinds, keptModel(t, kinds), sdk.LayerRange{End: 1}, 6*block)
	k.mustReserve(sdk.Reservation{Seq: 1, MaxLen: 200}) // four blocks
	k.feed(1, 0, 150)
	shares := func(seq sdk.SeqID) error {
		return k.reserve(sdk.Reservation{Seq: seq, MaxLen: 192, From: 1, Keep: 130}) // one block of its own
	}
	for seq := sdk.SeqID(2); seq <= 3; seq++ {
		if err := shares(seq); err != nil {
			t.Fatalf("sequence %d: %v", seq, err)
		}
	}
	if err := shares(4); sdk.CodeOf(err) != sdk.CodeOutOfMemory {
		t.Errorf("beyond the budget: %v", err)
	}
	if n := k.stateBytes(); n != 3*block {
		t.Errorf("%d bytes, want three blocks of %d", n, block)
	}
	for seq := sdk.SeqID(2); seq <= 3; seq++ {
		k.feed(seq, 130, 62) // all that it was promised
	}
	k.feed(1, 150, 50)
	if n := k.stateBytes(); n != 6*block {
		t.Errorf("%d bytes, want the whole budget of %d", n, 6*block)
	}
	// Going back to where it shared makes room for nobody: the blocks are the first's as well.
	if _, err := k.try(2, 64, 128); sdk.CodeOf(err) != sdk.CodeOutOfMemory {
		t.Errorf("two shared blocks written anew: %v", err)
	}
	if err := k.Release(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	k.feed(2, 64, 128)
	for _, seq := range []sdk.SeqID{2, 3} {
		if err := k.Release(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	if n := k.stateBytes(); n != 0 {
		t.Errorf("%d bytes for no sequence", n)
	}
}

// Whichever allocation of a step fails, the step says so by type, and the next one goes on: either where the sequence was, or
// with a new one. Nothing is left behind.
func TestStepWithoutMemory(t *testing.T) {
	defer cpu.FailAllocation(0)
	eachKept(t, func(t *testing.T, k *keptStage, recurrent, _ bool) {
		k.mustReserve(sdk.Reservation{Seq: 1})
		k.feed(1, 0, 70)
		want := k.feed(1, 70, 70)
		if err := k.Release(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		failed, went, arrays := 0, 0, mlx.LiveArrays()
		for n := 1; ; n++ {
			k.mustReserve(sdk.Reservation{Seq: 1})
			k.feed(1, 0, 70)
			k.change(t.Context(), func(m *loaded) error { m.stream.ReleaseScratch(); return nil })
			cpu.FailAllocation(n)
			got, err := k.try(1, 70, 70)
			through := cpu.FailAllocation(0) > 0
			if through && err != nil {
				t.Fatal(err)
			}
			if through {
				if !bytes.Equal(got, want) {
					t.Error("other logits at last")
				}
				break
			}
			failed++
			if sdk.CodeOf(err) != sdk.CodeOutOfMemory || !strings.Contains(err.Error(), "of state of 1 sequences") {
				t.Fatalf("allocation %d failed: %v", n, err)
			}
			again, err := k.try(1, 70, 70)
			switch {
			case err == nil:
				if went++; !bytes.Equal(again, want) {
					t.Errorf("allocation %d failed: other logits afterwards", n)
				}
			case !recurrent || sdk.CodeOf(err) != sdk.CodeInvalid:
				t.Errorf("allocation %d failed, and then: %v", n, err)
			}
			if err := k.Release(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			if a := mlx.LiveArrays(); a != arrays || k.stateBytes() != 0 {
				t.Fatalf("allocation %d failed: %d arrays became %d, %d bytes of state are left", n, arrays, a, k.stateBytes())
			}
		}
		if failed < 5 || went == 0 {
			t.Errorf("%d allocations failed, %d steps were repeated", failed, went)
		}
	})
}

// Penalties count what the reservation says was generated, and forget what a step goes back over.
func TestGeneratedIDs(t *testing.T) {
	k := wholeKept(t, "full")
	sampler := sdk.Sampler{FrequencyPenalty: 1}
	run := func(seq sdk.SeqID, pos int, tokens []int32, prompt bool) int32 {
		t.Helper()
		r, err := k.Step(context.Background(), &sdk.Step{Seqs: []sdk.SeqStep{{Seq: seq, Pos: pos, Rows: len(tokens), Tokens: tokens, Prompt: prompt, Want: sdk.WantToken}}})
		if err != nil {
			t.Fatal(err)
		}
		return r.Seqs[0].Token
	}
	prompt := []int32{3, 9, 27, 5}
	k.mustReserve(sdk.Reservation{Seq: 1, Prompt: prompt, Sampler: sampler})
	var want []int32
	next := run(1, 0, prompt, true)
	for i := range 12 {
		want = append(want, next)
		next = run(1, 4+i, []int32{next}, false)
	}
	for _, have := range []int{1, 5, 11} {
		seq := sdk.SeqID(1 + have)
		k.mustReserve(sdk.Reservation{Seq: seq, Prompt: prompt, Sampler: sampler, From: 1, Keep: 4 + have, Generated: want[:have]})
		for range 2 { // once more from the same place: a rewind takes the count back
			got := slices.Clone(want[:have+1])
			for i := have; i < 11; i++ {
				got = append(got, run(seq, 4+i, got[i:i+1], false))
			}
			if !slices.Equal(got, want) {
				t.Errorf("with %d tokens at the beginning: %v, want %v", have, got, want)
			}
		}
	}
	if slices.Equal(want[:6], slices.Repeat(want[:1], 6)) {
		t.Error("the penalties change nothing, so this test shows nothing")
	}
}
