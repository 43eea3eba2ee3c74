package sdktest

import (
	"context"
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// Checks of sequences that begin with positions of another.

// hot is a sampler that is of several minds in any model, so that another seed, choice or position shows.
var hot = sdk.Sampler{Temperature: 3, TopP: 0.99, Seed: 9, Choice: 1}

// counting is hot, and looks at the prompt and at what was generated.
func counting() sdk.Sampler {
	s := hot
	s.RepetitionPenalty, s.FrequencyPenalty = 3, 2
	return s
}

// prefill feeds a prompt, wanting nothing, in steps that end at every mark, and keeps a snapshot there.
func (r *rig) prefill(ctx context.Context, p *pipe, seq sdk.SeqID, tokens []int32, marks ...int) error {
	return r.prefillFrom(ctx, p, seq, 0, tokens, marks...)
}

// prefillFrom is prefill of tokens from a position on, within a prompt.
func (r *rig) prefillFrom(ctx context.Context, p *pipe, seq sdk.SeqID, pos int, tokens []int32, marks ...int) error {
	for pos < len(tokens) {
		end := min(len(tokens), pos+maxRows)
		for _, mark := range marks {
			if mark > pos {
				end = min(end, mark)
			}
		}
		q := sdk.SeqStep{Seq: seq, Pos: pos, Tokens: tokens[pos:end], Prompt: true}
		q.Snapshot = r.has(sdk.CapabilitySnapshots) && slices.Contains(marks, end)
		if _, err := p.step(ctx, q); err != nil {
			return err
		}
		pos = end
	}
	return nil
}

// fresh reserves a sequence of its own, prefills the prompt up to pos in steps that end at the marks, and goes on from there.
func (r *rig) fresh(ctx context.Context, p *pipe, res sdk.Reservation, pos, n int, marks ...int) (*trace, error) {
	res.Seq = r.seq()
	if err := p.do(ctx, res); err != nil {
		return nil, err
	}
	if err := r.prefill(ctx, p, res.Seq, res.Prompt[:pos], marks...); err != nil {
		return nil, err
	}
	t, err := r.walk(p, res.Seq, pos, res.Prompt[pos:]).goOn(ctx, n)
	if err != nil {
		return nil, err
	}
	return t, p.do(ctx, sdk.Release{Seq: res.Seq})
}

// checkShare lets sequences begin with positions of another, at every class of position, and compares them with sequences
// that had to compute everything themselves.
func checkShare(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityShare); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	for _, length := range r.lengths() {
		for _, keep := range r.classes(length) {
			if err := r.shareAt(ctx, p, length, keep); err != nil {
				return fmt.Errorf("keep %d positions of a sequence of %d: %w", keep, length, err)
			}
		}
	}
	return r.shareChain(ctx, p)
}

func (r *rig) shareAt(ctx context.Context, p *pipe, length, keep int) error {
	n := r.cfg.Generate
	tokens := r.madeUp(length+ownPrompt, 3)
	from := sdk.Reservation{Prompt: tokens, Snapshots: r.snapshots(1)}
	own := sdk.Reservation{Prompt: append(slices.Clone(tokens[:keep]), r.madeUp(ownPrompt, 8)...), Sampler: counting()}
	wantFrom, err := r.fresh(ctx, p, from, length, n, keep)
	if err != nil {
		return err
	}
	want, err := r.fresh(ctx, p, own, keep, n+2)
	if err != nil {
		return err
	}

	from.Seq, own.Seq = r.seq(), r.seq()
	if err := p.do(ctx, from); err != nil {
		return err
	}
	if err := r.prefill(ctx, p, from.Seq, tokens[:length], keep); err != nil {
		return err
	}
	own.From, own.Keep = from.Seq, keep
	if err := p.do(ctx, own); err != nil {
		if !r.mayLack(length, keep) {
			return err
		}
		return r.refusedAt(err, keep, length, func(n int) error {
			other := sdk.Reservation{Seq: own.Seq, From: from.Seq, Keep: n, Prompt: tokens}
			return p.do(ctx, other)
		}, func() error { return release(ctx, p, from.Seq, own.Seq) })
	}
	source, sharer := r.walk(p, from.Seq, length, tokens[length:]), r.walk(p, own.Seq, keep, own.Prompt[keep:])
	for range n {
		if err := source.step(ctx); err != nil {
			return err
		}
		if err := sharer.step(ctx); err != nil {
			return err
		}
	}
	gotFrom, err := source.goOn(ctx, 0)
	if err != nil {
		return err
	}
	if err := wantFrom.equal(gotFrom); err != nil {
		return fmt.Errorf("the sequence that it was kept of: %w", err)
	}
	if err := p.do(ctx, sdk.Release{Seq: from.Seq}); err != nil {
		return err
	}
	got, err := sharer.goOn(ctx, 2)
	if err != nil {
		return fmt.Errorf("after the release of the other: %w", err)
	}
	if err := want.equal(got); err != nil {
		return err
	}
	return p.do(ctx, sdk.Release{Seq: own.Seq})
}

func release(ctx context.Context, p *pipe, seqs ...sdk.SeqID) error {
	for _, seq := range seqs {
		if err := p.do(ctx, sdk.Release{Seq: seq}); err != nil {
			return err
		}
	}
	return nil
}

// refusedAt looks at the refusal of a position that a sequence can't go back to: it must name one that works.
func (r *rig) refusedAt(err error, pos, length int, try func(int) error, done func() error) error {
	if err := wantCode("a position that the state can't go back to", err, sdk.CodeUnsupported); err != nil {
		return err
	}
	for _, n := range numbers(err.Error()) {
		if n > 0 && n != pos && n <= length && try(n) == nil {
			return done()
		}
	}
	return fmt.Errorf("the refusal names no position that it can go back to: %w", err)
}

// shareChain keeps positions of a sequence that kept positions itself, each released as soon as the next one is there.
func (r *rig) shareChain(ctx context.Context, p *pipe) error {
	first := r.lengths()[0] * 3 / 4
	second := first + 4
	tokens := r.madeUp(second+ownPrompt, 3)
	res := sdk.Reservation{Prompt: tokens, Snapshots: r.snapshots(1)}
	want, err := r.fresh(ctx, p, res, second, r.cfg.Generate, first)
	if err != nil {
		return err
	}
	a, b, c := r.seq(), r.seq(), r.seq()
	res.Seq = a
	if err := p.do(ctx, res); err != nil {
		return err
	}
	if err := r.prefill(ctx, p, a, tokens[:first]); err != nil {
		return err
	}
	res.Seq, res.From, res.Keep = b, a, first
	if err := p.do(ctx, res); err != nil {
		return err
	}
	if err := p.do(ctx, sdk.Release{Seq: a}); err != nil {
		return err
	}
	if err := r.prefillFrom(ctx, p, b, first, tokens[:second]); err != nil {
		return fmt.Errorf("a sequence whose first %d positions another had: %w", first, err)
	}
	res.Seq, res.From, res.Keep = c, b, second
	if err := p.do(ctx, res); err != nil {
		return err
	}
	if err := p.do(ctx, sdk.Release{Seq: b}); err != nil {
		return err
	}
	got, err := r.walk(p, c, second, tokens[second:]).goOn(ctx, r.cfg.Generate)
	if err != nil {
		return err
	}
	if err := want.equal(got); err != nil {
		return fmt.Errorf("a sequence that kept positions of one that had kept them: %w", err)
	}
	return p.do(ctx, sdk.Release{Seq: c})
}

// checkShareErrors asks for positions that are not there.
func checkShareErrors(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityShare); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	const length, low, high = 40, 10, 30
	tokens := r.madeUp(length+ownPrompt, 3)
	res := sdk.Reservation{Prompt: tokens, Snapshots: r.snapshots(2)}
	want, err := r.fresh(ctx, p, res, length, r.cfg.Generate, low, high)
	if err != nil {
		return err
	}
	from, to, gone := r.seq(), r.seq(), r.seq()
	res.Seq = from
	if err := p.do(ctx, res); err != nil {
		return err
	}
	if err := r.prefill(ctx, p, from, tokens[:length], low, high); err != nil {
		return err
	}
	err = p.do(ctx, sdk.Reservation{Seq: to, From: gone, Keep: 1})
	if err := wantCode("keeping positions of an unknown sequence", err, sdk.CodeUnknownSequence); err != nil {
		return err
	}
	err = p.do(ctx, sdk.Reservation{Seq: to, From: from, Keep: length + 1})
	if err := wantCode(fmt.Sprintf("keeping %d positions of a sequence of %d", length+1, length), err, sdk.CodeInvalid); err != nil {
		return err
	}
	if r.recurrent() && r.has(sdk.CapabilitySnapshots) {
		for keep, nearest := range map[int][]int{low + 3: {low, high}, high - 1: {low, high}, high + 1: {high, length}} {
			err := p.do(ctx, sdk.Reservation{Seq: to, From: from, Keep: keep})
			if err := wantNamed(fmt.Sprintf("keeping %d positions without a snapshot there", keep), err, nearest...); err != nil {
				return err
			}
		}
	}
	// A reservation that failed has left nothing.
	if err := p.do(ctx, sdk.Reservation{Seq: to, From: from, Keep: length}); err != nil {
		return fmt.Errorf("a good reservation after bad ones: %w", err)
	}
	got, err := r.walk(p, from, length, tokens[length:]).goOn(ctx, r.cfg.Generate)
	if err != nil {
		return err
	}
	if err := want.equal(got); err != nil {
		return fmt.Errorf("after reservations that were refused: %w", err)
	}
	return nil
}

// wantNamed checks that err is CodeUnsupported and names the positions.
func wantNamed(what string, err error, positions ...int) error {
	if err := wantCode(what, err, sdk.CodeUnsupported); err != nil {
		return err
	}
	named := numbers(err.Error())
	for _, pos := range positions {
		if !slices.Contains(named, pos) {
			return fmt.Errorf("%s: the refusal must name the nearest positions %v: %w", what, positions, err)
		}
	}
	return nil
}

// held is what the stats say of state, over all stages.
func (p *pipe) held(ctx context.Context) (bytes int64, sequences int, err error) {
	for _, s := range p.stages {
		stats, err := s.client.Stats(ctx)
		if err != nil {
			return 0, 0, err
		}
		bytes += stats.StateBytes
		sequences += stats.Sequences
	}
	return bytes, sequences, nil
}

// checkShareCounts follows the stats while two sequences share positions: those count once, and go with the last owner.
func checkShareCounts(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityShare); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	for _, sourceFirst := range []bool{true, false} {
		if err := r.shareCounts(ctx, p, sourceFirst); err != nil {
			return fmt.Errorf("the source is released first: %v: %w", sourceFirst, err)
		}
	}
	return nil
}

func (r *rig) shareCounts(ctx context.Context, p *pipe, sourceFirst bool) error {
	length := r.lengths()[0]
	keep := length
	if !r.recurrent() {
		keep = min(length, length/r.block()*r.block()+1)
	}
	tokens := r.madeUp(length+ownPrompt, 3)
	start, _, err := p.held(ctx)
	if err != nil {
		return err
	}
	begin := func(n int) (sdk.SeqID, int64, error) {
		seq := r.seq()
		if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: tokens}); err != nil {
			return 0, 0, err
		}
		if err := r.prefill(ctx, p, seq, tokens[:n]); err != nil {
			return 0, 0, err
		}
		bytes, _, err := p.held(ctx)
		return seq, bytes - start, err
	}
	seq, alone, err := begin(keep)
	if err != nil {
		return err
	}
	if err := p.do(ctx, sdk.Release{Seq: seq}); err != nil {
		return err
	}
	from, source, err := begin(length)
	if err != nil {
		return err
	}
	to := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: to, Prompt: tokens, From: from, Keep: keep}); err != nil {
		return err
	}
	both, sequences, err := p.held(ctx)
	if err != nil {
		return err
	}
	if sequences != 2*len(p.stages) {
		return fmt.Errorf("two sequences share positions, the stats count %d", sequences)
	}
	added := both - start - source
	if added < 0 || added > alone || r.grows() && !r.cfg.CopiesState && added == alone {
		return fmt.Errorf("%d positions that are shared added %d bytes of state to %d; a sequence of its own has %d", keep, added, source, alone)
	}
	// Both go on, and part where they write.
	for _, walk := range []*walker{r.walk(p, from, length, tokens[length:]), r.walk(p, to, keep, r.madeUp(ownPrompt, 8))} {
		if err := walk.step(ctx); err != nil {
			return err
		}
	}
	first, last, lastLength := to, from, length+ownPrompt
	if sourceFirst {
		first, last, lastLength = from, to, keep+ownPrompt
	}
	if err := p.do(ctx, sdk.Release{Seq: first}); err != nil {
		return err
	}
	left, _, err := p.held(ctx)
	if err != nil {
		return err
	}
	if err := p.do(ctx, sdk.Release{Seq: last}); err != nil {
		return err
	}
	end, sequences, err := p.held(ctx)
	if err != nil {
		return err
	}
	if end != start || sequences != 0 {
		return fmt.Errorf("after both releases %d bytes of state are held in %d sequences, %d before", end, sequences, start)
	}
	return r.soleOwner(ctx, p, left-start, tokens, lastLength)
}

// soleOwner compares what a sequence held after the other's release with what one of that length holds that shared nothing.
func (r *rig) soleOwner(ctx context.Context, p *pipe, left int64, tokens []int32, length int) error {
	seq := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: tokens}); err != nil {
		return err
	}
	// Only the number of positions matters, not what they are.
	if err := p.feed(ctx, seq, 0, r.madeUp(length, 2), maxRows); err != nil {
		return err
	}
	want, _, err := p.held(ctx)
	if err != nil {
		return err
	}
	if err := p.do(ctx, sdk.Release{Seq: seq}); err != nil {
		return err
	}
	end, _, err := p.held(ctx)
	if err != nil {
		return err
	}
	// Windows let go at ends of steps, which fall elsewhere.
	if want -= end; r.window() == 0 && left != want {
		return fmt.Errorf("the sequence that is left holds %d bytes of state, one of its own %d", left, want)
	}
	return nil
}
