package partition

import (
	"fmt"
	"math"

	"github.com/mlxcel/mlxcel/sdk"
)

// Even cuts a model into k stages whose heaviest holds as few bytes as any cut allows, and among those one whose
// lightest holds the most; equal plans are told apart by the earlier cuts, so that the same model gives the same
// plan everywhere. No adjacency group is cut.
//
// It is exact: two dynamic programmes over the legal cuts, O(k·layers²) each.
func Even(profile *sdk.ModelProfile, k int) (*Plan, error) {
	if k < 1 {
		return nil, fmt.Errorf("a plan of %d stages: want at least one", k)
	}
	n := len(profile.Layers)
	if n == 0 {
		return nil, fmt.Errorf("the %s model has no layers to cut: check num_hidden_layers in its config.json", profile.Family)
	}
	c := newCutter(profile, k)
	if most := c.mostStages(); k > most {
		return nil, &TooManyStagesError{Stages: k, Most: most, Layers: n}
	}
	c.heaviest = c.solve(func(loads, rest int64) int64 { return max(loads, rest) }, less, 0, math.MaxInt64)[0][0]
	lightest := c.solve(func(load, rest int64) int64 { return min(load, rest) }, more, math.MaxInt64, -1)
	return newPlan(profile, c.trace(lightest)), nil
}

func less(a, b int64) bool { return a < b }
func more(a, b int64) bool { return a > b }

// cutter holds one cutting problem.
type cutter struct {
	k        int
	prefix   []int64 // prefix[i] is the weight of layers [0, i)
	legal    []bool  // legal[i]: a boundary may lie before layer i
	first    int64   // extra bytes of stage 0
	last     int64   // extra bytes of stage k-1
	heaviest int64   // no stage may be heavier
}

func newCutter(profile *sdk.ModelProfile, k int) *cutter {
	n := len(profile.Layers)
	c := &cutter{k: k, prefix: make([]int64, n+1), legal: make([]bool, n+1), first: profile.Embedding, last: headBytes(profile, k), heaviest: math.MaxInt64}
	for i, layer := range profile.Layers {
		c.prefix[i+1] = c.prefix[i] + layer.Weights
	}
	for i := range c.legal {
		c.legal[i] = cutGroup(profile.Adjacency, i) == nil
	}
	return c
}

// cutGroup returns a group that a boundary before layer cut would break, nil if there is none.
func cutGroup(groups []sdk.AdjacencyGroup, cut int) *sdk.AdjacencyGroup {
	for i := range groups {
		if groups[i].Source < cut && cut <= groups[i].Consumer {
			return &groups[i]
		}
	}
	return nil
}

func (c *cutter) layers() int { return len(c.prefix) - 1 }

func (c *cutter) mostStages() int {
	if c.layers() == 0 {
		return 0
	}
	most := 1
	for _, ok := range c.legal[1:c.layers()] {
		if ok {
			most++
		}
	}
	return most
}

// load is what stage s holds with layers [start, end).
func (c *cutter) load(s, start, end int) int64 {
	bytes := c.prefix[end] - c.prefix[start]
	if s == 0 {
		bytes += c.first
	}
	if s == c.k-1 {
		bytes += c.last
	}
	return bytes
}

// solve returns best[s][start]: the best value over all ways to cut layers from start on into stages s to k-1, by
// the given combination of a stage's load with the value of the stages behind it. none is the value of no stages,
// impossible that of a start from which no cut exists.
func (c *cutter) solve(combine func(load, rest int64) int64, better func(a, b int64) bool, none, impossible int64) [][]int64 {
	n := c.layers()
	best := make([][]int64, c.k+1)
	for s := range best {
		best[s] = make([]int64, n+1)
		for i := range best[s] {
			best[s][i] = impossible
		}
	}
	best[c.k][n] = none
	for s := c.k - 1; s >= 0; s-- {
		for start := range n {
			for end := start + 1; end <= n; end++ {
				if !c.allowed(s, start, end) || best[s+1][end] == impossible {
					continue
				}
				if v := combine(c.load(s, start, end), best[s+1][end]); better(v, best[s][start]) {
					best[s][start] = v
				}
			}
		}
	}
	return best
}

func (c *cutter) allowed(s, start, end int) bool {
	return c.legal[end] && c.load(s, start, end) <= c.heaviest
}

// trace walks the earliest cuts that reach the lightest stage's bytes that lightest promises.
func (c *cutter) trace(lightest [][]int64) []sdk.LayerRange {
	target := lightest[0][0]
	ranges := make([]sdk.LayerRange, 0, c.k)
	start := 0
	for s := range c.k {
		end := start + 1
		for !c.allowed(s, start, end) || lightest[s+1][end] < target || c.load(s, start, end) < target {
			end++
		}
		ranges = append(ranges, sdk.LayerRange{Start: start, End: end})
		start = end
	}
	return ranges
}
