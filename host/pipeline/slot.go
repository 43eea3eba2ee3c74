package pipeline

import "github.com/mlxcel/mlxcel/sdk"

// slot is one slot of a stage's region. It is taken from the moment that a micro-batch's activations are written
// into it (on stage 0: that the step is sent) until its output has been read.
type slot struct {
	stage *stage
	index int
	in    []byte
	out   []byte
	step  sdk.Step // what the slot's executor works on
	lent  bool     // to a link, which reads a frame into it
}

// Release gives the slot back; the stage goes on with what waited for it. It is the Releaser of the frames that
// the stage sends, and of those that a link has read into the slot.
func (s *slot) Release() {
	s.stage.mu.Lock()
	defer s.stage.unlock()
	s.stage.endLoan(s)
	s.stage.free = append(s.stage.free, s)
	s.stage.advance()
}
