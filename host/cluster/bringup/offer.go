package bringup

import (
	"fmt"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// Shape is how a pipeline works, which coordinator and stages must agree on. A zero takes package pipeline's default.
type Shape struct {
	PrefillChunk int // rows of one sequence in a step at most
	MicroBatch   int // sequences per micro-batch at most
	Slots        int // micro-batches in flight on a stage at most
}

// offer is what a peer is asked to be.
type offer struct {
	epoch       uint64
	cluster     string
	version     string
	identity    cluster.Identity
	family      string
	accelerator string
	place       sdk.Place
	stages      []offeredStage // every place, in order
	demand      partition.Demand
	shape       Shape
	config      []byte // the cluster's TOML
	observe     bool   // the coordinator wants to know what the stage does with each micro-batch
}

type offeredStage struct {
	place      sdk.Place
	node       string // id in the TOML
	address    string
	candidates []string // to dial it at
	peer       string   // what it calls itself
	layers     sdk.LayerRange
	memory     int64 // bytes that the operator lets it use; 0 is what its device has
	kvBudget   int64
}

// self is what the receiver is to be. check knows that it is there.
func (o *offer) self() offeredStage { return o.stages[o.place.Stage] }

// next are the places of the stage after the receiver's.
func (o *offer) next() []offeredStage {
	var next []offeredStage
	for _, s := range o.stages {
		if s.place.Stage == o.place.Stage+1 {
			next = append(next, s)
		}
	}
	return next
}

// checkPlaces refuses places that this version does not run: a stage has one rank.
func (o *offer) checkPlaces() error {
	refuse := func(format string, args ...any) error {
		return &cluster.Refusal{Code: cluster.CodeLayers, Reason: fmt.Sprintf(format, args...)}
	}
	for i, s := range o.stages {
		if want := (sdk.Place{Stage: i}); s.place != want {
			return refuse("the offer has stage %s where stage %s should be", s.place, want)
		}
	}
	if o.place.Stage < 0 || o.place.Stage >= len(o.stages) || o.place.Rank != 0 {
		return refuse("the offer is for stage %s of %d", o.place, len(o.stages))
	}
	return nil
}

func (o *offer) message() *pb.OfferRequest {
	return &pb.OfferRequest{
		Epoch: o.epoch, Cluster: o.cluster, Version: o.version, Identity: identityMessage(o.identity), Family: o.family,
		Accelerator: o.accelerator, Stage: int64(o.place.Stage), Rank: int64(o.place.Rank), Context: int64(o.demand.Context), Sequences: int64(o.demand.Sequences),
		PrefillChunk: int64(o.shape.PrefillChunk), MicroBatch: int64(o.shape.MicroBatch), Slots: int64(o.shape.Slots), Config: o.config, Observe: o.observe,
		Stages: each(o.stages, func(s offeredStage) *pb.Stage {
			return &pb.Stage{
				Stage: int64(s.place.Stage), Rank: int64(s.place.Rank), Node: s.node, Address: s.address, Candidates: s.candidates, Peer: s.peer, Start: int64(s.layers.Start), End: int64(s.layers.End),
				MemoryBytes: s.memory, KvBudget: s.kvBudget,
			}
		}),
	}
}

func offerFrom(m *pb.OfferRequest) *offer {
	return &offer{
		epoch: m.GetEpoch(), cluster: m.GetCluster(), version: m.GetVersion(), identity: identityFrom(m.GetIdentity()), family: m.GetFamily(),
		accelerator: m.GetAccelerator(), place: sdk.Place{Stage: int(m.GetStage()), Rank: int(m.GetRank())},
		demand: partition.Demand{Context: int(m.GetContext()), Sequences: int(m.GetSequences())},
		shape:  Shape{PrefillChunk: int(m.GetPrefillChunk()), MicroBatch: int(m.GetMicroBatch()), Slots: int(m.GetSlots())},
		config: m.GetConfig(), observe: m.GetObserve(),
		stages: each(m.GetStages(), func(s *pb.Stage) offeredStage {
			return offeredStage{
				place: sdk.Place{Stage: int(s.GetStage()), Rank: int(s.GetRank())}, node: s.GetNode(), address: s.GetAddress(), candidates: s.GetCandidates(), peer: s.GetPeer(),
				layers: sdk.LayerRange{Start: int(s.GetStart()), End: int(s.GetEnd())}, memory: s.GetMemoryBytes(), kvBudget: s.GetKvBudget(),
			}
		}),
	}
}

// offers are what the plan asks of each node.
func offers(epoch uint64, version string, topology *cluster.Config, plan *Plan, learned []Learned, shape Shape, observe bool) []*offer {
	nodes := topology.Stages()
	stages := make([]offeredStage, len(nodes))
	for i, n := range nodes {
		stages[i] = offeredStage{
			place: sdk.Place{Stage: i}, node: n.ID, address: n.Address, peer: learned[i].Node, layers: plan.Stages[i].LayerRange,
			memory: topology.Memory(n), kvBudget: plan.KVBudgets[i],
		}
		if i > 0 {
			stages[i].candidates = candidates(learned[i-1], learned[i])
		}
	}
	config := topology.Render()
	out := make([]*offer, len(nodes))
	for i := range out {
		out[i] = &offer{
			epoch: epoch, cluster: topology.Name, version: version, identity: plan.Identity, family: plan.Family.Name,
			accelerator: learned[i].Device.Kind, place: sdk.Place{Stage: i}, stages: stages, demand: plan.Demand, shape: shape, config: config, observe: observe,
		}
	}
	return out
}

// plan is the cut that is offered, as this peer's own profile prices it. The error is a refusal of the layer ranges.
func (o *offer) plan(profile *sdk.ModelProfile) (*partition.Plan, error) {
	ranges := make([]sdk.LayerRange, len(o.stages))
	budgets := make([]int64, len(o.stages))
	for i, s := range o.stages {
		ranges[i], budgets[i] = s.layers, partition.Unlimited
	}
	hardware := partition.Separate(budgets)
	for i, s := range o.stages {
		hardware.Stages[i].DeviceID = s.node
	}
	plan, err := partition.New(partition.Request{Profile: profile, Demand: o.demand, Hardware: hardware, Ranges: ranges})
	if err != nil {
		return nil, cluster.RefuseLayers(o.self().layers, len(profile.Layers), err.Error())
	}
	return plan, nil
}

// check returns the cut that the peer takes its stage of, or why it can't, a *cluster.Refusal. device is counted now.
func (o *offer) check(name, version string, have *Inspection, device sdk.Device, headroom partition.Headroom) (*partition.Plan, error) {
	if err := o.checkPlaces(); err != nil {
		return nil, err
	}
	switch {
	case o.cluster != name:
		return nil, cluster.RefuseCluster(name, o.cluster)
	case o.version != version:
		return nil, cluster.RefuseVersion(version, o.version)
	case have.Profile == nil || have.Family.Name != o.family || have.Family.PlanOnly || !have.Family.Pipeline && len(o.stages) > 1:
		return nil, cluster.RefuseCapability(cluster.Capability{Family: o.family, ModelType: have.ModelType, There: have.Executors})
	case device.Kind != o.accelerator:
		return nil, cluster.RefuseAccelerator(o.accelerator, device.Kind)
	}
	if diff := o.identity.Diff(have.Identity); len(diff) > 0 {
		return nil, cluster.RefuseModel(diff)
	}
	plan, err := o.plan(have.Profile)
	if err != nil {
		return nil, err
	}
	if err := o.checkConfig(); err != nil {
		return nil, err
	}
	if need, budget := plan.Stages[o.place.Stage].Load.Total(), o.budget(device, headroom); need > budget {
		return nil, cluster.RefuseMemory(need, budget)
	}
	return plan, nil
}

// budget is what the stage may use of this peer's device, whatever other stages do there.
func (o *offer) budget(device sdk.Device, headroom partition.Headroom) int64 {
	stated := o.self().memory
	switch {
	case stated <= 0:
		return deviceBudget(headroom, device, 1)
	case device.TotalMemory > 0:
		return min(stated, device.TotalMemory)
	}
	return stated
}

// checkConfig refuses a TOML that does not say what the offer says.
func (o *offer) checkConfig() error {
	refuse := func(reason string) error {
		return &cluster.Refusal{Code: CodeConfig, Reason: "the offered cluster file " + reason, Remedy: "install the same version of mlxcel on every host"}
	}
	c, err := cluster.Parse(o.config, "the offered cluster file")
	if err != nil {
		return refuse(fmt.Sprintf("is no good: %v", err))
	}
	nodes := c.Stages()
	if len(nodes) != len(o.stages) || c.Name != o.cluster {
		return refuse(fmt.Sprintf("describes cluster %q with %d stages, the offer %q with %d", c.Name, len(nodes), o.cluster, len(o.stages)))
	}
	for i, n := range nodes {
		if n.ID != o.stages[i].node || n.Stage != i {
			return refuse(fmt.Sprintf("has node %q as stage %d, the offer %q as stage %d", n.ID, n.Stage, o.stages[i].node, i))
		}
	}
	return nil
}

// stageConfig is what package pipeline starts the stage from.
func (o *offer) stageConfig(plan *partition.Plan, model ModelConfig, have *Inspection, launcher pipeline.Launcher) pipeline.StageConfig {
	cfg := o.shape.pipelineConfig(plan, have.Profile, o.epoch)
	cfg.ModelDir, cfg.Dtype, cfg.Threads = model.Dir, model.Dtype, model.Threads
	for _, s := range o.stages {
		cfg.KVBudgets = append(cfg.KVBudgets, s.kvBudget)
	}
	return pipeline.StageConfig{
		Epoch: o.epoch, Node: o.self().node, Assignment: plan.Stages[o.place.Stage], Stages: len(o.stages), Launcher: launcher,
		Load: cfg.LoadRequest(o.place.Stage), Boundary: have.Profile.Boundary, VocabSize: have.Profile.VocabSize,
	}
}

func (s Shape) pipelineConfig(plan *partition.Plan, profile *sdk.ModelProfile, epoch uint64) pipeline.Config {
	return pipeline.Config{Plan: plan, Profile: profile, Epoch: epoch, PrefillChunk: s.PrefillChunk, MicroBatch: s.MicroBatch, Slots: s.Slots}
}
