package bringup

import (
	"encoding"
	"fmt"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/sdk"
)

// each converts a list.
func each[A, B any](list []A, convert func(A) B) []B {
	if list == nil {
		return nil
	}
	out := make([]B, len(list))
	for i, v := range list {
		out[i] = convert(v)
	}
	return out
}

// encoder makes bytes of the sdk's values. Its first error sticks.
type encoder struct{ err error }

func (e *encoder) bytes(v encoding.BinaryMarshaler) []byte {
	b, err := v.MarshalBinary()
	if e.err == nil {
		e.err = err
	}
	return b
}

// decoder reads them. Its first error sticks.
type decoder struct{ err error }

func (d *decoder) read(b []byte, into encoding.BinaryUnmarshaler) {
	if d.err == nil {
		d.err = into.UnmarshalBinary(b)
	}
}

func (l Learned) message() (*pb.LearnReply, error) {
	var e encoder
	m := &pb.LearnReply{
		Node: l.Node, Machine: l.Machine, LastEpoch: l.LastEpoch, Addresses: l.Addresses, PluginFolders: l.Folders,
		ModelType: l.ModelType, Problem: l.Problem, Plugin: l.Plugin, Identity: identityMessage(l.Identity),
		Device: e.bytes(&l.Device), Family: e.bytes(&l.Family),
		Executors: each(l.Executors, func(d sdk.Description) []byte { return e.bytes(&d) }),
	}
	if l.Profile != nil {
		m.Profile = e.bytes(l.Profile)
	}
	return m, e.err
}

func learnedFrom(m *pb.LearnReply) (Learned, error) {
	var d decoder
	l := Learned{
		Node: m.GetNode(), Machine: m.GetMachine(), LastEpoch: m.GetLastEpoch(), Addresses: m.GetAddresses(),
		Inspection: Inspection{
			ModelType: m.GetModelType(), Identity: identityFrom(m.GetIdentity()), Folders: m.GetPluginFolders(), Problem: m.GetProblem(), Plugin: m.GetPlugin(),
			Executors: each(m.GetExecutors(), func(b []byte) (v sdk.Description) {
				d.read(b, &v)
				return v
			}),
		},
	}
	d.read(m.GetDevice(), &l.Device)
	d.read(m.GetFamily(), &l.Family)
	if m.Profile != nil {
		l.Profile = &sdk.ModelProfile{}
		d.read(m.Profile, l.Profile)
	}
	return l, d.refusal()
}

// refusal is the error as that of a peer's message, nil where there is none.
func (d *decoder) refusal() error {
	if d.err == nil {
		return nil
	}
	return &cluster.Refusal{Code: CodeMessage, Reason: fmt.Sprintf("the peer's message makes no sense: %v", d.err), Remedy: "install the same version of mlxcel on every host"}
}

func identityMessage(id cluster.Identity) *pb.Identity {
	return &pb.Identity{
		Version: id.Version, ConfigHash: id.ConfigHash, Layers: int64(id.Layers),
		Weights: each(id.Weights, func(w cluster.WeightFile) *pb.WeightFile {
			return &pb.WeightFile{Name: w.Name, Size: w.Size, Hash: w.Hash}
		}),
	}
}

func identityFrom(m *pb.Identity) cluster.Identity {
	return cluster.Identity{
		Version: m.GetVersion(), ConfigHash: m.GetConfigHash(), Layers: int(m.GetLayers()),
		Weights: each(m.GetWeights(), func(w *pb.WeightFile) cluster.WeightFile {
			return cluster.WeightFile{Name: w.GetName(), Size: w.GetSize(), Hash: w.GetHash()}
		}),
	}
}

func reportMessage(i pipeline.StageInfo) (*pb.LoadReport, error) {
	var e encoder
	return &pb.LoadReport{Plugin: i.Plugin, Report: e.bytes(&i.Loaded)}, e.err
}
