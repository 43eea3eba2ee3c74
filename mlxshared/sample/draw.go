package sample

import (
	"math"

	"github.com/mlxcel/mlxcel/sdk"
)

// candidate is a token that may still be drawn; weight is its probability times a constant, 1 for the most probable.
type candidate struct {
	weight float64
	token  int32
}

// before orders candidates: more probable first, the lower id first among equals.
func (a candidate) before(b candidate) bool {
	return a.weight > b.weight || a.weight == b.weight && a.token < b.token
}

// draw samples from changed logits, m being the largest. The candidates that remain are walked in the order of ids, so
// the draw hangs on nothing but the distribution and the generator.
func (c *Chooser) draw(logits []float32, m float32, r *Request) int32 {
	s := r.Sampler
	total := c.weigh(logits, m, 1/float64(s.Temperature))
	keep := c.restrict(s, total)
	sum := 0.0
	for i, w := range c.weights {
		if w > 0 && !keep.before(candidate{w, int32(i)}) {
			sum += w
		}
	}
	target := Uniform(s.Seed, s.Choice, r.Position) * sum
	last := int32(-1)
	for i, w := range c.weights {
		if w == 0 || keep.before(candidate{w, int32(i)}) {
			continue
		}
		last = int32(i)
		if target -= w; target < 0 {
			break
		}
	}
	return last // rounding may leave the target at 0 after the last candidate, which is then the one
}

// weigh fills c.weights with exp((logit-m)·inverse temperature) and returns their sum.
func (c *Chooser) weigh(logits []float32, m float32, inverse float64) float64 {
	c.weights = append(c.weights[:0], make([]float64, len(logits))...)
	total := 0.0
	for i, x := range logits {
		d := float64(x-m) * inverse
		if d <= -negligible {
			continue
		}
		w := expNegative(d)
		c.weights[i] = w
		total += w
	}
	return total
}

// restrict returns the last candidate, in the order of before, that top-k, top-p and min-p keep. The most probable
// token is always kept.
func (c *Chooser) restrict(s *sdk.Sampler, total float64) candidate {
	last := candidate{0, math.MaxInt32}
	useP := s.TopP > 0 && s.TopP < 1
	if s.TopK > 0 && s.TopK < len(c.weights) || useP {
		c.candidates = c.candidates[:0]
		for i, w := range c.weights {
			if w > 0 {
				c.candidates = append(c.candidates, candidate{w, int32(i)})
			}
		}
		kept := c.candidates
		if k := s.TopK; k > 0 && k < len(kept) {
			partition(kept, k-1)
			kept, last = kept[:k], kept[k-1]
			total = sum(kept)
		}
		if useP {
			last = nucleus(kept, float64(s.TopP)*total)
		}
	}
	if s.MinP > 0 {
		// The largest weight is exactly 1. math.MaxInt32 keeps every id of that weight.
		if floor := (candidate{float64(s.MinP), math.MaxInt32}); floor.before(last) {
			last = floor
		}
	}
	return last
}

// partition moves the k+1 first candidates, in the order of before, to the front, the last of them to index k
// (Hoare's selection, with the middle of three as pivot).
func partition(c []candidate, k int) {
	lo, hi := 0, len(c)-1
	for lo < hi {
		p := split(c, lo, hi)
		switch {
		case p == k:
			return
		case p < k:
			lo = p + 1
		default:
			hi = p - 1
		}
	}
}

// split orders c[lo:hi+1] around a pivot and returns the pivot's index.
func split(c []candidate, lo, hi int) int {
	mid := lo + (hi-lo)/2
	if c[mid].before(c[lo]) {
		c[mid], c[lo] = c[lo], c[mid]
	}
	if c[hi].before(c[lo]) {
		c[hi], c[lo] = c[lo], c[hi]
	}
	if c[mid].before(c[hi]) {
		c[mid], c[hi] = c[hi], c[mid]
	}
	pivot, at := c[hi], lo
	for i := lo; i < hi; i++ {
		if c[i].before(pivot) {
			c[i], c[at] = c[at], c[i]
			at++
		}
	}
	c[at], c[hi] = c[hi], c[at]
	return at
}

// nucleus returns the last member of the smallest set of most probable candidates whose weights reach mass (Holtzman
// et al. 2020). It halves the range like a selection, so it needs no sorted list.
func nucleus(c []candidate, mass float64) candidate {
	lo, hi, before := 0, len(c)-1, 0.0
	for lo < hi {
		p := split(c, lo, hi)
		front := before + sum(c[lo:p])
		switch {
		case front >= mass:
			hi = max(p-1, lo)
		case front+c[p].weight >= mass:
			return c[p]
		default:
			before = front + c[p].weight
			lo = min(p+1, hi)
		}
	}
	return c[lo]
}

func sum(c []candidate) float64 {
	s := 0.0
	for i := range c {
		s += c[i].weight
	}
	return s
}
