// Command gemma4 is the executor of the gemma4 group of families.
package main

import "github.com/mlxcel/mlxcel/mlxshared/stage"

// version is set when a release is linked.
var version = "dev"

// families are the wire families of this executor. To add one, write its file and name it here.
func families() []stage.Family {
	return []stage.Family{gemma3{}, gemma4{"gemma4"}, gemma4{"gemma4_vlm"}}
}

func main() { stage.Main("gemma4", version, families()...) }
