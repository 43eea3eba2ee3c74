// Command mlxcel-server serves a model over HTTP with OpenAI's API.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/mlxcel/mlxcel/cmd/internal/serve"
	"github.com/urfave/cli/v2"
)

// version is set at link time.
var version = "dev"

func main() {
	if len(os.Args) == 2 && os.Args[1] == serve.TemplateCheckName {
		os.Exit(serve.TemplateCheck(os.Stdin, os.Stdout))
	}
	if err := newApp(os.Stdout, os.Stderr).RunContext(context.Background(), os.Args); err != nil {
		fmt.Fprintf(os.Stderr, "mlxcel-server: %v\n", err)
		os.Exit(1)
	}
}

func newApp(stdout, stderr io.Writer) *cli.App {
	app := cli.NewApp()
	app.Name = "mlxcel-server"
	app.Usage = "serve a model over HTTP with OpenAI's API"
	app.UsageText = "mlxcel-server --model FOLDER [flags]"
	app.Version = version
	app.HideVersion = true // -v is --verbose, as in mlxcel
	app.Writer, app.ErrWriter = stdout, stderr
	app.HideHelpCommand = true
	app.DisableSliceFlagSeparator = true
	app.ExitErrHandler = func(*cli.Context, error) {} // main prints it
	app.OnUsageError = func(_ *cli.Context, err error, _ bool) error { return fmt.Errorf("%w; see --help", err) }
	app.Flags = append(serve.Flags(), &cli.BoolFlag{Name: "version", Usage: "print the version"})
	app.Action = func(c *cli.Context) error {
		if c.Bool("version") {
			_, err := fmt.Fprintln(stdout, "mlxcel-server version", version)
			return err
		}
		return serve.Action(c)
	}
	return app
}
