package serve

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/host/chat"
	"github.com/urfave/cli/v2"
)

// Action runs the server that the flags describe, until a signal ends it.
func Action(c *cli.Context) error {
	cfg, err := read(c, c.App.Version)
	if err != nil {
		return err
	}
	if cfg.Cluster.DryRun {
		return dryRun(c.Context, cfg, c.App.Writer, c.App.ErrWriter)
	}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	// The first signal is to drain, so it must not end the context.
	ctx := context.WithoutCancel(c.Context)
	if cfg.Cluster.Mode == clusterflags.Peer {
		return runPeer(ctx, cfg, signals, c.App.ErrWriter)
	}
	return run(ctx, cfg, signals, c.App.Writer, c.App.ErrWriter)
}

// TemplateCheckName is the command that a program runs itself with, to try a chat template where a fault of the template can
// do no harm.
const TemplateCheckName = "chat-template-check"

// TemplateCheck is what that command does; it returns the exit code.
func TemplateCheck(in io.Reader, out io.Writer) int { return chat.ProbeMain(in, out) }
