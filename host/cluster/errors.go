package cluster

import (
	"fmt"
	"strings"
)

// Flags that messages name.
const (
	FlagAuto        = "--pp-auto"
	FlagPeer        = "--pp-peer"
	FlagClusterName = "--cluster-name"
	FlagSeeds       = "--cluster-peers"
	FlagDiscovery   = "--cluster-discovery"
	FlagControlAddr = "--cluster-control-addr"
	FlagConfigOut   = "--cluster-config-out"
	FlagSecretFile  = "--cluster-secret-file"
	FlagLooseSecret = "--allow-loose-secret"
	FlagConfig      = "--distributed-config"
	FlagNodeID      = "--node-id"
	FlagNodeRole    = "--node-role"
	FlagPeers       = "--peers"
	FlagHost        = "--host"
	FlagPort        = "--port"
	FlagStageMemory = "--stage-memory"
)

// Fault is one thing that is wrong with a topology.
type Fault struct {
	File   string // empty for a plan
	Key    string // the TOML key, e.g. "nodes[1].stage"
	Reason string
}

func (f *Fault) Error() string {
	text := f.Key
	if text != "" {
		text += " "
	}
	if f.File != "" {
		text = f.File + ": " + text
	}
	return text + f.Reason
}

// ConfigError is everything that is wrong with a topology.
type ConfigError struct {
	File   string
	Faults []*Fault // at least one
}

func (e *ConfigError) Error() string { return joinLines(e.Unwrap()).Error() }

// Unwrap returns the faults.
func (e *ConfigError) Unwrap() []error {
	errs := make([]error, len(e.Faults))
	for i, f := range e.Faults {
		errs[i] = f
	}
	return errs
}

// lines are several errors, told one a line.
type lines []error

func (l lines) Unwrap() []error { return l }

func (l lines) Error() string {
	if len(l) == 1 {
		return l[0].Error()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d faults:", len(l))
	for _, err := range l {
		b.WriteString("\n  - ")
		b.WriteString(strings.ReplaceAll(err.Error(), "\n", "\n    "))
	}
	return b.String()
}

// joinLines is errors.Join with a list that shows where one error ends and the next begins. Lists in the list become part
// of it.
func joinLines(errs []error) error {
	var all lines
	for _, err := range errs {
		switch e := err.(type) {
		case *ConfigError:
			all = append(all, e.Unwrap()...)
		case lines:
			all = append(all, e...)
		default:
			all = append(all, err)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all
}
