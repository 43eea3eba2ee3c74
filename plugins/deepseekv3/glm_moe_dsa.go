package main

import (
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// glmMoEDSA is GLM-5 and DeepSeek-V3.2 (reference: mlx_lm/models/deepseek_v32.py): DeepSeek-V3's layers with sparse
// attention. An indexer with keys of its own picks the index_topk positions that a row attends to.
type glmMoEDSA struct{}

// deepSeekV32 is the model type whose indexer rotates halves; glm_moe_dsa's rotates neighbours.
const deepSeekV32 = "deepseek_v32"

func (glmMoEDSA) Info() sdk.Family { return stage.Info("glm_moe_dsa", "glm_moe_dsa", deepSeekV32) }

func (glmMoEDSA) Model(c *config.Object) stage.Model {
	a := readLatentDecoder(c)
	a.LatentNormEps = deepSeekNormEps
	a.Indexer = &nn.IndexerConfig{
		Width: a.HiddenSize, QRank: a.QLoraRank, RopeDim: a.QKRopeHeadDim, Rope: a.Rope,
		Heads: c.Size("index_n_heads"), Dim: c.Size("index_head_dim"), TopK: c.Size("index_topk"),
	}
	a.Indexer.Rope.Traditional = c.BoolOr("indexer_rope_interleave", c.StringOr("model_type", "") != deepSeekV32)
	if a.QLoraRank == 0 {
		c.Fail("q_lora_rank", "is missing; the indexer reads the query's latent")
	}
	if a.Indexer.RopeDim > a.Indexer.Dim {
		c.Fail("index_head_dim", "is %d, less than the %d of qk_rope_head_dim", a.Indexer.Dim, a.Indexer.RopeDim)
	}
	return a
}
