package cluster

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/sdk"
)

// Code is why a node is not let into a cluster. Codes travel between nodes, so they are never renamed.
type Code string

// The codes of refusals.
const (
	CodeSecret      Code = "secret"
	CodeProtocol    Code = "protocol-version"
	CodeVersion     Code = "program-version"
	CodeCluster     Code = "cluster-name"
	CodeCapability  Code = "capability"
	CodeModel       Code = "model-identity"
	CodeBusy        Code = "busy"
	CodeMemory      Code = "memory"
	CodeAccelerator Code = "accelerator-family"
	CodeLayers      Code = "layer-range"
	CodeEpoch       Code = "stale-epoch"
)

// Refusal is a node that is not let into a cluster, or does not come in. It is plain data, so that it reaches the logs of both
// sides alike.
type Refusal struct {
	Code   Code
	Reason string // what was wanted and what was got
	Remedy string // what to change, and where
}

func (r *Refusal) Error() string {
	if r.Remedy == "" {
		return r.Reason
	}
	return r.Reason + ": " + r.Remedy
}

// Is tells whether target is a refusal of the same code, whatever its text.
func (r *Refusal) Is(target error) bool {
	t, ok := target.(*Refusal)
	return ok && t.Code == r.Code && t.Reason == "" && t.Remedy == ""
}

// RefuseSecret is a node that does not hold the cluster's secret.
func RefuseSecret() *Refusal {
	return &Refusal{CodeSecret, "the cluster secrets differ",
		fmt.Sprintf("copy the same file to every host, and give it with %s, %s, %s or secret_file under [cluster]", FlagSecretFile, EnvSecretFile, EnvSecret)}
}

// RefuseProtocol is a node that speaks another version of the cluster protocol.
func RefuseProtocol(want, got int) *Refusal {
	return &Refusal{CodeProtocol, fmt.Sprintf("cluster protocol version %d, want %d", got, want), "install the same version of mlxcel on every host"}
}

// RefuseVersion is a node that runs another version of the program.
func RefuseVersion(want, got string) *Refusal {
	return &Refusal{CodeVersion, fmt.Sprintf("mlxcel version %s, want %s", quote(got), quote(want)), "install the same version of mlxcel on every host"}
}

// RefuseCluster is a node of a cluster of another name.
func RefuseCluster(want, got string) *Refusal {
	return &Refusal{CodeCluster, fmt.Sprintf("cluster name %s, want %s", quote(got), quote(want)), fmt.Sprintf("give every node the same %s", FlagClusterName)}
}

// RefuseEpoch is an assignment of a bring-up that a newer one has replaced.
func RefuseEpoch(newest, got uint64) *Refusal {
	return &Refusal{CodeEpoch, fmt.Sprintf("bring-up %d is over, the newest is %d", got, newest), "start the coordinator again"}
}

// RefuseBusy is a node that serves another coordinator.
func RefuseBusy(coordinator string) *Refusal {
	return &Refusal{CodeBusy, fmt.Sprintf("the node serves coordinator %s", coordinator), "stop that one, or wait for it, or use another node"}
}

// RefuseModel is a node whose copy of the model is not the coordinator's. differences is not empty.
func RefuseModel(differences []Difference) *Refusal {
	texts := make([]string, len(differences))
	for i, d := range differences {
		texts[i] = d.String()
	}
	return &Refusal{CodeModel, "the model differs: " + strings.Join(texts, "; "),
		"copy the coordinator's model folder to the node, and give it there with --model"}
}

// Capability is what a pipeline needs of a node, and what the node has.
type Capability struct {
	Family    string // wire name of the family that is needed
	ModelType string // of the model
	Plugin    string // the executor that serves it elsewhere, e.g. "llama"; empty when unknown
	Folder    string // the node's plugin folder
	There     []sdk.Description
	Here      []sdk.Description // the coordinator's; empty when it has no executors
}

// RefuseCapability is a node without an executor that runs the model's family as a stage.
func RefuseCapability(c Capability) *Refusal {
	reason := fmt.Sprintf("pipeline capability mismatch: the model needs a stage executor of family %s (model_type %s); the node has %s", c.Family, c.ModelType, families(c.There))
	if len(c.Here) > 0 {
		reason += ", the coordinator " + families(c.Here)
	}
	plugin := "an executor that serves " + c.Family
	if c.Plugin != "" {
		plugin = fmt.Sprintf("the executor %s", filepath.Base(c.Plugin))
	}
	folder := "the node's plugin folder"
	if c.Folder != "" {
		folder = c.Folder
	}
	return &Refusal{CodeCapability, reason, fmt.Sprintf("drop %s into %s on the node, or name its folder there with --plugin-dir", plugin, folder)}
}

// families lists what executors run as stages.
func families(executors []sdk.Description) string {
	var out []string
	for _, e := range executors {
		var names []string
		for _, f := range e.Families {
			switch {
			case f.PlanOnly:
				names = append(names, f.Name+" (plan only)")
			case !f.Pipeline:
				names = append(names, f.Name+" (unsplit only)")
			default:
				names = append(names, f.Name)
			}
		}
		out = append(out, fmt.Sprintf("%s %s [%s]", e.Name, e.Version, strings.Join(names, ", ")))
	}
	if len(out) == 0 {
		return "no executors"
	}
	return strings.Join(out, ", ")
}

// RefuseMemory is a stage that does not fit into its node. All sizes are bytes.
func RefuseMemory(need, have int64) *Refusal {
	return &Refusal{CodeMemory, fmt.Sprintf("the stage needs %s (%d bytes), and the node has %s (%d bytes) for it: %s short",
		partition.FormatSize(need), need, partition.FormatSize(have), have, partition.FormatSize(need-have)),
		"free memory there, lower --parallel or --ctx, add a stage, or give the node fewer layers with --pp-layers or resources.memory_bytes"}
}

// RefuseAccelerator is a node that computes on another kind of device than the rest: one kind rounds differently from another.
func RefuseAccelerator(want, got string) *Refusal {
	return &Refusal{CodeAccelerator, fmt.Sprintf("accelerator family %s, want %s as on the other nodes", got, want), "build a cluster of one kind of device only"}
}

// RefuseLayers is a range of layers that is no part of the model, or none that the node can run.
func RefuseLayers(r sdk.LayerRange, layers int, why string) *Refusal {
	return &Refusal{CodeLayers, fmt.Sprintf("layers %d to %d of a model with %d: %s", r.Start, r.End-1, layers, why), "correct --pp-layers, or leave it out"}
}

// FromHandshake returns the refusal that a failed handshake amounts to, nil where it is none: a network that is down, for one.
func FromHandshake(err error) *Refusal {
	if e, ok := errors.AsType[*securelink.ProtocolError](err); ok {
		return RefuseProtocol(int(e.Want), int(e.Got))
	}
	if _, ok := errors.AsType[*securelink.SecretError](err); ok {
		return RefuseSecret()
	}
	if e, ok := errors.AsType[*securelink.RefusedError](err); ok {
		return fromVerdict(e.Refusal)
	}
	return nil
}

// fromVerdict keeps the text: the node that refused knows best what is wrong. What to change is the same everywhere.
func fromVerdict(r securelink.Refusal) *Refusal {
	var like *Refusal
	switch r.Code {
	case securelink.RefusedBusy:
		like = RefuseBusy("")
	case securelink.RefusedVersion:
		like = RefuseVersion("", "")
	case securelink.RefusedCluster:
		like = RefuseCluster("", "")
	default:
		return nil
	}
	return &Refusal{Code: like.Code, Reason: strings.TrimSuffix(r.String(), ": "+like.Remedy), Remedy: like.Remedy}
}
