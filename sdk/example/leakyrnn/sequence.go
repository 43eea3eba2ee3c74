package leakyrnn

import (
	"fmt"
	"slices"

	"github.com/mlxcel/mlxcel/sdk"
)

// sequence is one sequence: what its sampler counts, and the state of its layers. There are both kinds of state here that
// a family can have. The cache has a row for every position, so it can go back to any. The recurrent state stands for all
// positions at once, so it can go back to its snapshots only.
type sequence struct {
	sampler   sdk.Sampler
	maxLen    int
	prompt    []int32 // as reserved
	generated []generatedToken

	cache        []*position
	state        [][]float32 // by layer, after the last position; a layer's slice is replaced, never changed
	snapshots    []snapshot  // the oldest first
	maxSnapshots int

	arrived []bool // by layer, while a state is being imported; nil before and after
}

// generatedToken is a token that follows the prompt, at its position.
type generatedToken struct {
	pos   int
	token int32
}

// position is what the layers' caches keep of one position. Sequences share it: it never changes, and it is gone with its
// last owner.
type position struct {
	rows   []cacheRow // by layer
	owners int
}

// snapshot is the recurrent state after pos positions.
type snapshot struct {
	pos   int
	state [][]float32
}

func newSequence(r *sdk.Reservation, m *model) *sequence {
	s := &sequence{sampler: r.Sampler, maxLen: r.MaxLen, prompt: r.Prompt, maxSnapshots: r.Snapshots, state: m.zeros()}
	for i, token := range r.Generated {
		s.generated = append(s.generated, generatedToken{len(r.Prompt) + i, token})
	}
	return s
}

// length is the number of positions that the state has.
func (s *sequence) length() int { return len(s.cache) }

// stateAt returns the recurrent state after pos positions, if it is there still.
func (s *sequence) stateAt(pos int, m *model) ([][]float32, error) {
	if pos == s.length() {
		return s.state, nil
	}
	if pos == 0 {
		return m.zeros(), nil
	}
	below, above := 0, s.length()
	for _, kept := range s.snapshots {
		switch {
		case kept.pos == pos:
			return kept.state, nil
		case kept.pos < pos:
			below = max(below, kept.pos)
		default:
			above = min(above, kept.pos)
		}
	}
	return nil, sdk.Errorf(sdk.CodeUnsupported,
		"no snapshot is held at position %d: the recurrent state can go back to positions %d and %d, which are the nearest", pos, below, above)
}

// keep begins the sequence with the first positions of another.
func (s *sequence) keep(from *sequence, n int, m *model) error {
	state, err := from.stateAt(n, m)
	if err != nil {
		return err
	}
	s.state = state
	s.cache = slices.Clone(from.cache[:n])
	for _, p := range s.cache {
		p.owners++
	}
	return nil
}

// rewind drops the positions from pos on, and what belongs to them. It returns how many of them nobody owns any more.
func (s *sequence) rewind(pos int, m *model) (freed int, err error) {
	if pos == s.length() {
		return 0, nil
	}
	if s.state, err = s.stateAt(pos, m); err != nil {
		return 0, err
	}
	freed = s.drop(pos)
	s.snapshots = slices.DeleteFunc(s.snapshots, func(k snapshot) bool { return k.pos > pos })
	s.generated = slices.DeleteFunc(s.generated, func(g generatedToken) bool { return g.pos >= pos })
	return freed, nil
}

// drop gives up the cache from pos on, and returns how many positions nobody owns any more.
func (s *sequence) drop(pos int) (freed int) {
	for i, p := range s.cache[pos:] {
		if p.owners--; p.owners == 0 {
			freed++
		}
		s.cache[pos+i] = nil
	}
	s.cache = s.cache[:pos]
	return freed
}

// snapshot keeps the recurrent state, in the place of the oldest one if need be.
func (s *sequence) snapshot() {
	s.snapshots = slices.DeleteFunc(s.snapshots, func(k snapshot) bool { return k.pos == s.length() })
	s.snapshots = append(s.snapshots, snapshot{s.length(), s.state})
	if excess := len(s.snapshots) - s.maxSnapshots; excess > 0 {
		s.snapshots = slices.Delete(s.snapshots, 0, excess)
	}
}

// seen returns what the penalties count: the prompt, whether it has come or not, and what was generated.
func (s *sequence) seen() []seenToken {
	var list []seenToken
	for _, token := range s.prompt {
		list = append(list, seenToken{token, true})
	}
	for _, g := range s.generated {
		list = append(list, seenToken{g.token, false})
	}
	return list
}

// check refuses rows that don't fit the sequence.
func (s *sequence) check(q *sdk.SeqStep, m *model, answers bool) error {
	if i := slices.Index(s.arrived, false); i >= 0 {
		return sdk.Errorf(sdk.CodeInvalid, "the state of sequence %d's layer %d was not imported yet", q.Seq, m.first+i)
	}
	if q.Pos > s.length() {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d continues at position %d, but its state ends at %d", q.Seq, q.Pos, s.length())
	}
	if limit := m.config.ContextLength; limit > 0 && q.End() > limit || s.maxLen > 0 && q.End() > s.maxLen {
		return sdk.Errorf(sdk.CodeInvalid, "sequence %d would grow to %d positions, past its %d or the context's %d", q.Seq, q.End(), s.maxLen, limit)
	}
	if answers && !q.Prompt && len(q.Tokens) == 0 && s.sampler.CountsTokens() {
		return sdk.Errorf(sdk.CodeInvalid, "the penalties of sequence %d count its tokens, but the step brings none", q.Seq)
	}
	for _, token := range slices.Concat(q.Tokens, q.Targets) {
		if int(token) >= m.config.VocabSize {
			return sdk.Errorf(sdk.CodeInvalid, "token id %d is not in the vocabulary of %d", token, m.config.VocabSize)
		}
	}
	if _, err := s.stateAt(q.Pos, m); err != nil {
		return fmt.Errorf("sequence %d can't be rewound from %d positions: %w", q.Seq, s.length(), err)
	}
	return nil
}
