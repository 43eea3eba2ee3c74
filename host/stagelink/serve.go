package stagelink

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// Connections are what joins a stage to its pipeline.
type Connections struct {
	Coordinator net.Conn   // brings orders, takes reports
	Previous    net.Conn   // brings activations; nil on stage 0
	Next        []net.Conn // take activations, one for each place of the next stage; none on the last
}

// check tells what a stage lacks.
func (c Connections) check(stage int, last bool) error {
	switch {
	case c.Coordinator == nil:
		return fmt.Errorf("stage %d has no connection to its coordinator", stage)
	case (c.Previous != nil) != (stage > 0):
		return fmt.Errorf("stage %d: a link from the stage before is there: %v, want %v", stage, c.Previous != nil, stage > 0)
	case (c.Next != nil) == last:
		return fmt.Errorf("stage %d: a link to the next stage is there: %v, want %v", stage, len(c.Next) > 0, !last)
	}
	return nil
}

func (c Connections) close() error {
	var errs []error
	for _, conn := range append([]net.Conn{c.Coordinator, c.Previous}, c.Next...) {
		if conn != nil {
			errs = append(errs, conn.Close())
		}
	}
	return errors.Join(errs...)
}

// ServeStage runs a loaded stage over its connections, until ctx ends or the coordinator goes, which is a *LinkError. A
// link to another stage that breaks is reported to the coordinator as the loss of that stage; what follows is the
// coordinator's decision, but the error tells of it as well. When ServeStage returns, all connections are closed and
// nothing of them touches the stage any more: it may be closed.
func ServeStage(ctx context.Context, stage *pipeline.Stage, conns Connections, cfg Config) error {
	info, layout := stage.Info(), stage.Layout()
	i := info.StageIndex
	at := info.Place()
	if err := conns.check(i, info.HasLMHead); err != nil {
		return errors.Join(err, conns.close())
	}
	up := newUplink(conns.Coordinator, at, stage.Node(), cfg)
	defer up.close()
	var links []*stageLink
	join := func(e *ending, other sdk.Place, name string) {
		links = append(links, watch(e, stage.Epoch(), other, name, up))
	}
	var next []pipeline.Link
	for rank, conn := range conns.Next {
		to := sdk.Place{Stage: i + 1, Rank: rank}
		out := newOutgoing(conn, layout.Slots, int64(layout.OutBytes), cfg)
		join(out.ending, to, fmt.Sprintf("link to it from stage %s", at))
		next = append(next, out)
	}
	stage.Join(next, up)
	up.wait.Go(func() { up.serve(stage) })
	if conns.Previous != nil {
		in := newIncoming(conns.Previous, stage, layout.Slots, int64(layout.InBytes))
		join(in.ending, sdk.Place{Stage: i - 1}, fmt.Sprintf("link from it to stage %s", at))
	}
	var errs []error
	select {
	case <-ctx.Done():
	case <-up.done:
		errs = append(errs, &LinkError{Link: "connection to the coordinator", Err: up.err})
	}
	for _, l := range links {
		l.close()
		if l.lost != nil {
			errs = append(errs, l.lost)
		}
	}
	return errors.Join(errs...)
}

// stageLink is a link to another stage.
type stageLink struct {
	*ending
	lost *pipeline.StageError // the other stage, once the link has broken
}

// watch reports the end of a link as the loss of the stage at its other end.
func watch(e *ending, epoch uint64, other sdk.Place, name string, r pipeline.Reporter) *stageLink {
	l := &stageLink{ending: e}
	e.wait.Go(func() {
		<-e.done
		if err := e.broken(); err != nil {
			l.lost = &pipeline.StageError{Place: other, Err: &LinkError{Link: name, Err: err}}
			r.Lost(epoch, l.lost)
		}
	})
	return l
}
