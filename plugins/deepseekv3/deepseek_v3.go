package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// deepSeekV3 is DeepSeek-V3 and R1 (DeepSeek-AI 2024; reference: mlx_lm/models/deepseek_v3.py).
type deepSeekV3 struct{}

func (deepSeekV3) Info() sdk.Family {
	return sdk.Family{Name: "deepseek_v3", ModelTypes: []string{"deepseek_v3"}, Pipeline: true, Quantizations: quantizations()}
}

func (deepSeekV3) Model(c *config.Object) stage.Model {
	a := readLatentDecoder(c)
	a.LatentNormEps = deepSeekNormEps
	return a
}

// deepSeekNormEps is fixed in DeepSeek's own code for the norms over the latents, whatever rms_norm_eps is.
const deepSeekNormEps = 1e-6
