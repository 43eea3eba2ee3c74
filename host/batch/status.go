package batch

import (
	"fmt"
	"maps"
	"time"

	"github.com/mlxcel/mlxcel/host/kvledger"
)

// State is what a scheduler is doing.
type State string

const (
	StateReady       State = "ready"
	StateRelaunching State = "relaunching" // the pipeline was lost and is being started again
	StateDraining    State = "draining"    // no new requests
	StateFailed      State = "failed"      // the pipeline was lost for good
	StateClosed      State = "closed"
)

// Status is a snapshot of a scheduler.
type Status struct {
	State      State
	QueueDepth int // requests that wait
	MaxQueue   int
	MaxActive  int
	Active     []ActiveRequest // in the order in which they joined
	InFlight   int             // steps under way
	KV         []kvledger.StageUsage
	LastStep   time.Duration // of the latest step that ended
	Progress   time.Time     // when work last made progress, or began to wait for it
	Expected   time.Duration // that the longest step in flight should take; 0 where nothing was measured
	Outage     error         // why requests are refused, an *UnavailableError that names the lost stage; nil while they are not
	Counters   Counters
}

// ActiveRequest is a request that has joined.
type ActiveRequest struct {
	ID           uint64 // Stream.ID
	PromptTokens int
	Prefilled    int // positions held
	Generated    int
	MaxTokens    int
	Priority     int
	Since        time.Time // of Submit
}

// Counters only grow.
type Counters struct {
	Steps           uint64
	PromptTokens    uint64 // prefilled, again after a preemption or a restart included
	GeneratedTokens uint64
	Requests        uint64 // accepted
	Finished        uint64 // with an answer
	Failed          uint64 // with an error other than a cancellation
	Cancelled       uint64
	QueueFull       uint64 // refused
	Preemptions     uint64
	Restarts        uint64 // of requests whose state was lost with another's
	Unshared        uint64 // choices that prefill their prompt, though it was prefilled for another
	Relaunches      uint64
	Panics          uint64
	Rejections      map[Rejection]uint64
}

// Rejection is why a request could not join at once. A request that waits for memory counts once.
type Rejection struct {
	Stage  int
	Reason kvledger.Reason
}

// Status returns a snapshot.
func (s *Scheduler) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.core
	out := Status{
		State: s.state(), QueueDepth: len(c.queue), MaxQueue: c.cfg.maxQueue, MaxActive: c.cfg.maxActive, InFlight: len(c.flights),
		KV: c.ledger.Usage(), LastStep: c.lastStep, Progress: c.progress, Outage: s.outage, Counters: c.counters,
	}
	if s.failure != nil {
		out.Outage = s.failure
	}
	out.Counters.Rejections = maps.Clone(c.counters.Rejections)
	for _, j := range c.active {
		out.Active = append(out.Active, ActiveRequest{
			ID: j.id, PromptTokens: len(j.req.Prompt), Prefilled: j.held, Generated: j.generated,
			MaxTokens: j.req.MaxTokens, Priority: j.req.Priority, Since: j.submitted,
		})
	}
	for _, f := range c.flights {
		out.Expected = max(out.Expected, f.expected)
	}
	return out
}

func (s *Scheduler) state() State {
	switch {
	case s.closed:
		return StateClosed
	case s.failure != nil:
		return StateFailed
	case s.draining:
		return StateDraining
	case s.life == nil:
		return StateRelaunching
	}
	return StateReady
}

// UnhealthyError is a scheduler that should get no traffic.
type UnhealthyError struct {
	State   State
	Stalled time.Duration // since work last made progress; 0 where State says it all
	Allowed time.Duration // that it may take
	Waiting int           // requests that wait or run
	Outage  error         // Status.Outage
}

// Unwrap returns the outage.
func (e *UnhealthyError) Unwrap() error { return e.Outage }

func (e *UnhealthyError) Error() string {
	if e.Stalled > 0 {
		return fmt.Sprintf("no step has ended for %v, with %d requests at work; %v is the most that it should take", e.Stalled.Round(time.Millisecond), e.Waiting, e.Allowed)
	}
	if e.Outage != nil {
		return fmt.Sprintf("the scheduler is %s: %v", e.State, e.Outage)
	}
	return fmt.Sprintf("the scheduler is %s", e.State)
}

const (
	leastStall  = 5 * time.Second
	stallFactor = 10 // of the time that a step should take
)

// Healthy tells whether new requests would be served: nil, or an *UnhealthyError. Health is progress: while there is
// work, a step must end within 5 s or ten times the time that one of its size was measured to take, whichever is
// longer.
func (s *Scheduler) Healthy(now time.Time) error { return s.Status().Healthy(now) }

// Healthy is Scheduler.Healthy for a snapshot.
func (s Status) Healthy(now time.Time) error {
	e := &UnhealthyError{State: s.State, Allowed: max(leastStall, stallFactor*s.Expected), Waiting: s.QueueDepth + len(s.Active), Outage: s.Outage}
	if s.State != StateReady {
		return e
	}
	if stalled := now.Sub(s.Progress); e.Waiting > 0 && stalled > e.Allowed {
		e.Stalled = stalled
		return e
	}
	return nil
}
