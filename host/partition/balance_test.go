package partition

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
)

// reference decides by trying every cut, with sums of its own.
type reference struct {
	Request
	best   []sdk.LayerRange
	rank   []float64 // the best's, by order of importance, each the smaller the better
	unable bool      // some cut is legal, whether it fits or not
}

func (r *reference) search() {
	n, k := len(r.Profile.Layers), len(r.Hardware.Stages)
	if k > n {
		return
	}
	var try func(ranges []sdk.LayerRange, start int)
	try = func(ranges []sdk.LayerRange, start int) {
		if len(ranges) == k-1 {
			r.consider(append(slices.Clone(ranges), sdk.LayerRange{Start: start, End: n}))
			return
		}
		for end := start + 1; end < n; end++ {
			try(append(ranges, sdk.LayerRange{Start: start, End: end}), end)
		}
	}
	try(nil, 0)
}

// consider takes a cut that is strictly better: cuts come in ascending order.
func (r *reference) consider(ranges []sdk.LayerRange) {
	if !r.legal(ranges) {
		return
	}
	r.unable = true
	loads := r.loads(ranges)
	if !r.within(loads) {
		return
	}
	rank := []float64{float64(slices.Max(loads)), -float64(slices.Min(loads))}
	if r.Objective == ObjectiveSpeed {
		rank = []float64{r.slowest(ranges), float64(slices.Max(loads))}
	}
	if r.best == nil || slices.Compare(rank, r.rank) < 0 {
		r.best, r.rank = ranges, rank
	}
}

func (r *reference) legal(ranges []sdk.LayerRange) bool {
	for _, g := range r.Profile.Adjacency {
		for _, stage := range ranges {
			in := func(i int) bool { return stage.Start <= i && i < stage.End }
			if in(g.Source) != in(g.Consumer) {
				return false
			}
		}
	}
	return true
}

func (r *reference) loads(ranges []sdk.LayerRange) []int64 {
	out := make([]int64, len(ranges))
	for s, stage := range ranges {
		for i := stage.Start; i < stage.End; i++ {
			l := r.Profile.Layers[i]
			out[s] += l.Weights
			for _, state := range l.States {
				positions := 0
				for positions < r.Demand.Context && (state.Window == 0 || positions < state.Window) {
					positions += max(1, state.Block)
				}
				if state.Window > 0 {
					positions = min(positions, state.Window)
				}
				out[s] += (state.Fixed + state.BytesPerPosition*int64(positions)) * int64(r.Demand.Sequences)
			}
		}
	}
	out[0] += r.Profile.Embedding
	head := r.Profile.Head
	if len(ranges) == 1 {
		head -= r.Profile.TiedBytes
	}
	out[len(out)-1] += head
	return out
}

func (r *reference) within(loads []int64) bool {
	for m, memory := range r.Hardware.Memories {
		var sum int64
		for s, place := range r.Hardware.Stages {
			if place.Memory == m {
				sum += loads[s]
			}
		}
		if sum > memory.Budget {
			return false
		}
	}
	return true
}

func (r *reference) slowest(ranges []sdk.LayerRange) (slowest float64) {
	read := r.loads(ranges)
	read[0] -= r.Profile.Embedding // a row of it
	if len(ranges) == 1 {
		read[0] += r.Profile.TiedBytes
	}
	for s, bytes := range read {
		slowest = max(slowest, float64(bytes)/r.Speeds[s])
	}
	return slowest
}

// check compares New with the reference: the same cut, or an error that is true.
func check(t *testing.T, r Request) {
	t.Helper()
	want := reference{Request: r}
	want.search()
	got, err := New(r)
	var tooMany *TooManyStagesError
	var infeasible *InfeasibleError
	switch {
	case want.best != nil:
		if err != nil || !slices.Equal(got.Ranges(), want.best) {
			t.Fatalf("%s\n got %v, %v\nwant %v", describe(r), got, err, want.best)
		}
		if !got.Fits || !want.within(got.loads()) || !slices.Equal(got.loads(), want.loads(want.best)) {
			t.Fatalf("%s\nthe plan's loads are %v of %+v, want %v", describe(r), got.loads(), got, want.loads(want.best))
		}
	case want.unable:
		if !errors.As(err, &infeasible) {
			t.Fatalf("%s\n got %v, %v, but no cut fits", describe(r), got, err)
		}
		checkRemedies(t, r, infeasible)
	case !errors.As(err, &tooMany):
		t.Fatalf("%s\n got %v, %v, but no cut is legal", describe(r), got, err)
	}
}

// checkRemedies: each proposal works, and one step less does not.
func checkRemedies(t *testing.T, r Request, e *InfeasibleError) {
	t.Helper()
	found := func(r Request) bool {
		ref := reference{Request: r}
		ref.search()
		return ref.best != nil
	}
	demand := func(context, sequences int) bool {
		r := r
		r.Demand = Demand{context, sequences}
		return found(r)
	}
	d, m := r.Demand, e.Remedies
	exact := func(n, limit int, ok func(int) bool) bool {
		return (n == 0 || ok(n)) && (n+1 >= limit || !ok(n+1))
	}
	if !exact(m.Sequences, d.Sequences, func(n int) bool { return demand(d.Context, n) }) {
		t.Fatalf("%s\n%v\n%d sequences", describe(r), e, m.Sequences)
	}
	if !exact(m.Context, d.Context, func(n int) bool { return demand(n, d.Sequences) }) {
		t.Fatalf("%s\n%v\ncontext %d", describe(r), e, m.Context)
	}
	more := func(n int) bool {
		r := r
		r.Hardware, r.Speeds, r.Objective = r.Hardware.grown(n, r.Hardware.largest()), nil, ObjectiveMemory
		return found(r)
	}
	for n := 1; n <= len(r.Profile.Layers)-len(r.Hardware.Stages); n++ {
		if ok := more(n); ok != (n == m.MoreStages) {
			t.Fatalf("%s\n%v\n%d more stages fit: %v", describe(r), e, n, ok)
		} else if ok {
			break
		}
	}
	checkLack(t, r, e)
}

// checkLack: raising every budget by what is lacked makes a cut fit, by one byte less makes none.
func checkLack(t *testing.T, r Request, e *InfeasibleError) {
	t.Helper()
	raised := func(by int64) bool {
		ref := reference{Request: r}
		ref.Hardware.Memories = slices.Clone(r.Hardware.Memories)
		for i := range ref.Hardware.Memories {
			ref.Hardware.Memories[i].Budget += by
		}
		ref.search()
		return ref.best != nil
	}
	if e.LackBytes <= 0 || e.NeedBytes-e.BudgetBytes != e.LackBytes || !raised(e.LackBytes) || raised(e.LackBytes-1) {
		t.Fatalf("%s\n%v\nlacks %d", describe(r), e, e.LackBytes)
	}
}

func describe(r Request) string {
	return fmt.Sprintf("%+v for %+v on %+v by %s %v", *r.Profile, r.Demand, r.Hardware, r.Objective, r.Speeds)
}

// Every model of up to four layers of one or three bytes, on every way to share memories of three sizes, with no
// group and with each.
func TestNewEqualsBruteForceOnAllSmallCases(t *testing.T) {
	for layers := 1; layers <= 4; layers++ {
		for sizes := range 1 << layers {
			profile := &sdk.ModelProfile{Embedding: 1, Head: 2, TiedBytes: int64(sizes % 2)}
			for i := range layers {
				profile.Layers = append(profile.Layers, sdk.LayerProfile{Weights: int64(1 + sizes>>i&1*2)})
			}
			for _, groups := range smallGroups(layers) {
				profile.Adjacency = groups
				for stages := 1; stages <= layers; stages++ {
					eachHardware(stages, []int64{2, 4, 7}, func(h Hardware) {
						check(t, Request{Profile: profile, Hardware: h})
					})
				}
			}
		}
	}
}

func smallGroups(layers int) [][]sdk.AdjacencyGroup {
	out := [][]sdk.AdjacencyGroup{nil}
	for source := range layers {
		for consumer := source + 1; consumer < layers; consumer++ {
			out = append(out, []sdk.AdjacencyGroup{{Source: source, Consumer: consumer, Reason: "test"}})
		}
	}
	return out
}

// eachHardware calls f with every way to put stages on memories, of every choice of budgets.
func eachHardware(stages int, budgets []int64, f func(Hardware)) {
	var choose func(h Hardware)
	choose = func(h Hardware) {
		if len(h.Stages) == stages {
			f(h)
			return
		}
		for m := range h.Memories {
			choose(Hardware{h.Memories, append(slices.Clone(h.Stages), Place{Memory: m})})
		}
		for _, b := range budgets {
			choose(Hardware{append(slices.Clone(h.Memories), Memory{Name: "m", Budget: b}), append(slices.Clone(h.Stages), Place{Memory: len(h.Memories)})})
		}
	}
	choose(Hardware{})
}

// A thousand random models, with caches, groups, shared memories, budgets around what is needed, and speeds.
func TestNewEqualsBruteForceOnRandomModels(t *testing.T) {
	fits := 0
	for seed := range uint64(1000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		r := randomRequest(rng)
		check(t, r)
		if _, err := New(r); err == nil {
			fits++
		}
	}
	if fits < 300 || fits > 800 {
		t.Errorf("%d of 1000 fit: the models are no test of both outcomes", fits)
	}
}

// layer has a cache that grows by single positions.
func layer(weights, perPosition int64) sdk.LayerProfile {
	return sdk.LayerProfile{Weights: weights, States: []sdk.StateProfile{{Kind: sdk.StateKV, BytesPerPosition: perPosition}}}
}

func randomRequest(rng *rand.Rand) Request {
	n := 1 + rng.IntN(9)
	p := &sdk.ModelProfile{Embedding: rng.Int64N(30), Head: rng.Int64N(40)}
	p.TiedBytes = rng.Int64N(1 + min(p.Embedding, p.Head))
	for range n {
		l := sdk.LayerProfile{Weights: rng.Int64N(5) * 7}
		for range rng.IntN(3) {
			l.States = append(l.States, sdk.StateProfile{
				BytesPerPosition: rng.Int64N(3), Window: rng.IntN(2) * rng.IntN(5), Fixed: rng.Int64N(4), Block: rng.IntN(4),
			})
		}
		p.Layers = append(p.Layers, l)
	}
	for range rng.IntN(3) {
		if source := rng.IntN(n); source+1 < n {
			p.Adjacency = append(p.Adjacency, sdk.AdjacencyGroup{Source: source, Consumer: source + 1 + rng.IntN(n-source-1), Reason: "test"})
		}
	}
	r := Request{Profile: p, Demand: Demand{rng.IntN(9), rng.IntN(4)}}
	k := 1 + rng.IntN(n)
	memories := 1 + rng.IntN(k)
	for m := range memories {
		r.Hardware.Memories = append(r.Hardware.Memories, Memory{Name: fmt.Sprintf("m%d", m), Budget: 1 + rng.Int64N(400/int64(memories))})
	}
	for s := range k {
		m := rng.IntN(memories)
		if memories == k {
			m = s
		}
		r.Hardware.Stages = append(r.Hardware.Stages, Place{DeviceID: fmt.Sprint(s), Memory: m})
	}
	if rng.IntN(3) == 0 {
		r.Objective = ObjectiveSpeed
		for range k {
			r.Speeds = append(r.Speeds, 0.5+2*rng.Float64())
		}
	}
	return r
}

// Advisory budgets bind nothing, and are told.
func TestAdvisoryBudget(t *testing.T) {
	for seed := range uint64(200) {
		r := randomRequest(rand.New(rand.NewPCG(seed, 5)))
		ref := reference{Request: r}
		ref.search()
		advised := r
		advised.Hardware.Memories = slices.Clone(r.Hardware.Memories)
		for i := range advised.Hardware.Memories {
			advised.Hardware.Memories[i].Advisory = true
		}
		plan, err := New(advised)
		if err != nil {
			if ref.unable {
				t.Fatalf("%s\n%v", describe(r), err)
			}
			continue
		}
		told := slices.ContainsFunc(plan.Warnings, func(w string) bool { return strings.Contains(w, "lacks") })
		if ok := ref.within(plan.loads()); plan.Fits != ok || told == ok {
			t.Fatalf("%s\n%+v: within the budgets: %v", describe(r), plan, ok)
		}
	}
}

// What fits is the last that does.
func TestWhatFitsEqualsBruteForce(t *testing.T) {
	checked := 0
	for seed := range uint64(300) {
		r := randomRequest(rand.New(rand.NewPCG(seed, 7)))
		r.Profile.ContextLength = 12
		if _, err := New(r); err != nil {
			continue
		}
		checked++
		fits, err := WhatFits(r)
		if err != nil {
			t.Fatal(err)
		}
		ok := func(d Demand) bool {
			ref := reference{Request: r}
			ref.Demand = d
			ref.search()
			return ref.best != nil
		}
		if n := *fits.Context; !ok(Demand{n, r.Demand.Sequences}) || n < 12 && ok(Demand{n + 1, r.Demand.Sequences}) || n > 12 {
			t.Fatalf("%s\ncontext %d", describe(r), n)
		}
		if n := fits.Sequences; n == nil {
			if !ok(Demand{r.Demand.Context, 1 << 20}) {
				t.Fatalf("%s\nany number of sequences", describe(r))
			}
		} else if !ok(Demand{r.Demand.Context, *n}) || ok(Demand{r.Demand.Context, *n + 1}) {
			t.Fatalf("%s\n%d sequences", describe(r), *n)
		}
	}
	if checked < 100 {
		t.Errorf("only %d models fit", checked)
	}
}

func TestWhatFitsWithManualRangesAndWithoutLimits(t *testing.T) {
	r := Request{
		Profile:  &sdk.ModelProfile{Layers: slices.Repeat([]sdk.LayerProfile{layer(10, 1)}, 3)},
		Demand:   Demand{4, 1},
		Hardware: Separate([]int64{30, 20}),
		Ranges:   []sdk.LayerRange{{Start: 0, End: 2}, {Start: 2, End: 3}},
	}
	fits, err := WhatFits(r)
	if err != nil || *fits.Context != 5 || *fits.Sequences != 1 {
		t.Errorf("got %v, %v, %v, want a context of 5 and 1 sequence", *fits.Context, *fits.Sequences, err)
	}
	r.Hardware = Local(2, Memory{Budget: Unlimited})
	if fits, err := WhatFits(r); err != nil || fits.Context != nil || fits.Sequences != nil {
		t.Errorf("without limits: got %v, %v", fits, err)
	}
}

func TestWeightlessLayers(t *testing.T) {
	for stages := 1; stages <= 5; stages++ {
		r := Request{Profile: &sdk.ModelProfile{Layers: make([]sdk.LayerProfile, 5)}, Hardware: Separate(slices.Repeat([]int64{1}, stages))}
		check(t, r)
		r.Objective, r.Speeds = ObjectiveSpeed, slices.Repeat([]float64{2}, stages)
		check(t, r)
	}
}

func TestRefusesWhatCantBeSummed(t *testing.T) {
	layers := []sdk.LayerProfile{layer(1, 1<<40), layer(1, 1<<40)}
	for _, d := range []Demand{{1 << 30, 1 << 30}, {math.MaxInt, math.MaxInt}, {1 << 20, 1}} {
		r := Request{Profile: &sdk.ModelProfile{Layers: layers}, Demand: d, Hardware: Local(2, Memory{Budget: Unlimited})}
		if p, err := New(r); err == nil || !strings.Contains(err.Error(), "--ctx") {
			t.Errorf("%+v: %+v, %v", d, p, err)
		}
		r.Ranges = []sdk.LayerRange{{Start: 0, End: 1}, {Start: 1, End: 2}}
		if p, err := New(r); err == nil {
			t.Errorf("%+v by hand: %+v", d, p)
		}
	}
}

func TestRefusesBadProfiles(t *testing.T) {
	for name, p := range map[string]sdk.ModelProfile{
		"negative weights": {Layers: []sdk.LayerProfile{{Weights: -1}}},
		"negative head":    {Layers: []sdk.LayerProfile{{}}, Head: -1},
		"negative tied":    {Layers: []sdk.LayerProfile{{}}, Embedding: 2, Head: 1, TiedBytes: -1},
		"more tied":        {Layers: []sdk.LayerProfile{{}}, Embedding: 2, Head: 1, TiedBytes: 2},
		"group outside":    {Layers: []sdk.LayerProfile{{}, {}}, Adjacency: []sdk.AdjacencyGroup{{Source: 0, Consumer: 2}}},
		"group reversed":   {Layers: []sdk.LayerProfile{{}, {}}, Adjacency: []sdk.AdjacencyGroup{{Source: 1, Consumer: 0}}},
	} {
		var fault *ProfileError
		if _, err := New(Request{Profile: &p, Hardware: Separate([]int64{100})}); !errors.As(err, &fault) {
			t.Errorf("%s: %v, want a *ProfileError", name, err)
		}
	}
}

// Crosswise sharing of many unequal layers is given up, not decided wrongly.
func TestGivesUpOnTooManyWays(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	r := Request{Profile: &sdk.ModelProfile{}, Hardware: Hardware{Memories: []Memory{{Name: "a", Budget: 1 << 45}, {Name: "b", Budget: 1 << 45}, {Name: "c", Budget: 1 << 45}}}}
	for range 64 {
		r.Profile.Layers = append(r.Profile.Layers, sdk.LayerProfile{Weights: rng.Int64N(1 << 40)})
	}
	for s := range 12 {
		r.Hardware.Stages = append(r.Hardware.Stages, Place{Memory: s % 3})
	}
	if _, err := New(r); !errors.Is(err, ErrTooManyWays) {
		t.Errorf("got %v", err)
	}
}

// gemma4E2B has the shape of Gemma 4 e2b: layers 15 to 34 read the cache of layer 13 (sliding) or 14 (full), and have
// MLPs of twice the width.
func gemma4E2B() *sdk.ModelProfile {
	p := &sdk.ModelProfile{Embedding: 280 << 20, Head: 280 << 20, Tied: true, TiedBytes: 280 << 20, Quantization: "affine 4-bit group 64"}
	for i := range 35 {
		l := layer(22<<20, 512)
		l.Kind, l.States[0].Window = "sliding-attention", 512
		if i%5 == 4 {
			l = layer(22<<20, 1024)
			l.Kind = "attention"
		}
		if i >= 15 {
			l.Weights, l.States = 38<<20, nil
			p.Adjacency = append(p.Adjacency, sdk.AdjacencyGroup{Source: map[bool]int{false: 13, true: 14}[i%5 == 4], Consumer: i, Reason: "shared KV cache"})
		}
		p.Layers = append(p.Layers, l)
	}
	return p
}

func TestGemma4CutsBeforeItsSources(t *testing.T) {
	profile := gemma4E2B()
	p, err := New(Request{Profile: profile, Demand: Demand{4096, 1}, Hardware: Local(2, Memory{Budget: Unlimited})})
	if err != nil {
		t.Fatal(err)
	}
	if cut := p.Stages[0].LayerRange.End; cut != 13 {
		t.Errorf("the cut is before layer %d, want 13, the last legal one", cut)
	}
	if len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "Heaviest stage 1 carries adjacency group 14..34 (shared KV cache)") {
		t.Errorf("warnings %q", p.Warnings)
	}
	_, err = New(Request{Profile: profile, Hardware: Local(15, Memory{Budget: Unlimited})})
	var tooMany *TooManyStagesError
	if !errors.As(err, &tooMany) || tooMany.Most != 14 {
		t.Errorf("15 stages: %v, want at most 14", err)
	}
	_, err = New(Request{Profile: profile, Hardware: Local(2, Memory{Budget: Unlimited}), Ranges: []sdk.LayerRange{{Start: 0, End: 20}, {Start: 20, End: 35}}})
	var cut *AdjacencyError
	if !errors.As(err, &cut) || cut.Group.Source != 13 || cut.Group.Consumer != 20 || cut.Before != 13 || cut.After != 0 {
		t.Errorf("a cut before layer 20: %+v, %v", cut, err)
	}
}

// 16 GiB and 64 GiB, and a model that needs both.
func TestUnequalDevices(t *testing.T) {
	profile := &sdk.ModelProfile{Embedding: 1 << 30, Head: 1 << 30, ContextLength: 8192}
	for range 62 {
		profile.Layers = append(profile.Layers, layer(1<<30, 4096))
	}
	for _, budgets := range [][]int64{{16 << 30, 64 << 30}, {64 << 30, 16 << 30}} {
		p, err := New(Request{Profile: profile, Demand: Demand{8192, 4}, Hardware: Separate(budgets)})
		if err != nil {
			t.Fatal(err)
		}
		small, large := p.Stages[0], p.Stages[1]
		if budgets[0] > budgets[1] {
			small, large = large, small
		}
		if small.EstimatedMemoryBytes > 16<<30 || large.EstimatedMemoryBytes > 64<<30 {
			t.Errorf("%v: loads %v", budgets, p.loads())
		}
		if count(small) >= count(large) {
			t.Errorf("%v: %d layers on the small device, %d on the large", budgets, count(small), count(large))
		}
	}
}

func count(s StageAssignment) int { return s.LayerRange.End - s.LayerRange.Start }

func BenchmarkNew(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	profile := &sdk.ModelProfile{Embedding: 1 << 30, Head: 1 << 30}
	for range 128 {
		profile.Layers = append(profile.Layers, layer(4<<30+rng.Int64N(1<<30), 4096*rng.Int64N(2)))
	}
	budgets := make([]int64, 16)
	speeds := make([]float64, 16)
	for i := range budgets {
		budgets[i], speeds[i] = 36<<30+rng.Int64N(32<<30), 1+rng.Float64()
	}
	r := Request{Profile: profile, Demand: Demand{8192, 4}, Hardware: Separate(budgets)}
	fast, halves := r, r
	fast.Objective, fast.Speeds = ObjectiveSpeed, speeds
	halves.Hardware = Hardware{Memories: []Memory{{Budget: 400 << 30}, {Budget: 700 << 30}}}
	for s := range 16 {
		halves.Hardware.Stages = append(halves.Hardware.Stages, Place{Memory: s / 8})
	}
	for name, r := range map[string]Request{"memory": r, "speed": fast, "shared": halves} {
		b.Run("L=128/K=16/"+name, func(b *testing.B) {
			for b.Loop() {
				if _, err := New(r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
