package main

import (
	"fmt"

	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/mlxshared/weights"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// jamba is Jamba (Lieber et al. 2024; reference: mlx_lm/models/jamba.py): Mamba layers, every few of them an attention
// layer without rotary positions, and experts on some.
type jamba struct{}

func (jamba) Info() sdk.Family { return family("jamba", "jamba") }

type jambaConfig struct {
	hybrid
	IntermediateSize int // of dense layers and of each expert
	LayersBlockType  []string
	Mamba            nn.MambaConfig

	ExpertLayerOffset, ExpertLayerPeriod int
	NumExperts, NumExpertsPerTok         int
}

// The values of layers_block_type.
const (
	blockAttention = "attention"
	blockMamba     = "mamba"
)

func (jamba) Model(c *config.Object) stage.Model {
	a := &jambaConfig{
		hybrid:            readHybrid(c, "rms_norm_eps", true),
		IntermediateSize:  c.Size("intermediate_size"),
		ExpertLayerOffset: count(c, "expert_layer_offset"),
		ExpertLayerPeriod: c.Size("expert_layer_period"),
		NumExperts:        c.Size("num_experts"),
		NumExpertsPerTok:  c.Size("num_experts_per_tok"),
	}
	a.NumHiddenLayers = c.Size("num_hidden_layers")
	a.HeadDim = max(1, a.HiddenSize/a.NumAttentionHeads)
	a.normPath = "model.final_layernorm"
	a.names.Sources = []weights.Source{{Of: "feed_forward.switch_mlp.", From: "feed_forward.experts.{}."}}
	a.Mamba = nn.MambaConfig{
		Width: a.HiddenSize, Channels: c.Size("mamba_expand") * a.HiddenSize, States: c.Size("mamba_d_state"), Conv: c.Size("mamba_d_conv"),
		DtRank: dtRank(c, a.HiddenSize), ProjBias: c.BoolOr("mamba_proj_bias", false), ConvBias: c.BoolOr("mamba_conv_bias", true), NormEps: a.Eps,
	}
	a.readBlocks(c)
	a.check(c)
	return a
}

// dtRank reads mamba_dt_rank, a number or "auto".
func dtRank(c *config.Object, hidden int) int {
	const key = "mamba_dt_rank"
	if !c.Has(key) || c.Value(key) == "auto" {
		return (hidden + 15) / 16
	}
	return c.Size(key)
}

// count reads a required number that may be 0.
func count(c *config.Object, key string) int {
	if n, ok := config.Integer(c.Value(key)); ok && n == 0 {
		return 0
	}
	return c.Size(key)
}

func (a *jambaConfig) readBlocks(c *config.Object) {
	if a.LayersBlockType = c.Strings("layers_block_type"); a.LayersBlockType == nil {
		period, offset := c.Size("attn_layer_period"), count(c, "attn_layer_offset")
		if c.Err() != nil || a.NumHiddenLayers > maxLayers {
			return // the stage refuses that many
		}
		for i := range a.NumHiddenLayers {
			kind := blockMamba
			if i%period == offset {
				kind = blockAttention
			}
			a.LayersBlockType = append(a.LayersBlockType, kind)
		}
		return
	}
	if len(a.LayersBlockType) != a.NumHiddenLayers {
		c.Fail("layers_block_type", "has %d entries for %d layers", len(a.LayersBlockType), a.NumHiddenLayers)
	}
	for i, kind := range a.LayersBlockType {
		if kind != blockAttention && kind != blockMamba {
			c.Unsupported(fmt.Sprintf("layers_block_type[%d]", i), "%q is not built; built are %s, %s", kind, blockAttention, blockMamba)
		}
	}
}

// maxLayers bounds the lists that are made for a config's layers.
const maxLayers = 1 << 14

func (a *jambaConfig) check(c *config.Object) {
	c.OneOf("hidden_act", "silu", "silu", "swish")
	checkTopK(c, a.NumExpertsPerTok, a.NumExperts)
	checkConv(c, "mamba_d_conv", a.Mamba.Conv)
	checkWidth(c, "mamba_expand", a.Mamba.Channels)
	// Transformers places experts where i % period == offset, mlx-lm where (i + offset) % period == 0. Where they differ, a
	// checkpoint's tensors tell that the config means the first; refuse rather than guess.
	if p := a.ExpertLayerPeriod; a.NumExperts > 1 && 2*a.ExpertLayerOffset%p != 0 {
		c.Unsupported("expert_layer_offset", "%d with a period of %d places experts differently in transformers and in mlx-lm; built is what both agree on", a.ExpertLayerOffset, p)
	}
}

// checkConv refuses a convolution that keeps no state.
func checkConv(c *config.Object, key string, width int) {
	if width < 2 {
		c.Unsupported(key, "%d is not built; built is 2 and more", width)
	}
}

func (a *jambaConfig) Head(b *nn.Builder) nn.Head { return a.head(b, 0) }

func (a *jambaConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	l := &block{
		kind:            a.LayersBlockType[i],
		inputNorm:       nn.NewRMSNorm(b, path+".input_layernorm", a.HiddenSize, a.Eps),
		feedForwardNorm: nn.NewRMSNorm(b, path+".pre_ff_layernorm", a.HiddenSize, a.Eps),
	}
	if l.kind == blockAttention {
		l.mixer = nn.NewAttention(b, path+".self_attn", a.attention())
	} else {
		l.mixer = nn.NewMamba(b, path+".mamba", a.Mamba)
	}
	path += ".feed_forward"
	if a.NumExperts == 1 || (i+a.ExpertLayerOffset)%a.ExpertLayerPeriod != 0 {
		l.feedForward = nn.NewMLP(b, path, a.HiddenSize, a.IntermediateSize, false)
		return l
	}
	l.kind += "-moe"
	l.feedForward = &nn.MoE{
		Router: nn.NewRouter(b, path+".router", a.NumExperts, a.HiddenSize, false,
			mlx.RouteSpec{TopK: a.NumExpertsPerTok, Scores: mlx.RouteSoftmaxChosen}),
		Experts: nn.NewSwitchGLU(b, path+".switch_mlp", a.NumExperts, a.HiddenSize, a.IntermediateSize, false, nn.SwiGLU),
	}
	return l
}
