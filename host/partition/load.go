package partition

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// DefaultContext is the context that is planned for where none is asked for and the model allows it.
const DefaultContext = 4096

// Demand is what a plan leaves room for beside the weights. The zero value leaves none.
type Demand struct {
	Context   int // positions of each sequence
	Sequences int // at once
}

// PlanningContext is the context that the model is planned for where none is asked for.
func PlanningContext(profile *sdk.ModelProfile) int {
	if profile.ContextLength > 0 {
		return min(profile.ContextLength, DefaultContext)
	}
	return DefaultContext
}

// Load is what a stage, or one layer, holds, in bytes.
type Load struct {
	Weights int64
	KV      int64 // of the asked context and sequences
	State   int64 // of the asked sequences
}

// Total is what counts against a budget.
func (l Load) Total() int64 { return l.Weights + l.KV + l.State }

func (l Load) plus(m Load) Load {
	return Load{add(l.Weights, m.Weights), add(l.KV, m.KV), add(l.State, m.State)}
}

func (l Load) minus(m Load) Load {
	return Load{l.Weights - m.Weights, l.KV - m.KV, l.State - m.State}
}

// tooMuch is more than any machine holds. Sums stop here, so that no context, however long, wraps around.
const tooMuch = int64(1) << 60

func add(a, b int64) int64 { return min(a+b, tooMuch) } // both are at most tooMuch

func multiply(a, b int64) int64 {
	high, low := bits.Mul64(uint64(a), uint64(b))
	if high != 0 || low > uint64(tooMuch) {
		return tooMuch
	}
	return int64(low)
}

// LayerLoad prices one layer.
func (d Demand) LayerLoad(l sdk.LayerProfile) Load {
	state := l.StateBytes(0, 0) // what an empty sequence has
	cache := min(l.StateBytes(d.Context, 0)-state, tooMuch)
	return Load{
		Weights: min(l.Weights, tooMuch),
		KV:      multiply(cache, int64(d.Sequences)),
		State:   multiply(state, int64(d.Sequences)),
	}
}

// prices are the loads of one model that is cut into stages.
type prices struct {
	stages int
	prefix []Load  // prefix[i] is the load of layers [0, i)
	sum    []int64 // sum[i] is prefix[i].Total()
	first  int64   // the embedding, on stage 0
	last   int64   // the head, on the last stage
	read   int64   // of the head, for one token
}

func newPrices(profile *sdk.ModelProfile, demand Demand, stages int) *prices {
	p := &prices{
		stages: stages, prefix: make([]Load, len(profile.Layers)+1), sum: make([]int64, len(profile.Layers)+1), first: min(profile.Embedding, tooMuch),
		last: min(headBytes(profile, stages), tooMuch), read: min(profile.Head, tooMuch),
	}
	for i, l := range profile.Layers {
		p.prefix[i+1] = p.prefix[i].plus(demand.LayerLoad(l))
		p.sum[i+1] = p.prefix[i+1].Total()
	}
	return p
}

// headBytes is what the head adds to the last of the stages. A tied projection is the embedding matrix: a single
// stage holds it once; of more stages the first and the last hold it both.
func headBytes(profile *sdk.ModelProfile, stages int) int64 {
	if stages == 1 {
		return profile.Head - profile.TiedBytes
	}
	return profile.Head
}

func (p *prices) layers() int { return len(p.prefix) - 1 }

// load is what stage s holds with layers [start, end).
func (p *prices) load(s, start, end int) Load {
	l := p.prefix[end].minus(p.prefix[start])
	if s == 0 {
		l.Weights += p.first
	}
	if s == p.stages-1 {
		l.Weights += p.last
	}
	return l
}

// bytes is the total of load.
func (p *prices) bytes(s, start, end int) int64 {
	bytes := p.sum[end] - p.sum[start]
	if s == 0 {
		bytes += p.first
	}
	if s == p.stages-1 {
		bytes += p.last
	}
	return bytes
}

// traffic is what stage s reads to decode one token of each sequence: its layers' weights, the caches, and the head.
// Of the embedding it reads a row, which counts as nothing.
func (p *prices) traffic(s, start, end int) int64 {
	bytes := p.sum[end] - p.sum[start]
	if s == p.stages-1 {
		bytes += p.read
	}
	return bytes
}

// total is the load of all stages together.
func (p *prices) total() int64 {
	return add(add(min(p.sum[p.layers()], tooMuch), p.first), p.last)
}

// check refuses what can't be summed.
func (p *prices) check(demand Demand) error {
	if p.total() >= tooMuch {
		return fmt.Errorf("%d sequences of %d tokens need more than %s in all: ask for a shorter context (--ctx) or fewer sequences (--parallel)",
			demand.Sequences, demand.Context, FormatSize(tooMuch))
	}
	return nil
}

func negative(s sdk.StateProfile) bool {
	return s.BytesPerPosition < 0 || s.Window < 0 || s.Fixed < 0 || s.Block < 0
}

// checkProfile refuses a profile that can't be planned with.
func checkProfile(p *sdk.ModelProfile) error {
	n := len(p.Layers)
	if n == 0 {
		return fmt.Errorf("the %s model has no layers to cut: check num_hidden_layers in its config.json", p.Family)
	}
	for i, l := range p.Layers {
		if l.Weights < 0 || slices.ContainsFunc(l.States, negative) {
			return &ProfileError{p.Family, fmt.Sprintf("layer %d has a negative size: %+v", i, l)}
		}
	}
	if p.Embedding < 0 || p.Head < 0 {
		return &ProfileError{p.Family, fmt.Sprintf("embedding of %d and head of %d bytes", p.Embedding, p.Head)}
	}
	if p.TiedBytes < 0 || p.TiedBytes > min(p.Embedding, p.Head) {
		return &ProfileError{p.Family, fmt.Sprintf("embedding of %d and head of %d bytes have %d in common", p.Embedding, p.Head, p.TiedBytes)}
	}
	for _, g := range p.Adjacency {
		if g.Source < 0 || g.Source > g.Consumer || g.Consumer >= n {
			return &ProfileError{p.Family, fmt.Sprintf("adjacency group %d..%d of %d layers", g.Source, g.Consumer, n)}
		}
	}
	return nil
}
