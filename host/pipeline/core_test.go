package pipeline

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/mlxcel/mlxcel/sdk"
)

// TestCore runs the files of testdata/core, which read as the specification of what a place does with its orders. An
// order is named by its ID, a micro-batch by <order>.<number>, a micro-batch's sequences with commas between them.
//
//	new [stage=1] [rank=0] [stages=2] [slots=2] [orders=<n>] [bytes=<n>] [observed]
//	at <duration>                                    the clock
//	reserve <order> <seq> [prompt=<n>] [epoch=<n>]
//	release <order> <seq>
//	plan <order> <seqs>... [rows=1] [prompt]         one argument for each micro-batch
//	frame <micro-batch> <seqs> [rows=1] [claimed] [epoch=<n>]
//	                                                 rows is of each sequence; claimed: it lies in the slot lent last
//	claim <micro-batch> [bytes=<n>]                  a link asks where to read a frame to
//	unclaim                                          no frame comes into the slot lent last
//	read <micro-batch>                               its output has been read
//	good [tamper=<what>] | fail | gone               the executor's answer to the oldest thing sent
//	hold | go                                        the executor's client is taken up, and free again
//	refused [gone]                                   the last thing sent did not go out
//	phase                                            what the executor is at, as the watchdog sees it
//	abort <micro-batch>
//	overdue                                          time has passed for held frames
//	close
//
// Each prints what is sent to the executor, and then what is to be done beside.
func TestCore(t *testing.T) {
	datadriven.Walk(t, "testdata/core", func(t *testing.T, path string) {
		var r *coreRun
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				r = newCoreRun(t, d)
				return "ok\n"
			}
			return r.event(t, d)
		})
	})
}

type coreRun struct {
	c      *core
	now    time.Time
	hold   bool
	lent   *slot
	frames map[string]Frame // given out, not read
	down   error            // last printed
	out    strings.Builder
}

func newCoreRun(t *testing.T, d *datadriven.TestData) *coreRun {
	cfg := coreConfig{
		epoch: benchEpoch, plugin: "toy", slots: 2, boundary: sdk.Boundary{Width: toyWidth, Dtype: sdk.DtypeFloat32},
		observed: d.HasArg("observed"), maxOrders: maxOrders, maxBytes: maxOrderBytes,
	}
	stages, bytes := 2, 0
	cfg.place.Stage = 1
	d.MaybeScanArgs(t, "stage", &cfg.place.Stage)
	d.MaybeScanArgs(t, "rank", &cfg.place.Rank)
	d.MaybeScanArgs(t, "stages", &stages)
	d.MaybeScanArgs(t, "slots", &cfg.slots)
	d.MaybeScanArgs(t, "orders", &cfg.maxOrders)
	d.MaybeScanArgs(t, "bytes", &bytes)
	if bytes > 0 {
		cfg.maxBytes = int64(bytes)
	}
	cfg.role = sdk.RoleOf(cfg.place, stages)
	r := &coreRun{c: newCore(cfg), now: time.Unix(0, 0), frames: map[string]Frame{}}
	for i := range cfg.slots {
		sl := &slot{core: r.c, index: cfg.slots - 1 - i, in: make([]byte, 64), out: make([]byte, 64)}
		sl.released = func(sl *slot) {
			r.printf("slot %d comes back", sl.index)
			r.c.released(r.now, sl)
		}
		r.c.free = append(r.c.free, sl)
	}
	return r
}

func (r *coreRun) printf(format string, args ...any) { fmt.Fprintf(&r.out, format+"\n", args...) }

func (r *coreRun) event(t *testing.T, d *datadriven.TestData) string {
	r.out.Reset()
	switch d.Cmd {
	case "at":
		passed, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			t.Fatal(err)
		}
		r.now = time.Unix(0, 0).Add(passed)
	case "reserve", "release", "plan":
		r.c.order(r.now, r.order(t, d))
	case "frame":
		r.c.frame(r.now, r.frame(t, d))
	case "claim":
		bytes := 16
		d.MaybeScanArgs(t, "bytes", &bytes)
		if sl := r.c.claim(r.tag(t, d), bytes); sl != nil {
			r.lent = sl
			r.printf("slot %d is lent", sl.index)
		}
	case "unclaim":
		r.lent.Release()
	case "read":
		r.frames[d.CmdArgs[0].Key].Owner.Release()
	case "good", "fail", "gone":
		r.answer(t, d)
	case "hold", "go":
		r.hold = d.Cmd == "hold"
	case "refused":
		err := error(sdk.Errorf(sdk.CodeInvalid, "no good"))
		if d.HasArg("gone") {
			err = fmt.Errorf("send: %w", sdk.ErrExecutorGone)
		}
		r.c.refused(r.now, err)
	case "phase":
		since := ""
		if r.c.busy() {
			since = " since " + r.c.began.Sub(time.Unix(0, 0)).String()
		}
		r.printf("%s%s", r.c.phase, since)
	case "abort":
		r.c.abort(r.now, r.tag(t, d))
	case "overdue":
		if next, any := r.c.overdue(r.now); any {
			r.printf("ask again in %v", next)
		}
	case "close":
		r.c.close()
	default:
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
	r.settle()
	if r.out.Len() == 0 {
		return "nothing\n"
	}
	return r.out.String()
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func sequences(t *testing.T, text string) (seqs []sdk.SeqID) {
	for one := range strings.SplitSeq(text, ",") {
		seqs = append(seqs, sdk.SeqID(number(t, one)))
	}
	return seqs
}

func epochOf(t *testing.T, d *datadriven.TestData) uint64 {
	epoch := uint64(benchEpoch)
	d.MaybeScanArgs(t, "epoch", &epoch)
	return epoch
}

// tag reads the first argument.
func (r *coreRun) tag(t *testing.T, d *datadriven.TestData) Tag {
	step, mb, _ := strings.Cut(d.CmdArgs[0].Key, ".")
	return Tag{Epoch: epochOf(t, d), Step: uint64(number(t, step)), MicroBatch: number(t, mb)}
}

func (r *coreRun) order(t *testing.T, d *datadriven.TestData) Order {
	o := Order{Epoch: epochOf(t, d), ID: uint64(number(t, d.CmdArgs[0].Key))}
	switch d.Cmd {
	case "reserve":
		prompt := 0
		d.MaybeScanArgs(t, "prompt", &prompt)
		o.Op = sdk.Reservation{Seq: sequences(t, d.CmdArgs[1].Key)[0], Prompt: make([]int32, prompt)}
	case "release":
		o.Op = sdk.Release{Seq: sequences(t, d.CmdArgs[1].Key)[0]}
	default:
		rows := 1
		d.MaybeScanArgs(t, "rows", &rows)
		o.Plan = &StepPlan{Cuts: []int{0}}
		for _, arg := range d.CmdArgs[1:] {
			if len(arg.Vals) > 0 || arg.Key == "prompt" {
				continue
			}
			for _, seq := range sequences(t, arg.Key) {
				o.Plan.IDs = append(o.Plan.IDs, seq)
				o.Plan.Seqs = append(o.Plan.Seqs, sdk.SeqStep{Seq: seq, Rows: rows, Prompt: d.HasArg("prompt")})
			}
			o.Plan.Cuts = append(o.Plan.Cuts, len(o.Plan.IDs))
		}
	}
	return o
}

func (r *coreRun) frame(t *testing.T, d *datadriven.TestData) Frame {
	rows := 1
	d.MaybeScanArgs(t, "rows", &rows)
	f := Frame{Tag: r.tag(t, d), Seqs: sequences(t, d.CmdArgs[1].Key)}
	f.Hidden = r.hidden(rows * len(f.Seqs))
	if f.Owner = Releaser(givenBack{r, f.Tag}); d.HasArg("claimed") {
		f.Owner = r.lent
	}
	return f
}

func (r *coreRun) hidden(rows int) sdk.Tensor {
	return sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: rows, Width: toyWidth, Data: make([]byte, rows*toyWidth*4)}
}

// givenBack prints the end of a frame.
type givenBack struct {
	r *coreRun
	t Tag
}

func (g givenBack) Release() { g.r.printf("frame %d.%d is given back", g.t.Step, g.t.MicroBatch) }

// answer answers the oldest thing sent; what is wrong with a good answer says tamper.
func (r *coreRun) answer(t *testing.T, d *datadriven.TestData) {
	if r.c.taken == 0 {
		t.Fatalf("%s: the executor owes no answer", d.Pos)
	}
	step, ok := (*r.c.sent.front()).what.(*sdk.Step)
	switch {
	case d.Cmd == "gone":
		r.c.fall(fmt.Errorf("answer: %w", sdk.ErrExecutorGone))
	case d.Cmd == "fail":
		r.c.answered(r.now, nil, sdk.Errorf(sdk.CodeOutOfMemory, "no room"))
	case !ok:
		r.c.answered(r.now, nil, nil)
	default:
		tamper := ""
		d.MaybeScanArgs(t, "tamper", &tamper)
		r.c.answered(r.now, r.result(step, tamper), nil)
	}
}

func (r *coreRun) result(step *sdk.Step, tamper string) *sdk.StepResult {
	result := &sdk.StepResult{ID: step.ID, ComputeNanos: int64(time.Millisecond)}
	rows := 0
	for _, s := range step.Seqs {
		rows += s.Rows
		if tamper != "missing" {
			result.Seqs = append(result.Seqs, sdk.SeqResult{Seq: s.Seq, Token: int32(s.Seq) + 100})
		}
	}
	switch tamper {
	case "rows":
		rows++
	case "sequence":
		result.Seqs[0].Seq++
	}
	if r.c.cfg.role.GivesHidden {
		result.Seqs, result.Hidden = nil, r.hidden(rows)
	}
	return result
}

// settle does what the core asks for, as a monitor does.
func (r *coreRun) settle() {
	for {
		effects := slices.Clone(r.c.effects)
		r.c.effects = nil
		sent := false
		for op, ok := r.take(); ok; op, ok = r.take() {
			sent = true
			r.printSent(op)
		}
		for i := range effects {
			r.perform(&effects[i])
		}
		if !sent && len(effects) == 0 {
			break
		}
	}
	if r.c.down != nil && r.down == nil {
		r.down = r.c.down
		r.printf("down in %s: %v", r.c.phase, r.down)
	}
}

func (r *coreRun) take() (sdk.Op, bool) {
	if r.hold {
		return nil, false
	}
	return r.c.take()
}

func (r *coreRun) printSent(op sdk.Op) {
	switch op := op.(type) {
	case sdk.Reservation:
		r.printf("send reserve %d", op.Seq)
	case sdk.Release:
		r.printf("send release %d", op.Seq)
	case *sdk.Step:
		var seqs []sdk.SeqID
		for _, s := range op.Seqs {
			seqs = append(seqs, s.Seq)
		}
		hidden := ""
		if op.Hidden.Data != nil {
			hidden = fmt.Sprintf(" with %d rows", op.Hidden.Rows)
		}
		r.printf("send step #%d of %d in slot %d%s", op.ID, seqs, op.Slot, hidden)
	}
}

func (r *coreRun) perform(e *effect) {
	name := fmt.Sprintf("%d.%d", e.tag.Step, e.tag.MicroBatch)
	switch {
	case e.release != nil:
		e.release.Release()
	case e.frame != nil:
		name = fmt.Sprintf("%d.%d", e.frame.Step, e.frame.MicroBatch)
		r.frames[name] = *e.frame
		r.printf("frame %s of %d goes on with %d rows", name, e.frame.Seqs, e.frame.Hidden.Rows)
	case e.results != nil:
		var tokens []int32
		for _, s := range e.results {
			tokens = append(tokens, s.Token)
		}
		r.printf("result %s: %d", name, tokens)
	case e.answered != 0 && e.failed != nil:
		r.printf("order %d failed: %v", e.answered, e.failed)
	case e.answered != 0:
		r.printf("order %d is done", e.answered)
	case e.failed != nil:
		r.printf("%s failed: %v", name, e.failed)
	case e.cancel != 0:
		r.printf("cancel step #%d", e.cancel)
	case e.observed != nil:
		r.printObserved(e.observed)
	}
}

func (r *coreRun) printObserved(o *Observation) {
	ms := func(t time.Time) string {
		if t.IsZero() {
			return "never"
		}
		return t.Sub(time.Unix(0, 0)).String()
	}
	failed := ""
	if o.Failed {
		failed = ", nothing came of it"
	}
	r.printf("observed at %s: %d.%d received %s, began %s, ended %s, computed %v%s", o.Place, o.Step, o.MicroBatch,
		ms(o.Received), ms(o.Began), ms(o.Ended), o.Compute, failed)
}

// A BacklogError counts as the end of the executor, so that nothing more is sent to it.
func TestBacklogErrorIsALoss(t *testing.T) {
	if err := (&backlog{}).add(5, 1, 4); !errors.Is(err, sdk.ErrExecutorGone) {
		t.Errorf("got %v, want an error that tells the executor is gone", err)
	}
}
