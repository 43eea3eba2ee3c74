package stagelink

import (
	"fmt"
	"net"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// Port is the coordinator's end of the data connection to a stage. It is the pipeline's StagePort.
type Port struct {
	*dataConn
	place    sdk.Place
	epoch    uint64
	reporter chan pipeline.Reporter // holds the one that Start gave
}

var _ pipeline.StagePort = (*Port)(nil)

// NewPort makes a port of a connection to the stage at a place, which belongs to it from then on. It takes orders at once; reports
// wait until Start says for whom they are.
func NewPort(conn net.Conn, at sdk.Place, epoch uint64, cfg Config) *Port {
	p := &Port{place: at, epoch: epoch, reporter: make(chan pipeline.Reporter, 1)}
	p.dataConn = newDataConn(conn, cfg, p.refuse)
	return p
}

// Start passes the stage's reports on, until Close. The end of the connection is reported as the loss of the stage. It
// is called once.
func (p *Port) Start(r pipeline.Reporter) {
	p.reporter <- r
	p.wait.Go(func() { p.read(func(m *message) error { return p.take(r, m) }) })
	p.wait.Go(func() {
		<-p.done
		if err := p.broken(); err != nil {
			r.Lost(p.epoch, &pipeline.StageError{Place: p.place, Err: &LinkError{Link: "connection to it", Err: err}})
		}
	})
}

// Order is StagePort's. It does not wait for the network.
func (p *Port) Order(o pipeline.Order) { p.send(orderMessage(o)) }

// Abort is StagePort's.
func (p *Port) Abort(t pipeline.Tag) { p.send(message{kind: kindAbort, tag: t}) }

// Close ends the connection and waits until nothing is reported any more.
func (p *Port) Close() { p.close() }

// Done is closed when the connection has ended.
func (p *Port) Done() <-chan struct{} { return p.done }

// take passes a report on. A stage speaks for itself, for its epoch, and for a neighbour that it lost.
func (p *Port) take(r pipeline.Reporter, m *message) error {
	switch m.kind {
	case kindAnswered:
		if m.place != p.place {
			return fmt.Errorf("an answer of stage %s came from stage %s", m.place, p.place)
		}
		r.Answered(m.place, m.epoch, m.id, m.err)
	case kindFinished:
		r.Finished(m.tag, m.results)
	case kindFailed:
		r.Failed(m.tag, m.err.(*pipeline.StageError))
	case kindLost:
		r.Lost(m.epoch, m.err.(*pipeline.StageError))
	default:
		return &DecodeError{Kind: m.kind, Fault: "a stage does not send this"}
	}
	return nil
}

// refuse fails an order that can't be sent.
func (p *Port) refuse(m *message, err error) {
	var r pipeline.Reporter
	select {
	case r = <-p.reporter:
		p.reporter <- r
	case <-p.done:
		return
	}
	e := &pipeline.StageError{Place: p.place, Phase: pipeline.PhaseSend, Err: err}
	if m.order.Plan == nil {
		r.Answered(p.place, m.order.Epoch, m.order.ID, e)
		return
	}
	for mb := range m.order.Plan.MicroBatches() {
		r.Failed(pipeline.Tag{Epoch: m.order.Epoch, Step: m.order.ID, MicroBatch: mb}, e)
	}
}
