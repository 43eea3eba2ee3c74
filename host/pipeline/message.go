// Package pipeline owns the one runtime that every mode uses: a coordinator and its stages.
//
// The coordinator gives every place, a rank of a stage, the same orders in the same order, each cut to what the place's role
// needs. Activations flow from stage to stage; the place that answers hands its tokens straight back to the coordinator. What
// passes between them are the plain values of this file, over the three interfaces below: in one process they are method
// calls, between hosts they are links.
package pipeline

import "github.com/mlxcel/mlxcel/sdk"

// Tag names one micro-batch of one step.
type Tag struct {
	Epoch      uint64 // of the pipeline: a restarted one counts on, so that what is left of the old one is told apart
	Step       uint64 // the Order's ID
	MicroBatch int
}

// Order is one instruction to a stage. Exactly one of Op and Plan is set.
type Order struct {
	Epoch uint64
	ID    uint64  // grows by one with every order of an epoch
	Trace TraceID // that the order belongs to
	Op    sdk.Op  // a Reservation or Release
	Plan  *StepPlan
}

// StepPlan is what a step does: of the same sequences and micro-batches at every place, and never changed once sent.
type StepPlan struct {
	Seqs []sdk.SeqStep
	IDs  []sdk.SeqID // of Seqs
	Cuts []int       // micro-batch i is Seqs[Cuts[i]:Cuts[i+1]]
}

// MicroBatches returns the number of micro-batches.
func (p *StepPlan) MicroBatches() int { return len(p.Cuts) - 1 }

func (p *StepPlan) seqs(mb int) []sdk.SeqStep { return p.Seqs[p.Cuts[mb]:p.Cuts[mb+1]] }
func (p *StepPlan) ids(mb int) []sdk.SeqID    { return p.IDs[p.Cuts[mb]:p.Cuts[mb+1]] }

// phase tells whether a micro-batch works on a prompt.
func (p *StepPlan) phase(mb int) Phase {
	for _, s := range p.seqs(mb) {
		if s.Prompt {
			return PhasePrefill
		}
	}
	return PhaseDecode
}

// Frame carries the hidden rows of one micro-batch to the next stage.
type Frame struct {
	Tag
	Seqs   []sdk.SeqID // in the order of the rows
	Hidden sdk.Tensor
	Owner  Releaser // of Hidden's bytes
}

// Releaser gets bytes back that it lent.
type Releaser interface {
	Release()
}

// StagePort is how the coordinator reaches a stage.
type StagePort interface {
	// Order hands over the next order. It waits neither for it to be carried out nor for whoever does that, and keeps the
	// order of calls.
	Order(o Order)
	// Abort gives a micro-batch up: it is not begun any more, and what it yields is dropped. Every order up to
	// the micro-batch's own has been given before.
	Abort(t Tag)
}

// Link carries activations from one stage to a place of the next.
type Link interface {
	// Send takes the frame over. It calls Owner.Release once, when it needs the bytes no more; it keeps the
	// order of calls.
	Send(f Frame)
}

// Reporter is how a stage reaches the coordinator. It may be called from any goroutine.
type Reporter interface {
	// Answered tells how an order's Op ended at a place; err is nil or a *StageError.
	Answered(at sdk.Place, epoch, order uint64, err error)
	// Finished brings what the place that answers made of a micro-batch.
	Finished(t Tag, results []sdk.SeqResult)
	// Failed tells, past everything queued, that a stage can't finish a micro-batch.
	Failed(t Tag, err *StageError)
	// Lost tells that a stage is gone for good.
	Lost(epoch uint64, err *StageError)
}
