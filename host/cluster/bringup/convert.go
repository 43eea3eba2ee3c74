package bringup

import (
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
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

func (l Learned) message() *pb.LearnReply {
	return &pb.LearnReply{
		Node: l.Node, Machine: l.Machine, LastEpoch: l.LastEpoch, Addresses: l.Addresses,
		Device: &pb.Device{Kind: l.Device.Kind, Name: l.Device.Name, TotalMemory: l.Device.TotalMemory, FreeMemory: l.Device.FreeMemory},
		Executors: each(l.Executors, func(d sdk.Description) *pb.Executor {
			return &pb.Executor{Name: d.Name, Version: d.Version, Families: each(d.Families, familyMessage)}
		}),
		PluginFolders: l.Folders, ModelType: l.ModelType, Problem: l.Problem, Plugin: l.Plugin,
		Family: familyMessage(l.Family), Profile: profileMessage(l.Profile), Identity: identityMessage(l.Identity),
	}
}

func learnedFrom(m *pb.LearnReply) Learned {
	return Learned{
		Node: m.GetNode(), Machine: m.GetMachine(), LastEpoch: m.GetLastEpoch(), Addresses: m.GetAddresses(),
		Inspection: Inspection{
			ModelType: m.GetModelType(), Identity: identityFrom(m.GetIdentity()), Folders: m.GetPluginFolders(), Problem: m.GetProblem(), Plugin: m.GetPlugin(),
			Device: sdk.Device{
				Kind: m.GetDevice().GetKind(), Name: m.GetDevice().GetName(),
				TotalMemory: m.GetDevice().GetTotalMemory(), FreeMemory: m.GetDevice().GetFreeMemory(),
			},
			Executors: each(m.GetExecutors(), func(e *pb.Executor) sdk.Description {
				return sdk.Description{Name: e.GetName(), Version: e.GetVersion(), Families: each(e.GetFamilies(), familyFrom)}
			}),
			Family: familyFrom(m.GetFamily()), Profile: profileFrom(m.GetProfile()),
		},
	}
}

func familyMessage(f sdk.Family) *pb.Family {
	return &pb.Family{Name: f.Name, ModelTypes: f.ModelTypes, Pipeline: f.Pipeline, PlanOnly: f.PlanOnly, Quantizations: f.Quantizations}
}

func familyFrom(m *pb.Family) sdk.Family {
	return sdk.Family{
		Name: m.GetName(), ModelTypes: m.GetModelTypes(), Pipeline: m.GetPipeline(), PlanOnly: m.GetPlanOnly(), Quantizations: m.GetQuantizations(),
	}
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

func profileMessage(p *sdk.ModelProfile) *pb.ModelProfile {
	if p == nil {
		return nil
	}
	return &pb.ModelProfile{
		Family: p.Family, ModelType: p.ModelType, Embedding: p.Embedding, Head: p.Head, Tied: p.Tied, TiedBytes: p.TiedBytes,
		BoundaryWidth: int64(p.Boundary.Width), BoundaryDtype: int64(p.Boundary.Dtype),
		ContextLength: int64(p.ContextLength), VocabSize: int64(p.VocabSize), HiddenSize: int64(p.HiddenSize),
		Quantization: p.Quantization, Exact: p.Exact,
		Layers: each(p.Layers, func(l sdk.LayerProfile) *pb.LayerProfile {
			return &pb.LayerProfile{Kind: l.Kind, Weights: l.Weights, KvBytesPerToken: l.KVBytesPerToken, KvWindow: int64(l.KVWindow), StateBytes: l.StateBytes}
		}),
		Adjacency: each(p.Adjacency, func(g sdk.AdjacencyGroup) *pb.AdjacencyGroup {
			return &pb.AdjacencyGroup{Source: int64(g.Source), Consumer: int64(g.Consumer), Reason: g.Reason}
		}),
	}
}

func profileFrom(m *pb.ModelProfile) *sdk.ModelProfile {
	if m == nil {
		return nil
	}
	return &sdk.ModelProfile{
		Family: m.GetFamily(), ModelType: m.GetModelType(), Embedding: m.GetEmbedding(), Head: m.GetHead(), Tied: m.GetTied(), TiedBytes: m.GetTiedBytes(),
		Boundary:      sdk.Boundary{Width: int(m.GetBoundaryWidth()), Dtype: sdk.Dtype(m.GetBoundaryDtype())},
		ContextLength: int(m.GetContextLength()), VocabSize: int(m.GetVocabSize()), HiddenSize: int(m.GetHiddenSize()),
		Quantization: m.GetQuantization(), Exact: m.GetExact(),
		Layers: each(m.GetLayers(), func(l *pb.LayerProfile) sdk.LayerProfile {
			return sdk.LayerProfile{
				Kind: l.GetKind(), Weights: l.GetWeights(), KVBytesPerToken: l.GetKvBytesPerToken(), KVWindow: int(l.GetKvWindow()), StateBytes: l.GetStateBytes(),
			}
		}),
		Adjacency: each(m.GetAdjacency(), func(g *pb.AdjacencyGroup) sdk.AdjacencyGroup {
			return sdk.AdjacencyGroup{Source: int(g.GetSource()), Consumer: int(g.GetConsumer()), Reason: g.GetReason()}
		}),
	}
}

func reportMessage(plugin string, r sdk.LoadReport) *pb.LoadReport {
	return &pb.LoadReport{
		Plugin: plugin, WeightBytes: r.WeightBytes, Tensors: int64(r.Tensors), VocabSize: int64(r.VocabSize),
		BoundaryWidth: int64(r.Boundary.Width), BoundaryDtype: int64(r.Boundary.Dtype),
	}
}

func reportFrom(m *pb.LoadReport) sdk.LoadReport {
	return sdk.LoadReport{
		WeightBytes: m.GetWeightBytes(), Tensors: int(m.GetTensors()), VocabSize: int(m.GetVocabSize()),
		Boundary: sdk.Boundary{Width: int(m.GetBoundaryWidth()), Dtype: sdk.Dtype(m.GetBoundaryDtype())},
	}
}
