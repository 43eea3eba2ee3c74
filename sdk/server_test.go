package sdk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/protobuf/proto"
)

var echoLayout = RegionLayout{Slots: 2, InBytes: 64, OutBytes: 64, MaskBytes: 8}

var allCapabilities = []string{
	CapabilityShare, CapabilityRewind, CapabilitySnapshots, CapabilityState, CapabilityMasks, CapabilityScores, CapabilityLogits,
}

// serveEcho serves e in this process, with all capabilities unless it has some.
func serveEcho(t *testing.T, e *Echo) *Client {
	t.Helper()
	if e.Capabilities == nil {
		e.Capabilities = allCapabilities
	}
	c, stop, err := InProcess(e)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// TestStopWithoutACall ends an executor that nobody asked anything.
func TestStopWithoutACall(t *testing.T) {
	_, stop, err := InProcess(&Echo{})
	if err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	select {
	case err := <-stopped:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("it does not end")
	}
}

func loadEcho(t *testing.T, c *Client, change func(*LoadRequest)) {
	t.Helper()
	req := LoadRequest{Layers: LayerRange{1, 2}, Region: echoLayout}
	if change != nil {
		change(&req)
	}
	if _, err := c.Load(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
}

func openSteps(t *testing.T, c *Client) *StepStream {
	t.Helper()
	s, err := c.OpenSteps(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// row makes a step of one row whose hidden value is value.
func row(c *Client, id uint64, slot int, value uint32) *Step {
	in := c.Region().In(slot)[:4]
	binary.LittleEndian.PutUint32(in, value)
	return &Step{
		ID:     id,
		Slot:   slot,
		Seqs:   []SeqStep{{Seq: 1, Rows: 1}},
		Hidden: Tensor{Dtype: DtypeFloat32, Rows: 1, Width: 1, Data: in},
	}
}

func TestOperationsReachTheExecutorInOrder(t *testing.T) {
	e := &Echo{Width: 1}
	c := serveEcho(t, e)
	loadEcho(t, c, nil)
	s := openSteps(t, c)
	var last *Pending
	for _, op := range []Op{
		Reservation{Seq: 1}, row(c, 5, 0, 42), Reservation{Seq: 2, From: 1, Keep: 1}, row(c, 6, 1, 43), Release{Seq: 1},
	} {
		p, err := s.Send(op)
		if err != nil {
			t.Fatal(err)
		}
		last = p
	}
	if r, err := last.Wait(t.Context()); r != nil || err != nil {
		t.Errorf("a release answered %v, %v", r, err)
	}
	want := []string{"reserve 1", "step 5", "reserve 2", "step 6", "release 1"}
	if got := e.Calls(); !reflect.DeepEqual(got, want) {
		t.Errorf("calls %q, want %q", got, want)
	}
}

func TestTensorsCrossInPlace(t *testing.T) {
	c := serveEcho(t, &Echo{Width: 1})
	loadEcho(t, c, nil)
	s := openSteps(t, c)
	p, err := s.Send(row(c, 9, 1, 0xCAFE))
	if err != nil {
		t.Fatal(err)
	}
	r, err := p.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if r.ID != 9 || binary.LittleEndian.Uint32(r.Hidden.Data) != 0xCAFE || &r.Hidden.Data[0] != &c.Region().Out(1)[0] {
		t.Errorf("result %+v, want the rows of slot 1's output", r)
	}
}

// TestManyOperationsInFlight sends far more than any queue holds before it looks at an answer.
func TestManyOperationsInFlight(t *testing.T) {
	c := serveEcho(t, &Echo{Width: 1})
	loadEcho(t, c, nil)
	s := openSteps(t, c)
	var answers []*Pending
	for i := range 10_000 {
		p, err := s.Send(Release{Seq: SeqID(i)})
		if err != nil {
			t.Fatal(err)
		}
		answers = append(answers, p)
	}
	for _, p := range answers {
		if _, err := p.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestClientRefuses tries steps that the host's own end must not send.
func TestClientRefuses(t *testing.T) {
	hold := make(chan struct{})
	c := serveEcho(t, &Echo{Width: 1, OnStep: func(context.Context, *Step) error { <-hold; return nil }})
	loadEcho(t, c, nil)
	s := openSteps(t, c)
	busy, err := s.Send(row(c, 1, 0, 1))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		step *Step
		want string
	}{
		"a slot in use":        {row(c, 2, 0, 1), "belongs to step 1"},
		"an ID in use":         {row(c, 1, 1, 1), "in flight already"},
		"a slot past the last": {&Step{ID: 3, Slot: 2}, "slot 2"},
		"rows not in the slot": {&Step{ID: 4, Slot: 1, Hidden: Tensor{Dtype: DtypeFloat32, Rows: 1, Width: 1, Data: make([]byte, 4)}}, "does not lie in its slot"},
		"a huge message":       {&Step{ID: 5, Slot: 1, Seqs: []SeqStep{{Rows: 1, Targets: make([]int32, maxMessage)}}}, "limit"},
		"masks too large":      {&Step{ID: 6, Slot: 1, Seqs: []SeqStep{{Rows: 1, Allowed: make([]byte, 5)}, {Rows: 1, Allowed: make([]byte, 5)}}}, "MaskBytes"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := s.Send(c.step); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one about %q", err, c.want)
			}
		})
	}
	close(hold)
	if _, err := busy.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The refusals left no trace: the slot and the ID serve again.
	again, err := s.Send(row(c, 1, 0, 1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestServerRefuses sends raw messages that Client would not; the executor must not see them.
func TestServerRefuses(t *testing.T) {
	step := func(change func(*pb.Step)) *pb.Operation {
		m := &pb.Step{Id: 1, Seqs: []*pb.SeqStep{{Seq: 1, Tokens: []int32{1}}}, Hidden: &pb.Tensor{Dtype: pb.Dtype_DTYPE_FLOAT32, Rows: 1, Width: 4}}
		change(m)
		return &pb.Operation{Op: &pb.Operation_Step{Step: m}}
	}
	rows := func(n int) []*pb.SeqStep { return []*pb.SeqStep{{Seq: 1, Tokens: make([]int32, n)}} }
	head := func(r *LoadRequest) { r.HasHead = true }
	for name, c := range map[string]struct {
		load func(*LoadRequest)
		op   *pb.Operation
		want string
	}{
		"a slot past the last":       {nil, step(func(m *pb.Step) { m.Slot = 2 }), "slot 2 of 2"},
		"a tensor too large":         {nil, step(func(m *pb.Step) { m.Hidden.Rows = 5 }), "does not fit"},
		"an unknown dtype":           {nil, step(func(m *pb.Step) { m.Hidden.Dtype = 9 }), "dtype number 9"},
		"another dtype":              {nil, step(func(m *pb.Step) { m.Hidden.Dtype = pb.Dtype_DTYPE_FLOAT16 }), "want [1, 4] float32"},
		"another width":              {nil, step(func(m *pb.Step) { m.Hidden.Width = 3 }), "want [1, 4]"},
		"rows that don't match":      {nil, step(func(m *pb.Step) { m.Seqs = rows(2) }), "want [2, 4]"},
		"no hidden rows":             {nil, step(func(m *pb.Step) { m.Hidden = nil }), "want [1, 4]"},
		"hidden rows and embedding":  {func(r *LoadRequest) { r.HasEmbedding = true }, step(func(*pb.Step) {}), "embedding"},
		"more rows than Out takes":   {func(r *LoadRequest) { r.Region.OutBytes = 15 }, step(func(*pb.Step) {}), "gives out 16 bytes"},
		"more logits than Out takes": {head, step(func(m *pb.Step) { m.Seqs[0].Want = pb.Want_WANT_LOGITS }), "gives out 80 bytes"},
		"a short mask":               {head, step(func(m *pb.Step) { m.Seqs[0].Want = pb.Want_WANT_TOKEN; m.Seqs[0].Mask = &pb.Span{Bytes: 1} }), "want 3"},
		"no operation":               {nil, &pb.Operation{}, "nothing that this contract version knows"},
		"no tokens for an embedding": {func(r *LoadRequest) { r.HasEmbedding = true }, step(func(m *pb.Step) { m.Seqs[0].Tokens = nil; m.Seqs[0].Rows = 1 }), "no token ids"},
		"an export of other layers":  {nil, &pb.Operation{Op: &pb.Operation_StateExport{StateExport: &pb.StateExport{Layers: &pb.LayerRange{End: 2}}}}, "not all here"},
		"an import of no layers":     {nil, &pb.Operation{Op: &pb.Operation_StateImport{StateImport: &pb.StateImport{}}}, "empty"},
	} {
		t.Run(name, func(t *testing.T) {
			e := &Echo{Width: 4, Head: 20}
			client := serveEcho(t, e)
			loadEcho(t, client, c.load)
			c.op.Number = 1
			outcome := exchange(t, client, c.op)[0]
			got := outcome.GetError()
			if got.GetCode() != pb.Code_CODE_INVALID || !strings.Contains(got.GetMessage(), c.want) {
				t.Errorf("outcome %v, want an error of code invalid about %q", outcome, c.want)
			}
			if calls := e.Calls(); len(calls) != 0 {
				t.Errorf("the executor was called: %q", calls)
			}
		})
	}
}

// exchange sends raw operations and returns their outcomes.
func exchange(t *testing.T, c *Client, ops ...*pb.Operation) []*pb.Outcome {
	t.Helper()
	stream := openRaw(t, c)
	var outcomes []*pb.Outcome
	for _, op := range ops {
		stream.send(op)
	}
	for range ops {
		outcomes = append(outcomes, stream.receive())
	}
	return outcomes
}

// rawStream is a step stream without the host's checks.
type rawStream struct {
	t    *testing.T
	conn net.Conn
}

func openRaw(t *testing.T, c *Client) *rawStream {
	t.Helper()
	conn, err := c.stepSocket(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &rawStream{t, conn}
}

func (r *rawStream) send(m *pb.Operation) {
	r.t.Helper()
	frame, err := appendStreamFrame(nil, m)
	if err != nil {
		r.t.Fatal(err)
	}
	r.write(frame)
}

func (r *rawStream) write(b []byte) {
	r.t.Helper()
	if _, err := r.conn.Write(b); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rawStream) receive() *pb.Outcome {
	r.t.Helper()
	frame, err := readStreamFrame(r.conn, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	m := &pb.Outcome{}
	if err := proto.Unmarshal(frame, m); err != nil {
		r.t.Fatal(err)
	}
	return m
}

// mustEnd waits for the executor to end the stream.
func (r *rawStream) mustEnd() {
	r.t.Helper()
	if frame, err := readStreamFrame(r.conn, nil); !errors.Is(err, io.EOF) {
		r.t.Errorf("read %q, %v, want the end of the stream", frame, err)
	}
}

func rawStep(number uint64, slot int64) *pb.Operation {
	return &pb.Operation{Number: number, Op: &pb.Operation_Step{Step: &pb.Step{
		Id: number, Slot: slot, Seqs: []*pb.SeqStep{{Seq: number, Tokens: []int32{1}}},
		Hidden: &pb.Tensor{Dtype: pb.Dtype_DTYPE_FLOAT32, Rows: 1, Width: 1},
	}}}
}

// TestBadStreamEnds sends what no operation begins with; the next stream serves.
func TestBadStreamEnds(t *testing.T) {
	for name, raw := range map[string][]byte{
		"a lost order":      mustFrame(t, &pb.Operation{Number: 2, Op: &pb.Operation_Release{Release: &pb.Release{}}}),
		"a huge frame":      {0xff, 0xff, 0xff, 0xff},
		"no message":        {3, 0, 0, 0, 0xff, 0xff, 0xff},
		"an operation of 0": mustFrame(t, &pb.Operation{}),
	} {
		t.Run(name, func(t *testing.T) {
			c := serveEcho(t, &Echo{Width: 1})
			loadEcho(t, c, nil)
			bad := openRaw(t, c)
			bad.write(raw)
			bad.mustEnd()
			good := openRaw(t, c)
			good.send(rawStep(1, 0))
			if o := good.receive(); o.GetResult() == nil {
				t.Errorf("the next stream answered %v", o)
			}
		})
	}
}

func mustFrame(t *testing.T, m *pb.Operation) []byte {
	t.Helper()
	b, err := appendStreamFrame(nil, m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestFramesInPieces sends operations byte by byte, and several at once.
func TestFramesInPieces(t *testing.T) {
	c := serveEcho(t, &Echo{Width: 1})
	loadEcho(t, c, nil)
	stream := openRaw(t, c)
	for _, b := range mustFrame(t, rawStep(1, 0)) {
		stream.write([]byte{b})
	}
	stream.receive()
	stream.write(append(mustFrame(t, rawStep(2, 0)), mustFrame(t, rawStep(3, 1))...))
	for n := uint64(2); n <= 3; n++ {
		if o := stream.receive(); o.GetNumber() != n || o.GetResult() == nil {
			t.Errorf("outcome %v, want the result of step %d", o, n)
		}
	}
	long := &pb.Operation{Number: 4, Op: &pb.Operation_Reserve{Reserve: &pb.Reserve{Prompt: make([]int32, 3*streamBuffer)}}}
	stream.send(long)
	if o := stream.receive(); o.GetDone() == nil {
		t.Errorf("a long operation answered %v", o)
	}
}

func TestCancel(t *testing.T) {
	entered := make(chan struct{}, 2)
	e := &Echo{Width: 1, OnStep: func(ctx context.Context, _ *Step) error {
		entered <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}}
	c := serveEcho(t, e)
	loadEcho(t, c, nil)
	s := openSteps(t, c)
	running, err := s.Send(row(c, 1, 0, 0))
	if err != nil {
		t.Fatal(err)
	}
	queued, err := s.Send(row(c, 2, 1, 0))
	if err != nil {
		t.Fatal(err)
	}
	<-entered
	for _, id := range []uint64{2, 1, 77} { // the queued one first; there is no step 77
		if err := s.Cancel(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	for name, p := range map[string]*Pending{"running": running, "queued": queued} {
		if _, err := p.Wait(t.Context()); CodeOf(err) != CodeCanceled {
			t.Errorf("the %s step answered %v, want code canceled", name, err)
		}
	}
	if len(entered) != 0 {
		t.Error("the queued step was run, though it was given up before")
	}
}

// TestCancelOvertakes cancels an operation that has not arrived yet.
func TestCancelOvertakes(t *testing.T) {
	e := &Echo{Width: 1}
	c := serveEcho(t, e)
	loadEcho(t, c, nil)
	stream := openRaw(t, c)
	stream.send(&pb.Operation{Number: 1, Op: &pb.Operation_Release{Release: &pb.Release{}}})
	stream.receive() // the stream is up
	if _, err := c.calls.Cancel(t.Context(), &pb.CancelRequest{Number: 2}); err != nil {
		t.Fatal(err)
	}
	stream.send(rawStep(2, 1))
	o := stream.receive()
	if o.GetError().GetCode() != pb.Code_CODE_CANCELED {
		t.Errorf("outcome %v, want code canceled", o)
	}
	if got := e.Calls(); len(got) != 1 {
		t.Errorf("calls %q, want the release only", got)
	}
}

func TestErrorsKeepTheirType(t *testing.T) {
	want := &Error{Code: CodeCorrupt, Message: "tensor a of b is cut off", File: "b", Tensor: "a"}
	wrapped := fmt.Errorf("stage 2: %w", want)
	e := &Echo{Width: 1}
	c := serveEcho(t, e)
	loadEcho(t, c, nil)
	e.Fail(wrapped)
	s := openSteps(t, c)
	for name, call := range map[string]func() error{
		"inspect": func() error { _, err := c.Inspect(t.Context(), InspectRequest{}); return err },
		"import":  func() error { _, err := c.Import(t.Context(), ImportRequest{}); return err },
		"stats":   func() error { _, err := c.Stats(t.Context()); return err },
		"unload":  func() error { return c.Unload(t.Context()) },
		"reserve": func() error {
			p, err := s.Send(Reservation{Seq: 1})
			if err != nil {
				return err
			}
			_, err = p.Wait(t.Context())
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := call()
			got, ok := errors.AsType[*Error](err)
			if !ok || got.Code != want.Code || got.File != "b" || got.Tensor != "a" || got.Message != wrapped.Error() {
				t.Errorf("error %v (%+v), want %+v", err, got, want)
			}
		})
	}
	e.Fail(errors.New("out of luck"))
	if _, err := c.Stats(t.Context()); CodeOf(err) != CodeInternal || !strings.Contains(err.Error(), "out of luck") {
		t.Errorf("error %v, want one of code internal with its text", err)
	}
}

func TestLoadStates(t *testing.T) {
	e := &Echo{Width: 1}
	c := serveEcho(t, e)
	s := openSteps(t, c)
	send := func(op Op) error {
		p, err := s.Send(op)
		if err != nil {
			return err
		}
		_, err = p.Wait(t.Context())
		return err
	}
	if err := send(Reservation{Seq: 1}); CodeOf(err) != CodeNotLoaded {
		t.Errorf("a reservation before the load: %v", err)
	}
	if err := send(Release{Seq: 1}); err != nil {
		t.Errorf("a release before the load: %v", err)
	}
	loadEcho(t, c, nil)
	_, err := c.Load(t.Context(), LoadRequest{Layers: LayerRange{0, 1}, Region: echoLayout}, nil)
	if CodeOf(err) != CodeInvalid || !strings.Contains(err.Error(), "unload") {
		t.Errorf("a load over a load: %v", err)
	}
	if err := c.Unload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := send(Reservation{Seq: 1}); CodeOf(err) != CodeNotLoaded {
		t.Errorf("a reservation after the unload: %v", err)
	}
	loadEcho(t, c, func(r *LoadRequest) { r.Region.InBytes *= 2 })
	if err := send(row(c, 1, 1, 5)); err != nil {
		t.Errorf("a step after another layout: %v", err)
	}
}

func TestLoadProgress(t *testing.T) {
	e := &Echo{Width: 1, OnLoad: func(_ context.Context, progress func(LoadProgress)) error {
		for i := range int64(1000) {
			progress(LoadProgress{Loaded: i + 1, Total: 1000, Tensor: "w"})
		}
		return nil
	}}
	c := serveEcho(t, e)
	var seen []LoadProgress
	_, err := c.Load(t.Context(), LoadRequest{Layers: LayerRange{0, 1}, Region: echoLayout}, func(p LoadProgress) { seen = append(seen, p) })
	if err != nil {
		t.Fatal(err)
	}
	if len(seen) == 0 || seen[len(seen)-1] != (LoadProgress{1000, 1000, "w"}) {
		t.Errorf("progress %v, want it to end at 1000 of 1000", seen)
	}
}

func TestLoadGivenUp(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	e := &Echo{Width: 1, OnLoad: func(ctx context.Context, _ func(LoadProgress)) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}}
	c := serveEcho(t, e)
	if _, err := c.Load(ctx, LoadRequest{Layers: LayerRange{0, 1}, Region: echoLayout}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the context's", err)
	}
	e.OnLoad = nil
	loadEcho(t, c, nil)
}

// TestBadAnswers has the executor answer what the host could not use.
func TestBadAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		want   Want
		answer StepResult
		text   string
	}{
		"no answer":          {WantToken, StepResult{}, "without an answer"},
		"no such token":      {WantToken, StepResult{Seqs: []SeqResult{{Seq: 1, Token: 8}}}, "token 8 of 8"},
		"no scores":          {WantScores, StepResult{Seqs: []SeqResult{{Seq: 1}}}, "0 scores, want 1"},
		"no logits":          {WantLogits, StepResult{Seqs: []SeqResult{{Seq: 1}}}, "want [1, 8] float32"},
		"logits on the heap": {WantLogits, StepResult{Seqs: []SeqResult{{Seq: 1, Logits: Tensor{DtypeFloat32, 1, 8, make([]byte, 32)}}}}, "does not lie in its slot"},
	} {
		t.Run(name, func(t *testing.T) {
			e := &headEcho{Echo: Echo{Width: 1, Head: 8, Capabilities: allCapabilities}, answer: c.answer}
			client, stop, err := InProcess(e)
			if err != nil {
				t.Fatal(err)
			}
			defer stop()
			loadEcho(t, client, func(r *LoadRequest) { r.HasHead = true })
			s := openSteps(t, client)
			step := row(client, 1, 0, 0)
			step.Seqs[0].Want = c.want
			if c.want == WantScores {
				step.Seqs[0].Targets = []int32{0}
			}
			p, err := s.Send(step)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := p.Wait(t.Context()); err == nil || CodeOf(err) != CodeInternal || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v, want one of code internal about %q", err, c.text)
			}
		})
	}
}

// headEcho answers every step the same.
type headEcho struct {
	Echo
	answer StepResult
}

func (h *headEcho) Step(context.Context, *Step) (*StepResult, error) { return &h.answer, nil }

func TestCloseFailsWhatIsInFlight(t *testing.T) {
	entered := make(chan struct{}, 1)
	c := serveEcho(t, &Echo{Width: 1, OnStep: func(ctx context.Context, _ *Step) error {
		entered <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}})
	loadEcho(t, c, nil)
	s := openSteps(t, c)
	p, err := s.Send(row(c, 1, 0, 0))
	if err != nil {
		t.Fatal(err)
	}
	<-entered
	if _, err := c.OpenSteps(t.Context()); err == nil {
		t.Error("a second stream was opened beside the first")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(t.Context()); !errors.Is(err, ErrExecutorGone) {
		t.Errorf("error %v, want ErrExecutorGone", err)
	}
	if _, err := s.Send(Release{}); !errors.Is(err, ErrExecutorGone) {
		t.Errorf("a send after the close: %v, want ErrExecutorGone", err)
	}
	again := openSteps(t, c)
	released, err := again.Send(Release{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := released.Wait(t.Context()); err != nil {
		t.Errorf("an operation on the next stream: %v", err)
	}
}

func TestPending(t *testing.T) {
	p := NewPending()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Wait(canceled); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the context's", err)
	}
	want := &StepResult{ID: 3}
	p.Complete(want, nil)
	p.Complete(nil, errors.New("too late"))
	<-p.Done()
	if got, err := p.Wait(t.Context()); got != want || err != nil {
		t.Errorf("answer %v, %v, want the first", got, err)
	}
}

func TestPing(t *testing.T) {
	c := serveEcho(t, &Echo{Width: 1})
	if err := c.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestLackingCapabilities has an executor that lacks one capability, and another that has one more than the host knows.
func TestLackingCapabilities(t *testing.T) {
	step := func(change func(*SeqStep)) func(*Client) Op {
		return func(c *Client) Op {
			s := row(c, 1, 0, 0)
			change(&s.Seqs[0])
			return s
		}
	}
	plain := func(op Op) func(*Client) Op { return func(*Client) Op { return op } }
	for lacks, op := range map[string]func(*Client) Op{
		CapabilityShare:         plain(Reservation{Seq: 2, From: 1, Keep: 1}),
		CapabilitySnapshots:     plain(Reservation{Seq: 2, Snapshots: 1}),
		CapabilityState:         plain(StateExport{Seq: 1, Layers: LayerRange{1, 2}}),
		CapabilityMasks:         step(func(q *SeqStep) { q.Want, q.Allowed = WantToken, []byte{1} }),
		CapabilityScores:        step(func(q *SeqStep) { q.Want, q.Targets = WantScores, []int32{1} }),
		CapabilityLogits:        step(func(q *SeqStep) { q.Want = WantLogits }),
		"snapshots (of a step)": step(func(q *SeqStep) { q.Snapshot = true }),
	} {
		t.Run(lacks, func(t *testing.T) {
			name, _, _ := strings.Cut(lacks, " ")
			e := &Echo{Width: 1, Capabilities: []string{"from-the-future"}}
			for _, c := range allCapabilities {
				if c != name {
					e.Capabilities = append(e.Capabilities, c)
				}
			}
			c := serveEcho(t, e)
			loadEcho(t, c, nil)
			s := openSteps(t, c)
			if _, err := s.Send(op(c)); CodeOf(err) != CodeUnsupported || !strings.Contains(err.Error(), strconv.Quote(name)) {
				t.Errorf("error %v, want one of code unsupported about %q", err, name)
			}
			if calls := e.Calls(); len(calls) != 0 {
				t.Errorf("the executor was called: %q", calls)
			}
			p, err := s.Send(row(c, 1, 0, 0)) // the rest goes on
			if err != nil {
				t.Fatal(err)
			}
			if _, err := p.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestInProcessWithoutACall ends what nobody has used.
func TestInProcessWithoutACall(t *testing.T) {
	_, stop, err := InProcess(&Echo{Width: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// threadEcho runs everything on one goroutine, as an executor does whose library wants that.
type threadEcho struct {
	*Echo
	jobs chan func()

	mu   sync.Mutex
	loop *StepLoop
}

func newThreadEcho(e *Echo) *threadEcho {
	t := &threadEcho{Echo: e, jobs: make(chan func(), 64)}
	go func() {
		for f := range t.jobs {
			f()
		}
	}()
	return t
}

func (e *threadEcho) do(ctx context.Context, f func() error) error {
	if OnStepThread(ctx) {
		return f()
	}
	done := make(chan error, 1)
	e.jobs <- func() { done <- f() }
	e.mu.Lock()
	if e.loop != nil {
		e.loop.Wake()
	}
	e.mu.Unlock()
	return <-done
}

func (e *threadEcho) RunSteps(loop *StepLoop) {
	ended := make(chan struct{})
	e.jobs <- func() {
		e.setLoop(loop)
		loop.Run(e.runQueued)
		e.setLoop(nil)
		close(ended)
	}
	<-ended
}

func (e *threadEcho) setLoop(loop *StepLoop) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.loop = loop
}

func (e *threadEcho) runQueued() {
	for {
		select {
		case f := <-e.jobs:
			f()
		default:
			return
		}
	}
}

func (e *threadEcho) Unload(ctx context.Context) error {
	return e.do(ctx, func() error { return e.Echo.Unload(ctx) })
}

// TestUnloadBesideAStream unloads, on the thread that reads the step stream, while operations wait there.
func TestUnloadBesideAStream(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() { close(entered); <-leave })
	e := newThreadEcho(&Echo{Width: 1, Capabilities: allCapabilities, OnStep: func(context.Context, *Step) error { once(); return nil }})
	defer close(e.jobs)
	c, stop, err := InProcess(e)
	if err != nil {
		t.Fatal(err)
	}
	loadEcho(t, c, nil)
	s, err := c.OpenSteps(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var answers []*Pending
	for i := range 2 {
		p, err := s.Send(row(c, uint64(i), i, 0))
		if err != nil {
			t.Fatal(err)
		}
		answers = append(answers, p)
	}
	<-entered
	unloaded := make(chan error, 1)
	go func() { unloaded <- c.Unload(t.Context()) }()
	close(leave)
	if err := <-unloaded; err != nil {
		t.Error(err)
	}
	for i, p := range answers {
		if _, err := p.Wait(t.Context()); err != nil && CodeOf(err) != CodeNotLoaded {
			t.Errorf("step %d: %v", i, err)
		}
	}
	if err := errors.Join(s.Close(), stop()); err != nil {
		t.Error(err)
	}
}
