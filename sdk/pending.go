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

// Op is an operation of the step stream: Reservation, Release, Truncation, ForkOp or *Step.
type Op interface{ isOp() }

// Release frees a sequence.
type Release struct{ Seq SeqID }

// Truncation drops the state of every position at or past Length.
type Truncation struct {
	Seq    SeqID
	Length int
}

// ForkOp creates sequence To as a copy of From.
type ForkOp struct{ From, To SeqID }

func (Reservation) isOp() {}
func (Release) isOp()     {}
func (Truncation) isOp()  {}
func (ForkOp) isOp()      {}
func (*Step) isOp()       {}

func (o Release) String() string { return fmt.Sprintf("release of sequence %d", o.Seq) }
func (o Truncation) String() string {
	return fmt.Sprintf("truncation of sequence %d to %d", o.Seq, o.Length)
}
func (o ForkOp) String() string { return fmt.Sprintf("fork of sequence %d to %d", o.From, o.To) }

// StepClient is the host's end of the step stream of one stage. *StepStream is the real one.
type StepClient interface {
	// Send hands over one operation. Operations are applied in the order sent; Send does not wait for the
	// answer. One goroutine at a time may call it.
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
