package sdktest

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/mlxcel/mlxcel/sdk"
)

// Command returns a Launcher of the executor binary at path: a process with its region, lifeline and side channel, as
// a host starts it. logger gets the process's log; nil drops it.
func Command(path string, logger hclog.Logger) Launcher { return command(path, logger) }

func command(path string, logger hclog.Logger, env ...string) Launcher {
	if logger == nil {
		logger = hclog.NewNullLogger()
	}
	return func() (*sdk.Client, func() error, error) {
		region, err := sdk.NewRegion()
		if err != nil {
			return nil, nil, err
		}
		lifeline, err := sdk.NewLifeline()
		if err != nil {
			return nil, nil, errors.Join(err, region.Close())
		}
		channel, err := sdk.NewSideChannel()
		if err != nil {
			return nil, nil, errors.Join(err, lifeline.Close(), region.Close())
		}
		cmd := exec.Command(path)
		cmd.Env = append(os.Environ(), env...)
		sdk.Inherit(cmd, region, lifeline, channel)
		process := plugin.NewClient(sdk.ClientConfig(cmd, region, channel, logger))
		stop := func() error {
			process.Kill()
			return errors.Join(channel.Close(), lifeline.Close(), region.Close())
		}
		client, err := sdk.Dispense(process)
		if err != nil {
			return nil, nil, errors.Join(err, stop())
		}
		return client, stop, nil
	}
}

// Main lets a package's test binary be an executor too, so that Self can launch it. Call it from TestMain with
// the command's own main.
func Main(m *testing.M, executor func()) {
	if sdk.Launched() {
		executor()
		return
	}
	os.Exit(m.Run())
}

// Self returns a Launcher of the test's own binary; see Main.
func Self(logger hclog.Logger) Launcher {
	path, err := os.Executable()
	if err != nil {
		return func() (*sdk.Client, func() error, error) { return nil, nil, err }
	}
	// A binary with the race detector would sleep for a second at every exit.
	return command(path, logger, "GORACE=atexit_sleep_ms=0")
}
