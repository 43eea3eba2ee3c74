package sample

import "math"

// negligible is how far below the largest logit a term stops counting: e^-40 times any vocabulary is under the
// rounding of a float64 sum.
const negligible = 40

// expNegative returns e^d for -negligible <= d <= 0, to within 1e-9 of its value: beyond what float32 logits carry, at
// a third of math.Exp's time. It is 1 at 0, so the most probable token weighs exactly 1.
//
// d is cut into k·ln 2 + r with |r| <= ln 2 / 2; e^r is the Taylor polynomial of degree 8, whose remainder is under
// 0.35^9/9! = 2e-10; 2^k goes into the exponent's bits.
func expNegative(d float64) float64 {
	const bias, mantissa = 1023, 52
	k := int64(d*math.Log2E - 0.5) // truncation of a negative number: rounds to nearest
	r := d - float64(k)*math.Ln2
	p := 1 + r*(1+r*(1./2+r*(1./6+r*(1./24+r*(1./120+r*(1./720+r*(1./5040+r*(1./40320))))))))
	return p * math.Float64frombits(uint64(k+bias)<<mantissa)
}
