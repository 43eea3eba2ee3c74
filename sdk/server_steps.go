package sdk

import (
	"context"
	"errors"
	"io"
	"math"
	"sync"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
)

// opStream is one step stream. Operations are read and applied one after the other on one goroutine, so that no step is
// handed over within the process; the host's end queues what it has for later, and never makes its writer wait.
type opStream struct {
	server *server
	socket *stepSocket
	ctx    context.Context // of every operation; it ends with the stream
	fault  error           // why the stream ended, nil when the host closed it; valid after Run

	mu      sync.Mutex
	last    uint64              // number of the last operation read
	running context.CancelFunc  // of the step that runs, whose number is last; nil while none does
	early   map[uint64]struct{} // canceled before they were read
}

func newOpStream(ctx context.Context, s *server, socket *stepSocket) *opStream {
	return &opStream{server: s, socket: socket, ctx: context.WithValue(ctx, stepThread{}, true), early: map[uint64]struct{}{}}
}

// OpenSteps begins to serve the step stream. A second stream waits until the first one's last operation has returned.
func (s *server) OpenSteps(ctx context.Context, m *pb.OpenStepsRequest) (*pb.OpenStepsReply, error) {
	file, err := s.handed.take(ctx, m.GetSocket(), PurposeSteps)
	if err != nil {
		return nil, toStatus(err)
	}
	socket, err := newStepSocket(file)
	if err != nil {
		return nil, toStatus(Errorf(CodeInternal, "serve the step stream: %v", err))
	}
	select {
	case s.streaming <- struct{}{}:
	case <-ctx.Done():
		return nil, toStatus(errors.Join(ctx.Err(), socket.close()))
	}
	live, cancel := context.WithCancel(s.ctx)
	st := newOpStream(live, s, socket)
	s.setStream(st)
	socket.onHangUp(cancel)
	context.AfterFunc(live, socket.wake)
	s.streams.Go(func() {
		defer func() { <-s.streaming }()
		defer cancel()
		s.runSteps(&StepLoop{stream: st})
		s.setStream(nil)
		if err := errors.Join(st.fault, socket.close()); err != nil {
			s.log.Error("step stream ended", "error", err)
		}
	})
	return &pb.OpenStepsReply{}, nil
}

func (s *server) runSteps(loop *StepLoop) {
	if t, ok := s.exec.(Threaded); ok {
		t.RunSteps(loop)
		return
	}
	loop.Run(nil)
}

func (s *server) setStream(st *opStream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stream = st
}

// serve applies operations until the stream ends: well, or at an operation that breaks its order.
func (st *opStream) serve(woken func()) error {
	for {
		op := &pb.Operation{}
		switch err := st.socket.next(st.ctx, op, woken); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := st.enter(woken); err != nil {
			return err
		}
		outcome, err := st.run(op)
		st.server.gate.RUnlock()
		if err != nil {
			return err
		}
		if st.ctx.Err() != nil {
			return nil // the host is gone, or has closed the stream
		}
		if err := st.socket.send(outcome); err != nil {
			return err
		}
	}
}

// enter takes the gate together with other calls. Whoever holds it alone may want something done on this very thread.
func (st *opStream) enter(woken func()) error {
	for !st.server.gate.TryRLock() {
		woken()
		if err := st.socket.awaitWake(); err != nil {
			return err
		}
		woken()
	}
	return nil
}

// maxEarly bounds the cancels of operations that were not read yet: a correct host has fewer steps in flight.
const maxEarly = 1024

// cancel gives up a step. One that was answered is not running any more, and one that is still on its way is remembered
// until its turn: calls and the stream overtake each other.
func (st *opStream) cancel(number uint64) {
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case number == st.last && st.running != nil:
		st.running()
	case number > st.last && len(st.early) < maxEarly:
		st.early[number] = struct{}{}
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

// begin takes the next number up and returns the operation's context. An error ends the stream.
func (st *opStream) begin(op *pb.Operation) (context.Context, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if op.GetNumber() != st.last+1 {
		return nil, Errorf(CodeInvalid, "operation %d follows operation %d: the step stream lost its order", op.GetNumber(), st.last)
	}
	st.last = op.GetNumber()
	_, canceled := st.early[st.last]
	delete(st.early, st.last)
	if op.GetStep() == nil {
		return st.ctx, nil // only a step can be given up
	}
	ctx, cancel := context.WithCancel(st.ctx)
	st.running = cancel
	if canceled {
		cancel()
	}
	return ctx, nil
}

func (st *opStream) end() {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.running != nil {
		st.running()
		st.running = nil
	}
}

// run applies one operation and makes its answer. An error ends the stream.
func (st *opStream) run(op *pb.Operation) (*pb.Outcome, error) {
	ctx, err := st.begin(op)
	if err != nil {
		return nil, err
	}
	defer st.end()
	o := &pb.Outcome{Number: op.GetNumber()}
	if err := st.apply(ctx, op, o); err != nil {
		o.Outcome = &pb.Outcome_Error{Error: fromError(typedError(err))}
	}
	return o, nil
}

// apply carries an operation out and puts its result into o.
func (st *opStream) apply(ctx context.Context, op *pb.Operation, o *pb.Outcome) error {
	s := st.server
	if ctx.Err() != nil {
		return Errorf(CodeCanceled, "operation %d was given up before it ran", op.GetNumber())
	}
	o.Outcome = &pb.Outcome_Done{Done: &pb.Done{}}
	if s.loaded == nil {
		if op.GetRelease() != nil {
			return nil
		}
		return Errorf(CodeNotLoaded, "no model is loaded: load one before operating on sequences")
	}
	if m := op.GetStep(); m != nil {
		queued := int64(0)
		if op.GetSent() > 0 {
			queued = max(0, monotonicNanos()-op.GetSent())
		}
		result, err := s.step(ctx, m, queued)
		o.Outcome = &pb.Outcome_Result{Result: result}
		return err
	}
	return s.operate(ctx, op, o)
}

// operate applies an operation that is no step.
func (s *server) operate(ctx context.Context, m *pb.Operation, o *pb.Outcome) error {
	defer s.guard("operate")
	op, err := toOp(m)
	if err != nil {
		return err
	}
	switch op := op.(type) {
	case Reservation:
		return s.exec.Reserve(ctx, op)
	case Release:
		return s.exec.Release(ctx, op.Seq)
	}
	report, err := s.moveState(ctx, op)
	o.Outcome = &pb.Outcome_State{State: fromStateReport(report)}
	return err
}

// moveState carries out a StateExport or a StateImport.
func (s *server) moveState(ctx context.Context, op Op) (StateReport, error) {
	number, layers, seq := uint32(0), LayerRange{}, SeqID(0)
	export, out := op.(StateExport)
	if out {
		number, layers, seq = export.Descriptor, export.Layers, export.Seq
	} else {
		in := op.(StateImport)
		number, layers, seq = in.Descriptor, in.Layers, in.Seq
	}
	if held := s.loaded.request.Layers; layers.Start < held.Start || layers.End > held.End {
		return StateReport{}, Errorf(CodeInvalid, "layers [%d, %d) are not all here: this stage holds [%d, %d)", layers.Start, layers.End, held.Start, held.End)
	}
	file, err := s.handed.take(ctx, number, PurposeState)
	if err != nil {
		return StateReport{}, err
	}
	defer file.Close()
	// Several processes may hold the file at once: nobody relies on its offset.
	if out {
		return s.exportState(ctx, seq, layers, io.NewOffsetWriter(file, 0))
	}
	return s.importState(ctx, seq, layers, io.NewSectionReader(file, 0, math.MaxInt64))
}

func (s *server) exportState(ctx context.Context, seq SeqID, layers LayerRange, file io.Writer) (StateReport, error) {
	w := NewStateWriter(file, s.loaded.request.Family, layers)
	if err := s.exec.ExportState(ctx, seq, layers, w); err != nil {
		return StateReport{}, err
	}
	return w.Close()
}

func (s *server) importState(ctx context.Context, seq SeqID, layers LayerRange, file io.Reader) (StateReport, error) {
	r, err := NewStateReader(file, s.loaded.request.Family)
	if err != nil {
		return StateReport{}, err
	}
	if err := s.exec.ImportState(ctx, seq, layers, r); err != nil {
		return StateReport{}, err
	}
	return r.Report(), nil
}

func (s *server) step(ctx context.Context, m *pb.Step, queued int64) (*pb.StepResult, error) {
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
	result.ID, result.QueueNanos = step.ID, queued
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
	for i := range s.Seqs {
		if l.request.HasEmbedding && len(s.Seqs[i].Tokens) == 0 {
			return Errorf(CodeInvalid, "step %d brings no token ids for sequence %d to the stage with the embedding", s.ID, s.Seqs[i].Seq)
		}
	}
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
