package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Heartbeat beats on one connection, from goroutines of its own, and watches the other side. Silence counts from
// NewHeartbeat on, so a node that never opens the connection is found as well.
type Heartbeat struct {
	mu      sync.Mutex
	monitor *Monitor
	cfg     HeartbeatConfig
}

// NewHeartbeat begins to count silence.
func NewHeartbeat(cfg HeartbeatConfig) *Heartbeat {
	return &Heartbeat{monitor: NewMonitor(cfg, time.Now()), cfg: cfg.WithDefaults()}
}

// RoundTrip is Monitor's.
func (h *Heartbeat) RoundTrip() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.monitor.RoundTrip()
}

// Watch returns when the other side has been silent for too long, with a *SilentError, or when ctx ends.
func (h *Heartbeat) Watch(ctx context.Context) error {
	tick := time.NewTicker(h.cfg.checkEvery())
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		h.mu.Lock()
		err := h.monitor.Check(time.Now())
		h.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// Run sends and hears beats until the connection breaks or ctx ends, and closes the connection. The error says what
// ended it; it is never nil.
func (h *Heartbeat) Run(ctx context.Context, conn net.Conn) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var both sync.WaitGroup
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	both.Go(func() { cancel(h.send(ctx, conn)) })
	both.Go(func() { cancel(h.hear(conn)) })
	both.Wait()
	_ = conn.Close() // of no interest: the cause is known
	return context.Cause(ctx)
}

func (h *Heartbeat) send(ctx context.Context, conn net.Conn) error {
	tick := time.NewTicker(h.cfg.Interval)
	defer tick.Stop()
	buffer := make([]byte, 0, beatSize)
	for {
		h.mu.Lock()
		beat := h.monitor.Next(time.Now())
		h.mu.Unlock()
		// A full send buffer must not hold this goroutine for ever: silence has the same limit both ways.
		err := conn.SetWriteDeadline(time.Now().Add(h.cfg.Limit))
		if err == nil {
			_, err = conn.Write(beat.append(buffer))
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return &SilentError{For: h.cfg.Limit, Limit: h.cfg.Limit}
		case err != nil:
			return fmt.Errorf("send a heartbeat: %w", err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

func (h *Heartbeat) hear(conn net.Conn) error {
	var raw [beatSize]byte
	for {
		if _, err := io.ReadFull(conn, raw[:]); err != nil {
			return fmt.Errorf("heartbeat connection: %w", err)
		}
		h.mu.Lock()
		err := h.monitor.Heard(parseBeat(&raw), time.Now())
		h.mu.Unlock()
		if err != nil {
			return err
		}
	}
}
