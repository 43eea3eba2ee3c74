package bringup

import (
	"fmt"
	"strings"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/transport"
)

// assignment is a peer's side of a bring-up: one coordinator at a time, every phase in its order, epochs that only grow. It
// is pure; the zero value is not ready, see newAssignment.
type assignment struct {
	phase   Phase
	session transport.Session // of the coordinator
	owner   string            // the coordinator, for messages
	epoch   uint64            // of the offer; 0 before one
	seen    uint64            // the largest epoch that was ever offered
}

func newAssignment() *assignment { return &assignment{phase: PhaseWaiting} }

// OrderError is a phase that can't be entered from the one before.
type OrderError struct {
	From, To Phase
}

func (e *OrderError) Error() string { return fmt.Sprintf("can't go from %s to %s", e.From, e.To) }

// open gives the peer to a coordinator's session.
func (a *assignment) open(session transport.Session, owner string) error {
	if a.phase != PhaseWaiting {
		return a.busy()
	}
	a.phase, a.session, a.owner, a.epoch = PhaseLearned, session, owner, 0
	return nil
}

// admits tells whether a coordinator of that name may connect.
func (a *assignment) admits(owner string) error {
	if a.phase == PhaseWaiting || a.phase != PhaseStopping && a.owner == owner || a.yieldsTo(owner) {
		return nil
	}
	return a.busy()
}

// yieldsTo tells whether the peer goes over to another coordinator. Of two that have come at the same time, each may hold peers
// that the other waits for: as long as nothing has been offered, the one whose run has the smaller name gets them all.
func (a *assignment) yieldsTo(owner string) bool {
	return a.phase == PhaseLearned && runName(owner) < runName(a.owner)
}

// runName is the part of a coordinator's node id that each of its runs has anew, see Coordinator.newRun.
func runName(owner string) string { return owner[strings.LastIndexByte(owner, '#')+1:] }

func (a *assignment) busy() error {
	return cluster.RefuseBusy(fmt.Sprintf("%s (%s)", a.owner, a.phase))
}

// offer takes in an offer's epoch. An offer that was refused may be followed by another.
func (a *assignment) offer(epoch uint64) error {
	if a.phase != PhaseLearned {
		return &OrderError{From: a.phase, To: PhaseOffered}
	}
	if epoch <= a.seen {
		return cluster.RefuseEpoch(a.seen, epoch)
	}
	a.phase, a.epoch, a.seen = PhaseOffered, epoch, epoch
	return nil
}

// advance enters the next phase of the epoch.
func (a *assignment) advance(epoch uint64, to Phase) error {
	if epoch != a.epoch || a.epoch == 0 {
		return cluster.RefuseEpoch(a.epoch, epoch)
	}
	if from, ok := follows[to]; !ok || from != a.phase {
		return &OrderError{From: a.phase, To: to}
	}
	a.phase = to
	return nil
}

// stop begins the end of a session, whatever it has come to. It reports false where there is nothing to end: an abort that
// comes late, or a second loss.
func (a *assignment) stop(session transport.Session) bool {
	if a.phase == PhaseWaiting || a.phase == PhaseStopping || a.session != session {
		return false
	}
	a.phase = PhaseStopping
	return true
}

// stopped returns to waiting.
func (a *assignment) stopped() {
	*a = assignment{phase: PhaseWaiting, seen: a.seen}
}
