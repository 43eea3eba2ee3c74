// Command deepseekv3 is the executor of the deepseekv3 group of families.
package main

import "github.com/mlxcel/mlxcel/mlxshared/stage"

// version is set when a release is linked.
var version = "dev"

// families are the wire families of this executor. To add one, write its file and name it here.
func families() []stage.Family {
	return []stage.Family{deepSeekV3{}, glm4MoELite{}, glmMoEDSA{}, kimiK3{}}
}

func main() { stage.Main("deepseekv3", version, families()...) }
