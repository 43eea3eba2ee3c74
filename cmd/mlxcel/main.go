// Command mlxcel generates text with one model, in one process or split over pipeline stages.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"
)

// version is set at link time.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args, os.Stdin, os.Stdout, os.Stderr))
}

// exitInterrupted is the shell's code for a program ended by SIGINT.
const exitInterrupted = 130

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	err := newApp(stdin, stdout, stderr).RunContext(ctx, args)
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintln(stderr, "mlxcel: interrupted")
		return exitInterrupted
	}
	if code, ok := errors.AsType[exitCode](err); ok {
		return int(code)
	}
	fmt.Fprintf(stderr, "mlxcel: %v\n", err)
	return 1
}

// exitCode ends the program with a code and without a message.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func newApp(stdin io.Reader, stdout, stderr io.Writer) *cli.App {
	app := cli.NewApp()
	app.Name = "mlxcel"
	app.Usage = "run a model that is too large for one machine"
	app.Version = version
	app.Reader, app.Writer, app.ErrWriter = stdin, stdout, stderr
	app.HideHelpCommand = true
	app.DisableSliceFlagSeparator = true
	app.ExitErrHandler = func(*cli.Context, error) {} // run prints it
	app.OnUsageError = func(_ *cli.Context, err error, _ bool) error {
		return fmt.Errorf("%w; see --help", err)
	}
	app.Action = needCommand
	app.Commands = []*cli.Command{
		generateCommand(), chatCommand(), serveCommand(), importCommand(), inspectCommand(), planCommand(), pluginsCommand(),
		clusterCommand(), doctorCommand(), templateCheckCommand(),
	}
	shareSettings(app.Commands, app.OnUsageError)
	return app
}

// shareSettings gives all commands and theirs what cli does not hand down.
func shareSettings(commands []*cli.Command, onUsageError cli.OnUsageErrorFunc) {
	for _, c := range commands {
		c.OnUsageError, c.HideHelpCommand = onUsageError, true
		if len(c.Subcommands) > 0 {
			c.Action = needCommand
		}
		shareSettings(c.Subcommands, onUsageError)
	}
}

// needCommand is what a command that only holds others does by itself.
func needCommand(c *cli.Context) error {
	if c.NArg() > 0 {
		return fmt.Errorf("there is no command %q; see --help", c.Args().First())
	}
	if c.Command.Name != c.App.Name {
		return cli.ShowSubcommandHelp(c)
	}
	return cli.ShowAppHelp(c)
}
