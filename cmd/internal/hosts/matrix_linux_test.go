package hosts

import (
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMatrixIsWhole(t *testing.T) {
	names := map[string]bool{}
	for _, c := range Matrix() {
		names[c.String()] = true
		if want := map[syscall.Signal]time.Duration{syscall.SIGKILL: 150 * time.Millisecond, syscall.SIGSTOP: 3 * time.Second}[c.Signal]; c.Limit() != want {
			t.Errorf("%s: %v, want %v", c, c.Limit(), want)
		}
	}
	if len(names) != 9*3*2 || !names["stop executor in canary"] {
		t.Errorf("%d cells", len(names))
	}
}

// scene notes what is asked of it.
type scene struct {
	n        *Network
	p, other *Process
	calls    []string
}

func (s *scene) note(call string) { s.calls = append(s.calls, call) }

func (s *scene) Reach(t testing.TB) {
	s.note("reach")
	s.p = actor(t, s.n.Hosts[0], "log=idle")
	s.p.Await(t, Says("idle"))
}

func (s *scene) Strike(t testing.TB) time.Time {
	s.note("strike")
	at := s.p.Signal(t, syscall.SIGKILL)
	s.other = actor(t, s.n.Hosts[1], "log=lost")
	return at
}

func (s *scene) Witnesses() []Witness     { return []Witness{{s.other, IsMessage("lost")}} }
func (s *scene) CheckClient(t testing.TB) { s.note("client") }
func (s *scene) CheckLeft(t testing.TB)   { s.note("left") }
func (s *scene) Recover(t testing.TB)     { s.note("recover") }
func (s *scene) End(t testing.TB)         { s.note("end") }

func TestPlay(t *testing.T) {
	s := &scene{n: Loopback(t, "a", "b")}
	Play(t, Cell{StageHost, syscall.SIGSTOP, Idle}, s)
	if got := strings.Join(s.calls, " "); got != "reach strike client left recover end" {
		t.Error(got)
	}
}

func TestWitnessMustBeInTime(t *testing.T) {
	t.Setenv(required, "") // elsewhere than where nothing else runs, times are no fault
	if TooLate(time.Hour, time.Second) {
		t.Error("times are judged on a machine that may be busy")
	}
	t.Setenv(required, "required")
	n := Loopback(t, "a")
	p := actor(t, n.Hosts[0], "log=lost", "log=lost", "exit=")
	w := Witness{p, IsMessage("lost")}
	struck := p.journalStart(t)
	if took, err := w.notices(t.Context(), struck, time.Hour); err != nil || took != 0 {
		t.Error(err)
	}
	if _, err := w.notices(t.Context(), struck.Add(-time.Minute), 150*time.Millisecond); err == nil || !strings.Contains(err.Error(), "want at most 150ms") {
		t.Error(err)
	}
	if _, err := w.notices(t.Context(), struck, time.Hour); err == nil || !strings.Contains(err.Error(), "did not notice") {
		t.Error(err)
	}
}

// journalStart is when the first event was logged.
func (p *Process) journalStart(t *testing.T) time.Time {
	t.Helper()
	e, _, err := p.journal.next(t.Context(), 0, Says(""))
	if err != nil {
		t.Fatal(err)
	}
	return e.Logged
}
