package partition

import (
	"math"
	"slices"
	"sort"

	"github.com/mlxcel/mlxcel/sdk"
)

// cutter finds the cuts of one model that keep to limits. It walks the stages from the last to the first and keeps, for
// each stage and first layer, the ways to place that stage and all behind it.
//
// Where no two stages share a memory, a way is a plain yes. Where they do, a way is what the stages behind have taken of
// each memory that a stage before still needs, and a way that takes as much or more of all of them than another is
// dropped: whatever fits in front of it fits in front of the other too. So nothing is lost, and the search is exact.
// Stages that share with their neighbours only, as those of one machine do, leave a single way.
type cutter struct {
	*prices
	hw     Hardware
	speeds []float64 // by stage
	speed  []float64 // speed[s] is that of stages 0 to s-1 together
	legal  []bool    // legal[i]: a boundary may lie before layer i
	open   [][]int   // open[s]: limited memories with a stage before s and one at s or behind
	behind [][]int   // behind[s][j]: where open[s][j] stands in open[s+1], -1 when it does not
	own    []int     // own[s]: where the memory of stage s stands in open[s+1], -1 when it does not
	ways   [][]ways  // by stage and first layer
	work   int       // comparisons of ways so far
	err    error     // of a search that was given up
}

// ways holds vectors of bytes taken, one number for each open memory, one vector after another.
type ways struct {
	count int
	taken []int64
}

// limits bound every stage of a cut.
type limits struct {
	most    int64   // bytes of the heaviest stage
	least   int64   // bytes of the lightest
	slowest float64 // time of the slowest stage
	extra   int64   // bytes that every budget is raised by
}

func noLimits() limits { return limits{most: math.MaxInt64, slowest: math.Inf(1)} }

// maxWork bounds the comparisons of a search, to about a second. Only stages that share memories crosswise, with layers
// of very many different sizes, come near: to decide such a case is as hard as the knapsack problem.
const maxWork = 1 << 27

func newCutter(r Request) *cutter {
	k := len(r.Hardware.Stages)
	c := &cutter{prices: newPrices(r.Profile, r.Demand, k), hw: r.Hardware, speeds: r.Speeds, speed: make([]float64, k+1), legal: legalCuts(r.Profile)}
	if c.speeds == nil {
		c.speeds = slices.Repeat([]float64{1}, k)
	}
	for s, v := range c.speeds {
		c.speed[s+1] = c.speed[s] + v
	}
	n := c.layers()
	c.ways = make([][]ways, k+1)
	for s := range c.ways {
		c.ways[s] = make([]ways, n+1)
	}
	c.open = make([][]int, k+1)
	for s := 1; s < k; s++ {
		for m, memory := range c.hw.Memories {
			on := func(p Place) bool { return p.Memory == m }
			if memory.binding() && slices.ContainsFunc(c.hw.Stages[:s], on) && slices.ContainsFunc(c.hw.Stages[s:], on) {
				c.open[s] = append(c.open[s], m)
			}
		}
	}
	for s := range k {
		c.own = append(c.own, slices.Index(c.open[s+1], c.hw.Stages[s].Memory))
		c.behind = append(c.behind, nil)
		for _, m := range c.open[s] {
			c.behind[s] = append(c.behind[s], slices.Index(c.open[s+1], m))
		}
	}
	return c
}

// legalCuts tells for each layer whether a stage may begin with it.
func legalCuts(profile *sdk.ModelProfile) []bool {
	legal := make([]bool, len(profile.Layers)+1)
	for i := range legal {
		legal[i] = true
	}
	for _, g := range profile.Adjacency {
		for i := g.Source + 1; i <= g.Consumer; i++ {
			legal[i] = false
		}
	}
	return legal
}

// mostStages is how many stages the model can be cut into.
func mostStages(profile *sdk.ModelProfile) int {
	stages := 0
	for _, ok := range legalCuts(profile)[:len(profile.Layers)] {
		if ok {
			stages++
		}
	}
	return stages
}

// time is how long stage s takes for a token, in units of bytes: one of speed 1 reads a byte in each.
func (c *cutter) time(s, start, end int) float64 {
	return float64(c.traffic(s, start, end)) / c.speeds[s]
}

// ends calls f with each layer that may follow the last layer of a stage s that starts at start, in order, and with
// the stage's load, until f returns false. Loads never shrink as a stage grows, so the first too large one ends it.
func (c *cutter) ends(s, start int, l limits, f func(end int, load int64) bool) {
	n, behind := c.layers(), c.stages-1-s
	timed := l.slowest < math.Inf(1)
	most := l.most
	if m := c.hw.Memories[c.hw.Stages[s].Memory]; m.binding() {
		most = min(most, add(m.Budget, l.extra))
	}
	from := start + 1
	if behind == 0 {
		from = n
	}
	for end := from; end <= n-behind; end++ {
		load := c.bytes(s, start, end)
		if load > most || timed && c.time(s, start, end) > l.slowest {
			return
		}
		if c.legal[end] && load >= l.least && !f(end, load) {
			return
		}
	}
}

// reach tells whether a cut keeps to the limits, and leaves in ways how.
func (c *cutter) reach(l limits) bool {
	n, k := c.layers(), c.stages
	c.ways[k][n] = ways{count: 1}
	for s := k - 1; s >= 0 && c.err == nil; s-- {
		last := n - (k - s)
		if s == 0 {
			last = 0
		}
		for start := s; start <= last; start++ {
			c.place(s, start, l)
		}
	}
	return c.err == nil && c.ways[0][0].count > 0
}

// hopeless tells that the layers before start are too many for the stages before s, or those from it for the rest.
func (c *cutter) hopeless(s, start int, l limits) bool {
	n, before, rest := c.layers(), int64(s), int64(c.stages-s)
	if s > 0 && c.first+c.sum[start] > multiply(l.most, before) || c.sum[n]-c.sum[start]+c.last > multiply(l.most, rest) {
		return true
	}
	if l.slowest == math.Inf(1) {
		return false
	}
	enough := func(bytes int64, speed float64) bool { return float64(bytes) <= l.slowest*speed*roundingSlack }
	return !enough(c.sum[start], c.speed[s]) || !enough(c.sum[n]-c.sum[start]+c.read, c.speed[c.stages]-c.speed[s])
}

// roundingSlack keeps a shortcut on the safe side of rounding; what decides is the stages' times themselves.
const roundingSlack = 1 + 1e-6

// place finds the ways of stage s that starts at start.
func (c *cutter) place(s, start int, l limits) {
	here := &c.ways[s][start]
	here.count, here.taken = 0, here.taken[:0]
	if !c.legal[start] || c.hopeless(s, start, l) {
		return
	}
	c.ends(s, start, l, func(end int, load int64) bool {
		behind := c.ways[s+1][end]
		if len(c.open[s]) == 0 && len(c.open[s+1]) == 0 {
			here.count = min(1, behind.count)
			return here.count == 0
		}
		for i := range behind.count {
			c.join(here, s, load, behind.vector(i, len(c.open[s+1])), l)
		}
		return c.err == nil
	})
}

func (w ways) vector(i, width int) []int64 { return w.taken[i*width : (i+1)*width] }

// join puts stage s before one way of the stages behind it, and keeps the outcome unless it breaks a budget or another
// way takes no more.
func (c *cutter) join(here *ways, s int, load int64, behind []int64, l limits) {
	own, all, width := c.hw.Stages[s].Memory, load, len(c.open[s])
	if c.own[s] >= 0 {
		all += behind[c.own[s]]
	}
	if m := c.hw.Memories[own]; m.binding() && all > add(m.Budget, l.extra) {
		return
	}
	here.taken = here.taken[:here.count*width]
	for j, m := range c.open[s] {
		switch i := c.behind[s][j]; {
		case m == own:
			here.taken = append(here.taken, all)
		case i >= 0:
			here.taken = append(here.taken, behind[i])
		}
	}
	if c.work += here.count; c.work > maxWork {
		c.err = ErrTooManyWays
		return
	}
	fresh := here.vector(here.count, width)
	for i := range here.count {
		if noMore(here.vector(i, width), fresh) {
			return
		}
	}
	kept := 0
	for i := range here.count {
		if v := here.vector(i, width); !noMore(fresh, v) {
			copy(here.vector(kept, width), v)
			kept++
		}
	}
	copy(here.vector(kept, width), fresh)
	here.count = kept + 1
}

// noMore tells whether a takes no more than b of any memory.
func noMore(a, b []int64) bool {
	for i := range a {
		if a[i] > b[i] {
			return false
		}
	}
	return true
}

// trace returns the earliest cuts among those that the last reach, with the same limits, found.
func (c *cutter) trace(l limits) []sdk.LayerRange {
	ranges := make([]sdk.LayerRange, 0, c.stages)
	taken := make([]int64, len(c.hw.Memories))
	start := 0
	for s := range c.stages {
		c.ends(s, start, l, func(end int, load int64) bool {
			own := c.hw.Stages[s].Memory
			taken[own] += load
			if !c.fits(s+1, end, taken, l) {
				taken[own] -= load
				return true
			}
			ranges = append(ranges, sdk.LayerRange{Start: start, End: end})
			start = end
			return false
		})
	}
	return ranges
}

// fits tells whether stages s and up can follow, from layer start on, stages that have taken so much of each memory.
func (c *cutter) fits(s, start int, taken []int64, l limits) bool {
	for m, memory := range c.hw.Memories {
		if memory.binding() && taken[m] > add(memory.Budget, l.extra) {
			return false
		}
	}
	width := len(c.open[s])
	for i := range c.ways[s][start].count {
		v := c.ways[s][start].vector(i, width)
		ok := true
		for j, m := range c.open[s] {
			ok = ok && v[j]+taken[m] <= add(c.hw.Memories[m].Budget, l.extra)
		}
		if ok {
			return true
		}
	}
	return false
}

// balance returns the best legal cut under the budgets, nil if there is none. Best is, by the objective:
//
//   - ObjectiveMemory: the heaviest stage holds as few bytes as any cut allows; among those cuts, the lightest stage
//     holds the most.
//   - ObjectiveSpeed: the slowest stage takes as little time as any cut allows; among those cuts, the heaviest stage
//     holds as few bytes as possible.
//
// What is still equal is told apart by the earlier cuts, so that the same model gives the same plan everywhere.
func (c *cutter) balance(objective Objective) []sdk.LayerRange {
	l := noLimits()
	var ok bool
	if objective == ObjectiveSpeed {
		if l.slowest, ok = c.leastTime(l); ok {
			l.most, ok = c.leastMost(l)
		}
	} else if l.most, ok = c.leastMost(l); ok {
		l.least = c.mostLeast(l)
	}
	if !ok || !c.reach(l) {
		return nil
	}
	return c.trace(l)
}

// The best value of a limit is the load or the time of some stage, so the searches below halve what is left of the values
// and then go on to the next that a stage can have: of those there are few. They begin near the mean, since a search under
// tight limits is much shorter.

// leastMost returns the smallest limit of the heaviest stage that a cut keeps to; false if none keeps to l.
func (c *cutter) leastMost(l limits) (int64, bool) {
	low, total := c.heavier(c.total()/int64(c.stages)-1), c.total()
	l.most = low
	for step := low/16 + 1; !c.reach(l); step = multiply(step, 4) {
		if l.most >= total {
			return 0, false
		}
		low = c.heavier(l.most)
		l.most = add(l.most, step)
	}
	heaviest := func() int64 { return slices.Max(c.loads(c.trace(l))) }
	high := heaviest()
	for low < high {
		if l.most = low + (high-low)/2; c.reach(l) {
			high = heaviest()
		} else {
			low = c.heavier(l.most)
		}
	}
	return high, true
}

// mostLeast returns the largest limit of the lightest stage that a cut keeps to. One must keep to l.
func (c *cutter) mostLeast(l limits) int64 {
	if !c.reach(l) {
		return l.least
	}
	lightest := func() int64 { return slices.Min(c.loads(c.trace(l))) }
	low, high := lightest(), c.lighter(c.total()/int64(c.stages)+1)
	for low < high {
		if l.least = high - (high-low)/2; c.reach(l) {
			low = lightest()
		} else {
			high = c.lighter(l.least)
		}
	}
	return low
}

// leastTime returns the smallest limit of the slowest stage that a cut keeps to; false if none keeps to l.
func (c *cutter) leastTime(l limits) (float64, bool) {
	all := float64(c.sum[c.layers()] + c.read)
	low, longest := c.slower(all/c.speed[c.stages]/roundingSlack), all/slices.Min(c.speeds)*roundingSlack
	l.slowest = low
	for step := low / 16; !c.reach(l); step *= 4 {
		if l.slowest >= longest {
			return 0, false
		}
		low = c.slower(l.slowest)
		l.slowest += max(step, 1)
	}
	high := c.slowest(c.trace(l))
	for low < high {
		if l.slowest = low + (high-low)/2; l.slowest == high { // nothing lies between
			l.slowest = low
		}
		if c.reach(l) {
			high = c.slowest(c.trace(l))
		} else {
			low = c.slower(l.slowest)
		}
	}
	return high, true
}

func (c *cutter) loads(ranges []sdk.LayerRange) []int64 {
	out := make([]int64, len(ranges))
	for s, r := range ranges {
		out[s] = c.bytes(s, r.Start, r.End)
	}
	return out
}

func (c *cutter) slowest(ranges []sdk.LayerRange) (t float64) {
	for s, r := range ranges {
		t = max(t, c.time(s, r.Start, r.End))
	}
	return t
}

// heavier returns the smallest load above v that a stage can have; the largest number if there is none.
func (c *cutter) heavier(v int64) int64 {
	best := int64(math.MaxInt64)
	for _, s := range c.kinds() {
		for start := range c.starts(s) {
			if end := c.firstEnd(s, start, func(end int) bool { return c.bytes(s, start, end) > v }); end <= c.layers() {
				best = min(best, c.bytes(s, start, end))
			}
		}
	}
	return best
}

// lighter returns the largest load below v that a stage can have; 0 if there is none.
func (c *cutter) lighter(v int64) (best int64) {
	for _, s := range c.kinds() {
		for start := range c.starts(s) {
			end := c.firstEnd(s, start, func(end int) bool { return c.bytes(s, start, end) >= v }) - 1
			if end > start && (s < c.stages-1 || end == c.layers()) {
				best = max(best, c.bytes(s, start, end))
			}
		}
	}
	return best
}

// slower returns the smallest time above v that a stage can have; infinity if there is none.
func (c *cutter) slower(v float64) float64 {
	best := math.Inf(1)
	for s := range c.stages {
		for start := range c.starts(s) {
			if end := c.firstEnd(s, start, func(end int) bool { return c.time(s, start, end) > v }); end <= c.layers() {
				best = min(best, c.time(s, start, end))
			}
		}
	}
	return best
}

// kinds returns one stage of each kind that prices layers its own way: the first, one between, the last.
func (c *cutter) kinds() []int {
	return slices.Compact([]int{0, min(1, c.stages-1), c.stages - 1})
}

// starts is how many layers stage s may begin with, counted from the first.
func (c *cutter) starts(s int) int {
	if s == 0 {
		return 1
	}
	return c.layers()
}

// firstEnd returns the first layer that may follow a stage s from start on for which ok holds, one past the end if there is
// none. ok holds from some layer on.
func (c *cutter) firstEnd(s, start int, ok func(end int) bool) int {
	n, from := c.layers(), start+1
	if s == c.stages-1 {
		from = n
	}
	return from + sort.Search(n+1-from, func(i int) bool { return ok(from + i) })
}

// leastExtra returns the most even of the cuts that fit once every budget is raised by as few bytes as possible.
func (c *cutter) leastExtra() []sdk.LayerRange {
	l := noLimits()
	l.extra = smallest(0, c.total(), func(v int64) bool {
		l.extra = v
		return c.reach(l)
	})
	if l.most, _ = c.leastMost(l); !c.reach(l) {
		return nil
	}
	return c.trace(l)
}

// smallest returns the smallest number in [low, high] for which ok holds. It must hold for high, and from some number on.
func smallest(low, high int64, ok func(int64) bool) int64 {
	for low < high {
		middle := low + (high-low)/2
		if ok(middle) {
			high = middle
		} else {
			low = middle + 1
		}
	}
	return low
}
