package sdk

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// ErrExecutorGone is wrapped by the error of everything that an executor owes when its process or its
// connection ends.
var ErrExecutorGone = errors.New("executor is gone")

// Op is an operation of the step stream: Reservation, Release, *Step, StateExport or StateImport.
type Op interface{ isOp() }

// Release frees a sequence.
type Release struct{ Seq SeqID }

// StateExport writes the state that a sequence has in the layers to the file behind a descriptor; see Client.Hand.
type StateExport struct {
	Seq        SeqID
	Layers     LayerRange
	Descriptor uint32 // of purpose PurposeState
}

// StateImport fills the layers of a reserved sequence from the file behind a descriptor.
type StateImport struct {
	Seq        SeqID
	Layers     LayerRange
	Descriptor uint32 // of purpose PurposeState
}

// StateReport is the answer to a StateExport or StateImport.
type StateReport struct {
	Positions int   // of the sequence
	Bytes     int64 // written or read
}

func (Reservation) isOp() {}
func (Release) isOp()     {}
func (*Step) isOp()       {}
func (StateExport) isOp() {}
func (StateImport) isOp() {}

func (o Release) String() string { return fmt.Sprintf("release of sequence %d", o.Seq) }
func (o StateExport) String() string {
	return fmt.Sprintf("export of sequence %d's layers [%d, %d)", o.Seq, o.Layers.Start, o.Layers.End)
}
func (o StateImport) String() string {
	return fmt.Sprintf("import of sequence %d's layers [%d, %d)", o.Seq, o.Layers.Start, o.Layers.End)
}

// StepClient is the host's end of the step stream of one stage. *StepStream is the real one.
type StepClient interface {
	// Send hands over one operation. Operations are applied in the order sent. Send never waits for the executor: what it
	// does not take is queued, and a full queue ends the stream with ErrExecutorGone. What needs a capability that the
	// executor lacks is refused with CodeUnsupported and its name. It is safe for concurrent use.
	Send(op Op) (*Pending, error)
	// Cancel gives up the step with the ID, past the queue. The step still answers, with CodeCanceled
	// unless it was finished already. A step that is not in flight is ignored.
	Cancel(ctx context.Context, stepID uint64) error
	// Close ends the stream. What is in flight fails with ErrExecutorGone.
	Close() error
}

// Pending is an answer to come.
type Pending struct {
	once   sync.Once
	done   chan struct{}
	result *StepResult
	state  StateReport
	err    error
}

// NewPending returns an answer that Complete will give.
func NewPending() *Pending { return &Pending{done: make(chan struct{})} }

// Complete gives the answer. Only the first call counts.
func (p *Pending) Complete(result *StepResult, err error) {
	p.once.Do(func() {
		p.result, p.err = result, err
		close(p.done)
	})
}

// CompleteState gives the answer to a StateExport or StateImport. Only the first answer counts.
func (p *Pending) CompleteState(report StateReport) {
	p.once.Do(func() {
		p.state = report
		close(p.done)
	})
}

// Done is closed when the answer is there.
func (p *Pending) Done() <-chan struct{} { return p.done }

// Wait returns the answer: the result of a step, nil for every other operation. When ctx ends first it returns
// ctx's error, and the operation goes on.
func (p *Pending) Wait(ctx context.Context) (*StepResult, error) {
	select {
	case <-p.done:
		return p.result, p.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// WaitState is Wait for a StateExport or StateImport.
func (p *Pending) WaitState(ctx context.Context) (StateReport, error) {
	if _, err := p.Wait(ctx); err != nil {
		return StateReport{}, err
	}
	return p.state, nil
}
