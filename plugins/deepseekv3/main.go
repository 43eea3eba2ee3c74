// Command deepseekv3 is the executor of the deepseekv3 group of families.
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
	return []stage.Family{deepSeekV3{}, glm4MoELite{}, glmMoEDSA{}, kimiK3{}}
}

func main() {
	executor := stage.New(stage.Options{Name: "deepseekv3", Version: version, Families: families()})
	sdk.Serve(sdk.ServeOptions{Executor: executor})
	if err := executor.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
