package stage

import (
	"fmt"
	"os"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/sdk"
)

// Main is all that the main function of an executor does: it serves the families until the host ends it. name is the binary's,
// version the program's. What the executor logs reaches the host's log.
func Main(name, version string, families ...Family) {
	var executor *Executor
	sdk.Serve(sdk.ServeOptions{New: func(logger hclog.Logger) sdk.Executor {
		executor = New(Options{Name: name, Version: version, Families: families, Logger: logger})
		return executor
	}})
	if executor == nil { // no host
		return
	}
	if err := executor.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
