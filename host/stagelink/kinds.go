// Package stagelink owns the links between a coordinator and stages on other hosts: it carries the messages of package
// pipeline over connections.
//
// A data connection runs from the coordinator to a place: orders and aborts go down it, reports come up. A link runs
// from a stage to a place of the next and carries activations, as frames of package wire. The coordinator's end of a data connection is a Port; a stage's
// ends of all its connections are served by ServeStage.
package stagelink

import (
	"errors"
	"fmt"

	"github.com/mlxcel/mlxcel/host/wire"
	"github.com/mlxcel/mlxcel/sdk"
)

// Kinds of messages on a data connection, and of frames on a link.
const (
	kindOp uint8 = 1 + iota
	kindPlan
	kindAbort
	kindAnswered
	kindFinished
	kindFailed
	kindLost
	kindActivation
	kindSelfTest
	kindSelfTestReply
)

// LinkError is the end of a connection that was not asked for.
type LinkError struct {
	Link string // e.g. "link to it from stage 0"
	Err  error  // io.EOF where the other side closed it
}

func (e *LinkError) Error() string { return fmt.Sprintf("%s broke: %v", e.Link, e.Err) }
func (e *LinkError) Unwrap() error { return e.Err }

// DecodeError is a message that does not say what its kind should.
type DecodeError struct {
	Kind  uint8
	Fault string
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("bad message of kind %d: %s", e.Kind, e.Fault)
}

// RemoteError is why a stage on another host failed, as that host tells it.
type RemoteError struct {
	Text  string
	Cause *sdk.Error // the executor's own error, where there is one
	Gone  bool       // the executor is gone: errors.Is(err, sdk.ErrExecutorGone)
}

func (e *RemoteError) Error() string { return e.Text }

// Unwrap returns what the text does not say by itself.
func (e *RemoteError) Unwrap() []error {
	var causes []error
	if e.Cause != nil {
		causes = append(causes, e.Cause)
	}
	if e.Gone {
		causes = append(causes, sdk.ErrExecutorGone)
	}
	return causes
}

func remoteError(err error) *RemoteError {
	e := &RemoteError{Text: err.Error(), Gone: errors.Is(err, sdk.ErrExecutorGone)}
	e.Cause, _ = errors.AsType[*sdk.Error](err)
	return e
}

var wireDtypes = map[sdk.Dtype]wire.Dtype{
	sdk.DtypeFloat32: wire.Float32, sdk.DtypeFloat16: wire.Float16, sdk.DtypeBFloat16: wire.BFloat16, sdk.DtypeInt32: wire.Int32,
}

// sdkDtype returns sdk.DtypeAuto for what no activation has.
func sdkDtype(d wire.Dtype) sdk.Dtype {
	switch d {
	case wire.Float32:
		return sdk.DtypeFloat32
	case wire.Float16:
		return sdk.DtypeFloat16
	case wire.BFloat16:
		return sdk.DtypeBFloat16
	case wire.Int32:
		return sdk.DtypeInt32
	}
	return sdk.DtypeAuto
}
