package executor

import (
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"
)

// Config is all that a Catalog needs to know of the world.
type Config struct {
	PluginDirs      []string // folders of --plugin-dir, searched first, in order
	RequireChecksum bool     // --plugin-require-checksum: a binary without a .sha256 beside it is refused; default false
	Executable      string   // the host's own path (os.Executable); plugins/ beside it is searched; empty skips that
	Environ         []string // the host's environment (os.Environ): MLXCEL_PLUGIN_DIR, XDG_DATA_HOME, HOME, and what executors inherit
	PassEnv         []string // names of further variables that executors inherit, e.g. LD_LIBRARY_PATH; default none
	UID             int      // the user whose files are trusted, beside root's (os.Getuid)
	RunBase         string   // where run folders go, see DefaultRunBase; required

	StartTimeout time.Duration // for a process to come up, and again for its first answer; default 10 s
	GraceTimeout time.Duration // for a stop asked over the contract, then SIGTERM; default 3 s
	TermTimeout  time.Duration // for SIGTERM, then SIGKILL; default 1 s

	Logger hclog.Logger // gets the executors' log lines; default none
}

// killTimeout is how long a process may take to vanish after SIGKILL: it is past that only when it is stuck
// in the kernel.
const killTimeout = 5 * time.Second

// withDefaults fills what was left at zero.
func (c Config) withDefaults() Config {
	set := func(d *time.Duration, value time.Duration) {
		if *d == 0 {
			*d = value
		}
	}
	set(&c.StartTimeout, 10*time.Second)
	set(&c.GraceTimeout, 3*time.Second)
	set(&c.TermTimeout, time.Second)
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	return c
}

// Validate returns all faults at once.
func (c *Config) Validate() error {
	var faults []error
	if c.RunBase == "" {
		faults = append(faults, errors.New("no folder for run files: set TMPDIR"))
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"start", c.StartTimeout}, {"grace", c.GraceTimeout}, {"term", c.TermTimeout}} {
		if d.value < 0 {
			faults = append(faults, fmt.Errorf("executor %s timeout is %v: want more than zero", d.name, d.value))
		}
	}
	return errors.Join(faults...)
}
