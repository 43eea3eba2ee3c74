// Package partition owns the cut of a model's layers into pipeline stages.
package partition

import (
	"fmt"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
)

// StageAssignment is what one stage of a pipeline holds.
type StageAssignment struct {
	StageIndex           int
	DeviceID             string         // the node in the cluster configuration, "local-stage-<n>" on one machine
	LayerRange           sdk.LayerRange // half-open
	HasEmbedding         bool           // stage 0
	HasLMHead            bool           // the last stage
	EstimatedMemoryBytes int64          // weights, embedding and head included
}

// Plan is the cut of one model: every layer once, in order, on stages 0 to len(Stages)-1.
type Plan struct {
	Stages []StageAssignment
}

// newPlan assigns the given contiguous ranges to stages.
func newPlan(profile *sdk.ModelProfile, ranges []sdk.LayerRange) *Plan {
	plan := &Plan{Stages: make([]StageAssignment, len(ranges))}
	for i, r := range ranges {
		s := StageAssignment{
			StageIndex:   i,
			DeviceID:     fmt.Sprintf("local-stage-%d", i),
			LayerRange:   r,
			HasEmbedding: i == 0,
			HasLMHead:    i == len(ranges)-1,
		}
		for _, layer := range profile.Layers[r.Start:r.End] {
			s.EstimatedMemoryBytes += layer.Weights
		}
		if s.HasEmbedding {
			s.EstimatedMemoryBytes += profile.Embedding
		}
		if s.HasLMHead {
			s.EstimatedMemoryBytes += headBytes(profile, len(ranges))
		}
		plan.Stages[i] = s
	}
	return plan
}

// headBytes is what the head adds to the last of k stages. A tied projection is the embedding matrix: a single
// stage holds it once.
func headBytes(profile *sdk.ModelProfile, k int) int64 {
	if profile.Tied && k == 1 {
		return max(0, profile.Head-profile.Embedding)
	}
	return profile.Head
}

// Imbalance returns the heaviest stage's estimate divided by the lightest's; 0 when the lightest has none.
func (p *Plan) Imbalance() float64 {
	low, high := p.bounds()
	if low == 0 {
		return 0
	}
	return float64(high) / float64(low)
}

func (p *Plan) bounds() (low, high int64) {
	low = p.Stages[0].EstimatedMemoryBytes
	for _, s := range p.Stages {
		low = min(low, s.EstimatedMemoryBytes)
		high = max(high, s.EstimatedMemoryBytes)
	}
	return low, high
}

// Report describes the plan in one line and a line per stage. actual holds the bytes that each stage reported
// after its load; nil while nothing is loaded.
func (p *Plan) Report(actual []int64) string {
	var b strings.Builder
	low, high := p.bounds()
	fmt.Fprintf(&b, "pipeline partition quality: %d stages, max=%d bytes, min=%d bytes, imbalance=%.2fx", len(p.Stages), high, low, p.Imbalance())
	for i, s := range p.Stages {
		fmt.Fprintf(&b, "\n  stage %d device '%s' layers=%d estimated=%d actual=", i, s.DeviceID, s.LayerRange.End-s.LayerRange.Start, s.EstimatedMemoryBytes)
		if i >= len(actual) {
			b.WriteString("unknown")
			continue
		}
		fmt.Fprintf(&b, "%d", actual[i])
		if s.EstimatedMemoryBytes > 0 {
			fmt.Fprintf(&b, " drift=%+.1f%%", 100*(float64(actual[i])/float64(s.EstimatedMemoryBytes)-1))
		}
	}
	return b.String()
}
