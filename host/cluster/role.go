package cluster

import (
	"fmt"
	"slices"
	"strings"
)

// Role is what a node does, by the name that TOML and --node-role give it.
type Role string

// The roles. Those past RolePipelineStage are known by name only, so that a file or flag that asks for one gets a clear answer.
const (
	RoleHybrid                 Role = "hybrid"                   // the coordinator: serves requests, runs no stage
	RolePipelineStage          Role = "pipeline_stage"           // one contiguous range of layers
	RolePipelineTensorParallel Role = "pipeline_tensor_parallel" // one rank of one stage
	RoleTensorParallel         Role = "tensor_parallel"          // one rank of an unsplit model
	RolePrefill                Role = "prefill"                  // disaggregated serving: prompts
	RoleDecode                 Role = "decode"                   // disaggregated serving: generation
)

// roleNames maps every accepted spelling.
var roleNames = map[string]Role{
	"hybrid":                   RoleHybrid,
	"pipeline_stage":           RolePipelineStage,
	"pipeline_tensor_parallel": RolePipelineTensorParallel,
	"pp_tp":                    RolePipelineTensorParallel,
	"2d":                       RolePipelineTensorParallel,
	"tensor_parallel":          RoleTensorParallel,
	"prefill":                  RolePrefill,
	"prefill_only":             RolePrefill,
	"decode":                   RoleDecode,
	"decode_only":              RoleDecode,
}

// ParseRole reads a role or an alias of one.
func ParseRole(text string) (Role, error) {
	if role, ok := roleNames[text]; ok {
		return role, nil
	}
	return "", fmt.Errorf("%q is no role: give %s (the coordinator) or %s", text, RoleHybrid, RolePipelineStage)
}

// placed tells whether nodes of the role have a stage and a rank.
func (r Role) placed() (stage, rank bool) {
	return r == RolePipelineStage || r == RolePipelineTensorParallel, r == RolePipelineTensorParallel || r == RoleTensorParallel
}

// NotBuiltError is a valid request for a kind of serving that this version lacks.
type NotBuiltError struct {
	File string // the file or flag that asks for it
	Role Role
}

func (e *NotBuiltError) Error() string {
	kind := "disaggregated serving"
	switch e.Role {
	case RolePipelineTensorParallel:
		kind = "2D (pipeline × tensor) parallelism"
	case RoleTensorParallel:
		kind = "tensor parallelism"
	}
	return fmt.Sprintf("%s: role %q: %s is not built yet: use %s nodes with tensor_parallel_size 1", e.File, e.Role, kind, RolePipelineStage)
}

// Supported refuses a role that is known but not built yet. where is the file or flag that asks for it.
func (r Role) Supported(where string) error {
	if r == RoleHybrid || r == RolePipelineStage {
		return nil
	}
	return &NotBuiltError{File: where, Role: r}
}

// Supported refuses a topology with roles that are not built yet, each once.
func (c *Config) Supported() error {
	var refused []Role
	var errs []error
	for _, n := range c.Nodes {
		if err := n.Role.Supported(c.where()); err != nil && n.Role != "" && !slices.Contains(refused, n.Role) {
			refused = append(refused, n.Role)
			errs = append(errs, err)
		}
	}
	return joinLines(errs)
}

// where names the configuration in messages.
func (c *Config) where() string {
	if c.Path != "" {
		return c.Path
	}
	return "the cluster plan"
}

// Self is the place of this process in a hand-written topology: what --node-id, --node-role and --peers say.
type Self struct {
	ID    string
	Role  string   // --node-role, empty to take the topology's
	Peers []string // --peers, empty to take the topology's
}

// Locate finds this process's node. The topology decides: a role that disagrees with it is an error, peers that it does not
// list are returned as notices.
func (c *Config) Locate(self Self) (node Node, notices []string, err error) {
	if self.ID == "" {
		return Node{}, nil, fmt.Errorf("%s needs %s, one of %s", FlagConfig, FlagNodeID, c.ids())
	}
	node, ok := c.Node(self.ID)
	if !ok {
		return Node{}, nil, fmt.Errorf("%s %s: %s has no such node, only %s", FlagNodeID, self.ID, c.where(), c.ids())
	}
	if self.Role != "" {
		role, err := ParseRole(self.Role)
		if err != nil {
			return Node{}, nil, fmt.Errorf("%s: %w", FlagNodeRole, err)
		}
		if role != node.Role {
			return Node{}, nil, fmt.Errorf("%s %s: %s gives node %s the role %s: change one of them", FlagNodeRole, self.Role, c.where(), node.ID, node.Role)
		}
	}
	listed := map[string]bool{}
	for _, n := range c.Nodes {
		if a, err := ParseAddress(n.Address); err == nil {
			listed[a.Key()] = true
		}
	}
	for _, peer := range self.Peers {
		a, err := ParseAddress(strings.TrimSpace(peer))
		if err != nil {
			return Node{}, nil, fmt.Errorf("%s: %w", FlagPeers, err)
		}
		if !listed[a.Key()] {
			notices = append(notices, fmt.Sprintf("%s %s is not used: the addresses of %s count, and it is none of them", FlagPeers, a, c.where()))
		}
	}
	return node, notices, nil
}

func (c *Config) ids() string {
	ids := make([]string, len(c.Nodes))
	for i, n := range c.Nodes {
		ids[i] = n.ID
	}
	return strings.Join(ids, ", ")
}
