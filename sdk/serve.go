package sdk

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
)

// ServeOptions configures Serve.
type ServeOptions struct {
	// New makes the executor. It gets the process's logger, whose lines reach the host's log.
	New func(hclog.Logger) Executor
	// Executor is served when New is nil.
	Executor Executor
	// Logger replaces the default one: JSON lines on stderr at the level of MLXCEL_LOG_LEVEL. It must have
	// been made before Serve and write to stderr, where the host reads it.
	Logger hclog.Logger
}

// Serve runs the executor until its host ends it. It should be all that an executor's main does: until it runs,
// nobody notices the death of the host. A process that no host started prints what it is and exits.
//
// When the host dies, however it dies, the lifeline closes and the process kills itself, whatever its other
// threads do. (Linux's PR_SET_PDEATHSIG is left alone on purpose: it fires at the end of the host's thread that
// started the process, and Go's threads may end before their process does.)
//
// A panic in a method of the executor is logged with its stack and ends the process.
func Serve(opts ServeOptions) {
	// go-plugin replaces os.Stdout and os.Stderr, so the logger has to take stderr before.
	logger := opts.Logger
	if logger == nil {
		logger = hclog.New(&hclog.LoggerOptions{
			Level:      hclog.LevelFromString(levelName()),
			Output:     os.Stderr,
			JSONFormat: true,
		})
	}
	config := &plugin.ServeConfig{
		HandshakeConfig: Handshake(),
		GRPCServer:      newGRPCServer,
		Logger:          logger,
	}
	if Launched() {
		s, err := inherit(opts, logger)
		if err != nil {
			logger.Error("executor can't start", "error", err)
			os.Exit(1)
		}
		config.VersionedPlugins = versionedPlugins(&grpcPlugin{server: s})
	}
	plugin.Serve(config)
}

func levelName() string {
	if name := os.Getenv(EnvLogLevel); name != "" {
		return name
	}
	return "info"
}

// inherit takes over what the host handed down and makes the server.
func inherit(opts ServeOptions, logger hclog.Logger) (*server, error) {
	lifeline, err := inheritedFile(EnvLifelineFD)
	if err != nil {
		return nil, err
	}
	if lifeline != nil {
		go watch(lifeline)
	}
	file, err := inheritedFile(EnvRegionFD)
	if err != nil {
		return nil, err
	}
	var region *Region
	if file != nil {
		region = &Region{file: file}
	}
	far, err := inheritedFile(EnvChannelFD)
	if err != nil {
		return nil, err
	}
	var handed *descriptors
	if far != nil {
		if handed, err = newDescriptors(far); err != nil {
			return nil, err
		}
	}
	exec := opts.Executor
	if opts.New != nil {
		exec = opts.New(logger)
	}
	if exec == nil {
		return nil, errors.New("no executor to serve: set ServeOptions.New or ServeOptions.Executor")
	}
	return newServer(exec, region, handed, logger, exitOnPanic(logger)), nil
}

// inheritedFile opens the descriptor whose number the environment names; nil when it names none. Children of the
// executor don't get it.
func inheritedFile(key string) (*os.File, error) {
	text := os.Getenv(key)
	if text == "" {
		return nil, nil
	}
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 0 {
		return nil, fmt.Errorf("environment variable %s is %q, want the number of a descriptor", key, text)
	}
	f := os.NewFile(uintptr(fd), key)
	if _, err := f.Stat(); err != nil {
		return nil, fmt.Errorf("environment variable %s names descriptor %d, which was not inherited: %w", key, fd, err)
	}
	syscall.CloseOnExec(fd)
	return f, nil
}

// watch ends the process when the lifeline closes. A kill, not an exit: exit handlers of C libraries can hang
// while other threads still compute.
func watch(lifeline *os.File) {
	buf := make([]byte, 1)
	for {
		if _, err := lifeline.Read(buf); err != nil {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			return
		}
	}
}

func exitOnPanic(logger hclog.Logger) fatalFunc {
	return func(operation string, cause any, stack []byte) {
		logger.Error("executor panicked", "operation", operation, "panic", fmt.Sprint(cause), "stack", string(stack))
		os.Exit(2)
	}
}
