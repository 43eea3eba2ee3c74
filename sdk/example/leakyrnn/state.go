package leakyrnn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// The states of a layer, by their index in LayerProfile.States.
const (
	recurrentIndex = iota // the recurrent state, a matrix of one row
	cacheIndex            // the cache, a key and a value for every position
	statesPerLayer
)

// section describes a layer's state as the contract lays it out.
func (m *model) section(layer, index, positions int) sdk.StateSection {
	h := m.config.HiddenSize
	s := sdk.StateSection{Layer: m.first + layer, Index: index, Kind: sdk.StateRecurrent, Dtype: sdk.DtypeFloat32, Rows: 1, KeyWidth: h}
	if index == cacheIndex {
		s.Kind, s.Rows, s.ValueWidth = sdk.StateKV, positions, h
	}
	return s
}

func (e *executor) ExportState(ctx context.Context, id sdk.SeqID, layers sdk.LayerRange, w *sdk.StateWriter) error {
	seq, err := e.sequence(id)
	if err != nil {
		return err
	}
	if slices.Contains(seq.arrived, false) {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is still being imported", id)
	}
	if err := w.Begin(seq.length()); err != nil {
		return err
	}
	for l := layers.Start - e.model.first; l < layers.End-e.model.first; l++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		for index := range statesPerLayer {
			to, err := w.Section(e.model.section(l, index, seq.length()))
			if err != nil {
				return err
			}
			if err := seq.write(to, l, index); err != nil {
				return err
			}
		}
	}
	return nil
}

// write writes a section's rows: all keys, then all values.
func (s *sequence) write(to io.Writer, layer, index int) error {
	if index == recurrentIndex {
		return writeFloats(to, s.state[layer])
	}
	for _, part := range []func(*cacheRow) []float32{(*cacheRow).keys, (*cacheRow).values} {
		for _, p := range s.cache {
			if err := writeFloats(to, part(&p.rows[layer])); err != nil {
				return err
			}
		}
	}
	return nil
}

func writeFloats(to io.Writer, values []float32) error {
	raw := make([]byte, 4*len(values))
	putFloats(raw, values)
	_, err := to.Write(raw)
	return err
}

// layerState is the state of one layer that came in.
type layerState struct {
	state []float32
	cache []cacheRow
	next  int // index of the section that must come next
}

// ImportState reads everything before it changes anything, so that a sequence can take a good state after a bad one.
func (e *executor) ImportState(ctx context.Context, id sdk.SeqID, layers sdk.LayerRange, r *sdk.StateReader) error {
	seq, err := e.sequence(id)
	if err != nil {
		return err
	}
	positions := r.Header().Positions
	if err := e.checkImport(id, seq, layers, positions); err != nil {
		return err
	}
	came := make([]layerState, len(e.model.layers))
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		section, rows, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if section.Layer < layers.Start || section.Layer >= layers.End {
			continue // of a layer that is not asked for
		}
		l := section.Layer - e.model.first
		if err := came[l].take(section, e.model.section(l, came[l].next, positions), rows); err != nil {
			return err
		}
	}
	for l := layers.Start; l < layers.End; l++ {
		if came[l-e.model.first].next != statesPerLayer {
			return sdk.Errorf(sdk.CodeInvalid, "the state lacks layer %d: it holds layers [%d, %d)", l, r.Header().Layers.Start, r.Header().Layers.End)
		}
	}
	e.adopt(seq, layers, positions, came)
	return nil
}

// checkImport refuses an import before anything is read.
func (e *executor) checkImport(id sdk.SeqID, seq *sequence, layers sdk.LayerRange, positions int) error {
	if seq.arrived == nil && seq.length() > 0 {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d has a state of %d positions already: import into a new one", id, seq.length())
	}
	for l := layers.Start; l < layers.End && seq.arrived != nil; l++ {
		if seq.arrived[l-e.model.first] {
			return sdk.Errorf(sdk.CodeInvalid, "sequence %d has the state of layer %d already", id, l)
		}
	}
	if seq.arrived != nil && positions != seq.length() {
		return sdk.Errorf(sdk.CodeInvalid, "a state of %d positions does not fit the one of %d that came before", positions, seq.length())
	}
	if limit := e.model.config.ContextLength; limit > 0 && positions > limit || seq.maxLen > 0 && positions > seq.maxLen {
		return sdk.Errorf(sdk.CodeInvalid, "a state of %d positions passes sequence %d's %d or the context's %d", positions, id, seq.maxLen, limit)
	}
	if seq.arrived != nil {
		return nil
	}
	return e.checkBudget(int64(positions) * e.positionBytes())
}

// take takes one section in.
func (c *layerState) take(section, want sdk.StateSection, rows []byte) error {
	if section != want {
		return sdk.Errorf(sdk.CodeInvalid, "a state brings the section %+v, this model wants %+v", section, want)
	}
	values := getFloats(rows)
	if c.next == recurrentIndex {
		c.state = values
	} else {
		n, width := section.Rows, section.KeyWidth
		keys, behind := values[:n*width], values[n*width:]
		for i := range n {
			c.cache = append(c.cache, cacheRow{key: keys[i*width : (i+1)*width], value: behind[i*width : (i+1)*width]})
		}
	}
	c.next++
	return nil
}

// adopt puts layers' states that came in into the sequence.
func (e *executor) adopt(seq *sequence, layers sdk.LayerRange, positions int, came []layerState) {
	n := len(e.model.layers)
	if seq.arrived == nil {
		seq.arrived = make([]bool, n)
		for range positions {
			seq.cache = append(seq.cache, &position{rows: make([]cacheRow, n), owners: 1})
		}
		e.positions += positions
	}
	for l := layers.Start - e.model.first; l < layers.End-e.model.first; l++ {
		seq.arrived[l] = true
		seq.state[l] = came[l].state
		for i, p := range seq.cache {
			p.rows[l] = came[l].cache[i]
		}
	}
	if !slices.Contains(seq.arrived, false) {
		seq.arrived = nil
	}
	e.count()
}

// checkBudget refuses state that passes the budget.
func (e *executor) checkBudget(more int64) error {
	if held := e.stateBytes(); e.budget > 0 && held+more > e.budget {
		return &sdk.Error{
			Code:    sdk.CodeOutOfMemory,
			Message: fmt.Sprintf("%d bytes of state and %d more pass the budget of %d", held, more, e.budget),
			Wanted:  more,
			Held:    held,
		}
	}
	return nil
}
