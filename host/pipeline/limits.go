package pipeline

import (
	"fmt"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// Limits of a place. None of them is met by work as it comes: each bounds what a fault may cost.
const (
	// maxOrders is how many orders may be under way at a place. A coordinator has one or two for each sequence that is
	// active or waits, and as many steps as fill the stages: thousands mean that the executor takes nothing any more.
	// It is what a data connection between hosts queues as well.
	maxOrders = 8192

	// maxOrderBytes is what the prompts, rows and masks of these orders may hold together: 500 prompts of 128k tokens,
	// well below what a host that serves such has left.
	maxOrderBytes = 256 << 20

	// planPatience is how long a frame waits for its plan. Both come from the coordinator's side within a round trip.
	planPatience = 3 * time.Second

	healthInterval = 500 * time.Millisecond
	healthTimeout  = time.Second // of one question

	// stepPatience is how long an executor may work on one thing. It is beyond what the largest prefill chunk takes on the
	// slowest device that makes sense.
	stepPatience = 10 * time.Minute
)

// BacklogError is the loss of a stage that does not take its orders. The *StageError around it names the stage.
type BacklogError struct {
	Orders, MaxOrders int
	Bytes, MaxBytes   int64 // of prompts, rows and masks
}

func (e *BacklogError) Error() string {
	return fmt.Sprintf("%d orders of %d bytes wait for the executor, at most %d of %d bytes may: it does not take them",
		e.Orders, e.Bytes, e.MaxOrders, e.MaxBytes)
}

// Unwrap tells that the executor counts as gone: nothing is sent to it any more.
func (e *BacklogError) Unwrap() error { return sdk.ErrExecutorGone }

// backlog is what is under way at a place.
type backlog struct {
	orders int
	bytes  int64
}

// add books an order; it is a *BacklogError past the limits.
func (b *backlog) add(bytes int64, maxOrders int, maxBytes int64) error {
	b.orders++
	b.bytes += bytes
	if b.orders > maxOrders || b.bytes > maxBytes {
		return &BacklogError{Orders: b.orders, MaxOrders: maxOrders, Bytes: b.bytes, MaxBytes: maxBytes}
	}
	return nil
}

func (b *backlog) remove(bytes int64) {
	b.orders--
	b.bytes -= bytes
}

// bytes returns about how much memory an order holds beside a fixed size.
func (o *Order) bytes() int64 {
	var n int64
	if r, ok := o.Op.(sdk.Reservation); ok {
		n = 4*int64(len(r.Prompt)+len(r.Generated)) + 16*int64(len(r.Sampler.LogitBias))
	}
	if o.Plan != nil {
		for i := range o.Plan.Seqs {
			s := &o.Plan.Seqs[i]
			n += 4*int64(len(s.Tokens)+len(s.Targets)) + int64(len(s.Allowed))
		}
	}
	return n
}
