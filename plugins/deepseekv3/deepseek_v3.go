package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// deepSeekV3 is DeepSeek-V3 and R1 (DeepSeek-AI 2024; reference: mlx_lm/models/deepseek_v3.py).
type deepSeekV3 struct{}

func (deepSeekV3) Info() sdk.Family { return stage.Info("deepseek_v3", "deepseek_v3") }

func (deepSeekV3) Model(c *config.Object) stage.Model {
	a := readLatentDecoder(c)
	a.LatentNormEps = deepSeekNormEps
	return a
}
