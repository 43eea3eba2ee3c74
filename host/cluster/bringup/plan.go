package bringup

import (
	"errors"
	"fmt"
	"strings"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/kvledger"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// Demand is what a cluster is planned for.
type Demand struct {
	Pipeline  partition.PipelineConfig // its Size is that of the topology; Layers cuts by hand, Objective and Speeds say what a cut is for
	Context   int                      // --ctx: tokens of each sequence; 0 takes partition.PlanningContext
	Sequences int                      // --parallel: sequences at once; 0 means 1
	KVBudgets []int64                  // --kv-budget: bytes of each stage, or one for all; nil takes what the weights leave
	Headroom  *partition.Headroom      // --memory-headroom: left free of what devices report; nil is the default
}

// Plan is a cluster's cut of its model.
type Plan struct {
	*partition.Plan
	Profile   *sdk.ModelProfile
	Family    sdk.Family
	Identity  cluster.Identity // that all hold
	Device    string           // kind of all
	Demand    partition.Demand
	KVBudgets []int64 // bytes of each stage that all sequences' state may use together; 0 sets no limit
}

// offerer is what the coordinator's own host has of the model.
type offerer struct {
	identity  *cluster.Identity // nil where it has no copy: the first node's counts
	executors []sdk.Description // for messages
}

// agree checks that the nodes can make one pipeline, and returns every reason why they can't, each a *NodeError.
func (o offerer) agree(nodes []cluster.Node, learned []Learned) error {
	var faults []error
	refused := func(i int, r *cluster.Refusal) {
		faults = append(faults, &NodeError{Stage: i, Node: nodes[i].ID, Address: nodes[i].Address, Phase: PhaseLearned, Err: r})
	}
	first := map[string]int{}
	for i, l := range learned {
		if other, taken := first[l.Node]; taken {
			refused(i, &cluster.Refusal{
				Code: CodeNode, Reason: fmt.Sprintf("it calls itself %q, as %s at %s does: nodes are told apart by that", l.Node, nodes[other].ID, nodes[other].Address),
				Remedy: "give each peer a --node-id of its own",
			})
		}
		first[l.Node] = i
		if l.Profile == nil || l.Family.PlanOnly || !l.Family.Pipeline && len(nodes) > 1 {
			refused(i, o.incapable(l, learned))
		}
	}
	if faults != nil {
		return errors.Join(faults...) // without a profile of each there is nothing to compare
	}
	model := learned[0]
	want := model.Identity
	if o.identity != nil {
		want = *o.identity
		if want.Layers == 0 { // no executor here that could count them
			want.Layers = model.Identity.Layers
		}
	}
	for i, l := range learned {
		if diff := want.Diff(l.Identity); len(diff) > 0 {
			refused(i, cluster.RefuseModel(diff))
			continue
		}
		profiled := model.Profile.Diff(l.Profile)
		switch {
		case l.Device.Kind != model.Device.Kind:
			refused(i, cluster.RefuseAccelerator(model.Device.Kind, l.Device.Kind))
		case l.Family.Name != model.Family.Name:
			refused(i, o.incapable(l, learned))
		case len(profiled) > 0:
			refused(i, &cluster.Refusal{
				Code:   cluster.CodeCapability,
				Reason: fmt.Sprintf("pipeline capability mismatch: the executor profiles the model differently from that of %s: %s", nodes[0].ID, listed(profiled)),
				Remedy: "give every node the same --dtype, and install the same version of the executor on all",
			})
		}
	}
	return errors.Join(faults...)
}

func listed(differences []sdk.ProfileDifference) string {
	texts := make([]string, len(differences))
	for i, d := range differences {
		texts[i] = d.String()
	}
	return strings.Join(texts, "; ")
}

// incapable refuses a peer that can't run a stage of its model. The family is the name that the other peers resolved.
func (o offerer) incapable(l Learned, all []Learned) *cluster.Refusal {
	c := cluster.Capability{Family: l.Family.Name, ModelType: l.ModelType, Folder: strings.Join(l.Folders, " or "), There: l.Executors, Here: o.executors}
	for _, other := range all {
		if other.Profile != nil && other.ModelType == l.ModelType {
			c.Family, c.Plugin = other.Family.Name, other.Plugin
			break
		}
	}
	if c.Family == "" {
		c.Family = l.ModelType
	}
	return cluster.RefuseCapability(c)
}

// makePlan cuts the model for the nodes' memory as it is.
func makePlan(d Demand, topology *cluster.Config, learned []Learned) (*Plan, error) {
	nodes := topology.Stages()
	first := learned[0]
	p := &Plan{
		Profile: first.Profile, Family: first.Family, Identity: first.Identity, Device: first.Device.Kind,
		Demand: partition.Demand{Context: d.Context, Sequences: max(1, d.Sequences)},
	}
	if p.Demand.Context == 0 {
		p.Demand.Context = partition.PlanningContext(p.Profile)
	}
	cfg := d.Pipeline
	if cfg.Layers == nil {
		stages := len(nodes)
		cfg.Size = &stages
	}
	r, err := cfg.Request(partition.Request{
		Profile: p.Profile, Demand: p.Demand, Hardware: hardware(d.headroom(), topology, nodes, learned),
		Quantizations: p.Family.Quantizations,
	})
	if err != nil {
		return nil, err
	}
	if p.Plan, err = partition.New(r); err != nil {
		return nil, err
	}
	p.KVBudgets, err = kvBudgets(p.Plan, d.KVBudgets)
	return p, err
}

func (d Demand) headroom() partition.Headroom {
	if d.Headroom != nil {
		return *d.Headroom
	}
	return partition.DefaultHeadroom()
}

// hardware gives each stage the memory of its machine: what the operator lets it use, else what its device reports, which the
// stages on one machine share.
func hardware(headroom partition.Headroom, topology *cluster.Config, nodes []cluster.Node, learned []Learned) partition.Hardware {
	var h partition.Hardware
	shared := map[string]int{} // machine to memory
	for i, n := range nodes {
		place := partition.Place{DeviceID: n.ID, Memory: len(h.Memories)}
		if stated := topology.Memory(n); stated > 0 {
			h.Memories = append(h.Memories, partition.Memory{Name: n.ID, Budget: stated})
		} else if at, ok := shared[learned[i].Machine]; ok && learned[i].Machine != "" {
			place.Memory = at
		} else {
			shared[learned[i].Machine] = place.Memory
			h.Memories = append(h.Memories, machineMemory(headroom, topology, nodes, learned, i))
		}
		h.Stages = append(h.Stages, place)
	}
	return h
}

// machineMemory is what the stages without stated memory on the machine of stage i share.
func machineMemory(headroom partition.Headroom, topology *cluster.Config, nodes []cluster.Node, learned []Learned, i int) partition.Memory {
	var names []string
	var stages int
	var stated int64
	device := learned[i].Device
	for j, l := range learned {
		if j != i && (l.Machine == "" || l.Machine != learned[i].Machine) {
			continue
		}
		stages++
		if bytes := topology.Memory(nodes[j]); bytes > 0 {
			stated += bytes
			continue
		}
		names = append(names, nodes[j].ID)
		device.TotalMemory, device.FreeMemory = min(device.TotalMemory, l.Device.TotalMemory), min(device.FreeMemory, l.Device.FreeMemory)
	}
	m := partition.Memory{Name: strings.Join(names, "+"), Budget: deviceBudget(headroom, device, stages)}
	if m.Budget < partition.Unlimited {
		m.Budget = max(1, m.Budget-stated)
	}
	return m
}

// deviceBudget is what so many stages on a device may use of it now: all but the headroom, and no more than is free.
func deviceBudget(headroom partition.Headroom, d sdk.Device, stages int) int64 {
	if d.TotalMemory <= 0 {
		return partition.Unlimited
	}
	budget := headroom.Of(d.TotalMemory, stages)
	if d.FreeMemory > 0 {
		budget = min(budget, d.FreeMemory)
	}
	return max(1, budget)
}

// kvBudgets returns the bytes that the sequences' state may use on each stage: what was given, else what the weights leave
// of the stage's memory, which stages with one memory share as they need it.
func kvBudgets(plan *partition.Plan, given []int64) ([]int64, error) {
	if spread, err := kvledger.Spread(given, len(plan.Stages)); spread != nil || err != nil {
		return spread, err
	}
	out := make([]int64, len(plan.Stages))
	for i, s := range plan.Stages {
		if !s.Limited() {
			continue
		}
		left, need, sharers := s.BudgetBytes, int64(0), int64(0)
		for _, o := range plan.Stages {
			if o.Memory == s.Memory {
				left, need, sharers = left-o.Load.Weights, need+o.Load.KV+o.Load.State, sharers+1
			}
		}
		own := s.Load.KV + s.Load.State
		if need == 0 {
			out[i] = max(1, left/sharers)
			continue
		}
		out[i] = max(1, own, int64(float64(left)*(float64(own)/float64(need))))
	}
	return out, nil
}
