package pipeline

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// ErrClosed is what calls on a closed pipeline end with.
var ErrClosed = errors.New("pipeline is closed")

// Phase is what a stage was doing.
type Phase string

const (
	PhaseLaunch  Phase = "launch"
	PhaseLoad    Phase = "load"
	PhaseIdle    Phase = "idle"
	PhaseReserve Phase = "reserve"
	PhaseRelease Phase = "release"
	PhasePrefill Phase = "prefill"
	PhaseDecode  Phase = "decode"
	PhaseReceive Phase = "receive" // taking in activations of the stage before
	PhaseSend    Phase = "send"    // handing its output over
)

// StageError is a failure of one stage. Err is the executor's own error, or says how its process ended, with the
// last lines of its log.
type StageError struct {
	Place  sdk.Place
	Node   string // that the stage runs on; empty on a pipeline of one host
	Plugin string // the executor binary; the family while none has been launched
	Phase  Phase
	Err    error
}

func (e *StageError) Error() string {
	who := e.Plugin
	if e.Node != "" {
		who = e.Node + ", " + e.Plugin
	}
	return fmt.Sprintf("stage %s (%s) failed in %s: %v", e.Place, who, e.Phase, e.Err)
}

func (e *StageError) Unwrap() error { return e.Err }

// StepError says which sequences of a step failed. The results of the others are valid.
type StepError struct {
	Failures []StepFailure
}

// StepFailure says what failed for some sequences. They have been released on every stage.
type StepFailure struct {
	Seqs []sdk.SeqID
	Err  error // a *StageError, a *SpoiledError, ErrClosed, or the end of the context of an earlier step of the sequence
}

// SpoiledError is the failure of a sequence that shared a micro-batch with one that had failed in an earlier step. Nothing is
// wrong with it but that its state is lost: begun again, it goes on.
type SpoiledError struct {
	By  sdk.SeqID
	Err error // that the other failed with
}

func (e *SpoiledError) Error() string {
	return fmt.Sprintf("a step was lost as sequence %d, which was in it as well, had failed: %v", e.By, e.Err)
}

func (e *SpoiledError) Unwrap() error { return e.Err }

func (e *StepError) Error() string {
	text := e.Failures[0].Err.Error()
	if more := len(e.Failures) - 1; more > 0 {
		text += fmt.Sprintf(" (and %d more failures)", more)
	}
	return text
}

func (e *StepError) Unwrap() []error {
	errs := make([]error, len(e.Failures))
	for i, f := range e.Failures {
		errs[i] = f.Err
	}
	return errs
}

// Of returns what failed for a sequence, nil when nothing did.
func (e *StepError) Of(seq sdk.SeqID) error {
	for _, f := range e.Failures {
		if slices.Contains(f.Seqs, seq) {
			return f.Err
		}
	}
	return nil
}

// opPhase returns the phase that an operation is.
func opPhase(op sdk.Op) Phase {
	if _, ok := op.(sdk.Reservation); ok {
		return PhaseReserve
	}
	return PhaseRelease
}
