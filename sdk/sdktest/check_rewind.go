package sdktest

import (
	"context"
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// Checks of sequences that go back, and of the snapshots that recurrent states need for it.

// checkRewind goes back by some distances, takes another way from there, twice, and compares with one that went there
// straight.
func checkRewind(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityRewind); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	for _, length := range r.lengths() {
		for _, by := range []int{1, 7, goBack, length - 1} {
			if by >= length {
				continue
			}
			if err := r.rewindBy(ctx, p, length, by); err != nil {
				return fmt.Errorf("back by %d positions of %d: %w", by, length, err)
			}
		}
	}
	return nil
}

func (r *rig) rewindBy(ctx context.Context, p *pipe, length, by int) error {
	pos := length - by
	tokens := r.madeUp(length, 3)
	res := sdk.Reservation{Prompt: append(slices.Clone(tokens[:pos]), r.madeUp(ownPrompt, 8)...), Sampler: hot, Snapshots: r.snapshots(1)}
	want, err := r.fresh(ctx, p, res, pos, r.cfg.Generate)
	if err != nil {
		return err
	}
	res.Seq = r.seq()
	if err := p.do(ctx, res); err != nil {
		return err
	}
	if err := r.prefill(ctx, p, res.Seq, tokens, pos); err != nil {
		return err
	}
	for range 2 {
		got, err := r.walk(p, res.Seq, pos, res.Prompt[pos:]).goOn(ctx, r.cfg.Generate)
		if err != nil && r.mayLack(length, pos) {
			return r.refusedAt(err, pos, length, func(n int) error {
				_, err := p.ask(ctx, sdk.SeqStep{Seq: res.Seq, Pos: n, Tokens: tokens[:1], Want: sdk.WantToken})
				return err
			}, func() error { return p.do(ctx, sdk.Release{Seq: res.Seq}) })
		}
		if err != nil {
			return err
		}
		if err := want.equal(got); err != nil {
			return err
		}
	}
	return p.do(ctx, sdk.Release{Seq: res.Seq})
}

// penalizing is a sampler that counts prompt and generated tokens.
var penalizing = sdk.Sampler{RepetitionPenalty: 1.3, PresencePenalty: 0.5, FrequencyPenalty: 0.7}

// decisive is a sampler under which only these tokens can be chosen: first unless it was generated, then second unless it
// was, then third. So what the penalties count decides every token, whatever the model thinks.
func decisive(first, second, third int32) sdk.Sampler {
	return sdk.Sampler{PresencePenalty: 1e3, LogitBias: map[int32]float32{first: 1e4 + 200, second: 1e4 + 100, third: 1e4}}
}

// decisiveTokens are three tokens that none of the others is.
func (r *rig) decisiveTokens(others ...[]int32) (first, second, third int32) {
	taken := slices.Concat(others...)
	var free []int32
	for token := int32(0); len(free) < 3; token++ {
		if !slices.Contains(taken, token) {
			free = append(free, token)
		}
	}
	return free[0], free[1], free[2]
}

// chose compares the tokens of a trace with the one that must have been chosen each time.
func (t *trace) chose(want int32) error {
	for i, token := range t.tokens {
		if token != want {
			return fmt.Errorf("token %d is %d, want %d by what was generated before", i, token, want)
		}
	}
	return nil
}

// force runs tokens as generated ones, one a step, and returns what came after each. Where snapshots are had, each end keeps
// one.
func (r *rig) force(ctx context.Context, p *pipe, seq sdk.SeqID, pos int, tokens []int32) (*trace, error) {
	t := &trace{}
	for i, token := range tokens {
		q := sdk.SeqStep{Seq: seq, Pos: pos + i, Tokens: []int32{token}, Want: sdk.WantToken, TopN: topN, Snapshot: r.has(sdk.CapabilitySnapshots)}
		a, err := p.ask(ctx, q)
		if err != nil {
			return nil, err
		}
		t.tokens, t.answers = append(t.tokens, a.Token), append(t.answers, *a)
	}
	return t, nil
}

// checkRewindPenalties goes back into what was generated, and below it: the penalties forget what was dropped.
func checkRewindPenalties(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityRewind); err != nil {
		return err
	}
	if r.recurrent() {
		if err := r.need(sdk.CapabilitySnapshots); err != nil {
			return err
		}
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	n, below := len(r.prompt), len(r.prompt)-3
	first, other := r.madeUp(8, 6), r.madeUp(4, 9)
	came, dropped, never := r.decisiveTokens(r.prompt, first, other)
	first[6], other[0] = dropped, came
	sampler := decisive(came, dropped, never)
	sampler.RepetitionPenalty = penalizing.RepetitionPenalty
	res := sdk.Reservation{Prompt: r.prompt, Sampler: sampler, Snapshots: r.snapshots(16)}
	begin := func() (sdk.SeqID, error) {
		res.Seq = r.seq()
		if err := p.do(ctx, res); err != nil {
			return 0, err
		}
		return res.Seq, r.prefill(ctx, p, res.Seq, r.prompt, below, n)
	}
	for _, back := range []struct {
		what string
		pos  int
	}{{"into what was generated", n + 4}, {"to the end of the prompt", n}, {"into the prompt", below}} {
		straight, err := begin()
		if err != nil {
			return err
		}
		if _, err := r.force(ctx, p, straight, n, first[:max(0, back.pos-n)]); err != nil {
			return err
		}
		if back.pos < n {
			// A sequence that never went past the position.
			straight = r.seq()
			res.Seq = straight
			if err := p.do(ctx, res); err != nil {
				return err
			}
			if err := r.prefill(ctx, p, straight, r.prompt[:below], below); err != nil {
				return err
			}
		}
		want, err := r.force(ctx, p, straight, back.pos, other)
		if err != nil {
			return err
		}
		detour, err := begin()
		if err != nil {
			return err
		}
		if _, err := r.force(ctx, p, detour, n, first); err != nil {
			return err
		}
		got, err := r.force(ctx, p, detour, back.pos, other)
		if err != nil {
			return fmt.Errorf("back %s: %w", back.what, err)
		}
		if err := want.equal(got); err != nil {
			return fmt.Errorf("back %s, under penalties: %w", back.what, err)
		}
		// What came after going back counts, what was dropped does not.
		if err := got.chose(dropped); err != nil {
			return fmt.Errorf("back %s, under penalties: %w", back.what, err)
		}
	}
	return nil
}

// checkRewindRefused goes back to where a recurrent state has no snapshot. The refusal names the nearest, and nothing of the
// step is computed.
func checkRewindRefused(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilityRewind, sdk.CapabilitySnapshots); err != nil {
		return err
	}
	if !r.recurrent() {
		return fmt.Errorf("%w: its state can go back without snapshots", errSkipped)
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	const length, oldest, low, high = 40, 10, 20, 30
	tokens := r.madeUp(length+ownPrompt, 3)
	res := sdk.Reservation{Prompt: tokens, Snapshots: 2}
	want, err := r.fresh(ctx, p, res, length, r.cfg.Generate, oldest, low, high)
	if err != nil {
		return err
	}
	seq, beside := r.seq(), r.seq()
	for _, s := range []sdk.SeqID{seq, beside} {
		res.Seq = s
		if err := p.do(ctx, res); err != nil {
			return err
		}
		if err := r.prefill(ctx, p, s, tokens[:length], oldest, low, high); err != nil {
			return err
		}
	}
	for pos, nearest := range map[int][]int{oldest: {low}, low + 1: {low, high}, high + 5: {high, length}} {
		_, err := p.step(ctx,
			sdk.SeqStep{Seq: beside, Pos: length, Tokens: tokens[length:], Prompt: true, Want: sdk.WantToken},
			sdk.SeqStep{Seq: seq, Pos: pos, Tokens: tokens[:1], Prompt: true, Want: sdk.WantToken})
		if err := wantNamed(fmt.Sprintf("going back to position %d, with snapshots at %d and %d", pos, low, high), err, nearest...); err != nil {
			return err
		}
	}
	if r.chunked() {
		// A longer state would make another position's rows of these.
		for _, s := range []sdk.SeqID{beside, seq} {
			got, err := r.walk(p, s, length, tokens[length:]).goOn(ctx, r.cfg.Generate)
			if err != nil {
				return fmt.Errorf("after refusals: %w", err)
			}
			if err := want.equal(got); err != nil {
				return fmt.Errorf("after refusals: %w", err)
			}
		}
	}
	return r.goneAhead(ctx, p, seq, low, high)
}

// goneAhead goes back to a snapshot: the ones after it belong to positions that are gone.
func (r *rig) goneAhead(ctx context.Context, p *pipe, seq sdk.SeqID, low, high int) error {
	if err := p.feed(ctx, seq, low, r.madeUp(high-low+ownPrompt, 8), maxRows); err != nil {
		return fmt.Errorf("back to a snapshot at position %d: %w", low, err)
	}
	_, err := p.ask(ctx, sdk.SeqStep{Seq: seq, Pos: high, Tokens: r.prompt[:1], Want: sdk.WantToken})
	return wantNamed(fmt.Sprintf("a snapshot at position %d, taken before the sequence went back to %d, can't be gone back to", high, low), err, low)
}

// checkSnapshots asks for snapshots at every step: they change no answer, are no more than was reserved, and cost nothing
// where no state needs them.
func checkSnapshots(ctx context.Context, r *rig) error {
	if err := r.need(sdk.CapabilitySnapshots); err != nil {
		return err
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	const length, most = 24, 2
	tokens := r.madeUp(length, 3)
	var want *trace
	var plain int64
	for snapshots := range most + 1 {
		seq := r.seq()
		if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: tokens, Snapshots: snapshots}); err != nil {
			return err
		}
		if err := r.prefill(ctx, p, seq, tokens, 5, 10, 15); err != nil {
			return err
		}
		got, err := r.force(ctx, p, seq, length, tokens[:most+3])
		if err != nil {
			return err
		}
		bytes, _, err := p.held(ctx)
		if err != nil {
			return err
		}
		if snapshots == 0 {
			want, plain = got, bytes
			// What the others are measured by must hold none itself.
			if err := r.comparePrice(ctx, p, length+most+3); err != nil {
				return fmt.Errorf("without snapshots: %w", err)
			}
		}
		if err := want.equal(got); err != nil {
			return fmt.Errorf("with %d snapshots: %w", snapshots, err)
		}
		if extra, limit := bytes-plain, int64(snapshots)*r.fixedBytes(); extra > limit {
			return fmt.Errorf("%d snapshots take %d bytes, a recurrent state of %d bytes may take %d", snapshots, extra, r.fixedBytes(), limit)
		}
		if err := p.do(ctx, sdk.Release{Seq: seq}); err != nil {
			return err
		}
	}
	bytes, _, err := p.held(ctx)
	if err != nil {
		return err
	}
	if bytes != 0 {
		return fmt.Errorf("%d bytes of state are left after the releases", bytes)
	}
	return nil
}
