package hosts

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"
)

// Within these times a loss must be noticed.
const (
	ClosedLimit = 150 * time.Millisecond // whose sockets closed
	SilentLimit = 3 * time.Second        // who says nothing more
)

// Victim is what a cell of the kill matrix strikes.
type Victim string

// The victims.
const (
	CoordinatorHost Victim = "coordinator host"
	StageHost       Victim = "stage host"
	ExecutorProcess Victim = "executor"
)

// Phase is when a cell of the kill matrix strikes.
type Phase string

// The phases, in the order in which a cluster goes through them.
const (
	Waiting Phase = "waiting"
	Offer   Phase = "offer"
	Commit  Phase = "commit"
	Load    Phase = "load"
	Canary  Phase = "canary"
	Idle    Phase = "idle"
	Prefill Phase = "prefill"
	Decode  Phase = "decode"
	Drain   Phase = "drain"
)

// Cell is one cell of the kill matrix.
type Cell struct {
	Victim Victim
	Signal syscall.Signal // SIGKILL or SIGSTOP
	Phase  Phase
}

func (c Cell) String() string {
	name := "kill"
	if c.Signal == syscall.SIGSTOP {
		name = "stop"
	}
	return fmt.Sprintf("%s %s in %s", name, c.Victim, c.Phase)
}

// TooLate judges how long it took to notice a loss, where nothing else runs: with MLXCEL_TEST_HOSTS=required. Tests of
// other packages that compile and compute beside this one delay whoever notices, so that otherwise times are only logged.
func TooLate(took, limit time.Duration) bool {
	return took > limit && os.Getenv(required) == "required"
}

// Limit is within what time the loss must be noticed.
func (c Cell) Limit() time.Duration {
	if c.Signal == syscall.SIGSTOP {
		return SilentLimit
	}
	return ClosedLimit
}

// Matrix returns every victim with every signal in every phase.
func Matrix() []Cell {
	var cells []Cell
	for _, phase := range []Phase{Waiting, Offer, Commit, Load, Canary, Idle, Prefill, Decode, Drain} {
		for _, victim := range []Victim{CoordinatorHost, StageHost, ExecutorProcess} {
			for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
				cells = append(cells, Cell{victim, signal, phase})
			}
		}
	}
	return cells
}

// Witness is a process that must notice a loss, and how it says so.
type Witness struct {
	Process *Process
	Match   Match
}

// Scene is a cluster that one cell is tried on. Its methods are called in this order, once each; whatever does not hold
// they tell to the test.
type Scene interface {
	// Reach brings the cluster into the phase and keeps it there.
	Reach(t testing.TB)
	// Strike sends the signal and returns the moment before. It lets go of what kept the cluster in the phase.
	Strike(t testing.TB) time.Time
	// Witnesses are those who must notice, each within the cell's limit. In some phases there are none.
	Witnesses() []Witness
	// CheckClient checks what the client of the request that was under way got, if there was one.
	CheckClient(t testing.TB)
	// CheckLeft checks that the survivors hold nothing of the cluster that was.
	CheckLeft(t testing.TB)
	// Recover brings the victim back (a stopped one goes on, a killed one is started) and checks that the next bring-up
	// works with the very same survivors.
	Recover(t testing.TB)
	// End ends all processes in an orderly way and checks that nothing is left at all.
	End(t testing.TB)
}

// Play tries a cell on its scene.
func Play(t *testing.T, c Cell, s Scene) {
	t.Helper()
	s.Reach(t)
	struck := s.Strike(t)
	for _, w := range s.Witnesses() {
		took, err := w.notices(t.Context(), struck, c.Limit())
		if err != nil {
			t.Error(err)
		}
		t.Logf("%s noticed after %v", w.Process, took)
	}
	s.CheckClient(t)
	s.CheckLeft(t)
	s.Recover(t)
	s.End(t)
}

// notices waits for the witness; by the clock of its log it must be in time.
func (w Witness) notices(ctx context.Context, struck time.Time, limit time.Duration) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	e, err := w.Process.Next(ctx, w.Match)
	if err != nil {
		return 0, fmt.Errorf("%s did not notice (%s): %w; the end of its log:\n%s", w.Process, w.Match, err, w.Process.tail(30))
	}
	if took = e.Logged.Sub(struck); TooLate(took, limit) {
		return took, fmt.Errorf("%s noticed after %v, want at most %v: %s", w.Process, took, limit, e.Line)
	}
	return took, nil
}
