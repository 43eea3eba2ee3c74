package cluster

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// faults collects what is wrong. Of several faults of one key the first counts, as the others mostly follow from it.
type faults struct{ list []*Fault }

func (f *faults) add(key, reason string) {
	if !f.has(key) {
		f.list = append(f.list, &Fault{Key: key, Reason: reason})
	}
}

func (f *faults) has(key string) bool {
	return slices.ContainsFunc(f.list, func(other *Fault) bool { return other.Key == key })
}

func (f *faults) err(file string) error {
	if len(f.list) == 0 {
		return nil
	}
	for _, fault := range f.list {
		fault.File = file
	}
	return &ConfigError{File: file, Faults: f.list}
}

// Validate checks every rule of a topology and returns a *ConfigError with all that is wrong, nil if nothing is. It knows
// nothing of what is built: Supported does.
func (c *Config) Validate() error {
	var f faults
	c.check(&f)
	return f.err(c.Path)
}

func (c *Config) check(f *faults) {
	checkName(f, "cluster.name", c.Name, "a name, e.g. "+quote(DefaultName))
	c.checkSizes(f)
	if _, err := ParseBackend(string(c.Backend)); err != nil {
		f.add("cluster.transport_backend", err.Error())
	}
	if c.MemoryBytes < 0 {
		f.add("cluster.resources.memory_bytes", fmt.Sprintf("is %d, want a number of bytes above 0", c.MemoryBytes))
	}
	if len(c.Nodes) == 0 {
		f.add("nodes", "has no entry: add one [[nodes]] table for each node")
		return
	}
	for i, n := range c.Nodes {
		checkNode(f, nodeKey(i), n)
	}
	c.checkUnique(f)
	c.checkCoordinator(f)
	c.checkGrid(f)
}

func nodeKey(i int) string { return fmt.Sprintf("nodes[%d]", i) }

func checkName(f *faults, key, name, want string) {
	switch {
	case name == "":
		f.add(key, "is missing: give "+want)
	case len(name) > MaxNameLength:
		f.add(key, fmt.Sprintf("has %d bytes, want at most %d", len(name), MaxNameLength))
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
		f.add(key, fmt.Sprintf("is %s, want printable characters only", quote(name)))
	}
}

func (c *Config) checkSizes(f *faults) {
	if c.TensorParallel < 1 {
		f.add("cluster.tensor_parallel_size", fmt.Sprintf("is %d, want at least 1", c.TensorParallel))
	}
	minimum, why := 1, ""
	if c.hasStages() {
		minimum, why = MinStages, ": a pipeline has at least two stages"
	}
	if c.PipelineParallel < minimum {
		f.add("cluster.pipeline_parallel_size", fmt.Sprintf("is %d, want at least %d%s", c.PipelineParallel, minimum, why))
	}
	if product := int64(c.PipelineParallel) * int64(c.TensorParallel); product > MaxNodes {
		f.add("cluster.pipeline_parallel_size", fmt.Sprintf("times tensor_parallel_size is %d, want at most %d", product, MaxNodes))
	}
}

func (c *Config) hasStages() bool {
	return slices.ContainsFunc(c.Nodes, func(n Node) bool { stage, _ := n.Role.placed(); return stage })
}

func checkNode(f *faults, key string, n Node) {
	checkName(f, key+".id", n.ID, `an id, e.g. "stage-0"`)
	if n.ID != "" && !isFileName(n.ID) {
		f.add(key+".id", fmt.Sprintf("is %s, want letters, digits, '.', '_' and '-' only, and no '.' in front: files are named after it", quote(n.ID)))
	}
	checkAddress(f, key+".address", n.Address)
	if n.Role == "" {
		f.add(key+".role", fmt.Sprintf("is missing: give %q for the coordinator or %q", RoleHybrid, RolePipelineStage))
		return // what the role allows is not known
	}
	if _, err := ParseRole(string(n.Role)); err != nil {
		f.add(key+".role", err.Error())
		return
	}
	stage, rank := n.Role.placed()
	checkPlace(f, key+".stage", n.Stage, n.Role, stage)
	checkPlace(f, key+".rank", n.Rank, n.Role, rank)
	switch runs := stage || rank; {
	case n.MemoryBytes < 0:
		f.add(key+".resources.memory_bytes", fmt.Sprintf("is %d, want a number of bytes above 0", n.MemoryBytes))
	case n.MemoryBytes > 0 && n.Role == RoleHybrid && !runs:
		f.add(key+".resources.memory_bytes", "is set on the coordinator, which holds no layers: remove it")
	}
}

func isFileName(id string) bool {
	for _, c := range []byte(id) {
		if !isAlphanumeric(c) && !strings.ContainsRune("._-", rune(c)) {
			return false
		}
	}
	return id[0] != '.'
}

func checkAddress(f *faults, key, text string) {
	if text == "" {
		f.add(key, `is missing: give host:port, e.g. "192.168.1.11:19001"`)
		return
	}
	address, err := ParseAddress(text)
	if err == nil {
		err = address.Reachable()
	}
	if err != nil {
		f.add(key, err.Error())
	}
}

// checkPlace checks that a stage or rank is there exactly where the role has one. Its range is checkGrid's.
func checkPlace(f *faults, key string, v int, role Role, wanted bool) {
	switch {
	case wanted && v == Unset:
		f.add(key, fmt.Sprintf("is missing: %s nodes have one, from 0", role))
	case !wanted && v != Unset:
		f.add(key, fmt.Sprintf("is set, and %s nodes have none: remove it", role))
	}
}

func (c *Config) checkUnique(f *faults) {
	ids, addresses := map[string]int{}, map[string]int{}
	for i, n := range c.Nodes {
		if first, ok := ids[n.ID]; ok && n.ID != "" {
			f.add(nodeKey(i)+".id", fmt.Sprintf("is %s, which %s has: give each node its own", quote(n.ID), nodeKey(first)))
		} else {
			ids[n.ID] = i
		}
		address, err := ParseAddress(n.Address)
		if err != nil {
			continue // reported
		}
		if first, ok := addresses[address.Key()]; ok {
			f.add(nodeKey(i)+".address", fmt.Sprintf("is %s, which %s has: each node listens on a port of its own", quote(n.Address), nodeKey(first)))
		} else {
			addresses[address.Key()] = i
		}
	}
}

func (c *Config) checkCoordinator(f *faults) {
	first := -1
	for i, n := range c.Nodes {
		switch {
		case n.Role != RoleHybrid:
		case first < 0:
			first = i
		default:
			f.add(nodeKey(i)+".role", fmt.Sprintf("is %s, as is %s's: a cluster has one coordinator", RoleHybrid, nodeKey(first)))
		}
	}
}

// checkGrid checks that the nodes fill the grid of stages and ranks, each place once.
func (c *Config) checkGrid(f *faults) {
	count := map[Role]int{}
	for _, n := range c.Nodes {
		count[n.Role]++
	}
	pipeline, mesh := count[RolePipelineStage], count[RolePipelineTensorParallel]
	switch {
	case pipeline > 0 && mesh > 0:
		f.add("nodes", fmt.Sprintf("mix %d %s and %d %s nodes: every stage has the same tensor_parallel_size, so use one of the two roles",
			pipeline, RolePipelineStage, mesh, RolePipelineTensorParallel))
	case mesh > 0:
		c.checkFilled(f, RolePipelineTensorParallel, c.TensorParallel)
	case pipeline > 0 && c.TensorParallel > 1:
		f.add("cluster.tensor_parallel_size", fmt.Sprintf("is %d, want 1: %s nodes hold whole layers, and more ranks need the role %s",
			c.TensorParallel, RolePipelineStage, RolePipelineTensorParallel))
		c.checkFilled(f, RolePipelineStage, 1)
	case pipeline > 0 || c.PipelineParallel > 1:
		c.checkFilled(f, RolePipelineStage, 1)
	case count[RoleHybrid] == len(c.Nodes):
		f.add("nodes", fmt.Sprintf("has no %s node: a coordinator runs no stage itself", RolePipelineStage))
	}
}

// place is one cell of the grid of stages and ranks.
type place struct{ stage, rank int }

// checkFilled checks that nodes of the role take each of PipelineParallel × ranks places once.
func (c *Config) checkFilled(f *faults, role Role, ranks int) {
	if c.PipelineParallel < 1 || ranks < 1 || int64(c.PipelineParallel)*int64(ranks) > MaxNodes {
		return // reported
	}
	taken := map[place]int{}
	nodes, faulty := 0, false
	for i, n := range c.Nodes {
		if n.Role != role {
			continue
		}
		nodes++
		if !c.checkInside(f, nodeKey(i), n, ranks) {
			faulty = true
			continue
		}
		p := place{n.Stage, max(n.Rank, 0)} // a node without a rank is the only one of its stage
		if first, ok := taken[p]; ok {
			f.add(nodeKey(i)+".stage", fmt.Sprintf("is %s, which %s has: each is one node's", placeName(role, p), nodeKey(first)))
			continue
		}
		taken[p] = i
	}
	want := c.PipelineParallel * ranks
	switch missing := c.missing(role, ranks, taken); {
	case nodes != want:
		f.add("nodes", fmt.Sprintf("has %d %s nodes, want %d: pipeline_parallel_size %d × tensor_parallel_size %d%s",
			nodes, role, want, c.PipelineParallel, ranks, missing))
	case missing != "" && !faulty:
		f.add("nodes", "leave places empty"+missing)
	}
}

// checkInside tells whether a node's stage and rank are there, allowed and in the grid, and reports where they are not in it.
func (c *Config) checkInside(f *faults, key string, n Node, ranks int) bool {
	if n.Stage != Unset && (n.Stage < 0 || n.Stage >= c.PipelineParallel) {
		f.add(key+".stage", fmt.Sprintf("is %d, want 0 to %d: pipeline_parallel_size is %d", n.Stage, c.PipelineParallel-1, c.PipelineParallel))
	}
	if n.Rank != Unset && (n.Rank < 0 || n.Rank >= ranks) {
		f.add(key+".rank", fmt.Sprintf("is %d, want 0 to %d: tensor_parallel_size is %d", n.Rank, ranks-1, ranks))
	}
	return !f.has(key+".stage") && !f.has(key+".rank")
}

// missing lists the places that no node takes, at most a few.
func (c *Config) missing(role Role, ranks int, taken map[place]int) string {
	const most = 4
	var names []string
	for stage := range c.PipelineParallel {
		for rank := range ranks {
			p := place{stage, rank}
			if _, ok := taken[p]; ok {
				continue
			}
			if len(names) == most {
				return "; missing " + strings.Join(names, ", ") + " and more"
			}
			names = append(names, placeName(role, p))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "; missing " + strings.Join(names, ", ")
}

func placeName(role Role, p place) string {
	if role == RolePipelineStage {
		return fmt.Sprintf("stage %d", p.stage)
	}
	return fmt.Sprintf("stage %d rank %d", p.stage, p.rank)
}
