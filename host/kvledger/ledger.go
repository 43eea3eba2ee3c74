// Package kvledger owns the books of KV memory: what each sequence has reserved on each stage, and whether one more
// fits.
//
// A sequence is admitted on every stage or on none. The ledger is a plain value: it starts nothing, reads no clock and
// is not safe for concurrent use.
package kvledger

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"

	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/sdk"
)

// Layer is what one layer keeps of a sequence.
type Layer struct {
	BytesPerPosition int64
	Window           int   // positions after which it stops growing; 0 means never
	StateBytes       int64 // at any length
}

// Stage is one stage's share of the model and of the memory.
type Stage struct {
	Layers       []Layer
	Budget       int64 // bytes that all sequences may reserve together; 0 means no limit
	MaxSequences int   // at most; 0 means no limit
}

// Spread returns the KV budget of each stage for what --kv-budget gives: nothing, one size for all, or one for each.
func Spread(given []int64, stages int) ([]int64, error) {
	switch len(given) {
	case 0:
		return nil, nil
	case 1:
		return slices.Repeat(given, stages), nil
	case stages:
		return slices.Clone(given), nil
	}
	return nil, fmt.Errorf("--kv-budget gives %d sizes for %d stages: give one for each, or one for all", len(given), stages)
}

// Stages prices the stages of a plan. budgets holds the KV budget of each stage in bytes, 0 for no limit; nil means
// no limits.
func Stages(profile *sdk.ModelProfile, plan *partition.Plan, budgets []int64, maxSequences int) []Stage {
	stages := make([]Stage, len(plan.Stages))
	for i, a := range plan.Stages {
		s := &stages[i]
		s.MaxSequences = maxSequences
		if i < len(budgets) {
			s.Budget = budgets[i]
		}
		for _, l := range profile.Layers[a.LayerRange.Start:a.LayerRange.End] {
			s.Layers = append(s.Layers, Layer{BytesPerPosition: l.KVBytesPerToken, Window: l.KVWindow, StateBytes: l.StateBytes})
		}
	}
	return stages
}

// Config is what a ledger keeps the books of.
type Config struct {
	Stages        []Stage
	Block         int     // positions by which a cache grows; 0 means 64
	ContextLength int     // positions of the model; 0 means no limit
	Preemption    bool    // reserve as a sequence grows, instead of all that it may need at once
	Threshold     float64 // share of a budget past which a stage is under pressure, in (0, 1]; 0 means 0.9
}

const (
	defaultBlock     = 64
	defaultThreshold = 0.9
)

// Validate returns all faults at once.
func (c Config) Validate() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if len(c.Stages) == 0 {
		fault("KV ledger has no stages")
	}
	if c.Block < 0 || c.ContextLength < 0 {
		fault("KV ledger has block %d and context length %d: want 0 or more", c.Block, c.ContextLength)
	}
	if c.Threshold < 0 || c.Threshold > 1 {
		fault("KV pressure threshold %g: want more than 0 and at most 1", c.Threshold)
	}
	for i, s := range c.Stages {
		if s.Budget < 0 || s.MaxSequences < 0 {
			fault("stage %d has a KV budget of %d bytes for %d sequences: want 0 or more", i, s.Budget, s.MaxSequences)
		}
		for _, l := range s.Layers {
			if l.BytesPerPosition < 0 || l.Window < 0 || l.StateBytes < 0 {
				fault("stage %d has a layer of %d bytes per position, window %d and %d bytes of state: want 0 or more", i, l.BytesPerPosition, l.Window, l.StateBytes)
			}
		}
	}
	return errors.Join(faults...)
}

// Ledger is the books of one pipeline.
type Ledger struct {
	cfg   Config
	used  []int64 // by stage
	seqs  map[sdk.SeqID]*entry
	limit int // positions
	tight int // the stage that sets limit, -1 for the context
}

// entry is an admitted sequence.
type entry struct {
	positions int     // reserved, in whole blocks
	bytes     []int64 // reserved, by stage
}

// New opens empty books.
func New(cfg Config) (*Ledger, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Block == 0 {
		cfg.Block = defaultBlock
	}
	if cfg.Threshold == 0 {
		cfg.Threshold = defaultThreshold
	}
	l := &Ledger{cfg: cfg, used: make([]int64, len(cfg.Stages)), seqs: map[sdk.SeqID]*entry{}}
	l.limit, l.tight = l.findLimit()
	return l, nil
}

// Sequence is what is to be admitted.
type Sequence struct {
	Seq    sdk.SeqID
	Length int // positions that it has from the start: its prompt, and what it had generated before a preemption
	MaxLen int // positions that it may have in the end
}

// StageUsage is what a stage has reserved.
type StageUsage struct {
	Used      int64 // bytes
	Budget    int64 // bytes; 0 means no limit
	Sequences int
	Pressure  bool // past the threshold
}

// Bytes returns what a sequence of that many positions holds.
func (s Stage) Bytes(positions int) int64 {
	var n int64
	for _, l := range s.Layers {
		held := positions
		if l.Window > 0 {
			held = min(held, l.Window)
		}
		n += l.StateBytes + int64(held)*l.BytesPerPosition
	}
	return n
}

// Limit returns the positions that a lone sequence can have; math.MaxInt where nothing limits them.
func (l *Ledger) Limit() int { return l.limit }

// Check returns a *TooLongError for a request that could not be served with nothing else running.
func (l *Ledger) Check(prompt, maxTokens int) error {
	if prompt+maxTokens <= l.limit && (prompt < l.limit || maxTokens == 0) {
		return nil
	}
	e := &TooLongError{Prompt: prompt, MaxTokens: maxTokens, Limit: l.limit, Stage: l.tight}
	if l.tight >= 0 {
		e.Budget = l.cfg.Stages[l.tight].Budget
	}
	return e
}

// Admit reserves memory for a sequence on every stage, or returns an *AdmissionDiagnostic of the first stage that
// refuses and reserves none.
func (l *Ledger) Admit(s Sequence) error {
	e := &entry{positions: l.blocks(l.wanted(s)), bytes: make([]int64, len(l.cfg.Stages))}
	for i, stage := range l.cfg.Stages {
		e.bytes[i] = stage.Bytes(e.positions)
		if reason := l.refusal(i, s.Seq, e.bytes[i]); reason != "" {
			return l.diagnose(i, reason, s.Seq, e.bytes[i])
		}
	}
	l.seqs[s.Seq] = e
	l.add(e.bytes, 1)
	return nil
}

// wanted is the positions to reserve at admission.
func (l *Ledger) wanted(s Sequence) int {
	if l.cfg.Preemption {
		return min(s.Length+l.cfg.Block, s.MaxLen)
	}
	return s.MaxLen
}

// refusal is why stage i can't take a new sequence of so many bytes; empty when it can.
func (l *Ledger) refusal(i int, seq sdk.SeqID, bytes int64) Reason {
	stage := &l.cfg.Stages[i]
	switch {
	case l.seqs[seq] != nil:
		return ReasonAlreadyCached
	case stage.MaxSequences > 0 && len(l.seqs) >= stage.MaxSequences:
		return ReasonSequenceCap
	case !l.fits(i, bytes, l.admissible(i)):
		return ReasonMemory
	}
	return ""
}

// admissible is the bytes up to which stage i takes new sequences. With preemption it stops at the threshold, as a
// sequence beyond it would lose its place at once; only a lone sequence may have the whole budget.
func (l *Ledger) admissible(i int) int64 {
	budget := l.cfg.Stages[i].Budget
	if l.cfg.Preemption && len(l.seqs) > 0 {
		return l.threshold(budget)
	}
	return budget
}

func (l *Ledger) threshold(budget int64) int64 { return int64(l.cfg.Threshold * float64(budget)) }

func (l *Ledger) fits(i int, more, limit int64) bool {
	return l.cfg.Stages[i].Budget == 0 || l.used[i]+more <= limit
}

// Grow makes sure that a sequence has reserved that many positions. It takes whole blocks, on every stage or on none:
// then it returns an *AdmissionDiagnostic.
func (l *Ledger) Grow(seq sdk.SeqID, positions int) error {
	e := l.seqs[seq]
	if e == nil {
		return &UnknownSequenceError{Seq: seq}
	}
	if positions <= e.positions {
		return nil
	}
	bytes, more := make([]int64, len(e.bytes)), make([]int64, len(e.bytes))
	for i, stage := range l.cfg.Stages {
		bytes[i] = stage.Bytes(l.blocks(positions))
		more[i] = bytes[i] - e.bytes[i]
		if more[i] > 0 && !l.fits(i, more[i], stage.Budget) {
			return l.diagnose(i, ReasonMemory, seq, more[i])
		}
	}
	e.positions, e.bytes = l.blocks(positions), bytes
	l.add(more, 1)
	return nil
}

// blocks rounds positions up to whole blocks.
func (l *Ledger) blocks(positions int) int {
	return (positions + l.cfg.Block - 1) / l.cfg.Block * l.cfg.Block
}

// Release gives back what a sequence has reserved. An unknown one has nothing.
func (l *Ledger) Release(seq sdk.SeqID) {
	if e := l.seqs[seq]; e != nil {
		l.add(e.bytes, -1)
		delete(l.seqs, seq)
	}
}

func (l *Ledger) add(bytes []int64, sign int64) {
	for i, n := range bytes {
		l.used[i] += sign * n
	}
}

// Rejected describes the refusal of a stage itself, err, of a sequence that the ledger had admitted, and takes that
// sequence off the books.
func (l *Ledger) Rejected(seq sdk.SeqID, stage int, err error) *AdmissionDiagnostic {
	var bytes int64
	if e := l.seqs[seq]; e != nil && stage >= 0 && stage < len(e.bytes) {
		bytes = e.bytes[stage]
	}
	l.Release(seq)
	d := l.diagnose(max(0, min(stage, len(l.used)-1)), ReasonRejectedByStage, seq, bytes)
	d.Err = err
	return d
}

func (l *Ledger) diagnose(i int, reason Reason, seq sdk.SeqID, required int64) *AdmissionDiagnostic {
	return &AdmissionDiagnostic{
		Stage: i, Reason: reason, Used: l.used[i], Budget: l.cfg.Stages[i].Budget, Required: required,
		ActiveSequences: len(l.seqs), MaxSequences: l.cfg.Stages[i].MaxSequences, Seq: seq,
	}
}

// Pressure tells whether a stage has reserved more than the threshold's share of its budget.
func (l *Ledger) Pressure() bool {
	for i := range l.used {
		if l.pressure(i) {
			return true
		}
	}
	return false
}

func (l *Ledger) pressure(i int) bool {
	budget := l.cfg.Stages[i].Budget
	return budget > 0 && l.used[i] > l.threshold(budget)
}

// Usage returns what each stage has reserved.
func (l *Ledger) Usage() []StageUsage {
	usage := make([]StageUsage, len(l.used))
	for i := range usage {
		usage[i] = StageUsage{Used: l.used[i], Budget: l.cfg.Stages[i].Budget, Sequences: len(l.seqs), Pressure: l.pressure(i)}
	}
	return usage
}

// findLimit returns the positions that a lone sequence can have, and the stage that sets that limit, -1 for the
// model's context.
func (l *Ledger) findLimit() (limit, stage int) {
	limit, stage = math.MaxInt, -1
	if l.cfg.ContextLength > 0 {
		limit = l.cfg.ContextLength
	}
	for i, s := range l.cfg.Stages {
		if s.Budget == 0 {
			continue
		}
		// Far more positions than any model has: what fits then always fits.
		const most = math.MaxInt32
		fits := sort.Search(most, func(n int) bool { return s.Bytes(l.blocks(n+1)) > s.Budget })
		if fits < most && fits < limit {
			limit, stage = fits, i
		}
	}
	return limit, stage
}
