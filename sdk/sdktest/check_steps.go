package sdktest

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// Checks of the step stream: order, splits, chunks, batches, and the life of a sequence.

// checkOrder sends a sequence's whole life without waiting in between, and compares with one step at a time.
func checkOrder(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	want, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	tokens := append(slices.Clone(r.prompt), want.tokens...)
	seq := r.seq()
	stream := p.stages[0].stream
	var answers []*sdk.Pending
	send := func(op sdk.Op) error {
		a, err := stream.Send(op)
		answers = append(answers, a)
		return err
	}
	if err := send(sdk.Reservation{Seq: seq, Prompt: r.prompt}); err != nil {
		return err
	}
	// Three slots, three steps in flight: the prompt in two parts, then the first token.
	half := len(r.prompt) / 2
	for i, q := range []sdk.SeqStep{
		{Seq: seq, Pos: 0, Tokens: tokens[:half], Prompt: true},
		{Seq: seq, Pos: half, Tokens: tokens[half:len(r.prompt)], Prompt: true, Want: sdk.WantToken, TopN: topN},
		{Seq: seq, Pos: len(r.prompt), Tokens: want.tokens[:1], Want: sdk.WantToken, TopN: topN},
	} {
		if err := send(&sdk.Step{ID: 1000 + uint64(i), Slot: i, Seqs: []sdk.SeqStep{p.rows(p.stages[0], q)}}); err != nil {
			return err
		}
	}
	if err := send(sdk.Release{Seq: seq}); err != nil {
		return err
	}
	var results []*sdk.StepResult
	for i, a := range answers {
		result, err := a.Wait(ctx)
		if err != nil {
			return fmt.Errorf("operation %d of a sequence that was sent at once: %w", i, err)
		}
		results = append(results, result)
	}
	for i := range 2 {
		got, err := answerOf(results[2+i].Seqs, seq)
		if err != nil {
			return err
		}
		if got.Token != want.tokens[i] {
			return fmt.Errorf("sent at once, token %d is %d, one at a time it is %d", i, got.Token, want.tokens[i])
		}
	}
	return nil
}

// checkSplit compares the model split at every legal place, and once into as many stages as there can be, with the
// model in one piece: bit for bit.
func checkSplit(ctx context.Context, r *rig) error {
	cuts := r.cuts()
	if len(cuts) == 0 {
		return fmt.Errorf("%w: the model can't be split", errSkipped)
	}
	whole, err := r.open(ctx)
	if err != nil {
		return err
	}
	want, err := r.run(ctx, whole, r.greedy())
	if err != nil {
		return err
	}
	splits := [][]int{cuts}
	for _, cut := range cuts {
		splits = append(splits, []int{cut})
	}
	for _, split := range splits {
		if err := r.compareSplit(ctx, split, want); err != nil {
			return fmt.Errorf("split before layers %v: %w", split, err)
		}
	}
	return nil
}

func (r *rig) compareSplit(ctx context.Context, split []int, want *trace) error {
	p, err := r.open(ctx, split...)
	if err != nil {
		return err
	}
	pl := r.greedy()
	pl.chunk = r.splitChunk()
	got, err := r.run(ctx, p, pl)
	if err != nil {
		return err
	}
	if err := want.equal(got); err != nil {
		return err
	}
	for range p.stages {
		if err := r.stop(); err != nil {
			return err
		}
	}
	return nil
}

// splitChunk makes the split runs prefill in several steps, so that state carries over on every stage; on devices
// whose kernels depend on the shape, the same shapes are kept.
func (r *rig) splitChunk() int {
	if !r.device.Numerics.ChunkInvariant {
		return 0
	}
	return 5
}

func checkChunks(ctx context.Context, r *rig) error {
	if !r.device.Numerics.ChunkInvariant {
		return fmt.Errorf("%w: kernels depend on the shape", errSkipped)
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	want, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	for _, chunk := range []int{1, 2, 3, 7} {
		pl := r.greedy()
		pl.chunk = chunk
		got, err := r.run(ctx, p, pl)
		if err != nil {
			return fmt.Errorf("prefill in chunks of %d: %w", chunk, err)
		}
		if err := want.equal(got); err != nil {
			return fmt.Errorf("prefill in chunks of %d: %w", chunk, err)
		}
	}
	return nil
}

// checkBatch runs three sequences of different lengths in the same steps and compares each with itself alone.
func checkBatch(ctx context.Context, r *rig) error {
	if !r.device.Numerics.BatchInvariant {
		return fmt.Errorf("%w: kernels depend on the shape", errSkipped)
	}
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	prompts := [][]int32{r.prompt, r.madeUp(5, 11), r.madeUp(9, 2)}
	var alone []*trace
	for _, prompt := range prompts {
		t, err := r.run(ctx, p, plan{prompt: prompt, generate: r.cfg.Generate})
		if err != nil {
			return err
		}
		alone = append(alone, t)
	}
	together, err := r.runTogether(ctx, p, prompts)
	if err != nil {
		return err
	}
	for i := range prompts {
		if !slices.Equal(alone[i].tokens, together[i].tokens) {
			return fmt.Errorf("sequence %d of a batch: tokens %v became %v", i, alone[i].tokens, together[i].tokens)
		}
		for k := range alone[i].answers {
			if err := sameAnswer(&alone[i].answers[k], &together[i].answers[k]); err != nil {
				return fmt.Errorf("sequence %d of a batch, token %d: %w", i, k, err)
			}
		}
	}
	return nil
}

// runTogether starts one sequence more with every step, so that prefills and decodes share steps.
func (r *rig) runTogether(ctx context.Context, p *pipe, prompts [][]int32) ([]*trace, error) {
	traces := make([]*trace, len(prompts))
	next := make([]sdk.SeqStep, len(prompts))
	for i, prompt := range prompts {
		traces[i] = &trace{}
		next[i] = sdk.SeqStep{Seq: r.seq(), Tokens: prompt, Prompt: true, Want: sdk.WantToken, TopN: topN}
		if err := p.do(ctx, sdk.Reservation{Seq: next[i].Seq, Prompt: prompt}); err != nil {
			return nil, err
		}
	}
	for n := range len(prompts) + r.cfg.Generate {
		var batch []sdk.SeqStep
		var members []int
		for i := range prompts {
			if i <= n && len(traces[i].tokens) < r.cfg.Generate {
				batch, members = append(batch, next[i]), append(members, i)
			}
		}
		if len(batch) == 0 {
			break
		}
		results, err := p.step(ctx, batch...)
		if err != nil {
			return nil, err
		}
		for _, i := range members {
			a, err := answerOf(results, next[i].Seq)
			if err != nil {
				return nil, err
			}
			traces[i].answers = append(traces[i].answers, *a)
			traces[i].tokens = append(traces[i].tokens, a.Token)
			next[i].Pos += len(next[i].Tokens)
			next[i].Tokens, next[i].Prompt = []int32{a.Token}, false
		}
	}
	for i := range prompts {
		if err := p.do(ctx, sdk.Release{Seq: next[i].Seq}); err != nil {
			return nil, err
		}
	}
	return traces, nil
}

// checkSlots runs a step in one slot and looks whether the others' memory, and its own input, are as they were.
func checkSlots(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	s := p.stages[0]
	region := s.client.Region()
	seq := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq, Prompt: r.prompt}); err != nil {
		return err
	}
	const slot, mark = 1, 0xA5
	for i := range slots {
		fill(region.In(i), mark)
		fill(region.Out(i), mark)
		fill(region.Masks(i), mark)
	}
	q := sdk.SeqStep{Seq: seq, Tokens: r.prompt, Prompt: true, Want: sdk.WantToken, TopN: topN}
	if r.has(sdk.CapabilityLogits) {
		q.Want, q.TopN = sdk.WantLogits, 0
	}
	if _, err := s.do(ctx, &sdk.Step{ID: 1, Slot: slot, Seqs: []sdk.SeqStep{p.rows(s, q)}}); err != nil {
		return err
	}
	for i := range slots {
		areas := [][]byte{region.In(i), region.Masks(i)}
		if i != slot {
			areas = append(areas, region.Out(i))
		}
		for _, area := range areas {
			if n := bytes.Count(area, []byte{mark}); n != len(area) {
				return fmt.Errorf("a step in slot %d wrote %d bytes of slot %d that are not its own", slot, len(area)-n, i)
			}
		}
	}
	return nil
}

func fill(area []byte, value byte) {
	for i := range area {
		area[i] = value
	}
}

// checkRelease runs the same prompt again after a release, and releases twice.
func checkRelease(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	first, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	if err := p.do(ctx, sdk.Release{Seq: r.lastSeq}); err != nil {
		return fmt.Errorf("a second release must do nothing: %w", err)
	}
	// Another prompt in between would show in what is left over.
	if _, err := r.run(ctx, p, plan{prompt: r.madeUp(9, 5), generate: 2}); err != nil {
		return err
	}
	again, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	if err := first.equal(again); err != nil {
		return fmt.Errorf("the same prompt after a release: %w", err)
	}
	// A released sequence must be gone.
	_, err = p.ask(ctx, sdk.SeqStep{Seq: r.lastSeq, Pos: len(r.prompt) + r.cfg.Generate + 1, Tokens: r.prompt[:1], Want: sdk.WantToken})
	return wantCode("a step of a released sequence", err, sdk.CodeUnknownSequence)
}

// logits feeds tokens as generated ones and returns the logits after the last.
func (p *pipe) logits(ctx context.Context, seq sdk.SeqID, pos int, tokens []int32) ([]byte, error) {
	var raw []byte
	for i, token := range tokens {
		a, err := p.ask(ctx, sdk.SeqStep{Seq: seq, Pos: pos + i, Tokens: []int32{token}, Want: sdk.WantLogits})
		if err != nil {
			return nil, err
		}
		raw = a.Logits.Data
	}
	return raw, nil
}

func checkUnknownSequence(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	known, unknown := r.seq(), r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: known, Prompt: r.prompt}); err != nil {
		return err
	}
	_, err = p.ask(ctx, sdk.SeqStep{Seq: unknown, Tokens: r.prompt, Prompt: true, Want: sdk.WantToken})
	if err := wantCode("a step of an unknown sequence", err, sdk.CodeUnknownSequence); err != nil {
		return err
	}
	err = p.do(ctx, sdk.Reservation{Seq: r.seq(), From: unknown, Keep: 1})
	if err := wantCode("a reservation that keeps positions of an unknown sequence", err, sdk.CodeUnknownSequence, sdk.CodeUnsupported); err != nil {
		return err
	}
	if err := p.do(ctx, sdk.Release{Seq: unknown}); err != nil {
		return fmt.Errorf("a release of an unknown sequence must do nothing: %w", err)
	}
	if err := wantCode("a second reservation", p.do(ctx, sdk.Reservation{Seq: known}), sdk.CodeInvalid); err != nil {
		return err
	}
	_, err = p.ask(ctx, sdk.SeqStep{Seq: known, Tokens: r.prompt, Prompt: true, Want: sdk.WantToken})
	return err
}

// checkPositions skips positions, which would make wrong answers, and goes on where it should.
func checkPositions(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	want, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	skipped := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: skipped, Prompt: r.prompt}); err != nil {
		return err
	}
	n := len(r.prompt)
	if err := p.feed(ctx, skipped, 0, r.prompt[:n-1], maxRows); err != nil {
		return err
	}
	for _, pos := range []int{n, n + 64} {
		_, err := p.ask(ctx, sdk.SeqStep{Seq: skipped, Pos: pos, Tokens: r.prompt[:1], Want: sdk.WantToken})
		if err := wantCode(fmt.Sprintf("a step at position %d of a sequence of %d", pos, n-1), err, sdk.CodeInvalid); err != nil {
			return err
		}
	}
	a, err := p.ask(ctx, sdk.SeqStep{Seq: skipped, Pos: n - 1, Tokens: r.prompt[n-1:], Prompt: true, Want: sdk.WantToken, TopN: topN})
	if err != nil {
		return fmt.Errorf("a step where the state ends, after steps past it: %w", err)
	}
	if r.chunked() && a.Token != want.tokens[0] {
		return fmt.Errorf("after steps past its end a sequence chose token %d, without them %d", a.Token, want.tokens[0])
	}
	seq := r.seq()
	if err := p.do(ctx, sdk.Reservation{Seq: seq}); err != nil {
		return err
	}
	_, err = p.ask(ctx, sdk.SeqStep{Seq: seq, Tokens: []int32{math.MaxInt32}, Prompt: true, Want: sdk.WantToken})
	return wantCode("a token that is not in the vocabulary", err, sdk.CodeInvalid)
}

// checkCancel fills the slots with long steps and gives all of them up, some times over, because a step may be done
// or not begun when its turn comes. Each must answer, with its result or CodeCanceled, and other sequences must not
// notice.
func checkCancel(ctx context.Context, r *rig) error {
	p, err := r.open(ctx)
	if err != nil {
		return err
	}
	want, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	for range 5 {
		if err := r.giveUp(ctx, p); err != nil {
			return err
		}
	}
	got, err := r.run(ctx, p, r.greedy())
	if err != nil {
		return err
	}
	if err := want.equal(got); err != nil {
		return fmt.Errorf("after steps that were given up: %w", err)
	}
	return nil
}

func (r *rig) giveUp(ctx context.Context, p *pipe) error {
	rows := maxRows
	if limit := r.profile.ContextLength; limit > 0 {
		rows = min(rows, limit)
	}
	long := r.madeUp(rows, 4)
	stream := p.stages[0].stream
	var answers []*sdk.Pending
	var steps []*sdk.Step
	for slot := range slots {
		q := sdk.SeqStep{Seq: r.seq(), Tokens: long, Prompt: true, Want: sdk.WantToken}
		if err := p.do(ctx, sdk.Reservation{Seq: q.Seq, Prompt: long}); err != nil {
			return err
		}
		p.lastStep++
		steps = append(steps, &sdk.Step{ID: p.lastStep, Slot: slot, Seqs: []sdk.SeqStep{p.rows(p.stages[0], q)}})
	}
	for _, s := range steps {
		a, err := stream.Send(s)
		if err != nil {
			return err
		}
		answers = append(answers, a)
	}
	for _, s := range steps {
		if err := stream.Cancel(ctx, s.ID); err != nil {
			return err
		}
	}
	for i, a := range answers {
		if _, err := a.Wait(ctx); err != nil {
			if err := wantCode("a step given up", err, sdk.CodeCanceled); err != nil {
				return err
			}
		}
		if err := p.do(ctx, sdk.Release{Seq: steps[i].Seqs[0].Seq}); err != nil {
			return err
		}
	}
	return nil
}
