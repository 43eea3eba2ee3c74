// Command example is a complete executor, to be copied by a team that adds a family of its own.
package main

import (
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/example/leakyrnn"
)

func main() {
	sdk.Serve(sdk.ServeOptions{New: leakyrnn.New})
}
