// Package kvledger owns the books of KV memory: what each sequence has reserved on each stage, and whether one more
// fits.
//
// A sequence is admitted on every stage or on none. One that begins with positions of another shares the whole blocks of
// these: they count once and are free when the last that has them is gone. The ledger is a plain value: it starts nothing, reads no clock and
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

// Stage is one stage's share of the model and of the memory.
type Stage struct {
	Layers       []sdk.LayerProfile
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
		s.Layers = profile.Layers[a.LayerRange.Start:a.LayerRange.End]
	}
	return stages
}

// Config is what a ledger keeps the books of.
type Config struct {
	Stages        []Stage
	ContextLength int     // positions of the model; 0 means no limit
	Preemption    bool    // reserve as a sequence grows, instead of all that it may need at once
	Threshold     float64 // share of a budget past which a stage is under pressure, in (0, 1]; 0 means 0.9
}

const defaultThreshold = 0.9

// Validate returns all faults at once.
func (c Config) Validate() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if len(c.Stages) == 0 {
		fault("KV ledger has no stages")
	}
	if c.ContextLength < 0 {
		fault("KV ledger has context length %d: want 0 or more", c.ContextLength)
	}
	if c.Threshold < 0 || c.Threshold > 1 {
		fault("KV pressure threshold %g: want more than 0 and at most 1", c.Threshold)
	}
	for i, s := range c.Stages {
		if s.Budget < 0 || s.MaxSequences < 0 {
			fault("stage %d has a KV budget of %d bytes for %d sequences: want 0 or more", i, s.Budget, s.MaxSequences)
		}
		for _, l := range s.Layers {
			for _, p := range l.States {
				if p.BytesPerPosition < 0 || p.Window < 0 || p.Fixed < 0 || p.Block < 0 {
					fault("stage %d has a state of %d bytes per position by blocks of %d, window %d and %d bytes fixed: want 0 or more",
						i, p.BytesPerPosition, p.Block, p.Window, p.Fixed)
				}
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
	block int // the largest of any state
	grain int // positions within whose multiples no state grows
}

// entry is an admitted sequence. Its positions are those of segments that it shares, or has shared, one after the other, and
// then its own.
type entry struct {
	positions int        // reserved, in whole grains
	snapshots int        // of its states that do not grow
	shared    []*segment // in order
	own       []int64    // bytes reserved by it alone, by stage
}

// segment is a range of positions that several sequences have begun with. It counts those blocks that end within it.
type segment struct {
	start, end int
	owners     int
	bytes      []int64 // by stage
}

// begin is the first position that is the sequence's own.
func (e *entry) begin() int {
	if n := len(e.shared); n > 0 {
		return e.shared[n-1].end
	}
	return 0
}

// New opens empty books.
func New(cfg Config) (*Ledger, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Threshold == 0 {
		cfg.Threshold = defaultThreshold
	}
	l := &Ledger{cfg: cfg, used: make([]int64, len(cfg.Stages)), seqs: map[sdk.SeqID]*entry{}}
	l.block, l.grain = blocks(cfg.Stages)
	l.limit, l.tight = l.findLimit()
	return l, nil
}

// blocks returns the largest block of all states, and their greatest common divisor.
func blocks(stages []Stage) (largest, common int) {
	for _, s := range stages {
		for _, l := range s.Layers {
			for _, p := range l.States {
				if p.BytesPerPosition > 0 {
					block := max(1, p.Block)
					largest, common = max(largest, block), divisor(common, block)
				}
			}
		}
	}
	return max(1, largest), max(1, common)
}

func divisor(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// Sequence is what is to be admitted.
type Sequence struct {
	Seq    sdk.SeqID
	Length int // positions that it has from the start: its prompt, and what it had generated before a preemption
	MaxLen int // positions that it may have in the end

	// With Keep > 0 it begins with the first Keep positions of From, an admitted sequence that has reserved them.
	From sdk.SeqID
	Keep int
	// Snapshots is how many snapshots of the states that do not grow it may hold.
	Snapshots int
}

// StageUsage is what a stage has reserved.
type StageUsage struct {
	Used      int64 // bytes
	Budget    int64 // bytes; 0 means no limit
	Sequences int
	Pressure  bool // past the threshold
}

// Bytes returns what a sequence of that many positions holds, with so many snapshots.
func (s Stage) Bytes(positions, snapshots int) int64 {
	var n int64
	for _, l := range s.Layers {
		n = saturated(n, l.StateBytes(positions, snapshots))
	}
	return n
}

// shareable is what of the first so many positions can be shared: whole blocks of states without a window. Those of a window
// leave it, in each sequence at its own time: each reserves its whole window.
func (s Stage) shareable(positions int) int64 {
	var n int64
	for _, l := range s.Layers {
		for _, p := range l.States {
			if p.Window == 0 {
				whole := positions - positions%max(1, p.Block)
				n = saturated(n, p.Bytes(whole)-p.Fixed)
			}
		}
	}
	return n
}

func saturated(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
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
// refuses and reserves none. A *ShareError is a sequence that begins with what another does not have.
func (l *Ledger) Admit(s Sequence) error {
	if err := l.checkShare(s); err != nil {
		return err
	}
	e := &entry{positions: l.grains(l.wanted(s)), snapshots: s.Snapshots, own: make([]int64, len(l.cfg.Stages))}
	for i, stage := range l.cfg.Stages {
		e.own[i] = stage.Bytes(e.positions, e.snapshots) - stage.shareable(s.Keep)
		if reason := l.refusal(i, s.Seq, e.own[i]); reason != "" {
			return l.diagnose(i, reason, s.Seq, e.own[i])
		}
	}
	if s.Keep > 0 {
		e.shared = l.share(l.seqs[s.From], s.Keep)
	}
	l.seqs[s.Seq] = e
	l.add(e.own, 1)
	return nil
}

func (l *Ledger) checkShare(s Sequence) error {
	if s.Keep == 0 {
		return nil
	}
	from := l.seqs[s.From]
	switch {
	case from == nil:
		return &UnknownSequenceError{Seq: s.From}
	case s.Keep < 0 || s.Keep > from.positions || s.Keep > l.wanted(s):
		return &ShareError{From: s.From, Keep: s.Keep, Positions: min(from.positions, l.wanted(s))}
	}
	return nil
}

// share makes the first keep positions of a sequence segments, and returns them with one owner more. What the sequence held
// alone moves into a segment; a segment that keep cuts becomes two, in all the sequences that have it. Nothing is added up or
// lost: the parts of a range hold together what it held.
func (l *Ledger) share(from *entry, keep int) []*segment {
	if keep > from.begin() {
		g := l.segment(from.begin(), keep, 1)
		for i, bytes := range g.bytes {
			from.own[i] -= bytes
		}
		from.shared = append(from.shared, g)
	}
	var shared []*segment
	for _, g := range from.shared {
		if g.start >= keep {
			break
		}
		if g.end > keep {
			l.split(g, keep)
		}
		g.owners++
		shared = append(shared, g)
	}
	return shared
}

// split cuts a segment, which keeps its first part, in every sequence that has it.
func (l *Ledger) split(g *segment, at int) {
	rest, first := l.segment(at, g.end, g.owners), l.segment(g.start, at, g.owners)
	*g = *first
	for _, e := range l.seqs {
		if i := slices.Index(e.shared, g); i >= 0 {
			e.shared = slices.Insert(e.shared, i+1, rest)
		}
	}
}

// segment prices a range of positions.
func (l *Ledger) segment(start, end, owners int) *segment {
	g := &segment{start: start, end: end, owners: owners, bytes: make([]int64, len(l.cfg.Stages))}
	for i, stage := range l.cfg.Stages {
		g.bytes[i] = stage.shareable(end) - stage.shareable(start)
	}
	return g
}

// wanted is the positions to reserve at admission.
func (l *Ledger) wanted(s Sequence) int {
	if l.cfg.Preemption {
		return min(s.Length+l.block, s.MaxLen)
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
	return l.cfg.Stages[i].Budget == 0 || saturated(l.used[i], more) <= limit
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
	own, more := make([]int64, len(e.own)), make([]int64, len(e.own))
	for i, stage := range l.cfg.Stages {
		own[i] = stage.Bytes(l.grains(positions), e.snapshots) - stage.shareable(e.begin())
		more[i] = own[i] - e.own[i]
		if more[i] > 0 && !l.fits(i, more[i], stage.Budget) {
			return l.diagnose(i, ReasonMemory, seq, more[i])
		}
	}
	e.positions, e.own = l.grains(positions), own
	l.add(more, 1)
	return nil
}

// grains rounds positions up as far as costs nothing.
func (l *Ledger) grains(positions int) int {
	if rest := positions % l.grain; rest > 0 && positions <= math.MaxInt-l.grain {
		positions += l.grain - rest
	}
	return positions
}

// Release gives back what a sequence has reserved, but for what others share. An unknown one has nothing.
func (l *Ledger) Release(seq sdk.SeqID) {
	e := l.seqs[seq]
	if e == nil {
		return
	}
	l.add(e.own, -1)
	for _, g := range e.shared {
		if g.owners--; g.owners == 0 {
			l.add(g.bytes, -1)
		}
	}
	delete(l.seqs, seq)
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
	if e := l.seqs[seq]; e != nil && stage >= 0 && stage < len(e.own) {
		bytes = e.own[stage]
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
		fits := sort.Search(most, func(n int) bool { return s.Bytes(n+1, 0) > s.Budget })
		if fits < most && fits < limit {
			limit, stage = fits, i
		}
	}
	return limit, stage
}
