// Package cluster owns what a cluster is: its topology and the TOML file that holds it, the secret that its nodes share, the
// identity of the model that they serve, and the reasons for which a node is not let in. It opens no connection of its own.
package cluster

import (
	"fmt"
	"path/filepath"
	"slices"
)

// Names and ports that hold where no flag says otherwise.
const (
	DefaultName        = "mlxcel-cluster"
	DefaultControlPort = 19000
	DefaultConfigOut   = ".mlxcel/cluster.toml" // where the coordinator writes its plan, in the working folder
	CoordinatorID      = "coordinator"
)

// Limits of a cluster.
const (
	MaxNameLength = 64   // bytes of a cluster's name and of a node's id: what the handshake's hello holds
	MaxNodes      = 1024 // entries of a file
	MinStages     = 2    // stages of a pipeline
)

// Unset is the stage or rank of a node that has none.
const Unset = -1

// Config is a cluster's topology.
type Config struct {
	Path             string // the file that it was read from; empty for a plan
	Name             string // at most MaxNameLength bytes
	PipelineParallel int    // stages
	TensorParallel   int    // ranks of each stage; 1 is none
	Backend          Backend
	SecretFile       string // as the file gives it; SecretPath resolves it
	MemoryBytes      int64  // what each stage may use, unless its node says otherwise; 0 is what its device reports
	Nodes            []Node
}

// Node is one process of a cluster.
type Node struct {
	ID          string // unique, at most MaxNameLength bytes
	Address     string // host:port as the operator gave it; a host name is resolved by who dials it
	Role        Role
	Stage       int   // from 0; Unset where the role has no stage
	Rank        int   // tensor-parallel rank from 0; Unset where the role has no rank
	MemoryBytes int64 // what the stage may use; 0 is the cluster's MemoryBytes
}

// Coordinator returns the node that serves requests and runs no stage. A file need not have one.
func (c *Config) Coordinator() (Node, bool) {
	i := slices.IndexFunc(c.Nodes, func(n Node) bool { return n.Role == RoleHybrid })
	if i < 0 {
		return Node{}, false
	}
	return c.Nodes[i], true
}

// Stages returns the nodes that run the pipeline, by stage.
func (c *Config) Stages() []Node {
	var stages []Node
	for _, n := range c.Nodes {
		if n.Role == RolePipelineStage {
			stages = append(stages, n)
		}
	}
	slices.SortStableFunc(stages, func(a, b Node) int { return a.Stage - b.Stage })
	return stages
}

// Node returns the node of that id.
func (c *Config) Node(id string) (Node, bool) {
	i := slices.IndexFunc(c.Nodes, func(n Node) bool { return n.ID == id })
	if i < 0 {
		return Node{}, false
	}
	return c.Nodes[i], true
}

// Memory returns the bytes that the configuration lets a node use, 0 where it says nothing.
func (c *Config) Memory(n Node) int64 {
	if n.MemoryBytes != 0 {
		return n.MemoryBytes
	}
	return c.MemoryBytes
}

// SecretPath returns SecretFile; a relative one is relative to the folder of the TOML, not to where a command was started.
func (c *Config) SecretPath() string {
	if c.SecretFile == "" || filepath.IsAbs(c.SecretFile) || c.Path == "" {
		return c.SecretFile
	}
	return filepath.Join(filepath.Dir(c.Path), c.SecretFile)
}

// WithCoordinator completes a topology that has no coordinator node by one at the given address, the value of
// --cluster-control-addr. A topology that has one is returned as it is.
func (c *Config) WithCoordinator(address string) (*Config, error) {
	if _, ok := c.Coordinator(); ok {
		return c, nil
	}
	if address == "" {
		return nil, &Fault{File: c.Path, Key: "nodes", Reason: fmt.Sprintf("has no node with role %q, the coordinator: add one, or give its address with %s", RoleHybrid, FlagControlAddr)}
	}
	full := *c
	full.Nodes = append([]Node{{ID: CoordinatorID, Address: address, Role: RoleHybrid, Stage: Unset, Rank: Unset}}, c.Nodes...)
	if err := full.Validate(); err != nil {
		return nil, fmt.Errorf("%s %s: %w", FlagControlAddr, address, err)
	}
	return &full, nil
}
