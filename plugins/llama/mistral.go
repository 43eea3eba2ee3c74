package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// mistral is Mistral 7B and its successors (Jiang et al. 2023). mlx-lm computes it with its llama class, keys, defaults and
// names included, and so does this family: sliding windows apply to the layers that layer_types names, and a bare
// sliding_window has no effect.
type mistral struct{}

func (mistral) Info() sdk.Family { return stage.Info("mistral", "mistral") }

func (mistral) Model(c *config.Object) stage.Model { return readLlama(c) }
