package main

import (
	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/urfave/cli/v2"
)

// templateCheckName is the command that the program runs itself with, to try a chat template where a fault
// of the template can do no harm.
const templateCheckName = "chat-template-check"

func templateCheckCommand() *cli.Command {
	return &cli.Command{
		Name:   templateCheckName,
		Hidden: true,
		Action: func(c *cli.Context) error {
			if code := chat.ProbeMain(c.App.Reader, c.App.Writer); code != 0 {
				return exitCode(code)
			}
			return nil
		},
	}
}
