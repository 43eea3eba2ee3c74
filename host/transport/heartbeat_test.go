package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// Two sides that beat are never silent; once one stands still the other finds out within 3 seconds, and once one is closed at once.
func TestHeartbeat(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  func(cancel context.CancelFunc, conn net.Conn, stall chan<- struct{})
		want func(err error) bool
	}{
		{"silent", func(_ context.CancelFunc, _ net.Conn, stall chan<- struct{}) { close(stall) }, func(err error) bool {
			_, ok := errors.AsType[*SilentError](err)
			return ok
		}},
		{"closed", func(_ context.CancelFunc, conn net.Conn, _ chan<- struct{}) { conn.Close() }, func(err error) bool {
			return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe)
		}},
		{"canceled", func(cancel context.CancelFunc, _ net.Conn, _ chan<- struct{}) { cancel() }, func(err error) bool { return errors.Is(err, context.Canceled) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				here, there := net.Pipe()
				stall := make(chan struct{})
				own, other := NewHeartbeat(HeartbeatConfig{}), NewHeartbeat(HeartbeatConfig{})
				result := make(chan error, 2)
				go func() { result <- own.Run(ctx, here) }()
				go func() { result <- own.Watch(ctx) }()
				done := make(chan struct{})
				go func() {
					defer close(done)
					_ = other.Run(t.Context(), stallable{there, stall})
				}()
				time.Sleep(time.Minute) // of the bubble's clock
				select {
				case err := <-result:
					t.Fatalf("ended with %v", err)
				default:
				}
				if own.RoundTrip() < 0 {
					t.Error("no round trip")
				}
				at := time.Now()
				tc.end(cancel, there, stall)
				err := <-result
				if !tc.want(err) {
					t.Errorf("ended with %v", err)
				}
				if took := time.Since(at); took > 3*time.Second || tc.name != "silent" && took > 0 {
					t.Errorf("noticed after %v", took)
				}
				cancel()
				<-result
				there.Close()
				<-done
			})
		})
	}
}

// stallable writes nothing more once stall is closed, as a process that was stopped.
type stallable struct {
	net.Conn
	stall <-chan struct{}
}

func (c stallable) Write(p []byte) (int, error) {
	select {
	case <-c.stall:
		return len(p), nil
	default:
		return c.Conn.Write(p)
	}
}
