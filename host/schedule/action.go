// Package schedule owns the order of work in a pipeline: the GPipe schedule (Huang et al., 2019) as one place of it sees it, and
// the split of a batch into micro-batches.
//
// Everything here is pure: no goroutines, clocks or I/O. A caller asks for the next action, carries it out, and
// says when it is finished.
package schedule

import (
	"fmt"

	"github.com/mlxcel/mlxcel/sdk"
)

// Kind says what an Action asks for.
type Kind uint8

const (
	Idle    Kind = iota // nothing to do until an activation arrives or a forward pass ends
	Forward             // run the micro-batch through the stage's layers
	Receive             // take in the micro-batch's activations from the stage before
	Flush               // hand the micro-batch's output to the coordinator; only where the place answers
	Done                // nothing left to do
)

func (k Kind) String() string {
	switch k {
	case Idle:
		return "idle"
	case Forward:
		return "forward"
	case Receive:
		return "receive"
	case Flush:
		return "flush"
	case Done:
		return "done"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Action is one thing for a place to do. MicroBatch means nothing with Idle and Done.
type Action struct {
	Kind       Kind
	At         sdk.Place
	MicroBatch int
}

func (a Action) String() string {
	if a.Kind == Idle || a.Kind == Done {
		return a.Kind.String()
	}
	return fmt.Sprintf("%s stage=%s mb=%d", a.Kind, a.At, a.MicroBatch)
}
