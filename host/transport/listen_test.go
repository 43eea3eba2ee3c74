package transport

import (
	"context"
	"errors"
	"net"
	"testing"
	"testing/synctest"

	"github.com/mlxcel/mlxcel/host/securelink"
)

// slowToClose accepts nothing once its Close has begun, or from the start where it fails, and is closed only when it may be.
type slowToClose struct {
	fails error
	began chan struct{}
	may   chan struct{}
}

func (s *slowToClose) Accept() (*securelink.Conn, error) {
	if s.fails != nil {
		return nil, s.fails
	}
	<-s.began
	return nil, net.ErrClosed
}

func (s *slowToClose) Close() error {
	close(s.began)
	<-s.may
	return nil
}

// Whoever waits for Serve may listen on the address again at once.
func TestServeReturnsWithTheListenerClosed(t *testing.T) {
	for name, fails := range map[string]error{"told to stop": nil, "accepts no more": errors.New("out of descriptors")} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &slowToClose{fails: fails, began: make(chan struct{}), may: make(chan struct{})}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- Serve(ctx, l, nil, nil) }()
				if fails == nil {
					cancel()
				}
				synctest.Wait()
				select {
				case err := <-done:
					t.Errorf("it returns %v before the listener is closed", err)
				default:
				}
				close(l.may)
				synctest.Wait()
				select {
				case err := <-done:
					if !errors.Is(err, fails) {
						t.Errorf("it returns %v, want %v", err, fails)
					}
				default:
					t.Error("it does not return once the listener is closed")
				}
				cancel()
			})
		})
	}
}
