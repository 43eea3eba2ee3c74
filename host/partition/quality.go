package partition

import (
	"fmt"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
)

// PartitionQualityReport compares what the plan expects of each stage's weights with what the stages hold.
type PartitionQualityReport struct {
	Stages    []StageQuality
	MaxBytes  int64   // estimated weights of the heaviest stage
	MinBytes  int64   // and of the lightest
	Imbalance float64 // MaxBytes / MinBytes; 0 when MinBytes is 0
	Warnings  []string
}

// StageQuality is one stage of a report.
type StageQuality struct {
	StageIndex     int
	DeviceID       string
	Layers         int
	EstimatedBytes int64 // weights, embedding and head included: what a load can confirm
	ActualBytes    int64 // held after the load
	Loaded         bool  // ActualBytes is known
}

// Drift is how far the estimate was off, in percent of it; 0 while nothing is loaded or expected.
func (q StageQuality) Drift() float64 {
	if !q.Loaded || q.EstimatedBytes == 0 {
		return 0
	}
	return 100 * (float64(q.ActualBytes)/float64(q.EstimatedBytes) - 1)
}

// Quality makes the report. actual holds the bytes that each stage reported after its load; nil while nothing is
// loaded.
func (p *Plan) Quality(actual []int64) PartitionQualityReport {
	report := PartitionQualityReport{Warnings: p.Warnings}
	var weights []int64
	for i, s := range p.Stages {
		q := StageQuality{StageIndex: i, DeviceID: s.DeviceID, Layers: s.LayerRange.End - s.LayerRange.Start, EstimatedBytes: s.Load.Weights}
		if i < len(actual) {
			q.ActualBytes, q.Loaded = actual[i], true
		}
		report.Stages = append(report.Stages, q)
		weights = append(weights, q.EstimatedBytes)
	}
	report.MinBytes, report.MaxBytes = slices.Min(weights), slices.Max(weights)
	report.Imbalance = ratio(report.MinBytes, report.MaxBytes)
	return report
}

// Report is Quality as text.
func (p *Plan) Report(actual []int64) string { return p.Quality(actual).String() }

// String describes the plan in one line and a line per stage.
func (q PartitionQualityReport) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "pipeline partition quality: %d stages, max=%d bytes, min=%d bytes, imbalance=%.2fx", len(q.Stages), q.MaxBytes, q.MinBytes, q.Imbalance)
	for _, s := range q.Stages {
		fmt.Fprintf(&b, "\n  stage %d device '%s' layers=%d estimated=%d actual=", s.StageIndex, s.DeviceID, s.Layers, s.EstimatedBytes)
		if !s.Loaded {
			b.WriteString("unknown")
			continue
		}
		fmt.Fprintf(&b, "%d", s.ActualBytes)
		if s.EstimatedBytes > 0 {
			fmt.Fprintf(&b, " drift=%+.1f%%", s.Drift())
		}
	}
	return b.String()
}

// imbalanceWarning speaks up when the heaviest stage of an automatic cut holds one and a half times what the lightest
// does, or more. A cut by speed is to be uneven.
func imbalanceWarning(r Request, p *Plan) string {
	low, high := p.bounds()
	if r.Objective == ObjectiveSpeed || high-low < (low+1)/2 || high == low {
		return ""
	}
	heaviest := p.Stages[slices.Index(p.loads(), high)]
	text := fmt.Sprintf("pipeline auto-partition produced an imbalanced plan: stage byte loads range from %d to %d", low, high)
	if low > 0 {
		text += fmt.Sprintf(" (%.2fx)", ratio(low, high))
	}
	text += fmt.Sprintf(", which may hurt throughput. Heaviest stage %d carries ", heaviest.StageIndex)
	if g := widestGroup(r, heaviest.LayerRange); g != nil {
		return text + fmt.Sprintf("adjacency group %d..%d (%s).", g.Source, g.Consumer, g.Reason)
	}
	return text + "no adjacency group: layer sizes or budgets leave no evener cut."
}

// widestGroup returns the group of the most bytes that lies in the range, nil if none does.
func widestGroup(r Request, in sdk.LayerRange) (widest *sdk.AdjacencyGroup) {
	prices := newPrices(r.Profile, r.Demand, 1)
	var most int64
	for i, g := range r.Profile.Adjacency {
		if g.Source < in.Start || g.Consumer >= in.End {
			continue
		}
		bytes := prices.prefix[g.Consumer+1].minus(prices.prefix[g.Source]).Total()
		if widest == nil || bytes > most {
			widest, most = &r.Profile.Adjacency[i], bytes
		}
	}
	return widest
}
