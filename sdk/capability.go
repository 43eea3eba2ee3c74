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

// Has tells whether the executor has the capability.
func (d *Description) Has(capability string) bool { return slices.Contains(d.Capabilities, capability) }
