package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// glm4MoELite is GLM-4.7 Flash (Z.ai 2026; reference: mlx_lm/models/glm4_moe_lite.py): DeepSeek-V3's layers, with
// rms_norm_eps for the norms over the latents too and a floor under the router's sum.
type glm4MoELite struct{}

func (glm4MoELite) Info() sdk.Family { return stage.Info("glm4_moe_lite", "glm4_moe_lite") }

func (glm4MoELite) Model(c *config.Object) stage.Model {
	a := readLatentDecoder(c)
	a.LatentNormEps = a.RMSNormEps
	a.Route.Epsilon = 1e-20
	if f := c.FloatOr("partial_rotary_factor", 1); f != 1 {
		c.Unsupported("partial_rotary_factor", "%v is not built for glm4_moe_lite; built is 1", f)
	}
	return a
}
