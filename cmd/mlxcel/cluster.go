package main

import (
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/urfave/cli/v2"
)

func clusterCommand() *cli.Command {
	return &cli.Command{
		Name:        "cluster",
		Usage:       "make a cluster's secret, or look at a cluster that runs",
		Subcommands: []*cli.Command{secretCommand(), statusCommand()},
	}
}

func secretCommand() *cli.Command {
	return &cli.Command{
		Name:  "secret",
		Usage: "the secret that all nodes of a cluster share",
		Subcommands: []*cli.Command{{
			Name:      "new",
			Usage:     "write a new secret to FILE, which only its owner can read; copy it to every host",
			ArgsUsage: "FILE",
			Action: func(c *cli.Context) error {
				if c.NArg() != 1 {
					return errors.New("cluster secret new takes one FILE, e.g. cluster.secret")
				}
				path := c.Args().First()
				if err := cluster.NewSecretFile(path, rand.Reader); err != nil {
					return err
				}
				_, err := fmt.Fprintf(c.App.Writer, "wrote %s: copy it to every host of the cluster, and give it to each with --cluster-secret-file\n", path)
				return err
			},
		}},
	}
}
