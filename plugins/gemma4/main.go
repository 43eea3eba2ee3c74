// Command gemma4 is the executor of the gemma4 group of families.
package main

import (
	"fmt"
	"os"

	"github.com/mlxcel/mlxcel/mlxshared/stage"
	"github.com/mlxcel/mlxcel/sdk"
)

// version is set when a release is linked.
var version = "dev"

// families are the wire families of this executor. To add one, write its file and name it here.
func families() []stage.Family {
	return []stage.Family{gemma3{}, gemma4{"gemma4"}, gemma4{"gemma4_vlm"}}
}

func main() {
	executor := stage.New(stage.Options{Name: "gemma4", Version: version, Families: families()})
	sdk.Serve(sdk.ServeOptions{Executor: executor})
	if err := executor.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
