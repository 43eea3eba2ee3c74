package batch

import (
	"errors"
	"fmt"
	"time"

	"github.com/mlxcel/mlxcel/host/kvledger"
)

var (
	// ErrClosed is what everything on a closed scheduler ends with.
	ErrClosed = errors.New("the server has been stopped")
	// ErrDraining refuses new requests while running ones finish.
	ErrDraining = errors.New("the server is finishing its running requests and takes no new ones")
)

// QueueFullError refuses a request because too many wait. A server answers it with 429.
type QueueFullError struct {
	Depth      int           // requests that wait
	Choices    int           // that were to wait as well
	RetryAfter time.Duration // an estimate of when one of them will have left the queue, at least 1 s
}

func (e *QueueFullError) Error() string {
	if e.Choices > 1 {
		return fmt.Sprintf("%d requests wait already, and %d choices more are more than may (--max-queue-depth): try again in %.0f s, or ask for fewer",
			e.Depth, e.Choices, e.RetryAfter.Seconds())
	}
	return fmt.Sprintf("%d requests wait already, as many as may (--max-queue-depth): try again in %.0f s", e.Depth, e.RetryAfter.Seconds())
}

// DeadlineError is a request that took longer than it may.
type DeadlineError struct {
	Waited    time.Duration // since Submit
	Queued    bool          // it had not joined yet
	Generated int           // tokens
	// Admission says why the request could not join, where it waited for KV memory; a server answers it with 503.
	Admission *kvledger.AdmissionDiagnostic
}

func (e *DeadlineError) Error() string {
	waited := e.Waited.Round(time.Millisecond)
	switch {
	case e.Admission != nil:
		return fmt.Sprintf("the request waited %v for memory and reached its deadline: %v", waited, e.Admission)
	case e.Queued:
		return fmt.Sprintf("the request waited %v in the queue and reached its deadline", waited)
	}
	return fmt.Sprintf("the request reached its deadline after %v, with %d tokens generated", waited, e.Generated)
}

func (e *DeadlineError) Unwrap() error {
	if e.Admission == nil {
		return nil
	}
	return e.Admission
}

// FailedError is a request whose step failed. Err is a *pipeline.StageError, which names the stage, wherever a stage
// was at fault.
type FailedError struct {
	Generated int  // tokens
	Lost      bool // the whole pipeline was lost with it; a server answers the next request once it is back
	Err       error
}

func (e *FailedError) Error() string {
	return fmt.Sprintf("the request failed after %d tokens: %v", e.Generated, e.Err)
}

func (e *FailedError) Unwrap() error { return e.Err }

// UnavailableError refuses requests because the pipeline was lost. A server answers it with 503.
type UnavailableError struct {
	Relaunching bool  // it is being started again
	Attempts    int   // to start it again, all in vain
	Err         error // of the last attempt, or why the pipeline was lost where none has ended
}

func (e *UnavailableError) Error() string {
	switch {
	case e.Relaunching:
		return fmt.Sprintf("the model is not available until a lost stage is back: %v", e.Err)
	case e.Attempts == 0:
		return fmt.Sprintf("the model is not available, and nobody asked for it to be started again: %v", e.Err)
	}
	return fmt.Sprintf("the model is not available after %d attempts to start it again: %v", e.Attempts, e.Err)
}

func (e *UnavailableError) Unwrap() error { return e.Err }

// PanicError is a fault of the scheduler itself. It costs the requests that were in flight, not the server.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("the scheduler failed: %v", e.Value) }

// TokenRangeError is a token id that the model does not have.
type TokenRangeError struct {
	Token     int32
	VocabSize int
}

func (e *TokenRangeError) Error() string {
	return fmt.Sprintf("token id %d: the model has ids 0 to %d", e.Token, e.VocabSize-1)
}

// ErrEmptyPrompt is a prompt without tokens.
var ErrEmptyPrompt = errors.New("the prompt has no tokens: give some text, or at least the model's BOS token")
