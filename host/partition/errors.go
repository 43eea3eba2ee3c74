package partition

import (
	"fmt"

	"github.com/mlxcel/mlxcel/sdk"
)

// FlagError is a pipeline flag whose value can't be used.
type FlagError struct {
	Flag   string // e.g. "--pp-layers"
	Value  string // as given
	Reason string // what is wrong and what to change
}

func (e *FlagError) Error() string {
	return fmt.Sprintf("%s %q: %s", e.Flag, e.Value, e.Reason)
}

// AdjacencyError is a cut between two layers that must share a stage.
type AdjacencyError struct {
	Group  sdk.AdjacencyGroup
	Cut    int  // the first layer of the later stage
	Manual bool // asked for with --pp-layers
}

func (e *AdjacencyError) Error() string {
	text := fmt.Sprintf("layers %d and %d must be on one stage (%s), but a stage boundary lies before layer %d", e.Group.Source, e.Group.Consumer, e.Group.Reason, e.Cut)
	if e.Manual {
		text += fmt.Sprintf(": move the boundary in --pp-layers to layer %d or earlier, or past layer %d", e.Group.Source, e.Group.Consumer)
	}
	return text
}

// TooManyStagesError is a stage count that the model can't be cut into.
type TooManyStagesError struct {
	Stages int // asked for
	Most   int // that the model allows
	Layers int
}

func (e *TooManyStagesError) Error() string {
	if e.Most < e.Layers {
		return fmt.Sprintf("%d stages: the model has %d layers, but layers that must share a stage leave room for %d stages: use --pp-size %d or less", e.Stages, e.Layers, e.Most, e.Most)
	}
	return fmt.Sprintf("%d stages: the model has only %d layers, and every stage needs one: use --pp-size %d or less", e.Stages, e.Layers, e.Layers)
}
