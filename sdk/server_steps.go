package sdk

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/grpc"
)

// queueLen is how many operations and answers may wait before the stream's own flow control holds the host back.
const queueLen = 256

// opStream is one step stream. Three goroutines serve it, so that it can't deadlock: the reader only queues, the
// applier (the handler's own goroutine) runs one operation after the other, the writer only sends.
type opStream struct {
	server *server
	jobs   chan *job
	fault  error // why the reader stopped, nil at the end of the stream; valid once jobs is closed

	mu    sync.Mutex
	last  uint64                        // number of the last operation read
	slots map[int64]bool                // held by steps that are not answered yet
	steps map[uint64]context.CancelFunc // of the same steps, by operation number
	early map[uint64]bool               // canceled before they were read
}

// job is an operation in the queue.
type job struct {
	op      *pb.Operation
	ctx     context.Context
	refused error // found by the reader; the operation is only answered
}

func newOpStream(s *server) *opStream {
	return &opStream{
		server: s,
		jobs:   make(chan *job, queueLen),
		slots:  map[int64]bool{},
		steps:  map[uint64]context.CancelFunc{},
		early:  map[uint64]bool{},
	}
}

// Operate serves the step stream. A second stream waits until the first one's last operation has returned.
func (s *server) Operate(stream grpc.BidiStreamingServer[pb.Operation, pb.Outcome]) error {
	select {
	case s.streaming <- struct{}{}:
	case <-stream.Context().Done():
		return toStatus(stream.Context().Err())
	}
	defer func() { <-s.streaming }()
	st := newOpStream(s)
	s.setStream(st)
	defer s.setStream(nil)
	return st.serve(stream)
}

func (s *server) setStream(st *opStream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stream = st
}

func (st *opStream) serve(stream grpc.BidiStreamingServer[pb.Operation, pb.Outcome]) error {
	go st.read(stream)
	outcomes := make(chan *pb.Outcome, queueLen)
	written := make(chan struct{})
	go func() {
		defer close(written)
		for o := range outcomes {
			// A broken stream ends the reader too; the rest drains.
			_ = stream.Send(o)
		}
	}()
	for j := range st.jobs {
		outcomes <- st.run(j)
	}
	close(outcomes)
	<-written
	if st.fault != nil {
		return toStatus(st.fault)
	}
	return nil
}

// read queues what comes until the stream ends.
func (st *opStream) read(stream grpc.BidiStreamingServer[pb.Operation, pb.Outcome]) {
	defer close(st.jobs)
	for {
		op, err := stream.Recv()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				st.fault = err
			}
			return
		}
		j, err := st.accept(stream.Context(), op)
		if err != nil {
			st.fault = err
			return
		}
		st.jobs <- j
	}
}

// accept books a step's slot. An error ends the stream.
func (st *opStream) accept(ctx context.Context, op *pb.Operation) (*job, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if op.GetNumber() != st.last+1 {
		return nil, Errorf(CodeInvalid, "operation %d follows operation %d: the step stream lost its order", op.GetNumber(), st.last)
	}
	st.last = op.GetNumber()
	j := &job{op: op, ctx: ctx}
	step := op.GetStep()
	if step == nil {
		return j, nil
	}
	if st.slots[step.GetSlot()] {
		j.refused = Errorf(CodeInvalid, "step %d uses slot %d, which belongs to a step that was not answered yet", step.GetId(), step.GetSlot())
		return j, nil
	}
	var cancel context.CancelFunc
	j.ctx, cancel = context.WithCancel(ctx)
	if st.early[st.last] {
		delete(st.early, st.last)
		cancel()
	}
	st.slots[step.GetSlot()] = true
	st.steps[st.last] = cancel
	return j, nil
}

// finish gives a step's slot back.
func (st *opStream) finish(j *job) {
	step := j.op.GetStep()
	if step == nil || j.refused != nil {
		return
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.steps[j.op.GetNumber()]()
	delete(st.steps, j.op.GetNumber())
	delete(st.slots, step.GetSlot())
}

// maxEarly bounds the cancels of operations that were not read yet: a correct host has fewer in flight.
const maxEarly = 4 * queueLen

// cancel gives up a step. One that was answered is not in steps any more, and one that is still on its way is
// remembered: calls and the stream overtake each other.
func (st *opStream) cancel(number uint64) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if cancel, ok := st.steps[number]; ok {
		cancel()
	} else if number > st.last && len(st.early) < maxEarly {
		st.early[number] = true
	}
}

func (s *server) Cancel(_ context.Context, m *pb.CancelRequest) (*pb.CancelReply, error) {
	s.mu.Lock()
	st := s.stream
	s.mu.Unlock()
	if st != nil {
		st.cancel(m.GetNumber())
	}
	return &pb.CancelReply{}, nil
}

// run applies one operation and makes its answer.
func (st *opStream) run(j *job) *pb.Outcome {
	defer st.finish(j)
	o := &pb.Outcome{Number: j.op.GetNumber()}
	result, err := st.apply(j)
	switch {
	case err != nil:
		o.Outcome = &pb.Outcome_Error{Error: fromError(typedError(err))}
	case result != nil:
		o.Outcome = &pb.Outcome_Result{Result: result}
	default:
		o.Outcome = &pb.Outcome_Done{Done: &pb.Done{}}
	}
	return o
}

func (st *opStream) apply(j *job) (*pb.StepResult, error) {
	s := st.server
	s.gate.RLock()
	defer s.gate.RUnlock()
	if j.refused != nil {
		return nil, j.refused
	}
	if err := j.ctx.Err(); err != nil {
		return nil, Errorf(CodeCanceled, "operation %d was given up before it ran", j.op.GetNumber())
	}
	if m := j.op.GetRelease(); m != nil && s.loaded == nil {
		return nil, nil
	}
	if s.loaded == nil {
		return nil, Errorf(CodeNotLoaded, "no model is loaded: load one before operating on sequences")
	}
	switch op := j.op.GetOp().(type) {
	case *pb.Operation_Step:
		return s.step(j.ctx, op.Step)
	default:
		return nil, s.operate(j.ctx, j.op)
	}
}

// operate applies an operation that is no step.
func (s *server) operate(ctx context.Context, m *pb.Operation) error {
	defer s.guard("operate")
	switch op := m.GetOp().(type) {
	case *pb.Operation_Reserve:
		r, err := toReservation(op.Reserve)
		if err != nil {
			return err
		}
		return s.exec.Reserve(ctx, r)
	case *pb.Operation_Release:
		return s.exec.Release(ctx, SeqID(op.Release.GetSeq()))
	case *pb.Operation_Truncate:
		length, err := toCount("length to truncate to", op.Truncate.GetLength())
		if err != nil {
			return err
		}
		return s.exec.Truncate(ctx, SeqID(op.Truncate.GetSeq()), length)
	case *pb.Operation_Fork:
		if op.Fork.GetFrom() == op.Fork.GetTo() {
			return Errorf(CodeInvalid, "sequence %d can't be forked to itself", op.Fork.GetFrom())
		}
		return s.exec.Fork(ctx, SeqID(op.Fork.GetFrom()), SeqID(op.Fork.GetTo()))
	}
	return Errorf(CodeInvalid, "operation %d says nothing that this contract version knows", m.GetNumber())
}

func (s *server) step(ctx context.Context, m *pb.Step) (*pb.StepResult, error) {
	layout := s.loaded.request.Region
	step, err := toStep(m, layout, s.region.mem)
	if err != nil {
		return nil, err
	}
	if err := s.loaded.checkStep(step); err != nil {
		return nil, err
	}
	result, err := guarded(s, "step", func() (*StepResult, error) { return s.exec.Step(ctx, step) })
	if err != nil {
		return nil, err
	}
	if err := s.loaded.checkResult(step, result); err != nil {
		return nil, err
	}
	result.ID = step.ID
	answer, err := fromStepResult(result, step.Out)
	if err != nil {
		return nil, Errorf(CodeInternal, "the executor's answer to step %d: %v", step.ID, err)
	}
	return answer, nil
}

// checkStep refuses a step that does not fit what is loaded.
func (l *loaded) checkStep(s *Step) error {
	if err := l.checkInput(s); err != nil {
		return err
	}
	need := int64(0)
	if !l.request.HasHead {
		need, _ = tensorBytes(int64(s.Rows()), int64(l.report.Boundary.Width), l.report.Boundary.Dtype)
	}
	for i := range s.Seqs {
		seq := &s.Seqs[i]
		if !l.request.HasHead {
			continue
		}
		if seq.Want == WantLogits {
			need += int64(l.report.VocabSize) * int64(DtypeFloat32.Size())
		}
		if mask := (l.report.VocabSize + 7) / 8; len(seq.Allowed) != 0 && len(seq.Allowed) != mask {
			return Errorf(CodeInvalid, "sequence %d's mask has %d bytes, want %d for a vocabulary of %d", seq.Seq, len(seq.Allowed), mask, l.report.VocabSize)
		}
	}
	if need > int64(len(s.Out)) {
		return Errorf(CodeInvalid, "step %d gives out %d bytes, its slot has %d: raise the region layout's OutBytes or send fewer rows", s.ID, need, len(s.Out))
	}
	return nil
}

func (l *loaded) checkInput(s *Step) error {
	if l.request.HasEmbedding {
		if s.Hidden.Rows != 0 {
			return Errorf(CodeInvalid, "step %d brings hidden rows to the stage with the embedding", s.ID)
		}
		return nil
	}
	want := Tensor{Dtype: l.report.Boundary.Dtype, Rows: s.Rows(), Width: l.report.Boundary.Width}
	if got := s.Hidden; got.Dtype != want.Dtype || got.Rows != want.Rows || got.Width != want.Width {
		return Errorf(CodeInvalid, "step %d brings hidden rows [%d, %d] %v, want [%d, %d] %v", s.ID, got.Rows, got.Width, got.Dtype, want.Rows, want.Width, want.Dtype)
	}
	return nil
}

// checkResult refuses an answer that the host could not use, here, where the executor at fault is known.
func (l *loaded) checkResult(s *Step, r *StepResult) error {
	if !l.request.HasHead {
		b := l.report.Boundary
		if got := r.Hidden; got.Dtype != b.Dtype || got.Rows != s.Rows() || got.Width != b.Width {
			return Errorf(CodeInternal, "the executor answered step %d with hidden rows [%d, %d] %v, want [%d, %d] %v", s.ID, got.Rows, got.Width, got.Dtype, s.Rows(), b.Width, b.Dtype)
		}
		return nil
	}
	answers := make(map[SeqID]*SeqResult, len(r.Seqs))
	for i := range r.Seqs {
		answers[r.Seqs[i].Seq] = &r.Seqs[i]
	}
	for i := range s.Seqs {
		if err := l.checkAnswer(&s.Seqs[i], answers[s.Seqs[i].Seq]); err != nil {
			return err
		}
	}
	return nil
}

func (l *loaded) checkAnswer(asked *SeqStep, got *SeqResult) error {
	if asked.Want == WantNothing {
		return nil
	}
	if got == nil {
		return Errorf(CodeInternal, "the executor left sequence %d without an answer", asked.Seq)
	}
	switch {
	case asked.Want == WantToken && (got.Token < 0 || int(got.Token) >= l.report.VocabSize):
		return Errorf(CodeInternal, "the executor sampled token %d of %d", got.Token, l.report.VocabSize)
	case asked.Want == WantToken && len(got.Top) != min(asked.TopN, l.report.VocabSize):
		return Errorf(CodeInternal, "the executor gave %d top tokens, want %d", len(got.Top), asked.TopN)
	case asked.Want == WantScores && len(got.Scores) != len(asked.Targets):
		return Errorf(CodeInternal, "the executor gave %d scores, want %d", len(got.Scores), len(asked.Targets))
	case asked.Want == WantLogits && (got.Logits.Dtype != DtypeFloat32 || got.Logits.Rows != 1 || got.Logits.Width != l.report.VocabSize):
		return Errorf(CodeInternal, "the executor gave logits [%d, %d] %v, want [1, %d] float32", got.Logits.Rows, got.Logits.Width, got.Logits.Dtype, l.report.VocabSize)
	}
	return nil
}
