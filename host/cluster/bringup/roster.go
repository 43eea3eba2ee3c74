package bringup

import "slices"

// step is what the coordinator does next, at every node.
type step string

const (
	stepWait     step = ""         // for the other nodes
	stepOffer    step = "offer"    // all are learned: plan, then offer
	stepCommit   step = "commit"   // all accepted
	stepActivate step = "activate" // all committed
	stepLink     step = "link"     // all hold their weights
	stepCanary   step = "canary"   // all are linked: connect the pipeline and try it
	stepServe    step = "serve"    // the canary passed
	stepAbort    step = "abort"    // somebody refused or is lost
)

// nextStep is what follows once every node has reached a phase.
var nextStep = map[Phase]step{
	PhaseLearned: stepOffer, PhaseOffered: stepCommit, PhaseCommitted: stepActivate, PhaseLoaded: stepLink, PhaseLinked: stepCanary, PhaseReady: stepServe,
}

// roster is the coordinator's side of a bring-up: no node goes on before all have come as far, and the first refusal or
// loss aborts it at all of them. It is pure.
type roster struct {
	phases   []Phase // of each node
	gathered bool    // all were learned at the same time
	cause    error   // why it was aborted
	culprit  int
}

func newRoster(nodes int) *roster {
	r := &roster{phases: make([]Phase, nodes)}
	for i := range r.phases {
		r.phases[i] = PhaseWaiting
	}
	return r
}

// reached tells that a node has entered a phase, and returns what is to be done now. Reports after an abort are dropped.
func (r *roster) reached(node int, p Phase) (step, error) {
	if r.cause != nil {
		return stepWait, nil
	}
	from := r.phases[node]
	want, ordered := follows[p]
	if p == PhaseLearned {
		want, ordered = PhaseWaiting, true
	}
	if !ordered || from != want {
		return stepWait, &OrderError{From: from, To: p}
	}
	r.phases[node] = p
	next, barrier := nextStep[p]
	if !barrier || !r.all(p) {
		return stepWait, nil
	}
	r.gathered = true
	return next, nil
}

// all tells whether every node is in a phase.
func (r *roster) all(p Phase) bool {
	return !slices.ContainsFunc(r.phases, func(q Phase) bool { return q != p })
}

// left takes a node that was learned back to waiting: as long as others are still to come, one that goes may come again. It
// reports false where its going is a loss.
func (r *roster) left(node int) bool {
	if r.cause != nil || r.gathered || r.phases[node] != PhaseLearned {
		return false
	}
	r.phases[node] = PhaseWaiting
	return true
}

// failed takes in a refusal or a loss. Only the first counts.
func (r *roster) failed(node int, err error) step {
	if r.cause != nil {
		return stepWait
	}
	r.cause, r.culprit = err, node
	return stepAbort
}
