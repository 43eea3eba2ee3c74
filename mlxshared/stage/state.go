package stage

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/sdk"
)

// maxPositions bounds the length of an imported state.
const maxPositions = 1 << 31

// slots are the first and one past the last slot of the states of a layer of the stage.
func (m *loaded) slots(layer int) (first, end int) {
	return m.layerSlots[layer], m.layerSlots[layer+1]
}

// checkLayers refuses layers that are not this stage's.
func (m *loaded) checkLayers(layers sdk.LayerRange) error {
	own := sdk.LayerRange{Start: m.firstLayer, End: m.firstLayer + len(m.layers)}
	if layers.Start < own.Start || layers.End > own.End || layers.Start >= layers.End {
		return sdk.Errorf(sdk.CodeInvalid, "state of layers [%d, %d) asked of a stage of layers [%d, %d)", layers.Start, layers.End, own.Start, own.End)
	}
	return nil
}

// exportState writes what a sequence keeps in some layers.
func (m *loaded) exportState(id sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error {
	s := m.sequences[id]
	switch {
	case s == nil:
		return unknown(id)
	case s.broken || s.imported != nil:
		return s.unusable(id)
	}
	if err := m.checkLayers(layers); err != nil {
		return err
	}
	if err := w.Begin(s.length); err != nil {
		return err
	}
	for layer := layers.Start; layer < layers.End; layer++ {
		first, end := m.slots(layer - m.firstLayer)
		for slot := first; slot < end; slot++ {
			if err := exportSlot(w, s.states[slot], layer, slot-first); err != nil {
				return m.typed(fmt.Errorf("layer %d, state %d of sequence %d: %w", layer, slot-first, id, err))
			}
		}
	}
	return nil
}

func exportSlot(w *sdk.StateWriter, state nn.State, layer, index int) error {
	of := state.Section()
	rows, err := w.Section(sdk.StateSection{
		Layer: layer, Index: index, Kind: of.Kind, Dtype: contractDtype(of.Dtype), First: of.First, Rows: of.Rows,
		KeyWidth: of.KeyWidth, ValueWidth: of.ValueWidth,
	})
	if err != nil {
		return err
	}
	return state.Export(rows)
}

// importState fills some layers of an empty sequence; sections of other layers are passed over. Once every layer of the stage
// that keeps state has got its own, the sequence has the state's length. Where it fails the layers are as empty as before.
func (m *loaded) importState(id sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
	s, length := m.sequences[id], r.Header().Positions
	if err := m.checkImport(s, id, layers, length); err != nil {
		return err
	}
	err := m.readSections(s, layers, length, r)
	if err != nil {
		err = errors.Join(fmt.Errorf("state of sequence %d: %w", id, err), m.empty(s, layers))
	}
	m.account(s)
	if err != nil {
		return m.typed(err)
	}
	if s.imported == nil {
		s.imported, s.coming = make([]bool, len(m.layers)), length
	}
	for layer := layers.Start; layer < layers.End; layer++ {
		s.imported[layer-m.firstLayer] = true
	}
	if !m.allImported(s) {
		return nil
	}
	s.imported, s.length = nil, length
	return m.spare(id, 0)
}

func (m *loaded) checkImport(s *sequence, id sdk.SeqID, layers sdk.LayerRange, length int) error {
	if s == nil {
		return unknown(id)
	}
	if err := m.checkLayers(layers); err != nil {
		return err
	}
	switch {
	case s.broken:
		return s.unusable(id)
	case s.length > 0:
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d has %d positions; a state goes into an empty one", id, s.length)
	case length > maxPositions || s.maxLen > 0 && length > s.maxLen:
		return sdk.Errorf(sdk.CodeInvalid, "a state of %d positions for sequence %d, which may have %d", length, id, s.maxLen)
	case s.history != nil && len(s.generated) > 0 && s.prompt+len(s.generated) > length:
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d: a prompt of %d tokens and %d generated ones go past the %d positions of its state", id, s.prompt,
			len(s.generated), length)
	}
	if s.imported != nil && length != s.coming {
		return sdk.Errorf(sdk.CodeInvalid, "layers of sequence %d have a state of %d positions, now come %d", id, s.coming, length)
	}
	for layer, done := range s.imported {
		if at := m.firstLayer + layer; done && layers.Start <= at && at < layers.End {
			return sdk.Errorf(sdk.CodeInvalid, "layer %d of sequence %d has its state already", at, id)
		}
	}
	return m.spare(id, m.bytesAt(length, s.snapshots)-s.own()-s.growth())
}

// empty gives a sequence new states in the layers.
func (m *loaded) empty(s *sequence, layers sdk.LayerRange) error {
	first, _ := m.slots(layers.Start - m.firstLayer)
	_, end := m.slots(layers.End - 1 - m.firstLayer)
	for slot := first; slot < end; slot++ {
		state, err := m.specs[slot].New(m.stream)
		if err != nil {
			s.broken = true
			return err
		}
		s.states[slot].Free()
		s.states[slot] = state
	}
	return nil
}

// readSections imports every state of the layers.
func (m *loaded) readSections(s *sequence, layers sdk.LayerRange, length int, r *sdk.StateReader) error {
	first, _ := m.slots(layers.Start - m.firstLayer)
	_, end := m.slots(layers.End - 1 - m.firstLayer)
	came := make([]bool, end-first)
	for {
		in, rows, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if in.Layer < layers.Start || in.Layer >= layers.End {
			continue
		}
		begin, past := m.slots(in.Layer - m.firstLayer)
		slot := begin + in.Index
		if in.Index < 0 || slot >= past || came[slot-first] {
			return sdk.Errorf(sdk.CodeInvalid, "layer %d: state %d of %d, or twice the same", in.Layer, in.Index, past-begin)
		}
		if err := s.states[slot].Import(sectionOf(&in), length, bytes.NewReader(rows)); err != nil {
			return fmt.Errorf("layer %d, state %d: %w", in.Layer, in.Index, err)
		}
		came[slot-first] = true
	}
	if missing := slices.Index(came, false); missing >= 0 {
		return sdk.Errorf(sdk.CodeInvalid, "%d states of layers [%d, %d) are expected, state %d did not come", len(came), layers.Start, layers.End, missing)
	}
	return nil
}

// allImported tells whether no layer waits for its state.
func (m *loaded) allImported(s *sequence) bool {
	for layer, done := range s.imported {
		if first, end := m.slots(layer); !done && first < end {
			return false
		}
	}
	return true
}

func sectionOf(s *sdk.StateSection) nn.Section {
	return nn.Section{
		Kind: s.Kind, Dtype: ownDtype(s.Dtype), First: s.First, Rows: s.Rows, KeyWidth: s.KeyWidth, ValueWidth: s.ValueWidth,
	}
}
