package main

import (
	"fmt"

	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/urfave/cli/v2"
)

func importCommand() *cli.Command {
	return &cli.Command{
		Name:      "import",
		Usage:     "turn a GGUF file into an MLX model folder",
		ArgsUsage: "FILE.gguf FOLDER",
		Description: "Q4_0, Q4_1 and Q8_0 become MLX affine 4- and 8-bit with group 32 without loss; F32, F16 and BF16 stay as they are.\n" +
			"The folder appears only when it is complete.",
		Flags: pluginFlags(),
		Action: func(c *cli.Context) error {
			if c.NArg() != 2 {
				return fmt.Errorf("import takes a GGUF file and a folder to write, got %d arguments", c.NArg())
			}
			report, err := engine.ImportGGUF(c.Context, engineConfig(c), c.Args().Get(0), c.Args().Get(1))
			if err != nil {
				return err
			}
			for _, s := range report.Skipped {
				fmt.Fprintf(c.App.ErrWriter, "skipped %s\n", s)
			}
			fmt.Fprintf(c.App.Writer, "%s: family %s, %d tensors, %s\n", c.Args().Get(1), report.Family, report.Tensors, size(report.Bytes))
			return nil
		},
	}
}
