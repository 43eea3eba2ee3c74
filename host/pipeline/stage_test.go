package pipeline

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// These tests drive a stage as a remote coordinator and a remote neighbour would: late, early, twice, and wrong.

// bench is the last of two stages, with everything around it replaced by records.
type bench struct {
	t        *testing.T
	stage    *monitor
	toy      *toyExecutor
	events   chan string // what the stage reports
	released chan string // frames given back
}

const benchEpoch = 3

func newBench(t *testing.T) *bench {
	b := &bench{t: t, toy: newToyExecutor(1), events: make(chan string, 100), released: make(chan string, 100)}
	cfg := toyConfig(t, 2, &toyLauncher{}).withDefaults()
	if _, err := b.toy.Load(t.Context(), cfg.LoadRequest(1), func(sdk.LoadProgress) {}); err != nil {
		t.Fatal(err)
	}
	steps, err := b.toy.OpenSteps(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := sdk.Place{Stage: 1}
	b.stage = newMonitor(t.Context(), monitorConfig{
		core:     coreConfig{epoch: benchEpoch, place: at, role: sdk.RoleOf(at, 2), boundary: cfg.Profile.Boundary, slots: 2},
		executor: b.toy, steps: steps, clock: time.Now,
	})
	b.stage.join(nil, b)
	return b
}

func (b *bench) close() {
	if err := errors.Join(b.stage.close(), b.toy.Stop(b.t.Context())); err != nil {
		b.t.Error(err)
	}
}

func (b *bench) Answered(_ sdk.Place, _, order uint64, err error) {
	b.note("answered %d: %v", order, err)
}
func (b *bench) Finished(t Tag, r []sdk.SeqResult) {
	b.note("finished %d.%d for %d", t.Step, t.MicroBatch, r[0].Seq)
}
func (b *bench) Failed(t Tag, err *StageError) {
	b.note("failed %d.%d: %v", t.Step, t.MicroBatch, err.Err)
}
func (b *bench) Lost(_ uint64, err *StageError)    { b.note("lost: %v", err.Err) }
func (b *bench) note(format string, args ...any)   { b.events <- fmt.Sprintf(format, args...) }
func (b *bench) send(f Frame)                      { b.stage.Send(f) }
func (b *bench) order(id uint64, op sdk.Op)        { b.stage.Order(Order{Epoch: benchEpoch, ID: id, Op: op}) }
func (b *bench) reserve(id uint64, seq sdk.SeqID)  { b.order(id, sdk.Reservation{Seq: seq}) }
func (b *bench) abort(step uint64, microBatch int) { b.stage.Abort(benchTag(step, microBatch)) }
func (b *bench) plan(id uint64, seqs ...sdk.SeqID) { b.stage.Order(benchPlan(id, seqs...)) }
func benchTag(step uint64, microBatch int) Tag     { return Tag{benchEpoch, step, microBatch} }

// benchPlan is a step of one row for each sequence, in micro-batches of one.
func benchPlan(id uint64, seqs ...sdk.SeqID) Order {
	p := &StepPlan{Cuts: []int{0}}
	for i, seq := range seqs {
		p.Seqs = append(p.Seqs, sdk.SeqStep{Seq: seq, Rows: 1, Tokens: []int32{1}, Want: sdk.WantToken})
		p.IDs = append(p.IDs, seq)
		p.Cuts = append(p.Cuts, i+1)
	}
	return Order{Epoch: benchEpoch, ID: id, Plan: p}
}

// frame makes a frame whose return is recorded.
func (b *bench) frame(t Tag, seqs ...sdk.SeqID) Frame {
	data := make([]byte, 16*len(seqs))
	for i := range seqs {
		writeRow(data, i, 5)
	}
	return Frame{Tag: t, Seqs: seqs, Hidden: sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: len(seqs), Width: toyWidth, Data: data}, Owner: benchOwner{b, t}}
}

type benchOwner struct {
	b *bench
	t Tag
}

func (o benchOwner) Release() {
	o.b.released <- fmt.Sprintf("%d.%d", o.t.Step, o.t.MicroBatch)
}

// expect compares everything reported so far; an expectation is a prefix.
func (b *bench) expect(want ...string) {
	b.t.Helper()
	synctest.Wait()
	got := drain(b.events)
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		b.t.Errorf("reported %q, want %q", got, want)
	}
}

// expectReleased compares what was given back so far, in any order: goroutines of the stage share that work.
func (b *bench) expectReleased(want ...string) {
	b.t.Helper()
	synctest.Wait()
	got := drain(b.released)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		b.t.Errorf("frames given back: %v, want %v", got, want)
	}
}

func drain(c chan string) (all []string) {
	for len(c) > 0 {
		all = append(all, <-c)
	}
	return all
}

func onBench(t *testing.T, f func(t *testing.T, b *bench)) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.close()
		b.reserve(1, 10)
		b.reserve(2, 11)
		b.reserve(3, 12)
		b.expect("answered 1: <nil>", "answered 2: <nil>", "answered 3: <nil>")
		f(t, b)
	})
}

func TestFrameBeforeItsPlanIsHeld(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.send(b.frame(benchTag(4, 1), 11))
		b.send(b.frame(benchTag(4, 0), 10))
		b.expect()
		b.expectReleased()
		b.plan(4, 10, 11)
		b.expect("finished 4.0 for 10", "finished 4.1 for 11")
		b.expectReleased("4.0", "4.1")
	})
}

// No more frames are held than can be in flight.
func TestHeldFramesAreBounded(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.send(b.frame(benchTag(4, 0), 10))
		b.send(b.frame(benchTag(5, 0), 11))
		b.send(b.frame(benchTag(6, 0), 12))
		b.expect("failed 6.0: a frame of step 6 came before its plan")
		b.expectReleased("6.0")
	})
}

// A frame whose plan does not come is refused after 3 s.
func TestOverdueFramesAreRefused(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.send(b.frame(benchTag(4, 0), 10))
		time.Sleep(2 * time.Second)
		b.send(b.frame(benchTag(5, 0), 11))
		time.Sleep(999 * time.Millisecond)
		b.expect()
		time.Sleep(time.Millisecond)
		b.expect("failed 4.0: a frame of step 4 came, but not its plan within 3s")
		b.expectReleased("4.0")
		b.plan(5, 11)
		b.expect("finished 5.0 for 11")
		b.expectReleased("5.0")
		time.Sleep(time.Minute)
		b.expect()
	})
}

// claim asks for the slot of a frame of so many rows.
func (b *bench) claim(t Tag, rows int) ([]byte, Releaser) { return b.stage.claim(t, 16*rows) }

// claimed makes a frame that was read into a claimed slot.
func (b *bench) claimed(t Tag, seq sdk.SeqID) Frame {
	b.t.Helper()
	f := b.frame(t, seq)
	into, owner := b.claim(t, 1)
	if owner == nil {
		b.t.Fatalf("no slot for %v", t)
	}
	copy(into, f.Hidden.Data)
	f.Hidden.Data, f.Owner = into, owner
	return f
}

// A frame that was read into the stage's own slot is computed where it lies.
func TestClaimedSlotIsUsed(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.plan(4, 10, 11)
		b.plan(5, 12)
		for _, f := range []struct {
			tag Tag
			seq sdk.SeqID
		}{{benchTag(4, 0), 10}, {benchTag(4, 1), 11}, {benchTag(5, 0), 12}} {
			b.send(b.claimed(f.tag, f.seq))
			b.expect(fmt.Sprintf("finished %d.%d for %d", f.tag.Step, f.tag.MicroBatch, f.seq))
		}
		b.expectFree()
	})
}

// expectFree: every slot is back, and none is lent.
func (b *bench) expectFree() {
	b.t.Helper()
	synctest.Wait()
	b.stage.mu.Lock()
	defer b.stage.mu.Unlock()
	for _, sl := range b.stage.core.free {
		if sl.lent {
			b.t.Error("a free slot is lent")
		}
	}
	if len(b.stage.core.free) != 2 {
		b.t.Errorf("%d slots are free, want 2", len(b.stage.core.free))
	}
}

// A slot is lent only to a frame that would be taken in at once.
func TestClaimsThatAreNotGranted(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		claims := func(want bool, t Tag, rows int) {
			b.t.Helper()
			_, owner := b.claim(t, rows)
			if (owner != nil) != want {
				b.t.Errorf("a claim for %v of %d rows: granted %v", t, rows, !want)
			}
			if owner != nil {
				owner.Release()
			}
		}
		claims(false, benchTag(4, 0), 1) // no plan
		b.plan(4, 10, 11)
		b.plan(5, 12)
		claims(true, benchTag(4, 0), 1)
		claims(false, benchTag(4, 1), 1)
		claims(false, benchTag(5, 0), 1)
		claims(false, Tag{benchEpoch - 1, 4, 0}, 1)
		claims(false, benchTag(4, 0), 1000) // larger than a slot
		b.abort(4, 0)
		claims(false, benchTag(4, 0), 1)
		claims(true, benchTag(4, 1), 1)
		_, first := b.claim(benchTag(4, 1), 1)
		_, second := b.claim(benchTag(4, 1), 1)
		claims(false, benchTag(4, 1), 1) // no slot is left
		first.Release()
		second.Release()
		b.expect()
		b.expectFree()
	})
}

// Whatever becomes of a micro-batch while its frame is read, the slot comes back.
func TestClaimedSlotComesBack(t *testing.T) {
	for name, f := range map[string]func(b *bench){
		"broken link": func(b *bench) { b.claimed(benchTag(4, 0), 10).Owner.Release() },
		"aborted": func(b *bench) {
			f := b.claimed(benchTag(4, 0), 10)
			b.abort(4, 0)
			b.send(f)
		},
		"other sequences": func(b *bench) {
			f := b.claimed(benchTag(4, 0), 10)
			f.Seqs = []sdk.SeqID{12}
			b.send(f)
			b.expect("failed 4.0: a frame of sequences [12]")
		},
		"came twice": func(b *bench) {
			f, again := b.claimed(benchTag(4, 0), 10), b.claimed(benchTag(4, 0), 10)
			b.send(f)
			b.send(again)
			synctest.Wait()
			<-b.events
			<-b.events
		},
		"all slots are read into": func(b *bench) {
			f, other := b.claimed(benchTag(4, 0), 10), b.claimed(benchTag(4, 0), 10)
			b.send(f)
			b.expect("finished 4.0 for 10")
			other.Owner.Release()
		},
	} {
		t.Run(name, func(t *testing.T) {
			onBench(t, func(t *testing.T, b *bench) {
				b.plan(4, 10, 11)
				f(b)
				b.expectFree()
			})
		})
	}
}

// A stage does not close before the links have let go of its slots.
func TestCloseWaitsForClaims(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.plan(4, 10)
		f := b.claimed(benchTag(4, 0), 10)
		closed := make(chan error, 1)
		go func() { closed <- b.stage.close() }()
		synctest.Wait()
		if len(closed) > 0 {
			t.Error("the stage closed while a link read into its slot")
		}
		b.send(f)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if _, owner := b.claim(benchTag(4, 0), 1); owner != nil {
			t.Error("a closed stage lent a slot")
		}
	})
}

// A stage that is lost before it joins its pipeline says so when it joins.
func TestLossIsReportedOnJoining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		s, err := StartStage(t.Context(), toyConfig(t, 2, l).withDefaults().stageConfig(1))
		if err != nil {
			t.Fatal(err)
		}
		l.executor(1).die()
		<-s.Done()
		checkLost(t, s.Err(), 1, PhaseIdle)
		b := &bench{t: t, events: make(chan string, 10)}
		s.Join(nil, b)
		b.expect("lost: toy of stage 1 died in idle")
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestFramesOutOfOrderWaitForTheirTurn(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.plan(4, 10, 11)
		b.plan(5, 12)
		b.send(b.frame(benchTag(5, 0), 12))
		b.send(b.frame(benchTag(4, 1), 11))
		b.expect()
		b.send(b.frame(benchTag(4, 0), 10))
		b.expect("finished 4.0 for 10", "finished 4.1 for 11", "finished 5.0 for 12")
		b.expectReleased("4.0", "4.1", "5.0")
	})
}

func TestStaleFramesAreDropped(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.plan(4, 10)
		b.send(b.frame(Tag{benchEpoch - 1, 4, 0}, 10)) // of the pipeline before
		b.send(b.frame(Tag{benchEpoch + 1, 4, 0}, 10))
		b.send(b.frame(benchTag(2, 0), 10)) // of an order that was no step
		b.expect()
		b.expectReleased("4.0", "4.0", "2.0")
		b.send(b.frame(benchTag(4, 0), 10))
		b.expect("finished 4.0 for 10")
		b.send(b.frame(benchTag(4, 0), 10)) // finished
		b.expect()
		b.expectReleased("4.0", "4.0")
	})
}

func TestFramesThatAreNotInThePlanAreRefused(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.plan(4, 10, 11)
		b.send(b.frame(benchTag(4, 2), 10))
		b.expect("failed 4.2: micro-batch 2 arrived at stage 1, which has 2")
		b.send(b.frame(benchTag(4, -1), 10))
		b.expect("failed 4.-1: micro-batch -1 arrived")
		b.send(b.frame(benchTag(4, 1), 10))
		b.expect("failed 4.1: a frame of sequences [10] came where the plan has [11]")
		b.send(b.frame(benchTag(4, 0), 10))
		b.expect("finished 4.0 for 10")
		b.expectReleased("4.2", "4.-1", "4.1", "4.0")
	})
}

func TestFrameThatComesTwiceIsRefused(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.plan(4, 10, 11)
		b.send(b.frame(benchTag(4, 1), 11))
		b.send(b.frame(benchTag(4, 1), 11))
		b.expect("failed 4.1: micro-batch 1 arrived at stage 1 twice")
		b.expectReleased("4.1")
	})
}

// A sequence that was never reserved on this stage, or was released, does not reach the executor.
func TestUnknownSequencesAreRefused(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.order(4, sdk.Release{Seq: 11})
		b.expect("answered 4: <nil>")
		b.plan(5, 77, 11, 10)
		b.send(b.frame(benchTag(5, 0), 77))
		b.send(b.frame(benchTag(5, 1), 11))
		b.send(b.frame(benchTag(5, 2), 10))
		b.expect("failed 5.0: sequence 77 is not reserved", "failed 5.1: sequence 11 is not reserved", "finished 5.2 for 10")
		if b.toy.steps != 1 {
			t.Errorf("the executor saw %d steps, want 1", b.toy.steps)
		}
	})
}

func TestAbortedMicroBatchIsSkipped(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.plan(4, 10, 11)
		b.plan(5, 12)
		b.send(b.frame(benchTag(4, 1), 11))
		b.send(b.frame(benchTag(5, 0), 12))
		b.expect()
		b.abort(4, 0) // its frame never comes; what waited behind it goes on
		b.expect("finished 4.1 for 11", "finished 5.0 for 12")
		b.send(b.frame(benchTag(4, 0), 10)) // or comes late
		b.expect()
		b.expectReleased("4.1", "5.0", "4.0")
	})
}

func TestAbortGivesTheFrameBack(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.plan(4, 10, 11)
		b.send(b.frame(benchTag(4, 1), 11))
		b.abort(4, 1)
		b.abort(4, 1)
		b.expectReleased("4.1")
		b.send(b.frame(benchTag(4, 1), 11))
		b.expectReleased("4.1")
		b.send(b.frame(benchTag(4, 0), 10))
		b.expect("finished 4.0 for 10")
	})
}

func TestStrayAbortsAndOrdersDoNothing(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.abort(9, 0)
		b.stage.Abort(Tag{benchEpoch - 1, 4, 0})
		b.stage.Order(Order{Epoch: benchEpoch - 1, ID: 4, Op: sdk.Release{Seq: 10}})
		b.reserve(3, 99) // given before
		b.plan(4, 10)
		b.abort(4, 7)
		b.abort(4, -1)
		b.send(b.frame(benchTag(4, 0), 10))
		b.expect("finished 4.0 for 10")
	})
}

// Nothing reaches a closed stage, and what it held goes back.
func TestClosedStageTakesNothing(t *testing.T) {
	onBench(t, func(t *testing.T, b *bench) {
		b.send(b.frame(benchTag(4, 0), 10))
		if err := b.stage.close(); err != nil {
			t.Error(err)
		}
		b.expectReleased("4.0")
		b.plan(4, 10)
		b.send(b.frame(benchTag(4, 0), 10))
		b.abort(4, 0)
		b.expect()
		b.expectReleased("4.0")
		for i := range 2 { // the region may be unmapped by now
			if in := b.toy.region.In(i); !bytes.Equal(in, make([]byte, len(in))) {
				t.Errorf("slot %d was written after the close", i)
			}
		}
	})
}

// The coordinator drops reports that nobody waits for.
func TestCoordinatorDropsStrayReports(t *testing.T) {
	c := newCoordinator(benchEpoch, 1, 1, 1)
	c.addPort(nil, sdk.Place{}, 1)
	plan := benchPlan(1, 10, 11).Plan
	call := newStepCall(plan)
	if err := c.register(1, call); err != nil {
		t.Fatal(err)
	}
	result := []sdk.SeqResult{{Seq: 10, Token: 7}}
	c.Finished(benchTag(2, 0), result)
	c.Finished(Tag{benchEpoch - 1, 1, 0}, result)
	c.Finished(benchTag(1, 2), result)
	c.Finished(benchTag(1, -1), result)
	c.Answered(sdk.Place{}, benchEpoch, 1, nil)
	c.Answered(sdk.Place{}, benchEpoch, 2, nil)
	c.Failed(benchTag(2, 0), &StageError{})
	c.Lost(benchEpoch-1, &StageError{})
	if call.left != 2 || c.down != nil || len(call.signal) != 0 {
		t.Fatalf("a stray report counted: %+v", call)
	}
	c.Finished(benchTag(1, 0), result)
	c.Failed(benchTag(1, 0), &StageError{}) // it has ended
	c.Finished(benchTag(1, 0), []sdk.SeqResult{{Seq: 10, Token: 8}})
	if call.left != 1 || len(call.causes) != 0 || call.results[0].Token != 7 || call.results[1].Token != -1 {
		t.Errorf("after one micro-batch: %+v", call)
	}
}

func TestStepErrorText(t *testing.T) {
	one := StepFailure{Seqs: []sdk.SeqID{1}, Err: &StageError{Place: sdk.Place{Stage: 1}, Plugin: "toy", Phase: PhaseDecode, Err: errors.New("no room")}}
	e := &StepError{Failures: []StepFailure{one, one}}
	if got, want := e.Error(), "stage 1 (toy) failed in decode: no room (and 1 more failures)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	elsewhere := &StageError{Place: sdk.Place{Stage: 1}, Node: "stage-1", Plugin: "llama", Phase: PhaseDecode, Err: errors.New("no room")}
	if got, want := elsewhere.Error(), "stage 1 (stage-1, llama) failed in decode: no room"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestFifoKeepsOrderAndMemory(t *testing.T) {
	var q fifo[int]
	next, want := 0, 0
	for round := range 1000 {
		for range 1 + round%3 {
			q.push(next)
			next++
		}
		for q.len() > 2 {
			if got := *q.front(); got != want {
				t.Fatalf("got %d, want %d", got, want)
			}
			q.pop()
			want++
		}
	}
	if cap(q.items) > 16 {
		t.Errorf("a queue that never held more than 5 has room for %d", cap(q.items))
	}
}
