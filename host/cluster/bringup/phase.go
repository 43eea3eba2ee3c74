// Package bringup owns how a cluster comes up and goes down: a coordinator learns what its peers are, plans, offers, commits and
// activates, on all of them or on none; a peer serves one assignment after the other.
package bringup

// Phase is how far a bring-up has come, at one node or, where all have reached it, everywhere.
type Phase string

const (
	PhaseWaiting   Phase = "waiting"   // for a coordinator
	PhaseLearned   Phase = "learned"   // the coordinator knows what the peer is and has
	PhaseOffered   Phase = "offered"   // the peer accepts its stage
	PhaseCommitted Phase = "committed" // the peer holds itself ready for that stage
	PhaseLoading   Phase = "loading"   // the executor is started and reads its weights
	PhaseLoaded    Phase = "loaded"    // it holds them
	PhaseLinked    Phase = "linked"    // the link to the next stage passed its self-test
	PhaseReady     Phase = "ready"     // the canary passed every stage
	PhaseDraining  Phase = "draining"  // what runs comes to its end, nothing new begins
	PhaseStopping  Phase = "stopping"  // executor and connections are being ended
)

// follows is the order of a bring-up: from which phase each is entered.
var follows = map[Phase]Phase{
	PhaseOffered: PhaseLearned, PhaseCommitted: PhaseOffered, PhaseLoading: PhaseCommitted, PhaseLoaded: PhaseLoading,
	PhaseLinked: PhaseLoaded, PhaseReady: PhaseLinked, PhaseDraining: PhaseReady,
}
