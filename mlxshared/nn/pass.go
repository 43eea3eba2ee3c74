// Package nn owns the modules that model families are built from: small types that load themselves and compute
// Forward, and the per-sequence state that attention keeps.
//
// Hidden states are flat: [rows of all sequences of a micro-batch, width] in the activation dtype, without padding.
package nn

import "github.com/mlxcel/mlxcel/mlxshared/mlx"

// Pass is one micro-batch on its way through the layers of a stage. Its arrays die with its scope.
type Pass struct {
	*mlx.Scope
	Dtype    mlx.Dtype // of activations
	Pos      mlx.Array // int32 [rows]: the rows' absolute positions
	Segments []Segment // they cover every row once, in order

	// Carried is what the embedding adds to each row for later layers to read, [rows, width]; zero if the family has none. It
	// crosses to the next stage with the residual stream, unchanged.
	Carried mlx.Array

	kv     []mlx.Segment      // argument buffers
	states []mlx.StateSegment //
}

// Segment is one sequence's rows in a Pass.
type Segment struct {
	Row0   int
	Rows   int
	Pos    int  // absolute position of the first row
	Prompt bool // the rows are prompt, not generated
	States []State
}

// Attend extends the caches in the given slot by k and v and attends with q: mlx.Scope.Attention over the pass's segments.
// With zero k and v the caches hold these rows already.
func (p *Pass) Attend(q, k, v mlx.Array, spec *mlx.AttentionSpec, slot int) mlx.Array {
	return p.Attention(q, k, v, spec, p.kvSegments(slot))
}

// kvSegments views the segments as attention's, each with the state in the given slot.
func (p *Pass) kvSegments(slot int) []mlx.Segment {
	p.kv = p.kv[:0]
	for i := range p.Segments {
		s := &p.Segments[i]
		p.kv = append(p.kv, mlx.Segment{Cache: s.States[slot].(*kvState).cache, Row0: s.Row0, Rows: s.Rows, Pos: s.Pos})
	}
	return p.kv
}
