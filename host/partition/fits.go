package partition

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
)

// Fits is how far a cluster's memory reaches, with the same number of stages and, where the operator chose them, the
// same ranges. Each counts with the other as asked for; 0 means that not even one fits, nil that nothing limits it.
type Fits struct {
	Context   *int // tokens of each sequence, the model's context at most
	Sequences *int
}

// mostAsked bounds the search for what fits: where this fits, there is no limit.
const mostAsked = math.MaxInt32

// WhatFits finds the longest context and the most sequences that the request's hardware holds. Advisory budgets count.
func WhatFits(r Request) (Fits, error) {
	r.Hardware = r.Hardware.binding()
	if err := r.validate(); err != nil {
		return Fits{}, err
	}
	var fits Fits
	longest := mostAsked
	if r.Profile.ContextLength > 0 {
		longest = r.Profile.ContextLength
	}
	var err error
	try := func(d Demand) bool {
		ok, fault := r.fitsWith(d)
		if err == nil {
			err = fault
		}
		return ok
	}
	context := most(longest, func(n int) bool { return try(Demand{n, r.Demand.Sequences}) })
	sequences := most(mostAsked, func(n int) bool { return try(Demand{r.Demand.Context, n}) })
	if context < mostAsked {
		fits.Context = &context
	}
	if sequences < mostAsked {
		fits.Sequences = &sequences
	}
	return fits, err
}

// most returns the largest number up to limit for which ok holds, 0 if it doesn't hold for 1. It must hold up to
// some number.
func most(limit int, ok func(int) bool) int {
	return int(smallest(1, int64(limit)+1, func(v int64) bool { return v > int64(limit) || !ok(int(v)) })) - 1
}

// fitsWith tells whether there is a plan for another demand.
func (r Request) fitsWith(d Demand) (bool, error) {
	r.Demand = d
	return r.fits()
}

// fits tells whether there is a plan, whatever it is worth. The request is valid.
func (r Request) fits() (bool, error) {
	if r.Ranges != nil {
		p := newPrices(r.Profile, r.Demand, len(r.Ranges))
		return p.total() < tooMuch && r.worst(p, r.Ranges).lacks <= 0, nil
	}
	c := newCutter(r)
	if c.total() >= tooMuch {
		return false, nil
	}
	return c.reach(noLimits()), c.err
}

// shortage is the memory that lacks the most.
type shortage struct {
	memory Memory
	stages []int // on that memory
	stage  int   // the heaviest of them
	layers sdk.LayerRange
	load   Load  // of that stage
	needs  int64 // of all of them
	lacks  int64 // needs less the budget
}

// worst finds the binding memory that lacks the most, or has the least to spare.
func (r Request) worst(p *prices, ranges []sdk.LayerRange) shortage {
	worst := shortage{lacks: math.MinInt64}
	for m, memory := range r.Hardware.Memories {
		if !memory.binding() {
			continue
		}
		here := shortage{memory: memory}
		for s, layers := range ranges {
			if r.Hardware.Stages[s].Memory != m {
				continue
			}
			load := p.load(s, layers.Start, layers.End)
			if here.stages == nil || load.Total() > here.load.Total() {
				here.stage, here.layers, here.load = s, layers, load
			}
			here.stages = append(here.stages, s)
			here.needs += load.Total()
		}
		here.lacks = here.needs - memory.Budget
		if here.stages != nil && here.lacks > worst.lacks {
			worst = here
		}
	}
	return worst
}

// String says who lacks how much.
func (s shortage) String() string {
	if len(s.stages) == 1 {
		return fmt.Sprintf("stage %d (layers %s) lacks %s: it needs %s (%s), it may use %s of %s",
			s.stage, FormatRanges([]sdk.LayerRange{s.layers}), exactSize(s.lacks), FormatSize(s.needs), s.load, FormatSize(s.memory.Budget), s.memory.Name)
	}
	return fmt.Sprintf("stages %s share %s, which lacks %s: they need %s together, stage %d the most with %s (%s), they may use %s",
		listOf(s.stages), s.memory.Name, exactSize(s.lacks), FormatSize(s.needs), s.stage, FormatSize(s.load.Total()), s.load, FormatSize(s.memory.Budget))
}

// String names the parts of a load.
func (l Load) String() string {
	text := "weights " + FormatSize(l.Weights)
	if l.KV > 0 {
		text += ", KV cache " + FormatSize(l.KV)
	}
	if l.State > 0 {
		text += ", state " + FormatSize(l.State)
	}
	return text
}

func exactSize(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d %s", n, plural(int(n), "byte"))
	}
	return fmt.Sprintf("%d bytes (%s)", n, FormatSize(n))
}

func listOf(numbers []int) string {
	text := make([]string, len(numbers))
	for i, n := range numbers {
		text[i] = fmt.Sprint(n)
	}
	return strings.Join(text, ", ")
}

// explain says why no cut fits, and what would.
func explain(r Request) error {
	c := newCutter(r)
	ranges := c.leastExtra()
	if c.err != nil {
		return c.err
	}
	return newInfeasible(r, r.worst(c.prices, ranges), tooLarge(r, c))
}

// explainManual says what the operator's ranges lack, and what would fit.
func explainManual(r Request, worst shortage) error {
	e := newInfeasible(r, worst, "")
	e.Manual = true
	r.Ranges = nil
	if plan, err := New(r); err == nil {
		e.Remedies.Ranges = plan.Ranges()
		e.Remedies.MoreStages = 0
	}
	return e
}

func newInfeasible(r Request, s shortage, cause string) *InfeasibleError {
	return &InfeasibleError{
		Stages: len(r.Hardware.Stages), Stage: s.stage, Sharing: s.stages, Memory: s.memory.Name, Layers: s.layers,
		NeedBytes: s.needs, BudgetBytes: s.memory.Budget, LackBytes: s.lacks, Cause: cause, Demand: r.Demand, Remedies: r.remedies(),
		text: s.String(),
	}
}

// tooLarge names a single thing that no stage that must hold it can hold. Empty when it is only the sum that is too
// large.
func tooLarge(r Request, c *cutter) string {
	k := len(r.Hardware.Stages)
	over := func(s int, bytes int64) bool {
		m := r.Hardware.Memories[r.Hardware.Stages[s].Memory]
		return m.binding() && bytes > m.Budget
	}
	if over(0, c.first) {
		return fmt.Sprintf("the embedding alone takes %s, and it must lie on stage 0", FormatSize(c.first))
	}
	if over(k-1, c.last) {
		return fmt.Sprintf("the head alone takes %s, and it must lie on the last stage", FormatSize(c.last))
	}
	for start := 0; start < c.layers(); {
		end := start + 1
		for !c.legal[end] {
			end++
		}
		load := c.prefix[end].minus(c.prefix[start])
		if everywhere(k, func(s int) bool { return over(s, load.Total()) }) {
			if end == start+1 {
				return fmt.Sprintf("layer %d alone takes %s (%s), more than any stage may use", start, FormatSize(load.Total()), load)
			}
			return fmt.Sprintf("layers %d-%d, which must share a stage (%s), take %s (%s), more than any stage may use",
				start, end-1, reasonAt(r.Profile, start), FormatSize(load.Total()), load)
		}
		start = end
	}
	return ""
}

func everywhere(stages int, ok func(s int) bool) bool {
	for s := range stages {
		if !ok(s) {
			return false
		}
	}
	return true
}

func reasonAt(p *sdk.ModelProfile, source int) string {
	for _, g := range p.Adjacency {
		if g.Source == source && g.Consumer > source {
			return g.Reason
		}
	}
	return ""
}

// Remedies are changes that would make a plan fit, each alone and tried. What is zero would not help.
type Remedies struct {
	Sequences  int              // fewer sequences
	Context    int              // a shorter context
	MoreStages int              // more stages, each of MoreBytes, at the end
	MoreBytes  int64            // the largest budget that there is
	Bits       int              // weights quantized to so many bits, affine with groups of 64, by the ratio to how they are stored now
	BitsNow    float64          // bits per weight now, scales included
	Ranges     []sdk.LayerRange // an automatic cut, where manual ranges don't fit
}

func (r Request) remedies() Remedies {
	fits := func(r Request) bool {
		ok, err := r.fits()
		return ok && err == nil
	}
	with := func(d Demand) bool {
		r := r
		r.Demand = d
		return fits(r)
	}
	var found Remedies
	if n := r.Demand.Sequences; n > 1 {
		found.Sequences = most(n-1, func(n int) bool { return with(Demand{r.Demand.Context, n}) })
	}
	if n := r.Demand.Context; n > 1 {
		found.Context = most(n-1, func(n int) bool { return with(Demand{n, r.Demand.Sequences}) })
	}
	found.MoreStages, found.MoreBytes = r.moreStages(fits)
	found.Bits, found.BitsNow = r.fewerBits(fits)
	return found
}

// mostMoreStages bounds the search for more stages.
const mostMoreStages = 64

func (r Request) moreStages(fits func(Request) bool) (n int, budget int64) {
	budget, k := r.Hardware.largest(), len(r.Hardware.Stages)
	room := min(mostMoreStages, mostStages(r.Profile)-k)
	for n := 1; n <= room; n++ {
		more := r
		more.Hardware, more.Ranges, more.Speeds = r.Hardware.grown(n, budget), nil, nil // speeds don't decide what fits
		if fits(more) {
			return n, budget
		}
	}
	return 0, 0
}

// packedBits are what MLX packs as affine, from the most to the fewest.
var packedBits = []int{8, 6, 5, 4, 3, 2}

// affineGroup is the group that mlx-lm quantizes with by default: a 16-bit scale and bias for so many weights.
const affineGroup = 64

// fewerBits finds the most bits a weight with which a plan fits. All weights shrink by the ratio of the bits.
func (r Request) fewerBits(fits func(Request) bool) (bits int, now float64) {
	now, ok := storedBits(r.Profile)
	if !ok {
		return 0, 0
	}
	for _, bits := range packedBits {
		if r.Quantizations != nil && !slices.Contains(r.Quantizations, fmt.Sprintf("affine-%d", bits)) {
			continue
		}
		stored := float64(bits) + 32.0/affineGroup
		if stored >= now {
			continue
		}
		packed := r
		packed.Profile = scaled(r.Profile, stored/now)
		if fits(packed) {
			return bits, now
		}
	}
	return 0, 0
}

// storedBits is how many bits a weight takes now, scales included. Of several ways to pack it takes the tightest, so
// that what it promises is kept.
func storedBits(p *sdk.ModelProfile) (bits float64, ok bool) {
	if p.Quantization == "none" {
		return float64(8 * p.Boundary.Dtype.Size()), p.Boundary.Dtype.Size() > 0
	}
	for _, way := range strings.Split(p.Quantization, ", ") {
		one, known := bitsOf(way)
		if !known {
			return 0, false
		}
		if !ok || one < bits {
			bits, ok = one, true
		}
	}
	return bits, ok
}

// bitsOf reads one way to pack, as ModelProfile.Quantization writes it.
func bitsOf(way string) (float64, bool) {
	var bits, group int
	if n, _ := fmt.Sscanf(way, "affine %d-bit group %d", &bits, &group); n == 2 && group > 0 {
		return float64(bits) + 32/float64(group), true // a 16-bit scale and bias
	}
	name, rest, _ := strings.Cut(way, " ")
	if n, _ := fmt.Sscanf(rest, "group %d", &group); n != 1 || group <= 0 {
		return 0, false
	}
	scale := 8 / float64(group) // one byte
	switch name {
	case "mxfp4", "nvfp4":
		return 4 + scale, true
	case "mxfp8":
		return 8 + scale, true
	}
	return 0, false
}

// scaled returns the profile with all weights at a part of their bytes, rounded up.
func scaled(p *sdk.ModelProfile, part float64) *sdk.ModelProfile {
	out := *p
	shrink := func(n int64) int64 { return int64(math.Ceil(float64(n) * part)) }
	out.Embedding, out.Head = shrink(p.Embedding), shrink(p.Head)
	out.Layers = slices.Clone(p.Layers)
	for i := range out.Layers {
		out.Layers[i].Weights = shrink(out.Layers[i].Weights)
	}
	return &out
}
