package sdk

import "slices"

// What an executor may understand beyond what the contract's version asks of all. Each is a name in
// Description.Capabilities; a host ignores names that it does not know, and says by name what it lacks where it wants it.
const (
	CapabilityShare     = "share"     // Reservation.From and Keep
	CapabilityRewind    = "rewind"    // SeqStep.Pos before the end of the state
	CapabilitySnapshots = "snapshots" // Reservation.Snapshots and SeqStep.Snapshot
	CapabilityState     = "state"     // StateExport and StateImport
	CapabilityMasks     = "masks"     // SeqStep.Allowed
	CapabilityScores    = "scores"    // WantScores
	CapabilityLogits    = "logits"    // WantLogits
)

// lacking returns a capability that the operation needs, as an executor without it would misread or refuse it, and that
// the executor does not have; empty where there is none.
func lacking(op Op, has func(string) bool) string {
	missing := ""
	need := func(needed bool, capability string) {
		if needed && missing == "" && !has(capability) {
			missing = capability
		}
	}
	switch op := op.(type) {
	case Reservation:
		need(op.Keep > 0, CapabilityShare)
		need(op.Snapshots > 0, CapabilitySnapshots)
	case StateExport, StateImport:
		need(true, CapabilityState)
	case *Step:
		for i := range op.Seqs {
			q := &op.Seqs[i]
			need(q.Snapshot, CapabilitySnapshots)
			need(len(q.Allowed) > 0, CapabilityMasks)
			need(q.Want == WantScores, CapabilityScores)
			need(q.Want == WantLogits, CapabilityLogits)
		}
	}
	return missing
}

// Has tells whether the executor has the capability.
func (d *Description) Has(capability string) bool { return slices.Contains(d.Capabilities, capability) }
