package sdk

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/protobuf/proto"
)

// StepStream is the real StepClient, the host's end of an executor's step stream.
type StepStream struct {
	client *Client
	conn   *net.UnixConn
	out    *outbox
	self   *Description  // of the executor
	stop   func() bool   // of the watch over the stream's context
	done   chan struct{} // closed when the reader has ended

	send sync.Mutex // held over the choice of a number and its queueing, so that numbers go out in order

	mu      sync.Mutex
	last    uint64
	pending map[uint64]inFlight // by operation number
	steps   map[uint64]uint64   // step ID to operation number, of the steps in flight
	slots   map[int]uint64      // slot to step ID, of the steps in flight
	err     error               // why the stream ended
}

type inFlight struct {
	answer *Pending
	step   *Step // nil for other operations
	state  bool  // the answer is a StateReport
}

var _ StepClient = (*StepStream)(nil)

// OpenSteps opens the step stream. There is one at a time; it lives until Close or the end of ctx.
func (c *Client) OpenSteps(ctx context.Context) (*StepStream, error) {
	if !c.streaming.CompareAndSwap(false, true) {
		return nil, errors.New("open the step stream: it is open already, close it first")
	}
	self, err := c.Describe(ctx)
	if err != nil {
		c.streaming.Store(false)
		return nil, fmt.Errorf("open the step stream: %w", err)
	}
	conn, err := c.stepSocket(ctx)
	if err != nil {
		c.streaming.Store(false)
		return nil, err
	}
	s := &StepStream{
		self:    self,
		client:  c,
		conn:    conn,
		done:    make(chan struct{}),
		pending: map[uint64]inFlight{},
		steps:   map[uint64]uint64{},
		slots:   map[int]uint64{},
	}
	s.out = newOutbox(conn, s.fail)
	s.stop = context.AfterFunc(ctx, func() { s.fail(fmt.Errorf("step stream: %w: %w", ErrExecutorGone, context.Cause(ctx))) })
	go s.read()
	return s, nil
}

// stepSocket makes a socket pair and hands one end to the executor.
func (c *Client) stepSocket(ctx context.Context) (*net.UnixConn, error) {
	if c.channel == nil {
		return nil, errors.New("open the step stream: the executor was started without a side channel")
	}
	near, far, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("open the step stream: %w", err)
	}
	defer far.Close() // so that the executor alone holds it, and its death closes it
	conn, err := unixConn(near)
	if err != nil {
		return nil, fmt.Errorf("open the step stream: %w", err)
	}
	number, err := c.channel.Hand(PurposeSteps, far)
	if err == nil {
		if _, callErr := c.calls.OpenSteps(ctx, &pb.OpenStepsRequest{Socket: number}, limits()...); callErr != nil {
			err = callError(ctx, "open the step stream", callErr)
		}
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// Send implements StepClient. A step's slot must be free, and its hidden rows must lie in the slot's input area; the masks
// of its sequences are copied into the slot.
func (s *StepStream) Send(op Op) (*Pending, error) {
	if missing := lacking(op, s.self.Has); missing != "" {
		return nil, Errorf(CodeUnsupported, "executor %s lacks the capability %q, which this operation needs: update it, or do without", s.self.Name, missing)
	}
	s.send.Lock()
	defer s.send.Unlock()
	step, _ := op.(*Step)
	if step != nil {
		if err := s.checkFree(step); err != nil { // before anything is written into the slot
			return nil, err
		}
	}
	m, err := s.message(op, step)
	if err != nil {
		return nil, err
	}
	answer, err := s.register(m, op, step)
	if err != nil {
		return nil, err
	}
	frame, err := appendStreamFrame(nil, m)
	if err == nil {
		err = s.out.push(frame)
	}
	if err != nil {
		s.fail(err)
		<-s.done // the reader has failed the answer
		return nil, s.ended()
	}
	return answer, nil
}

func (s *StepStream) message(op Op, step *Step) (*pb.Operation, error) {
	m, err := s.body(op, step)
	if err != nil {
		return nil, err
	}
	m.Sent = monotonicNanos()
	if size := proto.Size(m); size > maxMessage-64 {
		return nil, Errorf(CodeInvalid, "an operation of %d bytes passes the limit of %d: send fewer sequences at once", size, maxMessage)
	}
	return m, nil
}

func (s *StepStream) body(op Op, step *Step) (*pb.Operation, error) {
	if step == nil {
		return fromOp(op)
	}
	region := s.client.region
	m, err := fromStep(step, region.In(step.Slot), region.Masks(step.Slot))
	if err != nil {
		return nil, fmt.Errorf("step %d: %w", step.ID, err)
	}
	return &pb.Operation{Op: &pb.Operation_Step{Step: m}}, nil
}

// checkFree refuses a step whose slot or ID is not free.
func (s *StepStream) checkFree(step *Step) error {
	if s.client.region == nil {
		return Errorf(CodeInvalid, "step %d: the executor was started without a shared-memory region", step.ID)
	}
	if slots := s.client.region.Layout().Slots; step.Slot < 0 || step.Slot >= slots {
		return Errorf(CodeInvalid, "step %d: slot %d of a region with %d slots", step.ID, step.Slot, slots)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if other, busy := s.slots[step.Slot]; busy {
		return Errorf(CodeInvalid, "step %d uses slot %d, which belongs to step %d until its answer", step.ID, step.Slot, other)
	}
	if _, busy := s.steps[step.ID]; busy {
		return Errorf(CodeInvalid, "step %d is in flight already: give every step its own ID", step.ID)
	}
	return nil
}

// register numbers an operation and books a step's slot.
func (s *StepStream) register(m *pb.Operation, op Op, step *Step) (*Pending, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	s.last++
	m.Number = s.last
	f := inFlight{answer: NewPending(), step: step}
	switch op.(type) {
	case *Step:
		s.slots[step.Slot] = step.ID
		s.steps[step.ID] = s.last
	case StateExport, StateImport:
		f.state = true
	}
	s.pending[s.last] = f
	return f.answer, nil
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

// fail ends the stream. Only the first reason counts.
func (s *StepStream) fail(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	s.conn.Close()
}

func (s *StepStream) ended() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// read completes answers until the stream ends. It never waits for anything but the stream, so the executor can
// always get rid of its answers.
func (s *StepStream) read() {
	s.fail(streamError(s.complete()))
	s.out.close()
	s.stop()
	s.mu.Lock()
	err, left := s.err, s.pending
	s.pending = nil
	s.mu.Unlock()
	for _, f := range left {
		f.answer.Complete(nil, err)
	}
	s.client.streaming.Store(false)
	close(s.done)
}

func streamError(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("step stream: %w: it ended the stream", ErrExecutorGone)
	}
	return fmt.Errorf("step stream: %w: %w", ErrExecutorGone, err)
}

func (s *StepStream) complete() error {
	r := bufio.NewReaderSize(s.conn, streamBuffer)
	var frame []byte
	for {
		var err error
		if frame, err = readStreamFrame(r, frame); err != nil {
			return err
		}
		m := &pb.Outcome{}
		if err := proto.Unmarshal(frame, m); err != nil {
			return fmt.Errorf("an answer is no message: %w", err)
		}
		f, ok := s.take(m.GetNumber())
		if !ok {
			return fmt.Errorf("an answer came to operation %d, which is not in flight", m.GetNumber())
		}
		s.answer(f, m)
	}
}

func (s *StepStream) answer(f inFlight, m *pb.Outcome) {
	if e := m.GetError(); e != nil {
		f.answer.Complete(nil, toError(e))
		return
	}
	switch {
	case f.step != nil:
		f.answer.Complete(s.result(f.step, m.GetResult()))
	case f.state:
		report, err := toStateReport(m.GetState())
		if err != nil {
			f.answer.Complete(nil, err)
			return
		}
		f.answer.CompleteState(report)
	default:
		f.answer.Complete(nil, nil)
	}
}

func (s *StepStream) result(step *Step, m *pb.StepResult) (*StepResult, error) {
	if m == nil {
		return nil, Errorf(CodeInternal, "the executor answered step %d without a result", step.ID)
	}
	return toStepResult(m, s.client.region.Out(step.Slot))
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
	s.fail(fmt.Errorf("step stream: %w: closed by the host", ErrExecutorGone))
	<-s.done
	return nil
}
