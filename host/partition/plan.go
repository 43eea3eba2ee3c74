// Package partition owns the cut of a model's layers into pipeline stages: what each stage holds, whether it fits, and
// what would.
package partition

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// Objective is what an automatic cut makes small.
type Objective string

const (
	ObjectiveMemory Objective = "memory" // the bytes of the heaviest stage; the default
	ObjectiveSpeed  Objective = "speed"  // the time of the slowest stage
)

// Request is what a plan is made from.
type Request struct {
	Profile       *sdk.ModelProfile
	Demand        Demand
	Hardware      Hardware         // with as many places as the plan has stages
	Ranges        []sdk.LayerRange // the operator's choice, one a stage; nil lets the planner cut
	Objective     Objective        // empty means ObjectiveMemory
	Speeds        []float64        // relative speed of each stage, for ObjectiveSpeed; nil means all equal
	Quantizations []string         // that the family runs, as in sdk.Family; they bound what an error proposes
}

// StageAssignment is what one stage of a pipeline holds.
type StageAssignment struct {
	StageIndex           int
	DeviceID             string         // the node in the cluster configuration, "local-stage-<n>" on one machine
	LayerRange           sdk.LayerRange // half-open
	HasEmbedding         bool           // stage 0
	HasLMHead            bool           // the last stage
	EstimatedMemoryBytes int64          // Load.Total: weights, embedding and head included, and caches
	Load                 Load           // what EstimatedMemoryBytes is made of
	Memory               string         // stages with the same share its budget
	BudgetBytes          int64          // of Memory; Unlimited where nothing is known
}

// Limited tells whether there is a budget.
func (s StageAssignment) Limited() bool { return Memory{Budget: s.BudgetBytes}.limited() }

// Plan is the cut of one model: every layer once, in order, on stages 0 to len(Stages)-1.
type Plan struct {
	Stages   []StageAssignment
	Fits     bool // no memory is asked for more than its budget; false only where a budget is advisory
	Warnings []string
}

// New makes a plan. It is deterministic, exact, and never breaks a budget that is not advisory. A request that can't
// be met ends with a *TooManyStagesError, an *InfeasibleError, an *AdjacencyError or a *FlagError.
func New(r Request) (*Plan, error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	if r.Ranges != nil {
		return r.manual()
	}
	c := newCutter(r)
	if err := c.check(r.Demand); err != nil {
		return nil, err
	}
	ranges := c.balance(r.Objective)
	switch {
	case c.err != nil:
		return nil, c.err
	case ranges == nil:
		return nil, explain(r)
	}
	plan := newPlan(r, ranges)
	if w := imbalanceWarning(r, plan); w != "" {
		plan.Warnings = append([]string{w}, plan.Warnings...)
	}
	return plan, nil
}

func (r Request) manual() (*Plan, error) {
	p := newPrices(r.Profile, r.Demand, len(r.Ranges))
	if err := p.check(r.Demand); err != nil {
		return nil, err
	}
	if worst := r.worst(p, r.Ranges); worst.lacks > 0 {
		return nil, explainManual(r, worst)
	}
	return newPlan(r, r.Ranges), nil
}

func (r Request) validate() error {
	k := len(r.Hardware.Stages)
	if k < 1 {
		return fmt.Errorf("a plan of %d stages: want at least one", k)
	}
	if err := errors.Join(checkProfile(r.Profile), r.Hardware.validate(), r.checkDemand(), r.checkObjective()); err != nil {
		return err
	}
	if r.Ranges != nil {
		if k != len(r.Ranges) {
			return fmt.Errorf("%d layer ranges for %d stages: give as many", len(r.Ranges), k)
		}
		return errors.Join(checkRanges(r.Profile, r.Ranges)...)
	}
	if most := mostStages(r.Profile); k > most {
		return &TooManyStagesError{Stages: k, Most: most, Layers: len(r.Profile.Layers)}
	}
	return nil
}

func (r Request) checkDemand() error {
	d, length := r.Demand, r.Profile.ContextLength
	switch {
	case d.Context < 0 || d.Sequences < 0:
		return fmt.Errorf("a plan for %d sequences of %d tokens: want none or more", d.Sequences, d.Context)
	case length > 0 && d.Context > length:
		return flagFault("--ctx", d.Context, fmt.Sprintf("the model's context ends at %d tokens: ask for no more", length))
	}
	return nil
}

func (r Request) checkObjective() error {
	switch r.Objective {
	case "", ObjectiveMemory, ObjectiveSpeed:
	default:
		_, err := ParseObjective(string(r.Objective))
		return err
	}
	if r.Speeds == nil {
		return nil
	}
	text := FormatSpeeds(r.Speeds)
	if r.Objective != ObjectiveSpeed || r.Ranges != nil {
		return &FlagError{speedFlag, text, "speeds decide an automatic cut with --pp-objective speed: add it, and leave --pp-layers out, or leave the speeds out"}
	}
	if n, k := len(r.Speeds), len(r.Hardware.Stages); n != k {
		return &FlagError{speedFlag, text, fmt.Sprintf("%d speeds for %d stages: give one for each stage", n, k)}
	}
	for _, v := range r.Speeds {
		if !validSpeed(v) {
			return &FlagError{speedFlag, text, "a speed is a number above 0"}
		}
	}
	return nil
}

// newPlan assigns contiguous ranges to stages.
func newPlan(r Request, ranges []sdk.LayerRange) *Plan {
	k := len(ranges)
	prices := newPrices(r.Profile, r.Demand, k)
	plan := &Plan{Stages: make([]StageAssignment, k)}
	for i, layers := range ranges {
		place := r.Hardware.Stages[i]
		memory := r.Hardware.Memories[place.Memory]
		load := prices.load(i, layers.Start, layers.End)
		plan.Stages[i] = StageAssignment{
			StageIndex: i, DeviceID: place.DeviceID, LayerRange: layers, HasEmbedding: i == 0, HasLMHead: i == k-1,
			EstimatedMemoryBytes: load.Total(), Load: load, Memory: memory.Name, BudgetBytes: memory.Budget,
		}
	}
	advised := r
	advised.Hardware = r.Hardware.binding()
	worst := advised.worst(prices, ranges)
	plan.Fits = worst.lacks <= 0
	if !plan.Fits {
		plan.Warnings = append(plan.Warnings, worst.String())
	}
	return plan
}

// Ranges returns the stages' layers.
func (p *Plan) Ranges() []sdk.LayerRange {
	out := make([]sdk.LayerRange, len(p.Stages))
	for i, s := range p.Stages {
		out[i] = s.LayerRange
	}
	return out
}

// Imbalance returns the heaviest stage's load divided by the lightest's; 0 when the lightest has none.
func (p *Plan) Imbalance() float64 {
	low, high := p.bounds()
	return ratio(low, high)
}

func (p *Plan) bounds() (low, high int64) {
	loads := p.loads()
	return slices.Min(loads), slices.Max(loads)
}

func (p *Plan) loads() []int64 {
	out := make([]int64, len(p.Stages))
	for i, s := range p.Stages {
		out[i] = s.EstimatedMemoryBytes
	}
	return out
}

func ratio(low, high int64) float64 {
	if low <= 0 {
		return 0
	}
	return float64(high) / float64(low)
}
