package batch

import (
	"context"
	"errors"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

// MeasureConfig says how to measure.
type MeasureConfig struct {
	Stages    int
	MaxBatch  int           // sequences of the largest step
	VocabSize int           // of the model; 0 means that any token will do
	Budget    time.Duration // larger sizes are left out once it is spent; 0 means 5 s
	Clock     Clock         // nil means the system's
}

const (
	defaultMeasureBudget = 5 * time.Second
	measureRepeats       = 3
	measureTrials        = 3  // of a size, of which the shortest times count, as long as they take no more than a share of the budget
	trialShare           = 4  // of the budget
	measureRows          = 64 // of the prompt that is timed
)

// Length is the positions of a sequence that Measure needs: a prompt, then each size alone and with all stages at work.
func (c MeasureConfig) Length() int {
	sizes := bits.Len(uint(max(1, c.MaxBatch)))
	return measureRows + 2*measureTrials*measureRepeats*sizes
}

// Measure times steps of 1, 2, 4, … sequences on an idle runtime, alone and with all stages at work, and rows of a
// prompt. It reserves a few short sequences and releases them again; where the memory is too small for MaxBatch of
// them, it measures fewer, and returns nil where it is too small for one. An error of the runtime ends it.
func Measure(ctx context.Context, rt Runtime, cfg MeasureConfig) (*Speeds, error) {
	if cfg.Clock == nil {
		cfg.Clock = SystemClock{}
	}
	orDefault(&cfg.Budget, defaultMeasureBudget)
	m := &meter{ctx: ctx, rt: rt, cfg: cfg, began: cfg.Clock.Now()}
	defer m.release()
	if err := m.reserve(max(1, cfg.MaxBatch)); err != nil {
		return nil, err
	}
	if len(m.seqs) == 0 {
		return nil, nil
	}
	speeds := &Speeds{}
	row, err := m.promptRow()
	if err != nil {
		return nil, err
	}
	for batch := 1; batch <= len(m.seqs); batch *= 2 {
		if batch > 1 && cfg.Clock.Now().Sub(m.began) > cfg.Budget {
			break
		}
		s, err := m.size(batch, speeds.Steps)
		if err != nil {
			return nil, err
		}
		speeds.Steps = append(speeds.Steps, s)
	}
	speeds.Row = row
	return speeds, nil
}

// meter measures.
type meter struct {
	ctx   context.Context
	rt    Runtime
	cfg   MeasureConfig
	began time.Time
	seqs  []*metered
}

type metered struct {
	seq    sdk.SeqID
	length int
}

// reserve makes up to n sequences; a lack of memory ends it early.
func (m *meter) reserve(n int) error {
	for range n {
		seq := m.rt.NewSeq()
		err := m.rt.Reserve(m.ctx, sdk.Reservation{Seq: seq, Prompt: []int32{0}, MaxLen: m.cfg.Length()})
		if sdk.CodeOf(err) == sdk.CodeOutOfMemory {
			return nil
		}
		if err != nil {
			return err
		}
		m.seqs = append(m.seqs, &metered{seq: seq})
	}
	return nil
}

func (m *meter) release() {
	ctx, done := context.WithCancel(context.WithoutCancel(m.ctx))
	done() // ordered, not waited for: what comes next comes after it
	for _, s := range m.seqs {
		_ = m.rt.Release(ctx, s.seq)
	}
}

// step runs one step of the given sequences, each with so many rows, and returns its time.
func (m *meter) step(seqs []*metered, rows int) (time.Duration, error) {
	steps := make([]sdk.SeqStep, len(seqs))
	for i, s := range seqs {
		steps[i] = sdk.SeqStep{Seq: s.seq, Pos: s.length, Rows: rows, Tokens: m.tokens(rows), Prompt: s.length == 0, Want: sdk.WantToken}
		s.length += rows
	}
	began := m.cfg.Clock.Now()
	_, err := m.rt.Begin(m.ctx, steps)()
	return m.cfg.Clock.Now().Sub(began), err
}

// tokens returns different ids, as far as there are any.
func (m *meter) tokens(n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i)
		if m.cfg.VocabSize > 0 {
			ids[i] %= int32(m.cfg.VocabSize)
		}
	}
	return ids
}

// promptRow feeds each sequence its first rows and returns the time of one row of a long prompt.
func (m *meter) promptRow() (time.Duration, error) {
	rows := max(1, min(measureRows, m.rt.PrefillChunk()))
	took, err := m.step(m.seqs[:1], rows)
	if err != nil {
		return 0, err
	}
	for _, s := range m.seqs[1:] {
		if _, err := m.step([]*metered{s}, 1); err != nil {
			return 0, err
		}
	}
	return took / time.Duration(rows), nil
}

// size measures steps of so many sequences. smaller are the sizes measured before. What else the machine does can only make
// steps longer, so the shortest of the trials count.
func (m *meter) size(batch int, smaller []Speed) (Speed, error) {
	s, err := m.trial(batch)
	for n := 1; err == nil && n < measureTrials && m.cfg.Clock.Now().Sub(m.began) < m.cfg.Budget/trialShare; n++ {
		var again Speed
		again, err = m.trial(batch)
		s.Latency, s.Interval = min(s.Latency, again.Latency), min(s.Interval, again.Interval)
	}
	if s.Interval == 0 && len(smaller) > 0 { // as much shorter than alone as with the size before
		last := smaller[len(smaller)-1]
		s.Interval = time.Duration(float64(s.Latency) * float64(last.Interval) / float64(max(1, last.Latency)))
	}
	if s.Interval == 0 || s.Interval > s.Latency {
		s.Interval = s.Latency
	}
	return s, err
}

// trial measures steps of so many sequences once; the interval is 0 where there are too few for all stages to be at work.
func (m *meter) trial(batch int) (Speed, error) {
	s := Speed{Batch: batch}
	var alone []time.Duration
	for range measureRepeats {
		took, err := m.step(m.seqs[:batch], 1)
		if err != nil {
			return s, err
		}
		alone = append(alone, took)
	}
	s.Latency = median(alone)
	groups := min(m.cfg.Stages+1, len(m.seqs)/batch)
	if m.cfg.Stages == 1 || groups < m.cfg.Stages {
		return s, nil
	}
	var err error
	s.Interval, err = m.together(batch, groups)
	return s, err
}

// together has groups of so many sequences step at the same time, and returns the time between the ends of their steps. It is
// the median over all spans in which each group ends once: the start, when the stages fill up, does not count, and neither
// does what else the machine did for a moment.
func (m *meter) together(batch, groups int) (time.Duration, error) {
	errs := make([]error, groups)
	var mu sync.Mutex
	var ends []time.Time
	var wait sync.WaitGroup
	for g := range groups {
		seqs := m.seqs[g*batch : (g+1)*batch]
		wait.Go(func() {
			for range measureRepeats {
				if _, errs[g] = m.step(seqs, 1); errs[g] != nil {
					return
				}
				mu.Lock()
				ends = append(ends, m.cfg.Clock.Now())
				mu.Unlock()
			}
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	var spans []time.Duration
	for i := groups; i < len(ends); i++ {
		spans = append(spans, ends[i].Sub(ends[i-groups])/time.Duration(groups))
	}
	return median(spans), nil
}

// median of some times, of which there is at least one.
func median(times []time.Duration) time.Duration {
	slices.Sort(times)
	return times[len(times)/2]
}
