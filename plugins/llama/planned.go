package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/mlx"
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/sdk"
)

// Families that are priced for planning and not run: their modules are declared, so that Inspect tells their bytes from
// headers or from a config alone, and the stage refuses to load them.

// plannedFamily describes a family that is only priced.
func plannedFamily(name string) sdk.Family {
	return sdk.Family{Name: name, ModelTypes: []string{name}, PlanOnly: true, Quantizations: nn.Quantizations()}
}

// planned stands for a layer or a head whose modules were declared.
type planned string

func (l planned) Kind() string { return string(l) }

// Forward returns no array, which every operation refuses.
func (planned) Forward(*nn.Pass, mlx.Array) mlx.Array { return mlx.Array{} }

// plan declares the norms and the attention of a layer; the caller declares what follows.
func (d *decoder) plan(b *nn.Builder, path string, a nn.AttentionConfig, sparse bool) planned {
	d.norm(b, path+".input_layernorm")
	d.norm(b, path+".post_attention_layernorm")
	kind := nn.NewAttention(b, path+".self_attn", a).Kind()
	if sparse {
		kind += "-moe"
	}
	return planned(kind)
}

// planExperts declares a router and experts.
func (d *decoder) planExperts(b *nn.Builder, path string, experts, hidden int) {
	nn.NewRouter(b, path+".gate", experts, d.HiddenSize, false, mlx.RouteSpec{})
	nn.NewSwitchGLU(b, path+".switch_mlp", experts, d.HiddenSize, hidden, false, nn.SwiGLU)
}
