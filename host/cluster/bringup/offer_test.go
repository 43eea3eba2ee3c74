package bringup

import (
	"testing"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
	"google.golang.org/protobuf/proto"
)

// goodOffer is an offer of stage 1, and the inspection of a peer that takes it.
func goodOffer() (*offer, *Inspection) {
	layer := sdk.LayerProfile{Kind: "attention", Weights: 100, States: []sdk.StateProfile{{Kind: sdk.StateKV, BytesPerPosition: 10}}}
	have := &Inspection{
		ModelType: "toy", Identity: cluster.Identity{Version: testVersion, ConfigHash: "00", Layers: 4},
		Family:  sdk.Family{Name: "toy", Pipeline: true},
		Profile: &sdk.ModelProfile{Family: "toy", Layers: []sdk.LayerProfile{layer, layer, layer, layer}, ContextLength: 64},
	}
	nodes := topology("a:1", "b:2")
	o := &offer{
		epoch: 1, cluster: "test", version: testVersion, identity: have.Identity, family: "toy", accelerator: "cpu", place: sdk.Place{Stage: 1},
		stages: []offeredStage{
			{place: sdk.Place{Stage: 0}, node: "stage-0", address: "a:1", layers: sdk.LayerRange{Start: 0, End: 2}},
			{place: sdk.Place{Stage: 1}, node: "stage-1", address: "b:2", layers: sdk.LayerRange{Start: 2, End: 4}},
		},
		demand: partition.Demand{Context: 8, Sequences: 2}, config: nodes.Render(),
	}
	return o, have
}

// What a peer itself looks at, beside what the coordinator has checked before.
func TestOfferIsChecked(t *testing.T) {
	need := int64(2*100 + 2*10*8*2)
	for _, tc := range []struct {
		name   string
		change func(*offer, *Inspection, *sdk.Device)
		code   cluster.Code // empty takes it
	}{
		{"good", func(*offer, *Inspection, *sdk.Device) {}, ""},
		{"no such stage", func(o *offer, _ *Inspection, _ *sdk.Device) { o.place.Stage = 2 }, cluster.CodeLayers},
		{"another rank", func(o *offer, _ *Inspection, _ *sdk.Device) { o.place.Rank = 1 }, cluster.CodeLayers},
		{"a stage with two ranks", func(o *offer, _ *Inspection, _ *sdk.Device) { o.stages[1].place = sdk.Place{Rank: 1} }, cluster.CodeLayers},
		{"stage below 0", func(o *offer, _ *Inspection, _ *sdk.Device) { o.place.Stage = -1 }, cluster.CodeLayers},
		{"cluster", func(o *offer, _ *Inspection, _ *sdk.Device) { o.cluster = "other" }, cluster.CodeCluster},
		{"version", func(o *offer, _ *Inspection, _ *sdk.Device) { o.version = "v0" }, cluster.CodeVersion},
		{"family", func(o *offer, _ *Inspection, _ *sdk.Device) { o.family = "other" }, cluster.CodeCapability},
		{"no executor", func(_ *offer, i *Inspection, _ *sdk.Device) { i.Profile = nil }, cluster.CodeCapability},
		{"plan only", func(_ *offer, i *Inspection, _ *sdk.Device) { i.Family.PlanOnly = true }, cluster.CodeCapability},
		{"identity", func(o *offer, _ *Inspection, _ *sdk.Device) { o.identity.ConfigHash = "01" }, cluster.CodeModel},
		{"accelerator", func(_ *offer, _ *Inspection, d *sdk.Device) { d.Kind = "metal" }, cluster.CodeAccelerator},
		{"layers past the end", func(o *offer, _ *Inspection, _ *sdk.Device) { o.stages[1].layers.End = 5 }, cluster.CodeLayers},
		{"a gap", func(o *offer, _ *Inspection, _ *sdk.Device) { o.stages[1].layers.Start = 3 }, cluster.CodeLayers},
		{"context past the model's", func(o *offer, _ *Inspection, _ *sdk.Device) { o.demand.Context = 65 }, cluster.CodeLayers},
		{"no cluster file", func(o *offer, _ *Inspection, _ *sdk.Device) { o.config = nil }, CodeConfig},
		{"the file of another cluster", func(o *offer, _ *Inspection, _ *sdk.Device) { o.stages[0].node = "stage-9" }, CodeConfig},
		{"just enough memory", func(_ *offer, _ *Inspection, d *sdk.Device) { d.FreeMemory = need }, ""},
		{"a byte too little", func(_ *offer, _ *Inspection, d *sdk.Device) { d.FreeMemory = need - 1 }, cluster.CodeMemory},
		{"a byte less than stated", func(o *offer, _ *Inspection, _ *sdk.Device) { o.stages[1].memory = need - 1 }, cluster.CodeMemory},
		{"stated memory that is not there", func(o *offer, _ *Inspection, d *sdk.Device) {
			o.stages[1].memory, d.TotalMemory = 1<<40, need-1
		}, cluster.CodeMemory},
		{"unknown memory", func(_ *offer, _ *Inspection, d *sdk.Device) { d.TotalMemory, d.FreeMemory = 0, 0 }, ""},
	} {
		o, have := goodOffer()
		device := sdk.Device{Kind: "cpu", TotalMemory: 1 << 20, FreeMemory: 1 << 20}
		tc.change(o, have, &device)
		_, err := o.check("test", testVersion, have, device, partition.Headroom{})
		refusal, _ := err.(*cluster.Refusal)
		if (err != nil) != (tc.code != "") || refusal != nil && refusal.Code != tc.code {
			t.Errorf("%s: %v, want code %q", tc.name, err, tc.code)
		}
	}
}

// Whatever a coordinator sends, a peer refuses it or can serve it.
func FuzzOffer(f *testing.F) {
	o, have := goodOffer()
	raw, err := proto.Marshal(o.message())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	device := sdk.Device{Kind: "cpu", TotalMemory: 1 << 20, FreeMemory: 1 << 20}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var m pb.OfferRequest
		if proto.Unmarshal(raw, &m) != nil {
			return
		}
		o := offerFrom(&m)
		plan, err := o.check("test", testVersion, have, device, partition.Headroom{})
		if err != nil {
			return
		}
		if plan.Stages[o.place.Stage].LayerRange != o.self().layers {
			t.Fatalf("an offer of %v was accepted with the plan %v", o.self().layers, plan)
		}
	})
}
