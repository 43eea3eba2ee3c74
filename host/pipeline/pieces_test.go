package pipeline

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// The pieces of one prompt follow each other through the stages: with m of them over k stages of one second a piece, the
// token comes after m+k-1 seconds, and it is the one of a run alone.
func TestPiecesFollowEachOther(t *testing.T) {
	for _, c := range []struct{ stages, pieces int }{{1, 1}, {1, 4}, {2, 1}, {2, 5}, {3, 2}, {toyLayers, 7}} {
		t.Run(fmt.Sprintf("%d stages, %d pieces", c.stages, c.pieces), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &toyLauncher{}
				slow(l, time.Second)
				p := startToy(t, toyConfig(t, c.stages, l))
				defer closeToy(t, p)
				r := newRequest(p, rand.New(rand.NewPCG(1, 9)), 3*c.pieces)
				if err := r.reserve(t.Context(), p); err != nil {
					t.Fatal(err)
				}
				began := time.Now()
				waits := beginPieces(t, p, r, c.pieces)
				for i, wait := range waits {
					results, err := wait()
					if err != nil {
						t.Fatalf("piece %d: %v", i, err)
					}
					if i == len(waits)-1 {
						r.tokens = append(r.tokens, results[0].Token)
					}
				}
				if took, want := time.Since(began), time.Duration(c.pieces+c.stages-1)*time.Second; took != want {
					t.Errorf("took %v, want %v", took, want)
				}
				r.check(t)
				if err := p.Release(t.Context(), r.id); err != nil {
					t.Fatal(err)
				}
				checkEmpty(t, p, l)
			})
		})
	}
}

// beginPieces has a prompt under way in pieces of three rows.
func beginPieces(t *testing.T, p *Pipeline, r *request, pieces int) (waits []func() ([]sdk.SeqResult, error)) {
	for range pieces {
		step := r.next(3)
		r.fed += len(step.Tokens)
		waits = append(waits, p.Begin(t.Context(), []sdk.SeqStep{step}))
	}
	return waits
}

// A piece that fails takes those after it with it, other sequences not; nothing of the sequence is left.
func TestFailedPieceEndsThoseAfterIt(t *testing.T) {
	for stage := range 3 {
		t.Run(fmt.Sprintf("on stage %d", stage), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := faultAt(stage, func(op sdk.Op) bool {
					s, ok := op.(*sdk.Step)
					return ok && s.Seqs[0].Seq == 1 && s.Seqs[0].Pos == 3
				}, sdk.Errorf(sdk.CodeInternal, "broken"))
				p := startToy(t, toyConfig(t, 3, l))
				defer closeToy(t, p)
				rng := rand.New(rand.NewPCG(1, 9))
				victim, other := newRequest(p, rng, 12), newRequest(p, rng, 12)
				for _, r := range []*request{victim, other} {
					if err := r.reserve(t.Context(), p); err != nil {
						t.Fatal(err)
					}
				}
				doomed, fine := beginPieces(t, p, victim, 4), beginPieces(t, p, other, 4)
				for i, wait := range doomed {
					if _, err := wait(); (err != nil) != (i > 0) {
						t.Errorf("piece %d ended with %v", i, err)
					}
				}
				for i, wait := range fine {
					results, err := wait()
					if err != nil {
						t.Fatalf("piece %d of another sequence: %v", i, err)
					}
					if i == 3 {
						other.tokens = append(other.tokens, results[0].Token)
					}
				}
				other.check(t)
				if err := p.Release(t.Context(), other.id); err != nil {
					t.Fatal(err)
				}
				synctest.Wait() // for the releases that nobody waited for
				checkEmpty(t, p, l)
			})
		})
	}
}

// While pieces are under way, what needs the sequence's end is refused, and so is a step after the one that yields a token.
func TestPiecesKeepOtherOrdersOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &toyLauncher{}
		slow(l, time.Second)
		p := startToy(t, toyConfig(t, 2, l))
		defer closeToy(t, p)
		r := newRequest(p, rand.New(rand.NewPCG(1, 9)), 9)
		if err := r.reserve(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		waits := beginPieces(t, p, r, 2)
		for name, err := range map[string]error{
			"truncate": p.Truncate(t.Context(), r.id, 1),
			"fork":     p.Fork(t.Context(), r.id, p.NewSeq()),
		} {
			if sdk.CodeOf(err) != sdk.CodeInvalid {
				t.Errorf("%s between pieces: %v", name, err)
			}
		}
		waits = append(waits, beginPieces(t, p, r, 1)...) // yields the token
		if _, err := p.Step(t.Context(), []sdk.SeqStep{{Seq: r.id, Pos: 9, Tokens: []int32{1}}}); sdk.CodeOf(err) != sdk.CodeInvalid {
			t.Errorf("a step before the token is known: %v", err)
		}
		for i, wait := range waits {
			if _, err := wait(); err != nil {
				t.Errorf("piece %d: %v", i, err)
			}
		}
		if err := p.Truncate(t.Context(), r.id, 4); err != nil {
			t.Errorf("truncate once they have ended: %v", err)
		}
	})
}
