package main

import (
	"github.com/mlxcel/mlxcel/cmd/internal/serve"
	"github.com/urfave/cli/v2"
)

// serveCommand is mlxcel-server under another name.
func serveCommand() *cli.Command {
	return &cli.Command{
		Name:   "serve",
		Usage:  "serve the model over HTTP with OpenAI's API",
		Flags:  serve.Flags(),
		Action: serve.Action,
	}
}
