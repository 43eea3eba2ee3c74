package sdktest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
)

// Checks of what operations bring, and of what an executor says that it understands.

// checkNeeds looks at what goes to one stage only: token ids to the embedding, and to the head under penalties, masks to the
// head, each to its own sequence.
func checkNeeds(ctx context.Context, r *rig) error {
	whole, err := r.open(ctx)
	if err != nil {
		return err
	}
	pl := plan{prompt: r.prompt, sampler: penalizing, generate: 2 * r.cfg.Generate}
	want, err := r.run(ctx, whole, pl)
	if err != nil {
		return err
	}
	p := whole
	if cuts := r.cuts(); len(cuts) > 0 {
		if p, err = r.open(ctx, cuts[len(cuts)/2]); err != nil {
			return err
		}
		got, err := r.run(ctx, p, pl)
		if err != nil {
			return err
		}
		if err := want.equal(got); err != nil {
			return fmt.Errorf("two stages, of which only the ends get token ids, under penalties: %w", err)
		}
	}
	if !r.has(sdk.CapabilityMasks) {
		return nil
	}
	return r.masked(ctx, p)
}

// masked lets each sequence of a step have one token of its own.
func (r *rig) masked(ctx context.Context, p *pipe) error {
	var batch []sdk.SeqStep
	for i := range maxSeqs {
		q := sdk.SeqStep{Seq: r.seq(), Tokens: r.prompt, Prompt: true, Want: sdk.WantToken}
		if i != 1 { // one without a mask stands between the others
			q.Allowed = make([]byte, r.maskBytes())
			q.Allowed[i/8] = 1 << (i % 8)
		}
		if err := p.do(ctx, sdk.Reservation{Seq: q.Seq, Prompt: r.prompt}); err != nil {
			return err
		}
		batch = append(batch, q)
	}
	results, err := p.step(ctx, batch...)
	if err != nil {
		return err
	}
	for i, q := range batch {
		a, err := answerOf(results, q.Seq)
		if err != nil {
			return err
		}
		if q.Allowed != nil && a.Token != int32(i) {
			return fmt.Errorf("the mask of sequence %d of a step leaves token %d only, but %d was chosen", i, i, a.Token)
		}
	}
	return nil
}

// checkGenerated hands over what was generated before, with positions of another sequence and with a state that came in: the
// penalties count it.
func checkGenerated(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	n := len(r.prompt)
	// What was generated most often comes again: whether it was counted decides, not what the model makes of it.
	res := sdk.Reservation{Seq: r.seq(), Prompt: r.prompt, Sampler: sdk.Sampler{FrequencyPenalty: -100}}
	often := r.madeUp(1, 9)[0]
	generated := append(r.madeUp(6, 9), often, often)
	begin := func() (sdk.SeqID, error) {
		res.Seq = r.seq()
		if err := p.do(ctx, res); err != nil {
			return 0, err
		}
		if err := r.prefill(ctx, p, res.Seq, r.prompt); err != nil {
			return 0, err
		}
		_, err := r.force(ctx, p, res.Seq, n, generated)
		return res.Seq, err
	}
	at, next := n+len(generated), generated[:3]
	straight, err := begin()
	if err != nil {
		return err
	}
	want, err := r.force(ctx, p, straight, at, next)
	if err != nil {
		return err
	}
	from, err := begin()
	if err != nil {
		return err
	}
	ways := map[string]func(to sdk.Reservation) error{}
	if r.has(sdk.CapabilityShare) {
		ways["kept"] = func(to sdk.Reservation) error {
			to.From, to.Keep = from, at
			return p.do(ctx, to)
		}
	}
	if r.has(sdk.CapabilityState) {
		ways["imported"] = func(to sdk.Reservation) error {
			files, err := p.exportAll(ctx, from, at)
			if err != nil {
				return err
			}
			if err := p.do(ctx, to); err != nil {
				return err
			}
			return p.importAll(ctx, to.Seq, files)
		}
	}
	if len(ways) == 0 {
		return fmt.Errorf("%w: no state comes from elsewhere", errSkipped)
	}
	for way, bring := range ways {
		to := res
		to.Seq, to.Generated = r.seq(), generated
		if err := bring(to); err != nil {
			return fmt.Errorf("generated tokens that were %s: %w", way, err)
		}
		got, err := r.force(ctx, p, to.Seq, at, next)
		if err != nil {
			return fmt.Errorf("generated tokens that were %s: %w", way, err)
		}
		if err := want.equal(got); err != nil {
			return fmt.Errorf("generated tokens that were %s, under penalties: %w", way, err)
		}
	}
	return nil
}

// checkCapabilities asks for what the executor does not say that it understands: it must say so by name, whether the rest of
// the host's wish could be met or not, and go on.
func checkCapabilities(ctx context.Context, r *rig) error {
	for i, c := range r.able {
		if c == "" || slices.Contains(r.able[:i], c) {
			return fmt.Errorf("capability %q is empty or listed twice", c)
		}
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	s, n := p.stages[0], len(r.prompt)
	seq, to := r.seq(), r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: r.prompt}); err != nil {
		return err
	}
	if err := p.feed(ctx, seq, 0, r.prompt, maxRows); err != nil {
		return err
	}
	ask := func(q sdk.SeqStep) error {
		q.Seq, q.Tokens = seq, r.prompt[:1]
		if q.Pos == 0 {
			q.Pos = n
		}
		_, err := p.ask(ctx, q)
		return err
	}
	for _, c := range []struct {
		capability string
		use        func() error
	}{
		{sdk.CapabilityShare, func() error { return p.do(ctx, sdk.Reservation{Seq: to, From: seq, Keep: n}) }},
		{sdk.CapabilityRewind, func() error { return ask(sdk.SeqStep{Pos: n - 1, Want: sdk.WantToken}) }},
		{sdk.CapabilitySnapshots, func() error { return p.do(ctx, sdk.Reservation{Seq: to, Snapshots: 1}) }},
		{sdk.CapabilityState, func() error { _, _, err := s.export(ctx, seq, r.all()); return err }},
		{sdk.CapabilityState, func() error { return r.importNothing(ctx, p, s) }},
		{sdk.CapabilityMasks, func() error {
			return ask(sdk.SeqStep{Want: sdk.WantToken, Allowed: bytes.Repeat([]byte{255}, r.maskBytes())})
		}},
		{sdk.CapabilityScores, func() error { return ask(sdk.SeqStep{Want: sdk.WantScores, Targets: []int32{0}}) }},
		{sdk.CapabilityLogits, func() error { return ask(sdk.SeqStep{Want: sdk.WantLogits}) }},
	} {
		if r.has(c.capability) {
			continue
		}
		err := c.use()
		if err := wantCode(fmt.Sprintf("what needs the capability %q, which is not described,", c.capability), err, sdk.CodeUnsupported); err != nil {
			return err
		}
		if !strings.Contains(err.Error(), c.capability) {
			return fmt.Errorf("the refusal must name the capability %q: %w", c.capability, err)
		}
	}
	if err := ask(sdk.SeqStep{Want: sdk.WantToken}); err != nil {
		return fmt.Errorf("a step after refusals: %w", err)
	}
	return nil
}

// importNothing imports a state without sections.
func (r *rig) importNothing(ctx context.Context, p *pipe, s *stage) error {
	seq := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq}); err != nil {
		return err
	}
	raw, err := compose(sdk.StateHeader{Family: r.cfg.Family, Layers: r.all()}, nil)
	if err != nil {
		return err
	}
	_, err = s.importState(ctx, seq, r.all(), raw)
	return err
}
