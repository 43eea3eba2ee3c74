package sdk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// StepStream is the real StepClient, the host's end of an executor's step stream.
type StepStream struct {
	client *Client
	stream grpc.BidiStreamingClient[pb.Operation, pb.Outcome]
	cancel context.CancelFunc
	done   chan struct{} // closed when the reader has ended

	send sync.Mutex // held over the choice of a number and its sending, so that numbers go out in order

	mu      sync.Mutex
	last    uint64
	pending map[uint64]inFlight // by operation number
	steps   map[uint64]uint64   // step ID to operation number, of the steps in flight
	slots   map[int]uint64      // slot to step ID, of the steps in flight
	closed  bool                // by Close
	err     error               // why the stream ended
}

type inFlight struct {
	answer *Pending
	step   *Step // nil for other operations
}

var _ StepClient = (*StepStream)(nil)

// OpenSteps opens the step stream. There is one at a time; it lives until Close or the end of ctx.
func (c *Client) OpenSteps(ctx context.Context) (*StepStream, error) {
	if !c.streaming.CompareAndSwap(false, true) {
		return nil, errors.New("open the step stream: it is open already, close it first")
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.calls.Operate(ctx, limits()...)
	if err != nil {
		cancel()
		c.streaming.Store(false)
		return nil, callError(ctx, "open the step stream", err)
	}
	s := &StepStream{
		client:  c,
		stream:  stream,
		cancel:  cancel,
		done:    make(chan struct{}),
		pending: map[uint64]inFlight{},
		steps:   map[uint64]uint64{},
		slots:   map[int]uint64{},
	}
	go s.read(ctx)
	return s, nil
}

// Send implements StepClient. A step's slot must be free, and its hidden rows must lie in the slot's input area.
func (s *StepStream) Send(op Op) (*Pending, error) {
	s.send.Lock()
	defer s.send.Unlock()
	m, err := s.message(op)
	if err != nil {
		return nil, err
	}
	step, _ := op.(*Step)
	answer, err := s.register(m, step)
	if err != nil {
		return nil, err
	}
	if err := s.stream.Send(m); err != nil {
		<-s.done // the reader knows why, and has failed the answer
		return nil, s.err
	}
	return answer, nil
}

func (s *StepStream) message(op Op) (*pb.Operation, error) {
	m := &pb.Operation{}
	switch op := op.(type) {
	case Reservation:
		m.Op = &pb.Operation_Reserve{Reserve: fromReservation(op)}
	case Release:
		m.Op = &pb.Operation_Release{Release: &pb.Release{Seq: uint64(op.Seq)}}
	case Truncation:
		m.Op = &pb.Operation_Truncate{Truncate: &pb.Truncate{Seq: uint64(op.Seq), Length: int64(op.Length)}}
	case ForkOp:
		m.Op = &pb.Operation_Fork{Fork: &pb.Fork{From: uint64(op.From), To: uint64(op.To)}}
	case *Step:
		step, err := s.stepMessage(op)
		if err != nil {
			return nil, fmt.Errorf("step %d: %w", op.ID, err)
		}
		m.Op = &pb.Operation_Step{Step: step}
	default:
		return nil, fmt.Errorf("operation of type %T is none of the step stream", op)
	}
	if size := proto.Size(m); size > maxMessage-64 {
		return nil, Errorf(CodeInvalid, "an operation of %d bytes passes the limit of %d: send fewer sequences or masks at once", size, maxMessage)
	}
	return m, nil
}

func (s *StepStream) stepMessage(step *Step) (*pb.Step, error) {
	if s.client.region == nil {
		return nil, Errorf(CodeInvalid, "the executor was started without a shared-memory region")
	}
	if slots := s.client.region.Layout().Slots; step.Slot < 0 || step.Slot >= slots {
		return nil, Errorf(CodeInvalid, "slot %d of a region with %d slots", step.Slot, slots)
	}
	return fromStep(step, s.client.region.In(step.Slot))
}

// register numbers an operation and books a step's slot.
func (s *StepStream) register(m *pb.Operation, step *Step) (*Pending, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	if step != nil {
		if other, busy := s.slots[step.Slot]; busy {
			return nil, Errorf(CodeInvalid, "step %d uses slot %d, which belongs to step %d until its answer", step.ID, step.Slot, other)
		}
		if _, busy := s.steps[step.ID]; busy {
			return nil, Errorf(CodeInvalid, "step %d is in flight already: give every step its own ID", step.ID)
		}
	}
	s.last++
	m.Number = s.last
	if step != nil {
		s.slots[step.Slot] = step.ID
		s.steps[step.ID] = s.last
	}
	answer := NewPending()
	s.pending[s.last] = inFlight{answer: answer, step: step}
	return answer, nil
}

// take removes an operation from the books.
func (s *StepStream) take(number uint64) (inFlight, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.pending[number]
	delete(s.pending, number)
	if f.step != nil {
		delete(s.slots, f.step.Slot)
		delete(s.steps, f.step.ID)
	}
	return f, ok
}

// read completes answers until the stream ends. It never waits for anything but the stream, so the executor can
// always get rid of its answers.
func (s *StepStream) read(ctx context.Context) {
	err := s.complete()
	switch {
	case s.wasClosed():
		err = fmt.Errorf("step stream: %w: closed by the host", ErrExecutorGone)
	case errors.Is(err, io.EOF):
		err = fmt.Errorf("step stream: %w: it ended the stream", ErrExecutorGone)
	default:
		err = callError(ctx, "step stream", err)
		if !errors.Is(err, ErrExecutorGone) {
			err = fmt.Errorf("%w: %w", ErrExecutorGone, err)
		}
	}
	s.mu.Lock()
	s.err = err
	left := s.pending
	s.pending = nil
	s.mu.Unlock()
	for _, f := range left {
		f.answer.Complete(nil, err)
	}
	s.cancel()
	s.client.streaming.Store(false)
	close(s.done)
}

func (s *StepStream) complete() error {
	for {
		m, err := s.stream.Recv()
		if err != nil {
			return err
		}
		f, ok := s.take(m.GetNumber())
		if !ok {
			return fmt.Errorf("an answer came to operation %d, which is not in flight", m.GetNumber())
		}
		f.answer.Complete(s.outcome(f, m))
	}
}

func (s *StepStream) outcome(f inFlight, m *pb.Outcome) (*StepResult, error) {
	if e := m.GetError(); e != nil {
		return nil, toError(e)
	}
	if f.step == nil {
		return nil, nil
	}
	r := m.GetResult()
	if r == nil {
		return nil, Errorf(CodeInternal, "the executor answered step %d without a result", f.step.ID)
	}
	return toStepResult(r, s.client.region.Out(f.step.Slot))
}

func (s *StepStream) wasClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Cancel implements StepClient.
func (s *StepStream) Cancel(ctx context.Context, stepID uint64) error {
	s.mu.Lock()
	number, ok := s.steps[stepID]
	s.mu.Unlock()
	if !ok {
		return nil
	}
	if _, err := s.client.calls.Cancel(ctx, &pb.CancelRequest{Number: number}, limits()...); err != nil {
		return callError(ctx, "cancel", err)
	}
	return nil
}

// Close implements StepClient. Operations that were sent but not answered may or may not be applied.
func (s *StepStream) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	<-s.done
	return nil
}
