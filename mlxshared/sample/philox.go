package sample

import "math/bits"

// Philox4x32-10, a counter-based generator: ten rounds turn a 128-bit counter under a 64-bit key into 128 random
// bits, without any state between draws. J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers:
// as easy as 1, 2, 3", SC 2011.
func philox(counter [4]uint32, key [2]uint32) [4]uint32 {
	const (
		multiplier0, multiplier1 = 0xD2511F53, 0xCD9E8D57
		weyl0, weyl1             = 0x9E3779B9, 0xBB67AE85
		rounds                   = 10
	)
	for range rounds {
		hi0, lo0 := bits.Mul32(multiplier0, counter[0])
		hi1, lo1 := bits.Mul32(multiplier1, counter[2])
		counter = [4]uint32{hi1 ^ counter[1] ^ key[0], lo1, hi0 ^ counter[3] ^ key[1], lo0}
		key[0] += weyl0
		key[1] += weyl1
	}
	return counter
}

// Uniform returns the draw in [0, 1) that belongs to (seed, choice, position) and to nothing else, so that a seeded
// request gives the same text alone, in a batch or split over stages. The key is the seed; the counter is the
// position's two halves, the choice and 0. 53 of the bits make the mantissa.
func Uniform(seed uint64, choice uint32, position int) float64 {
	p := uint64(position)
	r := philox([4]uint32{uint32(p), uint32(p >> 32), choice, 0}, [2]uint32{uint32(seed), uint32(seed >> 32)})
	return float64((uint64(r[0])<<32|uint64(r[1]))>>11) * 0x1p-53
}
