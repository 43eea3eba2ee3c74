package stagelink

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/host/internal/tcptest"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/wire"
	"github.com/mlxcel/mlxcel/sdk"
)

// owner counts how often a frame's bytes were given back.
type owner struct {
	mu       sync.Mutex
	releases int
	told     chan struct{} // a token for each
}

func newOwner() *owner { return &owner{told: make(chan struct{}, 100)} }

func (o *owner) Release() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.releases++
	o.told <- struct{}{}
}

func (o *owner) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.releases
}

// sink is the stage at the end of a link.
type sink struct {
	slot   *owner // where set, claims are granted
	claims int
	in     []byte
	got    chan pipeline.Frame
}

func newSink() *sink { return &sink{in: make([]byte, 1<<16), got: make(chan pipeline.Frame, 100)} }

func (s *sink) Claim(_ pipeline.Tag, n int) ([]byte, pipeline.Releaser) {
	if s.slot == nil {
		return nil, nil
	}
	s.claims++
	return s.in[:n], s.slot
}

func (s *sink) Send(f pipeline.Frame) { s.got <- f }

const frameBytes = 1 << 16

func frameOf(step uint64, o pipeline.Releaser) pipeline.Frame {
	data := make([]byte, 3*4*2)
	for i := range data {
		data[i] = byte(step)*16 + byte(i)
	}
	return pipeline.Frame{
		Tag: pipeline.Tag{Epoch: 1, Step: step, MicroBatch: 2}, Seqs: []sdk.SeqID{sdk.SeqID(step), 9},
		Hidden: sdk.Tensor{Dtype: sdk.DtypeBFloat16, Rows: 3, Width: 4, Data: data}, Owner: o,
	}
}

func checkFrame(t *testing.T, got pipeline.Frame, step uint64) {
	t.Helper()
	want := frameOf(step, nil)
	if got.Tag != want.Tag || !slices.Equal(got.Seqs, want.Seqs) || got.Hidden.Rows != 3 || got.Hidden.Width != 4 ||
		got.Hidden.Dtype != sdk.DtypeBFloat16 || !slices.Equal(got.Hidden.Data, want.Hidden.Data) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestActivationsArriveAsSent(t *testing.T) {
	for _, claims := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			s := newSink()
			if claims {
				s.slot = newOwner()
			}
			out, in := newOutgoing(near, 2, frameBytes, Config{}), newIncoming(far, s, 2, frameBytes)
			for step := range uint64(10) {
				o := newOwner()
				out.Send(frameOf(step, o))
				<-o.told
				f := <-s.got
				checkFrame(t, f, step)
				if lies := &f.Hidden.Data[0] == &s.in[0]; lies != claims {
					t.Errorf("the frame lies in the slot: %v, want %v", lies, claims)
				}
				f.Owner.Release()
			}
			if claims && s.slot.count() != 10 {
				t.Errorf("the slot was given back %d times", s.slot.count())
			}
			out.close()
			in.close()
			if out.broken() != nil {
				t.Errorf("a link that was closed broke: %v", out.broken())
			}
		})
	}
}

// With all its buffers in use a link is not read, and the side that sends keeps what it has not written.
func TestSlowReceiverHoldsBackTheSender(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slots = 2
		near, far := net.Pipe()
		s := newSink()
		out, in := newOutgoing(near, slots, frameBytes, Config{}), newIncoming(far, s, slots, frameBytes)
		o := newOwner()
		sent := uint64(0)
		send := func() { // as a stage does: a frame for each slot that it has back
			synctest.Wait()
			for sent-uint64(o.count()) < slots {
				out.Send(frameOf(sent, o))
				sent++
				synctest.Wait()
			}
		}
		send()
		if len(s.got) != slots || sent > 3*slots {
			t.Fatalf("%d frames came of %d sent, want %d", len(s.got), sent, slots)
		}
		for step := range uint64(20) {
			f := <-s.got
			checkFrame(t, f, step)
			f.Owner.Release()
			send()
			if len(s.got) != slots {
				t.Fatalf("%d frames wait after %d were taken", len(s.got), step+1)
			}
		}
		out.close()
		in.close()
		if o.count() != int(sent) {
			t.Errorf("%d of %d frames were given back", o.count(), sent)
		}
	})
}

// cutting passes a number of bytes and then breaks the connection.
type cutting struct {
	net.Conn
	left int
}

func (c *cutting) Write(b []byte) (int, error) {
	if len(b) <= c.left {
		c.left -= len(b)
		return c.Conn.Write(b)
	}
	n, _ := c.Conn.Write(b[:c.left])
	c.left = 0
	_ = c.Conn.Close()
	return n, io.ErrClosedPipe
}

// Wherever a link is cut, both sides notice, whole frames arrive, and the bytes of every frame are given back once.
func TestLinkCutAnywhere(t *testing.T) {
	for at := range 260 { // three frames and a bit
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			s := newSink()
			s.slot = newOwner()
			out := newOutgoing(&cutting{near, at}, 100, frameBytes, Config{})
			in := newIncoming(far, s, 2, frameBytes)
			var owners []*owner
			for step := range uint64(6) {
				owners = append(owners, newOwner())
				out.Send(frameOf(step, owners[step]))
				if step%2 == 1 {
					synctest.Wait()
				}
			}
			<-out.done
			<-in.done
			late := newOwner()
			out.Send(frameOf(9, late))
			if out.broken() == nil || in.broken() == nil {
				t.Errorf("cut at %d: sender %v, receiver %v", at, out.err, in.err)
			}
			out.close()
			in.close()
			for i, o := range append(owners, late) {
				if o.count() != 1 {
					t.Errorf("cut at %d: frame %d was given back %d times", at, i, o.count())
				}
			}
			arrived := len(s.got)
			for step := range uint64(arrived) {
				f := <-s.got
				checkTag(t, f, step)
				f.Owner.Release()
			}
			if s.slot.count() != s.claims || s.claims < arrived || s.claims > arrived+1 { // one may be cut while it is read
				t.Errorf("cut at %d: %d frames came, the slot was lent %d times and given back %d times", at, arrived, s.claims, s.slot.count())
			}
		})
	}
}

// checkTag leaves out what later frames were read over.
func checkTag(t *testing.T, got pipeline.Frame, step uint64) {
	t.Helper()
	if got.Step != step {
		t.Errorf("got a frame of step %d, want %d", got.Step, step)
	}
}

func TestWhatALinkDoesNotTake(t *testing.T) {
	rows := func(d wire.Dtype, rows uint32) wire.Header {
		h := wire.Header{Kind: kindActivation}
		h.SetMatrix(d, rows, 4)
		return h
	}
	meta := appendActivation(nil, pipeline.Tag{Epoch: 1, Step: 1}, []sdk.SeqID{1})
	for name, c := range map[string]struct {
		h    wire.Header
		meta []byte
		want any
	}{
		"another kind":     {wire.Header{Kind: kindPlan}, meta, new(*DecodeError)},
		"no rows":          {wire.Header{Kind: kindActivation}, meta, new(*DecodeError)},
		"a dtype of none":  {rows(wire.Int4, 1), meta, new(*DecodeError)},
		"no metadata":      {rows(wire.Float32, 1), nil, new(*DecodeError)},
		"too many rows":    {rows(wire.Float32, frameBytes/16+1), meta, new(*wire.LimitError)},
		"endless metadata": {rows(wire.Float32, 1), make([]byte, maxActivationMeta+1), new(*wire.LimitError)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				in := newIncoming(far, newSink(), 2, frameBytes)
				go func() {
					w := wire.NewWriter(near, wire.Limits{Meta: 1 << 30, Data: 1 << 30})
					_ = w.Write(c.h, c.meta, make([]byte, c.h.Data)) // the link ends in the middle of some
				}()
				<-in.done
				if !errors.As(in.broken(), c.want) {
					t.Errorf("got %v, want a %T", in.broken(), c.want)
				}
				in.close()
			})
		})
	}
}

func TestNothingComesBackOnALink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		out := newOutgoing(near, 2, frameBytes, Config{})
		if _, err := far.Write([]byte{7}); err != nil {
			t.Fatal(err)
		}
		<-out.done
		if err := out.broken(); err == nil || !strings.Contains(err.Error(), "0x7") {
			t.Errorf("got %v, want the stray byte", err)
		}
		out.close()
	})
}

// A receiver that does not read ends a link in the end, and so does more than can wait.
func TestStuckReceiver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		out := newOutgoing(near, 2, frameBytes, Config{FrameTimeout: time.Minute})
		o, begin := newOwner(), time.Now()
		out.Send(frameOf(1, o))
		<-out.done
		if err := out.broken(); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(begin) > time.Minute {
			t.Errorf("got %v after %v, want a deadline within a minute", err, time.Since(begin))
		}
		out.close()
		if o.count() != 1 {
			t.Errorf("the frame was given back %d times", o.count())
		}
	})
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		out := newOutgoing(near, 2, frameBytes, Config{})
		o := newOwner()
		out.Send(frameOf(1, o))
		synctest.Wait() // it is being written
		for step := range uint64(3) {
			out.Send(frameOf(step, o))
		}
		<-out.done
		if _, ok := errors.AsType[*FullError](out.broken()); !ok {
			t.Errorf("got %v, want a full queue", out.broken())
		}
		out.close()
		if o.count() != 4 {
			t.Errorf("%d of 4 frames were given back", o.count())
		}
	})
}

// secured puts the cluster's cipher on a connection.
func secured(t testing.TB, near, far net.Conn) (net.Conn, net.Conn) {
	t.Helper()
	secret, err := securelink.NewSecret([]byte("sixteen bytes or more"))
	if err != nil {
		t.Fatal(err)
	}
	config := securelink.Config{Secret: secret, Self: securelink.Identity{Role: securelink.RoleStage, NodeID: "node"}}
	var server net.Conn
	answered := make(chan error, 1)
	go func() {
		c, err := securelink.Server(t.Context(), far, config, func(securelink.Identity) *securelink.Refusal { return nil })
		server = c
		answered <- err
	}()
	client, err := securelink.Client(t.Context(), near, config)
	if err := errors.Join(err, <-answered); err != nil {
		t.Fatal(err)
	}
	return client, server
}

func TestActivationsCostNoAllocations(t *testing.T) {
	for _, claims := range []bool{false, true} {
		near, far := tcptest.Pair(t)
		near, far = secured(t, near, far)
		s := newSink()
		if claims {
			s.slot = newOwner()
		}
		out, in := newOutgoing(near, 2, frameBytes, Config{}), newIncoming(far, s, 2, frameBytes)
		o := newOwner()
		f := frameOf(1, o)
		got := testing.AllocsPerRun(200, func() {
			out.Send(f)
			<-o.told
			r := <-s.got
			r.Owner.Release()
			if claims {
				<-s.slot.told
			}
		})
		if got != 0 {
			t.Errorf("claims %v: %v allocations per frame", claims, got)
		}
		out.close()
		in.close()
	}
}

// reports notes what a port reports.
type reports chan string

func (r reports) Answered(at sdk.Place, epoch, order uint64, err error) {
	r <- fmt.Sprintf("answered %s %d.%d: %v", at, epoch, order, err)
}
func (r reports) Finished(t pipeline.Tag, results []sdk.SeqResult) {
	r <- fmt.Sprintf("finished %v: token %d", t, results[0].Token)
}
func (r reports) Failed(t pipeline.Tag, err *pipeline.StageError) {
	r <- fmt.Sprintf("failed %v: %v", t, err)
}
func (r reports) Lost(epoch uint64, err *pipeline.StageError) {
	r <- fmt.Sprintf("lost %d: %v", epoch, err)
}

func (r reports) expect(t *testing.T, want ...string) {
	t.Helper()
	for _, w := range want {
		if got := <-r; !strings.HasPrefix(got, w) {
			t.Errorf("reported %q, want %q", got, w)
		}
	}
	synctest.Wait()
	if len(r) > 0 {
		t.Errorf("reported %q as well", <-r)
	}
}

// orders notes what a stage is told.
type orders chan string

func (o orders) Order(order pipeline.Order) {
	o <- fmt.Sprintf("%d.%d %v %v", order.Epoch, order.ID, order.Op, order.Plan)
}
func (o orders) Abort(t pipeline.Tag) { o <- fmt.Sprintf("abort %v", t) }

// onDataConn joins a port and the stage's end of its connection.
func onDataConn(t *testing.T, cfg Config, f func(t *testing.T, p *Port, u *uplink, told orders, reported reports)) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		p, u := NewPort(near, sdk.Place{Stage: 2}, 3, cfg), newUplink(far, sdk.Place{Stage: 2}, "node-2", cfg)
		told, reported := make(orders, 100), make(reports, 100)
		p.Start(reported)
		u.wait.Go(func() { u.serve(told) })
		f(t, p, u, told, reported)
		p.Close()
		u.close()
	})
}

func TestOrdersAndReportsCross(t *testing.T) {
	onDataConn(t, Config{}, func(t *testing.T, p *Port, u *uplink, told orders, reported reports) {
		tag := pipeline.Tag{Epoch: 3, Step: 2, MicroBatch: 1}
		p.Order(pipeline.Order{Epoch: 3, ID: 1, Op: sdk.Release{Seq: 5}})
		p.Order(pipeline.Order{Epoch: 3, ID: 2, Plan: somePlan()})
		p.Abort(tag)
		for _, want := range []string{"3.1 release of sequence 5", "3.2 <nil> &{", "abort {3 2 1}"} {
			if got := <-told; !strings.HasPrefix(got, want) {
				t.Errorf("told %q, want %q", got, want)
			}
		}
		u.Answered(sdk.Place{Stage: 2}, 3, 1, nil)
		u.Answered(sdk.Place{Stage: 2}, 3, 1, stageErr(errors.New("no")))
		u.Finished(tag, []sdk.SeqResult{{Token: 6}})
		u.Failed(tag, stageErr(errors.New("boom")))
		u.Lost(3, stageErr(errors.New("died")))
		reported.expect(t, "answered 2 3.1: <nil>", "answered 2 3.1: stage 2 (node-2, llama) failed in decode: no",
			"finished {3 2 1}: token 6", "failed {3 2 1}: stage 2", "lost 3: stage 2 (node-2, llama) failed in decode: died")
	})
}

func TestEndOfADataConnection(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(p *Port, u *uplink)
		want string
	}{
		"the stage goes":                {func(_ *Port, u *uplink) { u.close() }, "EOF"},
		"the stage sends orders":        {func(_ *Port, u *uplink) { u.send(message{kind: kindAbort}) }, "bad message of kind 3"},
		"the stage answers for another": {func(_ *Port, u *uplink) { u.Answered(sdk.Place{Stage: 1}, 3, 1, nil) }, "an answer of stage 1 came from stage 2"},
		"the coordinator sends reports": {func(p *Port, _ *uplink) { p.send(message{kind: kindFinished}) }, "EOF"},
		"a message that says nothing":   {func(p *Port, u *uplink) { u.send(message{kind: kindFailed}) }, "bad message"},
		"a frame that no message announces": {func(p *Port, u *uplink) {
			u.send(message{kind: kindActivation, order: pipeline.Order{Op: sdk.Release{}}})
		}, "bad message"},
	} {
		t.Run(name, func(t *testing.T) {
			onDataConn(t, Config{}, func(t *testing.T, p *Port, u *uplink, _ orders, reported reports) {
				c.end(p, u)
				got := <-reported
				if !strings.HasPrefix(got, "lost 3: stage 2 () failed in : connection to it broke: ") || !strings.Contains(got, c.want) {
					t.Errorf("reported %q, want the loss of stage 2 by %q", got, c.want)
				}
				<-p.Done()
				<-u.done
			})
		})
	}
}

func TestClosedPortReportsNothing(t *testing.T) {
	onDataConn(t, Config{}, func(t *testing.T, p *Port, u *uplink, _ orders, reported reports) {
		p.Close()
		p.Order(pipeline.Order{Epoch: 3, ID: 1, Op: sdk.Release{Seq: 5}})
		<-u.done
		u.Answered(sdk.Place{Stage: 2}, 3, 1, nil)
		reported.expect(t)
	})
}

// What is too large to be sent fails by itself, and the connection goes on.
func TestMessagesTooLarge(t *testing.T) {
	onDataConn(t, Config{MaxMessage: 300}, func(t *testing.T, p *Port, u *uplink, told orders, reported reports) {
		tokens := make([]int32, 400)
		p.Order(pipeline.Order{Epoch: 3, ID: 1, Op: sdk.Reservation{Seq: 1, Prompt: tokens}})
		p.Order(pipeline.Order{Epoch: 3, ID: 2, Plan: &pipeline.StepPlan{Cuts: []int{0, 1}, IDs: []sdk.SeqID{1}, Seqs: []sdk.SeqStep{{Tokens: tokens}}}})
		p.Order(pipeline.Order{Epoch: 3, ID: 3, Op: sdk.Release{Seq: 1}})
		const passes = "stage 2 () failed in send: a frame with "
		reported.expect(t, "answered 2 3.1: "+passes, "failed {3 2 0}: "+passes)
		if got := <-told; !strings.HasPrefix(got, "3.3 ") {
			t.Errorf("told %q, want the order that fits", got)
		}
		u.Finished(pipeline.Tag{Epoch: 3, Step: 4}, []sdk.SeqResult{{Scores: make([]float32, 100)}})
		u.Answered(sdk.Place{Stage: 2}, 3, 3, nil)
		// The failure is queued behind what was there.
		got := []string{<-reported, <-reported}
		slices.Sort(got)
		if !strings.HasPrefix(got[0], "answered 2 3.3") || !strings.HasPrefix(got[1], "failed {3 4 0}: stage 2 (node-2, ) failed in send") {
			t.Errorf("reported %q", got)
		}
	})
}

// A stage that does not take its orders is lost: by the deadline, or by what waits.
func TestStuckStage(t *testing.T) {
	for _, c := range []struct {
		orders int
		within time.Duration
		want   string
	}{{1, 10 * time.Second, "timeout"}, {20, 0, "10 messages wait to be sent"}} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			defer far.Close()
			p, reported, begin := NewPort(near, sdk.Place{Stage: 2}, 3, Config{MaxQueued: 10}), make(reports, 100), time.Now()
			p.Start(reported)
			for i := range c.orders {
				p.Order(pipeline.Order{Epoch: 3, ID: uint64(i), Op: sdk.Release{}})
				if i == 0 {
					synctest.Wait() // it is being written
				}
			}
			if got := <-reported; !strings.Contains(got, c.want) || time.Since(begin) > c.within {
				t.Errorf("after %v: %q, want %q", time.Since(begin), got, c.want)
			}
			p.Close()
		})
	}
}

// flipping changes one bit of what is written through it.
type flipping struct {
	net.Conn
	at int
}

func (c *flipping) Write(b []byte) (int, error) {
	if at := c.at; at >= 0 && at < len(b) {
		b = slices.Clone(b)
		b[at] ^= 4
	}
	c.at -= len(b)
	return c.Conn.Write(b)
}

func runSelfTest(ctx context.Context, near, far net.Conn) (Probe, error, error) {
	answered := make(chan error)
	go func() { answered <- AnswerSelfTest(ctx, far) }()
	p, err := SelfTest(ctx, near, rand.NewChaCha8([32]byte{1}))
	if err != nil {
		near.Close()
	}
	return p, err, <-answered
}

func TestSelfTest(t *testing.T) {
	near, far := tcptest.Pair(t)
	p, err, answer := runSelfTest(t.Context(), near, far)
	if err != nil || answer != nil || p.RoundTrip <= 0 || p.BytesPerSecond <= 0 {
		t.Fatalf("got %+v, %v, %v", p, err, answer)
	}
	// The link is as it was: activations come next.
	s, o := newSink(), newOwner()
	out, in := newOutgoing(near, 2, frameBytes, Config{}), newIncoming(far, s, 2, frameBytes)
	out.Send(frameOf(5, o))
	checkFrame(t, <-s.got, 5)
	out.close()
	in.close()
}

func TestSelfTestFindsAFlippedBit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		_, err, _ := runSelfTest(t.Context(), &flipping{near, 10*wire.HeaderBytes + selfTestBytes/2}, far)
		if e, ok := errors.AsType[*ChecksumError](err); !ok || e.Sent == e.Got {
			t.Errorf("got %v, want a checksum error", err)
		}
	})
}

func TestSelfTestThatDoesNotWork(t *testing.T) {
	var sum [sha256.Size]byte
	for name, peer := range map[string]func(ctx context.Context, far net.Conn) error{
		"silence": func(ctx context.Context, _ net.Conn) error { <-ctx.Done(); return nil },
		"an end":  func(_ context.Context, far net.Conn) error { return far.Close() },
		"another answer": func(_ context.Context, far net.Conn) error {
			_, _, _ = wire.NewReader(far, wire.Limits{}).Next()
			return wire.NewWriter(far, wire.Limits{Meta: 100}).Write(wire.Header{Kind: kindLost}, sum[:], nil)
		},
		"a dialler of the same kind": func(ctx context.Context, far net.Conn) error {
			_, err := SelfTest(ctx, far, rand.NewChaCha8([32]byte{1}))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				done := make(chan error)
				go func() { done <- peer(ctx, far) }()
				if _, err := SelfTest(ctx, near, rand.NewChaCha8([32]byte{1})); err == nil {
					t.Error("the self-test passed")
				}
				near.Close()
				<-done
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer near.Close()
		go func() {
			w := wire.NewWriter(near, wire.Limits{})
			r := wire.NewReader(near, wire.Limits{Meta: 100})
			for { // never the last round
				if w.Write(wire.Header{Kind: kindSelfTest}, nil, nil) != nil {
					return
				}
				if _, _, err := r.Next(); err != nil {
					return
				}
			}
		}()
		if err := AnswerSelfTest(t.Context(), far); err == nil || !strings.Contains(err.Error(), "does not end") {
			t.Errorf("got %v", err)
		}
		far.Close()
	})
}
