package pipeline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// The toy model is a chain of hashes: every layer mixes its number, its input and all that it saw of the sequence
// before. A lost layer, a stale or foreign state, a wrong position or a swapped row changes every token after it.
const (
	toyLayers = 7
	toyWidth  = 4 // 16 bytes a row
	toyVocab  = 101
)

func mix(parts ...uint64) uint64 {
	h := uint64(0x9e3779b97f4a7c15)
	for _, p := range parts {
		h ^= p
		h *= 0xbf58476d1ce4e5b9
		h ^= h >> 29
	}
	return h
}

// toySequence is the state of one sequence over some layers: for each, its value after every position.
type toySequence struct {
	prompt  []int32
	seed    uint64
	history [][]uint64
}

func newToySequence(layers int, r sdk.Reservation) *toySequence {
	q := &toySequence{seed: r.Sampler.Seed, history: make([][]uint64, layers)}
	if r.Sampler.CountsTokens() {
		q.prompt = slices.Clone(r.Prompt)
	}
	return q
}

// toySampler is the sampler of a seed: every other one counts the tokens of the prompt.
func toySampler(seed uint64) sdk.Sampler {
	s := sdk.Sampler{Seed: seed}
	if seed%2 == 1 {
		s.PresencePenalty = 0.5
	}
	return s
}

func (q *toySequence) length() int { return len(q.history[0]) }

// forward takes a row through layers from first on.
func (q *toySequence) forward(first int, h uint64) uint64 {
	for i := range q.history {
		state := uint64(0)
		if n := len(q.history[i]); n > 0 {
			state = q.history[i][n-1]
		}
		h = mix(h, uint64(first+i), state)
		q.history[i] = append(q.history[i], mix(state, h))
	}
	return h
}

func toyEmbed(token int32, pos int) uint64 { return mix(uint64(token), uint64(pos), 1) }

func (q *toySequence) sample(h uint64) int32 {
	return int32(mix(h, q.seed, uint64(len(q.prompt))) % toyVocab)
}

// solo runs one sequence through the whole model, alone: what every pipeline must reproduce.
func solo(prompt []int32, seed uint64, n int) []int32 {
	q := newToySequence(toyLayers, sdk.Reservation{Prompt: prompt, Sampler: toySampler(seed)})
	var h uint64
	for pos, token := range prompt {
		h = q.forward(0, toyEmbed(token, pos))
	}
	var out []int32
	for len(out) < n {
		token := q.sample(h)
		out = append(out, token)
		h = q.forward(0, toyEmbed(token, q.length()))
	}
	return out
}

// toyExecutor is an executor process in miniature. It carries out what it is sent in order, on a goroutine.
type toyExecutor struct {
	stage  int
	req    sdk.LoadRequest
	region *sdk.Region
	done   chan struct{} // closed by die and Stop

	// before is asked before each operation is carried out, on the executor's goroutine. What it returns is the
	// operation's answer; errDie ends the process.
	before func(op sdk.Op) error
	// tamper may change the answer to a step.
	tamper  func(r *sdk.StepResult)
	loadErr error
	openErr error
	// loading, where set, holds a load up until it is closed; stuckLoad until the load is given up.
	loading   chan struct{}
	stuckLoad bool

	mu       sync.Mutex
	queue    []toyCall
	wake     chan struct{}
	err      error         // after done
	frozen   bool          // the process stands still
	room     int           // operations that Send takes for a frozen process before it waits for its end, against its contract
	freed    chan struct{} // closed once whoever waits in Send is freed
	waiting  int           // in Send
	killed   bool
	immortal bool // the system does not let the process go
	deaf     bool // the connection broke, the process lives
	stopped  bool
	seqs     map[sdk.SeqID]*toySequence
	steps    int // carried out
	canceled []uint64
	phase    Phase
	worker   sync.WaitGroup
}

type toyCall struct {
	op      sdk.Op
	pending *sdk.Pending
}

var errDie = errors.New("die")

func newToyExecutor(stage int) *toyExecutor {
	region, err := sdk.NewRegion()
	if err != nil {
		panic(err)
	}
	return &toyExecutor{stage: stage, region: region, done: make(chan struct{}), wake: make(chan struct{}, 1), freed: make(chan struct{}), room: 1 << 30, seqs: map[sdk.SeqID]*toySequence{}}
}

func (e *toyExecutor) Plugin() string      { return "toy" }
func (e *toyExecutor) Region() *sdk.Region { return e.region }
func (e *toyExecutor) Enter(p Phase)       { e.locked(func() { e.phase = p }) }

func (e *toyExecutor) locked(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

func (e *toyExecutor) Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	if e.loadErr != nil {
		if errors.Is(e.loadErr, errDie) {
			e.die()
			return nil, fmt.Errorf("load: %w", sdk.ErrExecutorGone)
		}
		return nil, e.loadErr
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if e.loading != nil {
		<-e.loading
	}
	if e.stuckLoad {
		<-ctx.Done()
		return nil, fmt.Errorf("load: %w", context.Cause(ctx))
	}
	if err := e.region.Map(req.Region); err != nil {
		return nil, err
	}
	e.req = req
	progress(sdk.LoadProgress{Loaded: 1, Total: 1, Tensor: "toy"})
	return &sdk.LoadReport{WeightBytes: int64(100*(req.Layers.End-req.Layers.Start) + 5), Boundary: sdk.Boundary{Width: toyWidth, Dtype: sdk.DtypeFloat32}, VocabSize: toyVocab}, nil
}

func (e *toyExecutor) OpenSteps(context.Context) (sdk.StepClient, error) {
	if e.openErr != nil {
		return nil, e.openErr
	}
	e.worker.Go(e.work)
	return e, nil
}

func (e *toyExecutor) Done() <-chan struct{} { return e.done }

func (e *toyExecutor) Err() (err error) {
	e.locked(func() { err = e.err })
	return err
}

func (e *toyExecutor) Explain(err error) error {
	if !errors.Is(err, sdk.ErrExecutorGone) {
		return err
	}
	if e.deaf {
		return fmt.Errorf("closed its connection but still runs: %w", err)
	}
	<-e.done
	return e.Err()
}

// Health does not return before its time where the toy is frozen, as a stopped process does not.
func (e *toyExecutor) Health(ctx context.Context) error {
	var frozen bool
	e.locked(func() { frozen = e.frozen })
	if !frozen {
		return nil
	}
	<-ctx.Done()
	return fmt.Errorf("toy of stage %d does not answer: %w", e.stage, ctx.Err())
}

// Kill is Executor's.
func (e *toyExecutor) Kill() error {
	var immortal bool
	e.locked(func() { e.killed, immortal = true, e.immortal })
	if immortal {
		return errors.New("it can't be killed")
	}
	e.end(errors.New("killed"))
	return nil
}

func (e *toyExecutor) Stop(context.Context) error {
	e.end(nil)
	e.worker.Wait()
	e.stopped = true
	return e.region.Close()
}

// die ends the process as a crash does.
func (e *toyExecutor) die() {
	var phase Phase
	e.locked(func() { phase = e.phase })
	e.end(fmt.Errorf("toy of stage %d died in %s; its last log lines: boom", e.stage, phase))
}

func (e *toyExecutor) end(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-e.done:
		return
	default:
	}
	e.err = err
	close(e.done)
	e.dropQueue()
}

// hangUp breaks the connection; the process lives.
func (e *toyExecutor) hangUp() {
	e.locked(func() {
		e.deaf = true
		e.dropQueue()
	})
}

func (e *toyExecutor) dropQueue() {
	for _, c := range e.queue {
		c.pending.Complete(nil, fmt.Errorf("step stream: %w", sdk.ErrExecutorGone))
	}
	e.queue = nil
	e.wakeUp()
	select {
	case <-e.freed:
	default:
		close(e.freed)
	}
}

func (e *toyExecutor) isDead() bool {
	select {
	case <-e.done:
		return true
	default:
		return e.deaf
	}
}

func (e *toyExecutor) wakeUp() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

func (e *toyExecutor) Send(op sdk.Op) (*sdk.Pending, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.frozen && len(e.queue) >= e.room {
		e.waiting++
		e.mu.Unlock()
		<-e.freed
		e.mu.Lock()
		e.waiting--
	}
	if e.isDead() {
		return nil, fmt.Errorf("send: %w", sdk.ErrExecutorGone)
	}
	c := toyCall{op, sdk.NewPending()}
	e.queue = append(e.queue, c)
	e.wakeUp()
	return c.pending, nil
}

func (e *toyExecutor) Cancel(_ context.Context, id uint64) error {
	e.locked(func() { e.canceled = append(e.canceled, id) })
	return nil
}

func (e *toyExecutor) Close() error {
	e.hangUp()
	return nil
}

func (e *toyExecutor) work() {
	for {
		e.mu.Lock()
		if e.isDead() {
			e.mu.Unlock()
			return
		}
		if len(e.queue) == 0 || e.frozen {
			e.mu.Unlock()
			<-e.wake
			continue
		}
		c := e.queue[0]
		e.mu.Unlock()
		r, err := e.carryOut(c.op)
		if errors.Is(err, errDie) {
			e.die()
			return
		}
		e.mu.Lock()
		if e.isDead() {
			e.mu.Unlock()
			return
		}
		e.queue = e.queue[1:]
		e.mu.Unlock()
		c.pending.Complete(r, err)
	}
}

func (e *toyExecutor) carryOut(op sdk.Op) (*sdk.StepResult, error) {
	if e.before != nil {
		if err := e.before(op); err != nil {
			return nil, err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.isDead() {
		return nil, sdk.ErrExecutorGone // and the region may be gone
	}
	switch op := op.(type) {
	case sdk.Reservation:
		if e.seqs[op.Seq] != nil {
			return nil, sdk.Errorf(sdk.CodeInvalid, "sequence %d twice", op.Seq)
		}
		q := newToySequence(e.req.Layers.End-e.req.Layers.Start, op)
		if op.Keep > 0 {
			from := e.seqs[op.From]
			if from == nil || op.Keep > from.length() {
				return nil, sdk.Errorf(sdk.CodeUnknownSequence, "sequence %d has not %d positions", op.From, op.Keep)
			}
			for i := range q.history {
				q.history[i] = slices.Clone(from.history[i][:op.Keep])
			}
		}
		e.seqs[op.Seq] = q
	case sdk.Release:
		delete(e.seqs, op.Seq)
	case *sdk.Step:
		return e.step(op)
	}
	return nil, nil
}

func (e *toyExecutor) step(s *sdk.Step) (*sdk.StepResult, error) {
	e.steps++
	r := &sdk.StepResult{ID: s.ID}
	out := s.Out
	if out == nil { // not served over the contract
		out = e.region.Out(s.Slot)
	}
	row := 0
	for i, q := range s.Seqs {
		state := e.seqs[q.Seq]
		if state == nil {
			return nil, sdk.Errorf(sdk.CodeUnknownSequence, "sequence %d is unknown to stage %d", q.Seq, e.stage)
		}
		if q.Pos < state.length() {
			for i := range state.history {
				state.history[i] = state.history[i][:q.Pos]
			}
		}
		if q.Pos != state.length() {
			return nil, sdk.Errorf(sdk.CodeInvalid, "sequence %d at %d, its state has %d", q.Seq, q.Pos, state.length())
		}
		var h uint64
		for j := range q.Rows {
			if e.req.HasEmbedding {
				h = toyEmbed(q.Tokens[j], q.Pos+j)
			} else {
				h = readRow(s.Hidden.Data, row)
			}
			h = state.forward(e.req.Layers.Start, h)
			if !e.req.HasHead {
				writeRow(out, row, h)
			}
			row++
		}
		if e.req.HasHead {
			r.Seqs = append(r.Seqs, e.answer(q, state, h, out, i))
		}
	}
	if !e.req.HasHead {
		r.Hidden = sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: row, Width: toyWidth, Data: out[:row*16]}
	}
	if e.tamper != nil {
		e.tamper(r)
	}
	return r, nil
}

func (e *toyExecutor) answer(q sdk.SeqStep, state *toySequence, h uint64, out []byte, i int) sdk.SeqResult {
	r := sdk.SeqResult{Seq: q.Seq, Token: -1}
	switch q.Want {
	case sdk.WantToken:
		r.Token = state.sample(h)
	case sdk.WantLogits:
		data := out[i*toyVocab*4 : (i+1)*toyVocab*4]
		for j := range toyVocab {
			binary.LittleEndian.PutUint32(data[j*4:], uint32(mix(h, uint64(j))))
		}
		r.Logits = sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: 1, Width: toyVocab, Data: data}
	}
	return r
}

// A row carries its value in every column pair, so that a half-copied row is noticed.
func writeRow(b []byte, row int, h uint64) {
	binary.LittleEndian.PutUint64(b[row*16:], h)
	binary.LittleEndian.PutUint64(b[row*16+8:], ^h)
}

func readRow(b []byte, row int) uint64 {
	h, check := binary.LittleEndian.Uint64(b[row*16:]), binary.LittleEndian.Uint64(b[row*16+8:])
	if h != ^check {
		return mix(h, check, 0xbad)
	}
	return h
}

// toyLauncher makes toy executors and lets a test prepare each.
type toyLauncher struct {
	prepare   func(*toyExecutor)
	launchErr map[int]error
	mu        sync.Mutex
	made      []*toyExecutor
}

// launcherBefore launches executors, one stage's of which calls before ahead of each operation: it may wait there, or fail it.
func launcherBefore(stage int, before func(sdk.Op) error) *toyLauncher {
	return &toyLauncher{prepare: onStage(stage, func(e *toyExecutor) { e.before = before })}
}

func (l *toyLauncher) Launch(_ context.Context, a partition.StageAssignment) (Executor, error) {
	if err := l.launchErr[a.StageIndex]; err != nil {
		return nil, err
	}
	e := newToyExecutor(a.StageIndex)
	if l.prepare != nil {
		l.prepare(e)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.made = append(l.made, e)
	return e, nil
}

// executor returns the toy of a stage.
func (l *toyLauncher) executor(stage int) *toyExecutor {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.made {
		if e.stage == stage {
			return e
		}
	}
	return nil
}

func toyProfile() *sdk.ModelProfile {
	p := &sdk.ModelProfile{Family: "toy", VocabSize: toyVocab, Boundary: sdk.Boundary{Width: toyWidth, Dtype: sdk.DtypeFloat32}}
	for range toyLayers {
		p.Layers = append(p.Layers, sdk.LayerProfile{Weights: 100})
	}
	return p
}

func toyConfig(t testing.TB, stages int, l *toyLauncher) Config {
	t.Helper()
	profile := toyProfile()
	plan, err := partition.New(partition.Request{Profile: profile, Hardware: partition.Local(stages, partition.Memory{Budget: partition.Unlimited})})
	if err != nil {
		t.Fatal(err)
	}
	return Config{Plan: plan, Profile: profile, Launcher: l, ModelDir: "toy", PrefillChunk: 16}
}

// startToy starts a pipeline: in this process, or as OverLinks says.
func startToy(t testing.TB, cfg Config) *Pipeline {
	t.Helper()
	start := Start
	if overLinks != nil {
		start = overLinks
	}
	p, err := start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func closeToy(t testing.TB, p *Pipeline) {
	t.Helper()
	if err := p.Close(context.Background()); err != nil {
		t.Errorf("close: %v", err)
	}
}

// stagesOf returns the stages of a pipeline, wherever they run.
func stagesOf(p *Pipeline) []*Stage {
	stages := p.running
	for _, r := range p.remote {
		stages = append(stages, r.Port.(PortTo).Stage)
	}
	return stages
}
