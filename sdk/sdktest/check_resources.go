package sdktest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// Checks of what an executor holds, and says that it holds.

func checkStats(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	s := p.stages[0]
	before, err := s.client.Stats(ctx)
	if err != nil {
		return err
	}
	if !before.Loaded || before.WeightBytes != s.report.WeightBytes || before.ResidentBytes <= 0 {
		return fmt.Errorf("after a load of %d bytes the stats are %+v", s.report.WeightBytes, *before)
	}
	seq := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: r.prompt}); err != nil {
		return err
	}
	const chunk = 2
	if err := p.feed(ctx, seq, 0, r.prompt, chunk); err != nil {
		return err
	}
	during, err := s.client.Stats(ctx)
	if err != nil {
		return err
	}
	if want := before.Steps + uint64((len(r.prompt)+chunk-1)/chunk); during.Steps != want {
		return fmt.Errorf("%d steps are finished, the stats say %d", want, during.Steps)
	}
	if during.Sequences != before.Sequences+1 || during.StateBytes <= before.StateBytes || during.BusyNanos <= before.BusyNanos {
		return fmt.Errorf("a sequence's steps took the stats from %+v to %+v", *before, *during)
	}
	if err := p.do(ctx, sdk.Release{Seq: seq}); err != nil {
		return err
	}
	after, err := s.client.Stats(ctx)
	if err != nil {
		return err
	}
	if after.Sequences != before.Sequences || after.StateBytes != before.StateBytes {
		return fmt.Errorf("after a release the stats are %+v, before the sequence they were %+v", *after, *before)
	}
	return nil
}

// checkReload unloads with a sequence still there, and loads again.
func checkReload(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	want, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	left := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: left, Prompt: r.prompt}); err != nil {
		return err
	}
	s := p.stages[0]
	if err := errors.Join(s.stream.Close(), s.client.Unload(ctx), s.client.Unload(ctx)); err != nil {
		return fmt.Errorf("unload, twice: %w", err)
	}
	stats, err := s.client.Stats(ctx)
	if err != nil {
		return err
	}
	if stats.Loaded || stats.Sequences != 0 || stats.WeightBytes != 0 || stats.StateBytes != 0 {
		return fmt.Errorf("after an unload the stats are %+v", *stats)
	}
	if err := s.load(ctx, r.request(sdk.LayerRange{End: len(r.profile.Layers)})); err != nil {
		return fmt.Errorf("the second load: %w", err)
	}
	got, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	if err := want.equal(got); err != nil {
		return fmt.Errorf("after the second load: %w", err)
	}
	_, err = p.ask(ctx, sdk.SeqStep{Seq: left, Tokens: r.prompt, Prompt: true, Want: sdk.WantToken})
	return wantCode("a step of a sequence from before the unload", err, sdk.CodeUnknownSequence)
}

// pricedPositions bounds the lengths at which checkPrice looks.
const pricedPositions = 1100

// checkPrice compares what the stats report with what the profile foretells, where blocks begin and windows fill, and
// after going back.
func checkPrice(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	lengths := r.priceLengths()
	tokens, seq := r.madeUp(lengths[len(lengths)-1], 5), r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: tokens}); err != nil {
		return err
	}
	if err := r.comparePrice(ctx, p, 0); err != nil {
		return err
	}
	fed := 0
	for _, n := range lengths {
		if err := p.feed(ctx, seq, fed, tokens[fed:n], maxRows); err != nil {
			return err
		}
		if err := r.comparePrice(ctx, p, n); err != nil {
			return err
		}
		fed = n
	}
	if !r.has(sdk.CapabilityRewind) || r.window() > 0 {
		return nil
	}
	// Any state but a window that has moved can begin anew.
	if err := p.feed(ctx, seq, 0, tokens[:1], maxRows); err != nil {
		return fmt.Errorf("back to the beginning: %w", err)
	}
	if err := r.comparePrice(ctx, p, 1); err != nil {
		return fmt.Errorf("after going back from %d positions: %w", fed, err)
	}
	return nil
}

// priceLengths are the lengths around the edges of blocks and windows, in order.
func (r *rig) priceLengths() []int {
	lengths := []int{1, len(r.prompt)}
	for _, l := range r.profile.Layers {
		for _, s := range l.States {
			for _, edge := range []int{s.Block, 2 * s.Block, s.Window, s.Window + s.Block} {
				lengths = append(lengths, edge-1, edge, edge+1)
			}
		}
	}
	most := pricedPositions
	if limit := r.profile.ContextLength; limit > 0 {
		most = min(most, limit)
	}
	slices.Sort(lengths)
	return slices.DeleteFunc(slices.Compact(lengths), func(n int) bool { return n < 1 || n > most })
}

// comparePrice looks at the only sequence. A window that is full may hold less than its price by a block at either end.
func (r *rig) comparePrice(ctx context.Context, p *pipe, positions int) error {
	var most, less int64
	for _, l := range r.profile.Layers {
		most += l.StateBytes(positions, 0)
		for _, s := range l.States {
			if s.Window > 0 && s.Bytes(positions) == s.Bytes(math.MaxInt) {
				less += 2 * int64(max(1, s.Block)) * s.BytesPerPosition
			}
		}
	}
	stats, err := p.stages[0].client.Stats(ctx)
	if err != nil {
		return err
	}
	switch held := stats.StateBytes; {
	case held > most:
		return fmt.Errorf("a sequence of %d positions holds %d bytes of state, the profile's price is %d", positions, held, most)
	case held < most-less:
		return fmt.Errorf("a sequence of %d positions holds %d bytes of state, the profile's price is %d and may be no more than %d too high", positions, held, most, less)
	}
	return nil
}

// checkBudget loads with a byte less than the prompt's state takes.
func checkBudget(ctx context.Context, r *rig) error {
	budget, empty := int64(-1), int64(-1)
	for _, l := range r.profile.Layers {
		budget += l.StateBytes(len(r.prompt), 0)
		empty += l.StateBytes(0, 0)
	}
	if budget == empty {
		return fmt.Errorf("%w: its state does not grow", errSkipped)
	}
	req := r.request(sdk.LayerRange{End: len(r.profile.Layers)})
	req.KVBudget = budget
	s, err := r.load(ctx, req)
	if err != nil {
		return err
	}
	p := &pipe{stages: []*stage{s}}
	seq := r.seq()
	err = p.do(ctx, sdk.Reservation{Seq: seq, Prompt: r.prompt, MaxLen: len(r.prompt)})
	if err == nil {
		err = p.feed(ctx, seq, 0, r.prompt, maxRows)
	}
	return wantCode(fmt.Sprintf("a prompt of %d tokens in a budget of %d bytes", len(r.prompt), budget), err, sdk.CodeOutOfMemory)
}

// slack is what memory may grow by in the course of checkMemory without being a leak: allocators and collectors
// settle only slowly.
const slack = 8 << 20

// checkMemory runs sequences one after the other, and looks whether the process grows once it has settled.
func checkMemory(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	pl := r.greedy()
	perRun := 2 + pl.generate
	runs := max(r.cfg.MemorySteps/perRun, 4)
	var settled *sdk.Stats
	for i := range runs {
		if _, err := r.run(ctx, p, pl); err != nil {
			return err
		}
		if i == runs/4 {
			if settled, err = r.memory(ctx, p); err != nil {
				return err
			}
		}
	}
	end, err := r.memory(ctx, p)
	if err != nil {
		return err
	}
	if end.StateBytes != settled.StateBytes || end.Sequences != 0 {
		return fmt.Errorf("%d sequences left %d bytes of state in %d sequences", runs, end.StateBytes, end.Sequences)
	}
	if grown := end.ResidentBytes - settled.ResidentBytes; grown > slack {
		return fmt.Errorf("%d steps grew the process by %d bytes", (runs-runs/4)*perRun, grown)
	}
	return nil
}

func (r *rig) memory(ctx context.Context, p *pipe) (*sdk.Stats, error) {
	if r.cfg.New != nil {
		debug.FreeOSMemory() // garbage of this process is no leak
	}
	return p.stages[0].client.Stats(ctx)
}
