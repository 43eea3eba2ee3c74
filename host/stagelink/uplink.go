package stagelink

import (
	"net"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// uplink is a stage's end of its data connection. It is the stage's Reporter.
type uplink struct{ *dataConn }

var _ pipeline.Reporter = (*uplink)(nil)

func newUplink(conn net.Conn, at sdk.Place, node string, cfg Config) *uplink {
	u := &uplink{}
	u.dataConn = newDataConn(conn, cfg, func(m *message, err error) {
		if m.kind == kindFinished { // the others are small, and their errors are cut to what can be sent
			u.Failed(m.tag, &pipeline.StageError{Place: at, Node: node, Phase: pipeline.PhaseSend, Err: err})
		}
	})
	return u
}

// serve hands the coordinator's orders to the stage.
func (u *uplink) serve(stage pipeline.StagePort) {
	u.read(func(m *message) error {
		switch m.kind {
		case kindOp, kindPlan:
			stage.Order(m.order)
		case kindAbort:
			stage.Abort(m.tag)
		default:
			return &DecodeError{Kind: m.kind, Fault: "a coordinator does not send this"}
		}
		return nil
	})
}

func (u *uplink) Answered(at sdk.Place, epoch, order uint64, err error) {
	u.send(message{kind: kindAnswered, place: at, epoch: epoch, id: order, err: err})
}

func (u *uplink) Finished(t pipeline.Tag, results []sdk.SeqResult) {
	u.send(message{kind: kindFinished, tag: t, results: results})
}

func (u *uplink) Failed(t pipeline.Tag, err *pipeline.StageError) {
	u.send(message{kind: kindFailed, tag: t, err: err})
}

func (u *uplink) Lost(epoch uint64, err *pipeline.StageError) {
	u.send(message{kind: kindLost, epoch: epoch, err: err})
}
