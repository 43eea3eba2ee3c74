package pipeline

import (
	"errors"
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

// piece returns the next rows of the prompt, and counts them as fed.
func (r *request) piece(rows int) sdk.SeqStep {
	step := r.next(rows)
	r.fed += len(step.Tokens)
	return step
}

// beginPieces has a prompt under way in pieces of three rows, each in a step with the others.
func beginPieces(t *testing.T, p *Pipeline, r *request, pieces int, others ...sdk.SeqStep) (waits []func() ([]sdk.SeqResult, error)) {
	for range pieces {
		waits = append(waits, p.Begin(t.Context(), append([]sdk.SeqStep{r.piece(3)}, others...)))
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
				for _, r := range []*request{victim, other} {
					if err := p.Release(t.Context(), r.id); err != nil {
						t.Fatal(err)
					}
				}
				checkEmpty(t, p, l)
			})
		})
	}
}

// A sequence that shares a step under way with a later piece of a failed prompt loses its state, and is told that it is not to
// blame; one that is to share a step with it from then on loses nothing.
func TestFailedPieceAndItsCompany(t *testing.T) {
	for stage := range 3 {
		t.Run(fmt.Sprintf("on stage %d", stage), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := make(chan struct{})
				l := faultAt(stage, func(op sdk.Op) bool {
					s, ok := op.(*sdk.Step)
					if ok = ok && s.Seqs[0].Seq == 1 && s.Seqs[0].Pos == 3; ok {
						<-begun
					}
					return ok
				}, sdk.Errorf(sdk.CodeInternal, "broken"))
				cfg := toyConfig(t, 3, l)
				cfg.MicroBatch = 4
				p := startToy(t, cfg)
				defer closeToy(t, p)
				rng := rand.New(rand.NewPCG(1, 9))
				victim, company, later := newRequest(p, rng, 18), newRequest(p, rng, 12), newRequest(p, rng, 3)
				for _, r := range []*request{victim, company, later} {
					if err := r.reserve(t.Context(), p); err != nil {
						t.Fatal(err)
					}
				}
				waits := beginPieces(t, p, victim, 2)
				for range 2 {
					waits = append(waits, beginPieces(t, p, company, 1, victim.piece(3))...)
				}
				close(begun)
				if _, err := waits[0](); err != nil {
					t.Errorf("the piece before the failure: %v", err)
				}
				for i, wait := range waits[1:] {
					_, err := wait()
					checkFailed(t, err, victim.id, nil)
					if i > 0 {
						checkFailed(t, err, company.id, &SpoiledError{By: victim.id})
					}
				}
				results, err := beginPieces(t, p, later, 1, victim.piece(3), company.piece(3))[0]()
				checkFailed(t, err, victim.id, nil)
				checkFailed(t, err, company.id, &SpoiledError{By: victim.id})
				if stepErr, ok := errors.AsType[*StepError](err); !ok || stepErr.Of(later.id) != nil || len(results) != 3 || results[0].Seq != later.id {
					t.Fatalf("what shared a step with them only then ended with %v, %v", results, err)
				}
				later.tokens = append(later.tokens, results[0].Token)
				later.check(t)
				_, err = beginPieces(t, p, victim, 1)[0]()
				checkFailed(t, err, victim.id, nil)
				for _, r := range []*request{victim, company, later} {
					if err := p.Release(t.Context(), r.id); err != nil {
						t.Fatal(err)
					}
				}
				checkEmpty(t, p, l)
			})
		})
	}
}

// checkFailed: the sequence failed with the injected error, on its own account or, with spoiled, because of another.
func checkFailed(t *testing.T, err error, seq sdk.SeqID, spoiled *SpoiledError) {
	t.Helper()
	stepErr, ok := errors.AsType[*StepError](err)
	if !ok {
		t.Fatalf("got %v, want a *StepError", err)
	}
	cause := stepErr.Of(seq)
	if stage, ok := errors.AsType[*StageError](cause); !ok || sdk.CodeOf(stage) != sdk.CodeInternal {
		t.Errorf("sequence %d failed with %v, want the stage's error", seq, cause)
	}
	other, ok := errors.AsType[*SpoiledError](cause)
	if ok != (spoiled != nil) || ok && other.By != spoiled.By {
		t.Errorf("sequence %d failed with %v, want spoiled: %v", seq, cause, spoiled)
	}
}

// While the step that yields a token is under way, the next is refused.
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
		waits = append(waits, beginPieces(t, p, r, 1)...) // yields the token
		if _, err := p.Step(t.Context(), []sdk.SeqStep{{Seq: r.id, Pos: 9, Rows: 1, Tokens: []int32{1}}}); sdk.CodeOf(err) != sdk.CodeInvalid {
			t.Errorf("a step before the token is known: %v", err)
		}
		for i, wait := range waits {
			if _, err := wait(); err != nil {
				t.Errorf("piece %d: %v", i, err)
			}
		}
	})
}
