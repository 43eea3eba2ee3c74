package pipeline

import "github.com/mlxcel/mlxcel/sdk"

// slot is one slot of a place's region. It is taken from the moment that a micro-batch's activations are written
// into it (where it takes none: that the step is sent) until its output has been read.
type slot struct {
	core     *core
	released func(*slot)
	index    int
	in       []byte
	out      []byte
	step     sdk.Step // what the slot's executor works on
	lent     bool     // to a link, which reads a frame into it
}

// Release gives the slot back; the place goes on with what waited for it. It is the Releaser of the frames that
// the place sends, and of those that a link has read into the slot.
func (s *slot) Release() { s.released(s) }
