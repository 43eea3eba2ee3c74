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
	app.CommandNotFound = func(_ *cli.Context, name string) {
		fmt.Fprintf(stderr, "mlxcel: there is no command %q; see mlxcel --help\n", name)
	}
	app.Commands = []*cli.Command{
		generateCommand(), chatCommand(), serveCommand(), importCommand(), inspectCommand(), planCommand(), pluginsCommand(), templateCheckCommand(),
	}
	for _, c := range app.Commands {
		c.OnUsageError = app.OnUsageError
		c.HideHelpCommand = true
	}
	return app
}
