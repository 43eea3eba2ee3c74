package schedule

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/mlxcel/mlxcel/sdk"
)

// The files in testdata read as the specification; -rewrite regenerates their expectations.
func TestSpecification(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var env interpreter
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return env.run(t, d) })
	})
}

// interpreter runs the commands of the specification files.
type interpreter struct {
	stage Stage
	begun []Action
}

func (in *interpreter) run(t *testing.T, d *datadriven.TestData) string {
	var stages, microBatches, batch, size, index int
	depth := 1
	for key, dst := range map[string]*int{"stages": &stages, "mbs": &microBatches, "batch": &batch, "size": &size, "index": &index, "depth": &depth} {
		d.MaybeScanArgs(t, key, dst)
	}
	switch d.Cmd {
	case "timeline":
		return timeline(t, stages, microBatches)
	case "actions":
		return actions(t, stages, microBatches)
	case "pieces":
		var rows int
		var fixed float64
		d.ScanArgs(t, "rows", &rows)
		d.ScanArgs(t, "fixed", &fixed)
		return fmt.Sprintln(PromptPieces(rows, stages, fixed))
	case "split":
		maxRows := math.MaxInt
		d.MaybeScanArgs(t, "max-rows", &maxRows)
		var rows []int
		for _, arg := range d.CmdArgs {
			if arg.Key == "rows" {
				for _, v := range arg.Vals {
					n, err := strconv.Atoi(v)
					if err != nil {
						t.Fatal(err)
					}
					rows = append(rows, n)
				}
			}
		}
		return split(batch, size, maxRows, rows)
	case "new":
		if _, err := newGPipe(stages, microBatches); err != nil {
			return err.Error() + "\n"
		}
		return "ok\n"
	case "stage":
		at := sdk.Place{Stage: index}
		d.MaybeScanArgs(t, "rank", &at.Rank)
		in.stage.Reset(at, sdk.RoleOf(at, stages), microBatches, depth)
		in.begun = nil
		return "ok\n"
	case "next", "finish", "arrive", "abort":
		return in.step(t, d)
	}
	t.Fatalf("unknown command %q", d.Cmd)
	return ""
}

// step runs a command of a single stage: next; finish; arrive N; abort N.
func (in *interpreter) step(t *testing.T, d *datadriven.TestData) string {
	var err error
	mb := -1
	if len(d.CmdArgs) > 0 {
		if _, e := fmt.Sscan(d.CmdArgs[0].Key, &mb); e != nil {
			t.Fatalf("%s: %v", d.Pos, e)
		}
	}
	switch d.Cmd {
	case "next":
		a := in.stage.Next()
		if a.Kind != Idle && a.Kind != Done {
			in.begun = append(in.begun, a)
		}
		return a.String() + "\n"
	case "finish": // the oldest action under way
		if len(in.begun) == 0 {
			err = in.stage.Finish(Action{Forward, in.stage.at, 0})
			break
		}
		a := in.begun[0]
		in.begun = in.begun[1:]
		err = in.stage.Finish(a)
	case "arrive":
		err = in.stage.Arrive(mb)
	case "abort":
		err = in.stage.Abort(mb)
	}
	if err != nil {
		return err.Error() + "\n"
	}
	return "ok\n"
}

// timeline draws who forwards what when every forward pass takes one tick and everything else none.
func timeline(t *testing.T, stages, microBatches int) string {
	g, err := newGPipe(stages, microBatches)
	if err != nil {
		return err.Error() + "\n"
	}
	rows := make([]strings.Builder, stages)
	for range stages + microBatches - 1 { // the bubble formula's denominator
		var running []Action
		for s := range stages {
			a := nextForward(t, g, s)
			if a.Kind == Forward {
				fmt.Fprintf(&rows[s], " %2d", a.MicroBatch)
				running = append(running, a)
			} else {
				rows[s].WriteString("  .")
			}
		}
		for _, a := range running {
			finish(t, g, a)
		}
	}
	if a := nextForward(t, g, stages-1); a.Kind != Done {
		t.Fatalf("%v is left after the last tick", a)
	}
	var b strings.Builder
	for s := range rows {
		fmt.Fprintf(&b, "stage %d:%s\n", s, rows[s].String())
	}
	return b.String()
}

// nextForward carries out whatever takes no time and returns the stage's next Forward, or Idle or Done.
func nextForward(t *testing.T, g *gpipe, stage int) Action {
	for {
		a := g.Next(stage)
		if a.Kind != Receive && a.Kind != Flush {
			return a
		}
		finish(t, g, a)
	}
}

func finish(t *testing.T, g *gpipe, a Action) {
	t.Helper()
	if err := g.Finish(a); err != nil {
		t.Fatal(err)
	}
}

// actions lists everything that each stage is told, the stages asked in turn.
func actions(t *testing.T, stages, microBatches int) string {
	g, err := newGPipe(stages, microBatches)
	if err != nil {
		return err.Error() + "\n"
	}
	var b strings.Builder
	for round := 0; !g.Done(); round++ {
		if round > 4*stages*microBatches {
			t.Fatal("the schedule stands still")
		}
		for s := range stages {
			a := g.Next(s)
			fmt.Fprintln(&b, a)
			if a.Kind != Idle {
				finish(t, g, a)
			}
		}
	}
	for s := range stages {
		fmt.Fprintln(&b, g.Next(s))
	}
	return b.String()
}

// split cuts a batch whose sequence i brings rows[i] rows, or one row when none are given.
func split(batch, size, maxRows int, rows []int) string {
	if len(rows) > 0 {
		batch = len(rows)
	}
	var b strings.Builder
	for start, end := range Split(batch, size, maxRows, func(i int) int {
		if len(rows) > 0 {
			return rows[i]
		}
		return 1
	}) {
		fmt.Fprintf(&b, "[%d,%d)\n", start, end)
	}
	if b.Len() == 0 {
		return "none\n"
	}
	return b.String()
}

func TestSplitStopsWhenAsked(t *testing.T) {
	n := 0
	for range Split(10, 1, 10, func(int) int { return 1 }) {
		if n++; n == 2 {
			break
		}
	}
	if n != 2 {
		t.Errorf("%d micro-batches, want 2", n)
	}
}

// Whatever the order in which actions end, each stage forwards each micro-batch once, in order and never before
// it received it, and the batch ends.
func TestAnyInterleavingForwardsEachMicroBatchOnceInOrder(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		stages, microBatches := 1+rng.IntN(6), 1+rng.IntN(9)
		g, err := newGPipe(stages, microBatches)
		if err != nil {
			t.Fatal(err)
		}
		w := newWitness(t, stages, microBatches)
		var running []Action
		for !g.Done() {
			for s := range stages {
				if rng.IntN(2) == 0 {
					continue
				}
				if a := g.Next(s); a.Kind != Idle && a.Kind != Done {
					w.begin(a)
					running = append(running, a)
				}
			}
			if len(running) == 0 {
				running = append(running, mustProgress(t, g, stages))
				w.begin(running[0])
			}
			i := rng.IntN(len(running))
			a := running[i]
			running = append(running[:i], running[i+1:]...)
			w.end(a)
			finish(t, g, a)
		}
		if len(running) != 0 {
			t.Fatalf("seed %d: done with %v under way", seed, running)
		}
		w.check()
	}
}

// mustProgress asks every stage: with nothing under way and the batch not done, one of them has work.
func mustProgress(t *testing.T, g *gpipe, stages int) Action {
	t.Helper()
	for s := range stages {
		if a := g.Next(s); a.Kind != Idle && a.Kind != Done {
			return a
		}
	}
	t.Fatal("deadlock: nothing is under way, no stage has work, and the batch is not done")
	return Action{}
}

// witness checks a run from outside, by counts of its own.
type witness struct {
	t                            *testing.T
	stages, mbs                  int
	received, begun, ended, flew []int
}

func newWitness(t *testing.T, stages, mbs int) *witness {
	return &witness{t, stages, mbs, make([]int, stages), make([]int, stages), make([]int, stages), make([]int, stages)}
}

func (w *witness) begin(a Action) {
	w.t.Helper()
	switch a.Kind {
	case Forward:
		if a.MicroBatch != w.begun[a.At.Stage] {
			w.t.Fatalf("%v begun after %d forwards", a, w.begun[a.At.Stage])
		}
		if a.At.Stage > 0 && w.received[a.At.Stage] <= a.MicroBatch {
			w.t.Fatalf("%v begun before it was received", a)
		}
		w.begun[a.At.Stage]++
	case Receive:
		if a.At.Stage == 0 || w.ended[a.At.Stage-1] <= a.MicroBatch {
			w.t.Fatalf("%v begun before stage %d had forwarded it", a, a.At.Stage-1)
		}
	case Flush:
		if a.At.Stage != w.stages-1 || w.ended[a.At.Stage] <= a.MicroBatch {
			w.t.Fatalf("%v begun on the wrong stage or too early", a)
		}
	}
}

func (w *witness) end(a Action) {
	switch a.Kind {
	case Forward:
		w.ended[a.At.Stage]++
	case Receive:
		w.received[a.At.Stage]++
	case Flush:
		w.flew[a.At.Stage]++
	}
}

func (w *witness) check() {
	w.t.Helper()
	for s := range w.stages {
		wantReceived, wantFlushed := w.mbs, 0
		if s == 0 {
			wantReceived = 0
		}
		if s == w.stages-1 {
			wantFlushed = w.mbs
		}
		if w.ended[s] != w.mbs || w.received[s] != wantReceived || w.flew[s] != wantFlushed {
			w.t.Fatalf("stage %d of %d: forwarded %d, received %d, flushed %d of %d", s, w.stages, w.ended[s], w.received[s], w.flew[s], w.mbs)
		}
	}
}

// Aborts at any moment never leave a stage waiting, and nothing aborted is begun afterwards.
func TestAbortNeverStalls(t *testing.T) {
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 2))
		stages, mbs := 1+rng.IntN(3), 1+rng.IntN(6)
		index := rng.IntN(stages)
		var s Stage
		at := sdk.Place{Stage: index}
		s.Reset(at, sdk.RoleOf(at, stages), mbs, 1+rng.IntN(3))
		todo := rng.Perm(mbs) // arrivals still to come, in any order
		var running []Action
		for events := 0; ; events++ {
			if events > 1000 {
				t.Fatalf("seed %d: the stage stands still", seed)
			}
			if rng.IntN(6) == 0 {
				if err := s.Abort(rng.IntN(mbs)); err != nil {
					t.Fatal(err)
				}
			}
			if index > 0 && len(todo) > 0 && rng.IntN(2) == 0 {
				if mb := todo[0]; !s.Aborted(mb) { // a driver drops what comes after an abort
					if err := s.Arrive(mb); err != nil {
						t.Fatal(err)
					}
				}
				todo = todo[1:]
			}
			a := s.Next()
			if a.Kind == Done {
				break
			}
			if a.Kind != Idle {
				if s.Aborted(a.MicroBatch) {
					t.Fatalf("seed %d: %v begun after its abort", seed, a)
				}
				running = append(running, a)
			}
			if len(running) > 0 && rng.IntN(2) == 0 {
				if err := s.Finish(running[0]); err != nil {
					t.Fatal(err)
				}
				running = running[1:]
			}
		}
		if len(running) > 0 {
			t.Fatalf("seed %d: done with %v under way", seed, running)
		}
	}
}

func TestActionStringsOfUnknownKinds(t *testing.T) {
	if got, want := Kind(42).String(), "kind(42)"; got != want {
		t.Errorf("Kind(42) prints as %q, want %q", got, want)
	}
}

func TestBadSizesPanic(t *testing.T) {
	for name, f := range map[string]func(){
		"split":          func() { Split(3, 0, 1, nil) },
		"reset no batch": func() { new(Stage).Reset(sdk.Place{}, sdk.RoleOf(sdk.Place{}, 2), 0, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("did not panic")
				}
			}()
			f()
		})
	}
}
