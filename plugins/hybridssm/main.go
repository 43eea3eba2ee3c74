// Command hybridssm is the executor of the families that mix attention with recurrent layers.
package main

import "github.com/mlxcel/mlxcel/mlxshared/stage"

// version is set when a release is linked.
var version = "dev"

// families are the wire families of this executor. To add one, write its file and name it here.
func families() []stage.Family {
	return []stage.Family{
		jamba{}, nemotronH{}, qwen3Next{},
		qwen35{"qwen3_5", "qwen3_5"}, qwen35{"qwen3_5_vlm", "qwen3_5"},
		qwen35{"qwen3_5_moe", "qwen3_5_moe"}, qwen35{"qwen3_5_moe_vlm", "qwen3_5_moe"},
	}
}

func main() { stage.Main("hybridssm", version, families()...) }
