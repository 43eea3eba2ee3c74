package sdk

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
)

// stateOf writes sections whose rows count up.
func stateOf(t testing.TB, layers LayerRange, positions int, sections ...StateSection) []byte {
	t.Helper()
	var out bytes.Buffer
	w := NewStateWriter(&out, "llama", layers)
	if err := w.Begin(positions); err != nil {
		t.Fatal(err)
	}
	for _, s := range sections {
		rows, err := w.Section(s)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range [][]byte{countUp(&s)[:1], countUp(&s)[1:]} {
			if _, err := rows.Write(part); err != nil {
				t.Fatal(err)
			}
		}
	}
	report, err := w.Close()
	if err != nil || report != (StateReport{Positions: positions, Bytes: int64(out.Len())}) {
		t.Fatalf("report %+v, %v of %d bytes", report, err, out.Len())
	}
	return out.Bytes()
}

func countUp(s *StateSection) []byte {
	n, _ := s.Bytes()
	rows := make([]byte, n)
	for i := range rows {
		rows[i] = byte(i + s.Layer)
	}
	return rows
}

var someSections = []StateSection{
	{Layer: 3, Kind: StateKV, Dtype: DtypeFloat16, First: 64, Rows: 5, KeyWidth: 4, ValueWidth: 6},
	{Layer: 3, Index: 1, Kind: StateLatent, Dtype: DtypeFloat32, Rows: 5, KeyWidth: 3},
	{Layer: 5, Kind: StateRecurrent, Dtype: DtypeBFloat16, Rows: 2, KeyWidth: 7},
}

func TestStateRoundTrip(t *testing.T) {
	raw := stateOf(t, LayerRange{3, 6}, 69, someSections...)
	r, err := NewStateReader(bytes.NewReader(raw), "llama")
	if err != nil {
		t.Fatal(err)
	}
	if want := (StateHeader{"llama", LayerRange{3, 6}, 69}); r.Header() != want {
		t.Errorf("header %+v, want %+v", r.Header(), want)
	}
	for _, want := range someSections {
		got, rows, err := r.Next()
		if err != nil || got != want || !bytes.Equal(rows, countUp(&want)) {
			t.Errorf("section %+v of %d bytes, %v, want %+v", got, len(rows), err, want)
		}
	}
	for range 2 {
		if _, _, err := r.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("error %v, want io.EOF", err)
		}
	}
	if got := r.Report(); got.Bytes != int64(len(raw)) || got.Positions != 69 {
		t.Errorf("report %+v of %d bytes", got, len(raw))
	}
}

// TestStateDamage changes every byte and cuts at every length: nothing comes through.
func TestStateDamage(t *testing.T) {
	raw := stateOf(t, LayerRange{3, 6}, 69, someSections...)
	for i := range raw {
		bad := bytes.Clone(raw)
		bad[i] ^= 0x10
		if err := readState(bad); err == nil {
			t.Errorf("a change at byte %d went unnoticed", i)
		}
		if err := readState(raw[:i]); CodeOf(err) != CodeCorrupt || !strings.Contains(err.Error(), "damaged") {
			t.Errorf("a cut at byte %d: %v, want code corrupt", i, err)
		}
	}
	if _, err := NewStateReader(bytes.NewReader(raw), "gemma3"); CodeOf(err) != CodeInvalid || !strings.Contains(err.Error(), `"llama"`) {
		t.Errorf("a state of another family: %v", err)
	}
}

func readState(raw []byte) error {
	r, err := NewStateReader(bytes.NewReader(raw), "")
	for err == nil {
		_, _, err = r.Next()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func TestStateWriterRefuses(t *testing.T) {
	section := func(change func(*StateSection)) StateSection {
		s := someSections[0]
		change(&s)
		return s
	}
	for name, s := range map[string]StateSection{
		"no kind":                   section(func(s *StateSection) { s.Kind = 0 }),
		"no dtype":                  section(func(s *StateSection) { s.Dtype = DtypeAuto }),
		"no width":                  section(func(s *StateSection) { s.KeyWidth = 0 }),
		"keys without values":       section(func(s *StateSection) { s.ValueWidth = 0 }),
		"a latent with values":      section(func(s *StateSection) { s.Kind = StateLatent }),
		"a matrix with a position":  section(func(s *StateSection) { s.Kind, s.ValueWidth = StateRecurrent, 0 }),
		"a size that overflows":     section(func(s *StateSection) { s.Rows, s.KeyWidth = 1<<62, 1<<20 }),
		"a layer before the first":  section(func(s *StateSection) { s.Layer = 2 }),
		"a layer after the last":    section(func(s *StateSection) { s.Layer = 6 }),
		"a section before the last": section(func(s *StateSection) { s.Layer = 4 }),
	} {
		t.Run(name, func(t *testing.T) {
			w := NewStateWriter(io.Discard, "llama", LayerRange{3, 6})
			if err := w.Begin(1); err != nil {
				t.Fatal(err)
			}
			if name == "a section before the last" {
				if _, err := w.Section(StateSection{Layer: 5, Kind: StateLatent, Dtype: DtypeFloat32, KeyWidth: 1}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := w.Section(s); err == nil {
				t.Errorf("section %+v was taken", s)
			}
		})
	}
	w := NewStateWriter(io.Discard, "llama", LayerRange{3, 6})
	if _, err := w.Section(someSections[0]); err == nil {
		t.Error("a section before Begin was taken")
	}
	if err := w.Begin(1); err != nil {
		t.Fatal(err)
	}
	rows, err := w.Section(someSections[0])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rows.Write(make([]byte, 1000)); err == nil {
		t.Error("more rows than the section has were taken")
	}
	if _, err := w.Close(); err == nil || !strings.Contains(err.Error(), "lacks 100 bytes") {
		t.Errorf("an unfinished section: %v", err)
	}
	if _, err := NewStateWriter(io.Discard, "llama", LayerRange{3, 6}).Close(); err == nil {
		t.Error("a state that was never begun is no error")
	}
}

// TestStateBytes keeps the layout what docs/contract.md shows.
func TestStateBytes(t *testing.T) {
	want := "4d4c5853544154311100000" + "00a076578" + "616d706c6512040804100518020f4469" +
		"800a00000008041803200130013802454e041f0000003f000080bfcfd776620e" +
		"0000000804100118012001300238024001df3407750000803f0000004000004040000080400000a0400000c040b9045180" +
		"0000000000000000"
	var out bytes.Buffer
	w := NewStateWriter(&out, "example", LayerRange{4, 5})
	if err := w.Begin(2); err != nil {
		t.Fatal(err)
	}
	for _, s := range []struct {
		StateSection
		rows []float32
	}{
		{StateSection{Layer: 4, Kind: StateRecurrent, Dtype: DtypeFloat32, Rows: 1, KeyWidth: 2}, []float32{0.5, -1}},
		{StateSection{Layer: 4, Index: 1, Kind: StateKV, Dtype: DtypeFloat32, Rows: 2, KeyWidth: 2, ValueWidth: 1}, []float32{1, 2, 3, 4, 5, 6}},
	} {
		rows, err := w.Section(s.StateSection)
		if err == nil {
			err = binary.Write(rows, binary.LittleEndian, s.rows)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(out.Bytes()); got != want {
		t.Errorf("\n%s, want\n%s", got, want)
	}
}

func TestStateIsMoved(t *testing.T) {
	e := &Echo{Width: 2}
	c := serveEcho(t, e)
	loadEcho(t, c, nil)
	s := openSteps(t, c)
	file, err := openAnonymous()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	move := func(op func(number uint32) Op) StateReport {
		t.Helper()
		number, err := c.Hand(PurposeState, file)
		if err != nil {
			t.Fatal(err)
		}
		p, err := s.Send(op(number))
		if err != nil {
			t.Fatal(err)
		}
		report, err := p.WaitState(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	out := move(func(n uint32) Op { return StateExport{Seq: 4, Layers: LayerRange{1, 2}, Descriptor: n} })
	in := move(func(n uint32) Op { return StateImport{Seq: 5, Layers: LayerRange{1, 2}, Descriptor: n} })
	if out != in || out.Positions != 3 || out.Bytes == 0 {
		t.Errorf("reports %+v and %+v, want the same", out, in)
	}
	if want, got := []string{"export 4 [1, 2)", "layer 1: 24 bytes", "import 5 [1, 2)"}, e.Calls(); !reflect.DeepEqual(got, want) {
		t.Errorf("calls %q, want %q", got, want)
	}
}

func FuzzState(f *testing.F) {
	f.Add(stateOf(f, LayerRange{3, 6}, 69, someSections...))
	f.Add(stateOf(f, LayerRange{0, 1}, 0, StateSection{Kind: StateLatent, Dtype: DtypeFloat32, Rows: 1, KeyWidth: 1}))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := NewStateReader(bytes.NewReader(raw), "")
		if err != nil {
			return
		}
		last := -1
		for {
			s, rows, err := r.Next()
			if err != nil {
				return
			}
			if n, ok := s.Bytes(); !ok || n != int64(len(rows)) || s.Layer < last || s.Layer >= r.Header().Layers.End {
				t.Errorf("section %+v of %d bytes came through", s, len(rows))
			}
			last = s.Layer
		}
	})
}
