// Command mlxcel-server serves a model over HTTP. The listener is not built yet: the program says so and refuses to start,
// so that nothing that calls it takes a silence for a server.
package main

import (
	"fmt"
	"os"
)

// version is set at link time.
var version = "dev"

func main() {
	if len(os.Args) == 2 && (os.Args[1] == "--version" || os.Args[1] == "-v") {
		fmt.Println("mlxcel-server version", version)
		return
	}
	fmt.Fprintln(os.Stderr, "mlxcel-server: the HTTP server is not built yet; use mlxcel generate or mlxcel chat")
	os.Exit(1)
}
