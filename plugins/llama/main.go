// Command llama is the executor of the llama group of families.
package main

import "github.com/mlxcel/mlxcel/mlxshared/stage"

// version is set when a release is linked.
var version = "dev"

// families are the wire families of this executor. To add one, write its file and name it here.
func families() []stage.Family {
	return []stage.Family{
		llama{}, mistral{}, mixtral{}, llama4{}, gptOSS{}, qwen3{}, glm4{}, glm4MoE{},
		qwen2MoE{}, qwen3MoE{}, phiMoE{}, exaoneMoE{},
	}
}

func main() { stage.Main("llama", version, families()...) }
