package partition

import (
	"errors"
	"fmt"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
)

// FlagError is a flag whose value can't be used.
type FlagError struct {
	Flag   string // e.g. "--pp-layers"
	Value  string // as given
	Reason string // what is wrong and what to change
}

func (e *FlagError) Error() string {
	return fmt.Sprintf("%s %q: %s", e.Flag, e.Value, e.Reason)
}

// ProfileError is a profile that contradicts itself.
type ProfileError struct {
	Family string
	Reason string
}

func (e *ProfileError) Error() string {
	return fmt.Sprintf("the executor's profile of this %s model can't be planned with: %s: update the executor", e.Family, e.Reason)
}

// AdjacencyError is a cut between two layers that must share a stage.
type AdjacencyError struct {
	Group         sdk.AdjacencyGroup
	Cut           int // the first layer of the later stage, as --pp-layers has it
	Before, After int // the nearest layers that a stage may begin with; 0 when there is none
}

func (e *AdjacencyError) Error() string {
	text := fmt.Sprintf("layers %d and %d must be on one stage (%s), but a stage boundary lies before layer %d: ", e.Group.Source, e.Group.Consumer, e.Group.Reason, e.Cut)
	switch {
	case e.Before > 0 && e.After > 0:
		return text + fmt.Sprintf("the nearest legal cuts are before layer %d and before layer %d: move the boundary in --pp-layers to one of them", e.Before, e.After)
	case e.Before+e.After > 0:
		return text + fmt.Sprintf("the nearest legal cut is before layer %d: move the boundary in --pp-layers there", e.Before+e.After)
	}
	return text + "no cut is legal: leave --pp-layers out"
}

// TooManyStagesError is a stage count that the model can't be cut into.
type TooManyStagesError struct {
	Flag   string // that asked for them; empty when none did
	Stages int    // asked for
	Most   int    // that the model allows
	Layers int
}

func (e *TooManyStagesError) Error() string {
	cure := fmt.Sprintf("use %s %d or less", e.Flag, e.Most)
	if e.Flag == "" {
		cure = fmt.Sprintf("use %d or fewer", e.Most)
	}
	if e.Most < e.Layers {
		return fmt.Sprintf("%d stages: the model has %d layers, but layers that must share a stage leave room for %d stages: %s", e.Stages, e.Layers, e.Most, cure)
	}
	return fmt.Sprintf("%d stages: the model has only %d layers, and every stage needs one: %s", e.Stages, e.Layers, cure)
}

// BudgetError is a memory that leaves nothing to use.
type BudgetError struct {
	Memory string
	Bytes  int64
}

func (e *BudgetError) Error() string {
	return fmt.Sprintf("%s may use %d bytes: give it memory above its headroom (--stage-memory, --memory-headroom)", e.Memory, e.Bytes)
}

// ErrTooManyWays ends a search over stages that share memories crosswise and layers of very many sizes.
var ErrTooManyWays = errors.New("too many ways to place these stages: they share memories crosswise; give stages on one device neighbouring numbers")

// InfeasibleError is a model that does not fit. The stage named is the one that lacks the most in the cut that lacks
// the least.
type InfeasibleError struct {
	Stages      int
	Stage       int   // lacks the most; of a shared memory's stages the heaviest
	Sharing     []int // the stages on its memory, itself included
	Memory      string
	Layers      sdk.LayerRange // of the stage
	NeedBytes   int64          // of all of Sharing
	BudgetBytes int64
	LackBytes   int64  // NeedBytes less BudgetBytes
	Cause       string // a single thing that is too large; empty when it is only the sum
	Manual      bool   // the ranges are the operator's
	Demand      Demand
	Remedies    Remedies

	text string
}

func (e *InfeasibleError) Error() string {
	var b strings.Builder
	what := fmt.Sprintf("no cut into %d stages fits, and in the one that lacks the least ", e.Stages)
	if e.Stages == 1 {
		what = "the model does not fit: "
	}
	if e.Manual {
		what = "the plan of --pp-layers does not fit: "
	}
	b.WriteString(what + e.text)
	if e.Cause != "" {
		b.WriteString("; " + e.Cause)
	}
	if list := e.remedies(); len(list) > 0 {
		return b.String() + "; what would fit: " + strings.Join(list, ", or ")
	}
	b.WriteString("; neither fewer sequences, a shorter context, more stages of that size nor a tighter quantization would fit: use devices with more memory")
	return b.String()
}

func (e *InfeasibleError) remedies() (list []string) {
	r := e.Remedies
	add := func(ok bool, format string, args ...any) {
		if ok {
			list = append(list, fmt.Sprintf(format, args...))
		}
	}
	add(r.Ranges != nil, "the automatic cut (--pp-layers %q, or leave the flag out)", FormatRanges(r.Ranges))
	add(r.Sequences > 0, "%d %s instead of %d (--parallel)", r.Sequences, plural(r.Sequences, "sequence"), e.Demand.Sequences)
	add(r.Context > 0, "a context of %d instead of %d tokens (--ctx)", r.Context, e.Demand.Context)
	add(r.MoreStages > 0, "%d more %s of %s", r.MoreStages, plural(r.MoreStages, "stage"), FormatSize(r.MoreBytes))
	add(r.Bits > 0, "a checkpoint of %d-bit weights (now about %.3g bits a weight)", r.Bits, r.BitsNow)
	return list
}

func plural(n int, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}
