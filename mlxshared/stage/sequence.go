package stage

import (
	"github.com/mlxcel/mlxcel/mlxshared/nn"
	"github.com/mlxcel/mlxcel/mlxshared/sample"
	"github.com/mlxcel/mlxcel/sdk"
)

// sequence is the state of one sequence on this stage.
type sequence struct {
	length    int        // positions in the state
	states    []nn.State // one per slot
	sampler   sdk.Sampler
	maxLen    int   // positions at most; 0 when not known
	snapshots int   // that each recurrent state may hold
	promise   int64 // bytes that the reservation may need in the end
	held      int64 // bytes held now; what is shared with others in full
	owed      int64 // of these, what the next step copies because another sequence holds it too
	broken    bool  // a step failed halfway: only a release helps

	imported []bool // by layer of the stage; nil but between the first import and the last
	coming   int    // positions of the imported states

	history   *sample.History // nil without the head or without penalties
	prompt    int             // tokens of the prompt in history
	generated []generated     // what history counted beyond the prompt, by position
}

type generated struct {
	position int
	token    int32
}

// growth is what the sequence may still take from the budget.
func (s *sequence) growth() int64 { return max(0, s.promise-s.own()) }

// own is what of its memory a sequence needs not take again.
func (s *sequence) own() int64 { return s.held - s.owed }

func unknown(id sdk.SeqID) error {
	return sdk.Errorf(sdk.CodeUnknownSequence, "no sequence %d on this stage", id)
}

// bytesAt is what a sequence of that length and number of snapshots holds at most between steps.
func (m *loaded) bytesAt(length, snapshots int) int64 {
	return m.price.StateBytes(length, snapshots)
}

// committed is what the budget must spare: what is held, each shared block once, and what reservations may still take.
func (m *loaded) committed() int64 { return m.held + m.growing }

// spare refuses growth beyond the budget.
func (m *loaded) spare(id sdk.SeqID, growth int64) error {
	if m.budget == 0 || growth < 0 {
		return nil
	}
	for _, s := range m.sequences {
		if s.owed > 0 { // the other may have written first
			m.account(s)
		}
	}
	if m.count(); m.committed()+growth <= m.budget {
		return nil
	}
	err := sdk.Errorf(sdk.CodeOutOfMemory, "sequence %d needs %d bytes more of KV state; %d of the budget of %d are taken by %d sequences",
		id, max(growth, m.committed()-m.budget), m.committed(), m.budget, len(m.sequences))
	err.Wanted, err.Held = max(growth, m.committed()-m.budget), m.committed()
	return err
}

func (m *loaded) reserve(r *sdk.Reservation) error {
	if err := m.checkReservation(r); err != nil {
		return err
	}
	s := &sequence{sampler: r.Sampler, maxLen: r.MaxLen, snapshots: r.Snapshots, promise: m.bytesAt(r.MaxLen, r.Snapshots)}
	if r.Keep == 0 {
		if err := m.spare(r.Seq, s.promise); err != nil {
			return err
		}
	}
	if err := m.begin(s, m.sequences[r.From], r.Keep); err != nil {
		s.free()
		return m.typed(err)
	}
	if m.head != nil && r.Sampler.CountsTokens() {
		s.history, s.prompt = sample.NewHistory(r.Prompt), len(r.Prompt)
		s.remember(len(r.Prompt), r.Generated)
	}
	m.sequences[r.Seq] = s
	m.growing += s.growth()
	m.account(s)
	if err := m.spare(r.Seq, 0); err != nil { // now it shows what the two share
		m.release(r.Seq)
		return err
	}
	return nil
}

func (m *loaded) checkReservation(r *sdk.Reservation) error {
	switch from := m.sequences[r.From]; {
	case m.sequences[r.Seq] != nil:
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is reserved already", r.Seq)
	case r.Adapter != "":
		return sdk.Errorf(sdk.CodeUnsupported, "sequence %d asks for adapter %q; none is loaded", r.Seq, r.Adapter)
	case r.MaxLen < 0:
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d: length of %d positions", r.Seq, r.MaxLen)
	case r.Snapshots < 0 || r.Keep < 0:
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d: %d snapshots and %d positions to keep", r.Seq, r.Snapshots, r.Keep)
	case r.Keep > 0 && from == nil:
		return unknown(r.From)
	case r.Keep > 0 && (from.broken || from.imported != nil):
		return from.unusable(r.From)
	case r.Keep > 0 && r.Keep > from.length:
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d is to begin with %d positions of sequence %d, which has %d", r.Seq, r.Keep, r.From, from.length)
	case r.Keep > 0 && len(r.Generated) > 0 && len(r.Prompt)+len(r.Generated) > r.Keep:
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d: a prompt of %d tokens and %d generated ones go past the %d positions that it begins with",
			r.Seq, len(r.Prompt), len(r.Generated), r.Keep)
	case r.Keep > 0:
		if err := from.reaches(r.From, r.Keep); err != nil {
			return err
		}
	}
	if err := sample.Validate(&r.Sampler); err != nil {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d: %v", r.Seq, err)
	}
	return nil
}

// begin gives a sequence its states: empty ones, or the first keep positions of from's.
func (m *loaded) begin(s, from *sequence, keep int) error {
	for slot, spec := range m.specs {
		var state nn.State
		var err error
		if keep > 0 {
			state, err = from.states[slot].Share(keep)
		} else {
			state, err = spec.New(m.stream)
		}
		if err != nil {
			return err
		}
		s.states = append(s.states, state)
	}
	s.length = keep
	return nil
}

// remember counts generated tokens for the penalties, from a position on.
func (s *sequence) remember(position int, tokens []int32) {
	for i, t := range tokens {
		s.history.Add(t)
		s.generated = append(s.generated, generated{position + i, t})
	}
}

// forget takes back the generated tokens from a position on.
func (s *sequence) forget(position int) {
	for n := len(s.generated); n > 0 && s.generated[n-1].position >= position; n-- {
		s.history.Remove(s.generated[n-1].token)
		s.generated = s.generated[:n-1]
	}
}

// account brings the totals up to date with what s holds.
func (m *loaded) account(s *sequence) {
	m.growing -= s.growth()
	s.held, s.owed = 0, 0
	for _, state := range s.states {
		s.held += state.Bytes()
		s.owed += state.Owed()
	}
	m.growing += s.growth()
}

// count brings what is held up to date.
func (m *loaded) count() {
	before := m.held
	m.held = int64(m.stream.HeldMemory())
	m.freed += max(0, before-m.held)
}

func (m *loaded) release(id sdk.SeqID) {
	s := m.sequences[id]
	if s == nil {
		return
	}
	m.growing -= s.growth()
	s.free()
	delete(m.sequences, id)
	m.count()
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

// before is the last position up to length that every state can go back to. The states may differ in length, as after a failed step.
func (s *sequence) before(length int) int {
	return s.meet(length, func(state nn.State, at int) int { to, _ := state.Nearest(at); return min(to, at) })
}

// after is the first position from length on that every state can go back to; at most the sequence's length.
func (s *sequence) after(length int) int {
	return s.meet(length, func(state nn.State, at int) int { _, to := state.Nearest(at); return max(to, at) })
}

// meet moves on from a position, in one direction, until every state stays where it is.
func (s *sequence) meet(at int, next func(nn.State, int) int) int {
	for moved := true; moved; {
		moved = false
		for _, state := range s.states {
			if to := next(state, at); to != at {
				at, moved = to, true
			}
		}
	}
	return at
}

// reaches refuses a length that a state can't go back to.
func (s *sequence) reaches(id sdk.SeqID, length int) error {
	before := s.before(length)
	if before == length {
		return nil
	}
	return sdk.Errorf(sdk.CodeUnsupported, "sequence %d of %d positions can't go back to %d: the nearest that it can go to are %d and %d", id, s.length,
		length, before, s.after(length))
}

// rewind drops the positions at or past length; reaches has allowed it. Where it fails the sequence is broken.
func (m *loaded) rewind(s *sequence, length int) error {
	for _, state := range s.states {
		if err := state.Rewind(length); err != nil {
			s.broken = true
			return err
		}
	}
	s.length = length
	s.forget(length)
	m.account(s)
	return nil
}

// unusable says why a sequence takes no step.
func (s *sequence) unusable(id sdk.SeqID) error {
	if s.imported != nil {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d has the state of some layers only; import the others' first", id)
	}
	return sdk.Errorf(sdk.CodeInvalid, "sequence %d broke in an earlier step; release it", id)
}
