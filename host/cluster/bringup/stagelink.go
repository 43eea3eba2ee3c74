package bringup

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
)

// stageLink is a connection to a neighbour. The coordinator's heartbeats don't tell when the way between two stages alone is
// cut, and what was sent on it may wait long for an answer: so the two stages beat as well, on a connection of its own, and the link
// breaks once they don't.
type stageLink struct {
	*transport.Conn
	silence atomic.Pointer[transport.SilentError]
}

// breakFor ends the link for the reason.
func (l *stageLink) breakFor(silence *transport.SilentError) {
	l.silence.Store(silence)
	_ = l.Conn.Close() // both sides learn of it
}

// why returns the silence behind an error of the connection, where there is one.
func (l *stageLink) why(err error) error {
	if silence := l.silence.Load(); err != nil && silence != nil {
		return silence
	}
	return err
}

// Read is net.Conn's.
func (l *stageLink) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	return n, l.why(err)
}

// Write is net.Conn's.
func (l *stageLink) Write(b []byte) (int, error) { return l.WriteBuffers(b) }

// WriteBuffers is securelink.Conn's.
func (l *stageLink) WriteBuffers(bufs ...[]byte) (int, error) {
	n, err := l.Conn.WriteBuffers(bufs...)
	return n, l.why(err)
}

// beatNext begins to beat with the next stage, at the address at which the link was made.
func (s *session) beatNext(ctx context.Context, link *stageLink, address string, accept func(securelink.Identity) error) error {
	opening := transport.Opening{Kind: transport.KindHeartbeat, Session: s.id, Place: link.Opening.Place}
	conn, err := s.peer.dial.Connect(ctx, []string{address}, opening, accept)
	if err != nil {
		return err
	}
	s.work.Go(func() { s.beat(conn.Conn, func() *stageLink { return link }) }) // the caller is counted
	return nil
}

// beatPrevious answers the beats of the stage before.
func (s *session) beatPrevious(conn *transport.Conn) {
	s.beat(conn, func() *stageLink {
		s.peer.mu.Lock()
		defer s.peer.mu.Unlock()
		return s.previousLink
	})
}

// beat breaks the link of a neighbour that is silent. One that is gone breaks it by itself.
func (s *session) beat(conn *transport.Conn, link func() *stageLink) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	beats := transport.NewHeartbeat(s.peer.cfg.Heartbeat)
	s.work.Go(func() { _ = beats.Run(ctx, conn) }) // how it ended is of no interest: silence follows
	silence, silent := errors.AsType[*transport.SilentError](beats.Watch(ctx))
	if !silent {
		return
	}
	if l := link(); l != nil {
		l.breakFor(silence)
		return
	}
	s.lose(silence)
}
