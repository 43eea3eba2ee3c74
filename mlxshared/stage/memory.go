package stage

import (
	"errors"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/sdk"
)

// typed gives errors from below the contract's codes a place in it. A lack of memory is logged, and what is kept for reuse is
// given back, so that the next, smaller request finds it.
func (m *loaded) typed(err error) error {
	var own *sdk.Error
	var op *mlx.OpError
	switch {
	case err == nil || errors.As(err, &own):
		return err
	case mlx.IsNoMemory(err):
		scratch := m.scratch()
		m.logger.Error("out of memory", "error", err, "weights", m.weights(), "state", m.held, "scratch", scratch, "sequences", len(m.sequences))
		m.stream.ReleaseScratch()
		m.stream.ClearCache()
		m.stream.Trim()
		full := sdk.Errorf(sdk.CodeOutOfMemory, "%v; held are %d bytes of weights, %d of state of %d sequences and %d of working memory; "+
			"use fewer sequences (--parallel), a smaller --prefill-chunk-size or more stages (--pp-size)", err, m.weights(), m.held,
			len(m.sequences), scratch)
		full.Wanted, full.Held = mlx.WantedBytes(err), m.weights()+m.held+scratch
		return full
	case errors.As(err, &op):
		return sdk.Errorf(sdk.CodeInternal, "%v", err)
	}
	return err
}

// weights is the bytes of the stage's weights.
func (m *loaded) weights() int64 {
	if m.loader == nil {
		return 0
	}
	return m.loader.Bytes()
}

// scratch is the memory that is kept beside weights and state from one step for the next.
func (m *loaded) scratch() int64 {
	return clampBytes(m.stream.ScratchMemory() + m.stream.CachedMemory())
}

// notePeak takes notice of the most memory that a step took.
func (m *loaded) notePeak() {
	m.peak = max(m.peak, clampBytes(m.stream.PeakMemory()+m.stream.ScratchMemory()))
}
