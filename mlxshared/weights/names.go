package weights

import (
	"slices"
	"strings"
)

// Names are the tensors of a checkpoint that a family leaves aside.
type Names struct {
	Drop         []string // whole names
	DropContains []string // parts of names
}

func (n *Names) drops(name string) bool {
	return slices.Contains(n.Drop, name) || slices.ContainsFunc(n.DropContains, func(part string) bool { return strings.Contains(name, part) })
}
