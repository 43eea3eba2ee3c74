package stage

import (
	"errors"

	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/sample"
	"github.com/mlxcel/mlxcel/sdk"
)

// sequence is the state of one sequence on this stage.
type sequence struct {
	length  int        // positions in the state
	states  []nn.State // one per slot
	sampler sdk.Sampler
	promise int64 // bytes that the reservation may need in the end
	held    int64 // bytes held now
	broken  bool  // a step failed halfway: only a release helps

	history   *sample.History // nil without the head or without penalties
	generated []generated     // what history counted beyond the prompt, by position
}

type generated struct {
	position int
	token    int32
}

// committed is what the budget must spare for the sequence.
func (s *sequence) committed() int64 { return max(s.promise, s.held) }

func unknown(id sdk.SeqID) error {
	return sdk.Errorf(sdk.CodeUnknownSequence, "no sequence %d on this stage", id)
}

// bytesAt is what a sequence of that length holds at most between steps.
func (m *loaded) bytesAt(length int) int64 {
	return m.price.StateBytes(length, 0)
}

// spare refuses growth beyond the budget.
func (m *loaded) spare(id sdk.SeqID, growth int64) error {
	if m.budget == 0 || growth <= 0 || m.committed+growth <= m.budget {
		return nil
	}
	return sdk.Errorf(sdk.CodeOutOfMemory, "sequence %d needs %d bytes more of KV state; %d of the budget of %d are taken by %d sequences",
		id, growth, m.committed, m.budget, len(m.sequences))
}

func (m *loaded) reserve(r *sdk.Reservation) error {
	if m.sequences[r.Seq] != nil {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is reserved already", r.Seq)
	}
	if r.Adapter != "" {
		return sdk.Errorf(sdk.CodeUnsupported, "sequence %d asks for adapter %q; none is loaded", r.Seq, r.Adapter)
	}
	if r.MaxLen < 0 {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d: length of %d positions", r.Seq, r.MaxLen)
	}
	if err := sample.Validate(&r.Sampler); err != nil {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d: %v", r.Seq, err)
	}
	s := &sequence{sampler: r.Sampler, promise: m.bytesAt(r.MaxLen)}
	if err := m.spare(r.Seq, s.promise); err != nil {
		return err
	}
	for _, spec := range m.specs {
		state, err := spec.New(m.stream)
		if err != nil {
			s.free()
			return typed(err)
		}
		s.states = append(s.states, state)
	}
	if m.head != nil && sample.UsesHistory(&r.Sampler) {
		s.history = sample.NewHistory(r.Prompt)
	}
	m.add(r.Seq, s)
	return nil
}

func (m *loaded) add(id sdk.SeqID, s *sequence) {
	m.sequences[id] = s
	m.committed += s.promise
	m.account(s)
}

// account brings the totals up to date with what s holds.
func (m *loaded) account(s *sequence) {
	before, committed := s.held, s.committed()
	s.held = 0
	for _, state := range s.states {
		s.held += state.Bytes()
	}
	m.held += s.held - before
	m.freed += max(0, before-s.held)
	m.committed += s.committed() - committed
}

func (m *loaded) release(id sdk.SeqID) {
	s := m.sequences[id]
	if s == nil {
		return
	}
	m.held -= s.held
	m.freed += s.held
	m.committed -= s.committed()
	s.free()
	delete(m.sequences, id)
	m.trim()
}

// Bytes of freed state that are worth a walk over the heap, which takes milliseconds: while sequences run and while none does.
const (
	trimBusy = 16 << 20
	trimIdle = 1 << 20
)

// trim gives freed memory back to the system. The C library's heap keeps the blocks of a released sequence wherever one that
// still runs lies behind them, and takes new memory for activations that don't fit between: without this it grows for long.
// What activations have left behind, in MLX's cache as well, goes once all is quiet.
func (m *loaded) trim() {
	switch idle := len(m.sequences) == 0; {
	case idle && m.freed >= trimIdle:
		m.freed, m.trimmed = 0, 0
		m.stream.ClearCache()
	case !idle && m.freed >= m.trimmed+trimBusy:
		m.trimmed = m.freed
	default:
		return
	}
	m.stream.Trim()
}

func (s *sequence) free() {
	for _, state := range s.states {
		state.Free()
	}
	s.states = nil
}

func (m *loaded) truncate(id sdk.SeqID, length int) error {
	s := m.sequences[id]
	if s == nil {
		return unknown(id)
	}
	if length < 0 || length > s.length {
		return sdk.Errorf(sdk.CodeInvalid, "can't truncate sequence %d of %d positions to %d", id, s.length, length)
	}
	for _, state := range s.states {
		if err := state.CanTruncate(length); err != nil {
			return typed(err)
		}
	}
	var errs []error
	for _, state := range s.states {
		errs = append(errs, state.Truncate(length))
	}
	if err := errors.Join(errs...); err != nil {
		s.broken = true
		return typed(err)
	}
	s.length = length
	for n := len(s.generated); n > 0 && s.generated[n-1].position >= length; n-- {
		s.history.Remove(s.generated[n-1].token)
		s.generated = s.generated[:n-1]
	}
	m.account(s)
	return nil
}

func (m *loaded) fork(from, to sdk.SeqID) error {
	s := m.sequences[from]
	switch {
	case s == nil:
		return unknown(from)
	case m.sequences[to] != nil:
		return sdk.Errorf(sdk.CodeInvalid, "can't fork into sequence %d: it is reserved already", to)
	case s.broken:
		return broken(from)
	}
	if err := m.spare(to, s.committed()); err != nil {
		return err
	}
	c := &sequence{length: s.length, sampler: s.sampler, promise: s.promise, generated: append([]generated(nil), s.generated...)}
	for _, state := range s.states {
		copied, err := state.Fork()
		if err != nil {
			c.free()
			return typed(err)
		}
		c.states = append(c.states, copied)
	}
	if s.history != nil {
		c.history = s.history.Clone()
	}
	m.add(to, c)
	return nil
}

func broken(id sdk.SeqID) error {
	return sdk.Errorf(sdk.CodeInvalid, "sequence %d broke in an earlier step; release it", id)
}
