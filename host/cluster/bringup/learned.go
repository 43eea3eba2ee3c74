package bringup

import (
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/sdk"
)

// Inspection is what a peer found on its machine when it started.
type Inspection struct {
	ModelType string // config.json's model_type
	Identity  cluster.Identity
	Device    sdk.Device        // its memory as it was when the coordinator asked
	Executors []sdk.Description // installed and usable; names, versions and families only
	Folders   []string          // where executors are looked for

	// Plugin is the file name of the executor for the model, Family and Profile are what it said of it. Problem says why
	// there is none.
	Plugin  string
	Family  sdk.Family
	Profile *sdk.ModelProfile
	Problem string
}

// Learned is what the coordinator knows of a peer.
type Learned struct {
	Inspection
	Node      string   // what the peer calls itself
	Machine   string   // the same for all processes that share one machine's memory; empty where the system does not tell
	LastEpoch uint64   // the largest that it was ever offered
	Addresses []string // candidates to dial it at, the likeliest first
	Reached   string   // the address at which it answered the coordinator
}
