package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// exaoneMoE is K-EXAONE (reference: mlx_lm/models/exaone_moe.py): DeepSeek V3's router behind attention with windows.
type exaoneMoE struct{}

func (exaoneMoE) Info() sdk.Family { return plannedFamily("exaone_moe") }

type exaoneMoEConfig struct {
	decoder
	IntermediateSize    int // of dense layers
	MoEIntermediateSize int
	NumExperts          int
	NumSharedExperts    int // 0 for none
	SlidingWindow       int
	LayerTypes          []string
	sparse              []bool
}

func (exaoneMoE) Model(c *config.Object) stage.Model {
	a := &exaoneMoEConfig{
		decoder:             readDecoder(c, false),
		IntermediateSize:    c.Size("intermediate_size"),
		MoEIntermediateSize: c.Size("moe_intermediate_size"),
		NumExperts:          c.Size("num_experts"),
		NumSharedExperts:    c.CountOr("num_shared_experts", 0),
		SlidingWindow:       c.Size("sliding_window"),
		LayerTypes:          nn.ReadLayerTypes(c, c.Size("num_hidden_layers")),
		sparse:              c.Bools("is_moe_layer"),
	}
	if a.LayerTypes == nil {
		c.Fail("layer_types", "is missing")
	}
	if len(a.sparse) != a.NumHiddenLayers {
		c.Fail("is_moe_layer", "has %d entries for %d layers", len(a.sparse), a.NumHiddenLayers)
	}
	a.names.Sources = append(expertsByNumber(), weights.Source{Of: "mlp.gate.e_score", From: "mlp.e_score"})
	a.names.DropContains = []string{"mtp."} // multi-token prediction
	return a
}

func (a *exaoneMoEConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	attention := a.attention()
	attention.QKNorm = a.RMSNormEps
	if a.LayerTypes[i] == nn.SlidingAttention {
		attention.Window = a.SlidingWindow
	}
	if !a.sparse[i] {
		nn.NewMLP(b, path+".mlp", a.HiddenSize, a.IntermediateSize, false)
		return a.plan(b, path, attention, false)
	}
	nn.NewCorrectedRouter(b, path+".mlp.gate", a.NumExperts, a.HiddenSize, mlx.RouteSpec{})
	nn.NewSwitchGLU(b, path+".mlp.switch_mlp", a.NumExperts, a.HiddenSize, a.MoEIntermediateSize, false, nn.SwiGLU)
	if a.NumSharedExperts > 0 {
		nn.NewMLP(b, path+".mlp.shared_experts", a.HiddenSize, a.MoEIntermediateSize*a.NumSharedExperts, false)
	}
	return a.plan(b, path, attention, true)
}
