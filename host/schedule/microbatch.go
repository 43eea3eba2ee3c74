package schedule

import (
	"fmt"
	"iter"
	"math"
)

// PromptPieces returns in how many pieces a prompt of so many rows had best follow itself through the stages. With m pieces
// of w rows in all, each costing a fixed time worth f rows besides its own, the last of k stages ends after
// (m+k-1)·(f + w/m): m = sqrt((k-1)·w/f) makes that the least.
func PromptPieces(rows, stages int, fixed float64) int {
	if rows < 1 || stages < 2 || !(fixed > 0) {
		return 1
	}
	return min(rows, max(1, int(math.Round(math.Sqrt(float64(stages-1)*float64(rows)/fixed)))))
}

// PiecesInFlight returns how many pieces of prompts fill the stages: one on each, and one that waits for the first, so that it
// need not wait for news of the last.
func PiecesInFlight(stages int) int {
	if stages < 2 {
		return 1
	}
	return stages + 1
}

// Split yields the half-open ranges [start, end) of the micro-batches of a batch, in order: each as large as it can
// be with at most size sequences and at most maxRows rows. rows tells how many rows sequence i brings; a sequence
// with more than maxRows makes a micro-batch of its own.
func Split(batch, size, maxRows int, rows func(i int) int) iter.Seq2[int, int] {
	if size < 1 { // a bug in the caller: flags are checked where they are read
		panic(fmt.Sprintf("schedule: micro-batch size %d, want at least 1", size))
	}
	return func(yield func(start, end int) bool) {
		start, sum := 0, 0
		for i := range batch {
			n := rows(i)
			if i > start && (i-start == size || sum+n > maxRows) {
				if !yield(start, i) {
					return
				}
				start, sum = i, 0
			}
			sum += n
		}
		if start < batch {
			yield(start, batch)
		}
	}
}
