package main

import (
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

func (jamba) Info() sdk.Family { return stage.Info("jamba", "jamba") }

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
		ExpertLayerOffset: c.Count("expert_layer_offset"),
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

func (a *jambaConfig) readBlocks(c *config.Object) {
	a.LayersBlockType = c.PerLayer("layers_block_type", a.NumHiddenLayers, blockAttention, blockMamba)
	if a.LayersBlockType != nil {
		return
	}
	period, offset := c.Size("attn_layer_period"), c.Count("attn_layer_offset")
	for i := range min(a.NumHiddenLayers, stage.MaxLayers) {
		kind := blockMamba
		if i%period == offset {
			kind = blockAttention
		}
		a.LayersBlockType = append(a.LayersBlockType, kind)
	}
}

func (a *jambaConfig) check(c *config.Object) {
	c.OneOf("hidden_act", "silu", "silu", "swish")
	nn.CheckTopK(c, "num_experts_per_tok", a.NumExpertsPerTok, a.NumExperts)
	checkConv(c, "mamba_d_conv", a.Mamba.Conv)
	checkWidth(c, "mamba_expand", a.Mamba.Channels)
	// Transformers places experts where i % period == offset, mlx-lm where (i + offset) % period == 0. Where they differ, a
	// checkpoint's tensors tell that the config means the first; refuse rather than guess.
	if p := a.ExpertLayerPeriod; a.NumExperts > 1 && 2*a.ExpertLayerOffset%p != 0 {
		c.Unsupported("expert_layer_offset", "%d with a period of %d places experts differently in transformers and in mlx-lm; built is what both agree on", a.ExpertLayerOffset, p)
	}
}

func (a *jambaConfig) Head(b *nn.Builder) nn.Head { return a.head(b, 0) }

func (a *jambaConfig) Layer(b *nn.Builder, i int) nn.Layer {
	path := a.layerPath(i)
	l := &nn.Block{
		InputNorm:       nn.NewRMSNorm(b, path+".input_layernorm", a.HiddenSize, a.Eps),
		FeedForwardNorm: nn.NewRMSNorm(b, path+".pre_ff_layernorm", a.HiddenSize, a.Eps),
	}
	if a.LayersBlockType[i] == blockAttention {
		l.Mixer = nn.NewAttention(b, path+".self_attn", a.attention())
	} else {
		l.Mixer = nn.NewMamba(b, path+".mamba", a.Mamba)
	}
	path += ".feed_forward"
	if a.NumExperts == 1 || (i+a.ExpertLayerOffset)%a.ExpertLayerPeriod != 0 {
		l.FeedForward = nn.NewMLP(b, path, a.HiddenSize, a.IntermediateSize, false)
		return l
	}
	l.FeedForward = &nn.MoE{
		Router: nn.NewRouter(b, path+".router", a.NumExperts, a.HiddenSize, false,
			mlx.RouteSpec{TopK: a.NumExpertsPerTok, Scores: mlx.RouteSoftmaxChosen}),
		Experts: nn.NewSwitchGLU(b, path+".switch_mlp", a.NumExperts, a.HiddenSize, a.IntermediateSize, false, nn.SwiGLU),
	}
	return l
}
