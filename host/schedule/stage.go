package schedule

import (
	"fmt"

	"github.com/mlxcel/mlxcel/sdk"
)

// state is how far a micro-batch has come on one stage.
type state uint8

const (
	waiting   state = iota // its activations are not here
	arrived                // its activations are here, not taken in
	receiving              // Receive is under way
	ready                  // Forward may begin
	running                // Forward is under way
	forwarded              // where the place answers: Flush may begin
	flushing               // Flush is under way
	done
)

type microBatch struct {
	state   state
	aborted bool
}

// Stage is the schedule of one batch as a single stage sees it. It forwards every micro-batch once and in order,
// never before its activations were received, and has at most depth forward passes begun and unfinished.
//
// The zero value is ready for Reset. A Stage is not safe for concurrent use.
type Stage struct {
	at    sdk.Place
	role  sdk.StageRole
	depth int

	batch       []microBatch
	nextReceive int // first micro-batch whose Receive has not begun
	nextForward int // first micro-batch whose Forward has not begun
	nextFlush   int // first micro-batch whose Flush has not begun; only where the place answers
	running     int // forward passes under way
	taken       int // micro-batches received and not yet forwarded to the end
	left        int // micro-batches not done
}

// Reset begins a batch of microBatches at a place with that role. depth is how many forward passes may be under way at
// once: 1 for a place that computes and answers in turn, more where its executor has a queue.
func (s *Stage) Reset(at sdk.Place, role sdk.StageRole, microBatches, depth int) {
	if microBatches < 1 || depth < 1 {
		panic(fmt.Sprintf("schedule: stage %s, %d micro-batches, depth %d", at, microBatches, depth))
	}
	batch := s.batch[:0]
	for range microBatches {
		batch = append(batch, microBatch{})
	}
	*s = Stage{at: at, role: role, depth: depth, batch: batch, left: microBatches}
	if !role.TakesHidden { // it makes its activations itself
		for i := range batch {
			batch[i].state = ready
		}
	}
}

// Arrive records that micro-batch mb's activations are here, in whatever order they come.
func (s *Stage) Arrive(mb int) error {
	if mb < 0 || mb >= len(s.batch) {
		return fmt.Errorf("micro-batch %d arrived at stage %s, which has %d", mb, s.at, len(s.batch))
	}
	if !s.role.TakesHidden {
		return fmt.Errorf("micro-batch %d arrived at stage %s, which makes its activations itself", mb, s.at)
	}
	if s.batch[mb].state != waiting {
		return fmt.Errorf("micro-batch %d arrived at stage %s twice", mb, s.at)
	}
	s.batch[mb].state = arrived
	return nil
}

// Next begins and returns the stage's next action. Every action but Idle and Done must be finished later.
func (s *Stage) Next() Action {
	switch {
	case s.left == 0:
		return Action{Kind: Done, At: s.at}
	case s.canFlush():
		mb := s.nextFlush
		s.nextFlush++
		s.batch[mb].state = flushing
		return Action{Flush, s.at, mb}
	case s.canForward():
		mb := s.nextForward
		s.nextForward++
		s.running++
		s.batch[mb].state = running
		return Action{Forward, s.at, mb}
	case s.canReceive():
		mb := s.nextReceive
		s.nextReceive++
		s.taken++
		s.batch[mb].state = receiving
		return Action{Receive, s.at, mb}
	}
	return Action{Kind: Idle, At: s.at}
}

func (s *Stage) canFlush() bool {
	s.nextFlush = s.skipAborted(s.nextFlush)
	return s.role.Answers && s.nextFlush < len(s.batch) && s.batch[s.nextFlush].state == forwarded
}

func (s *Stage) canForward() bool {
	s.nextForward = s.skipAborted(s.nextForward)
	return s.running < s.depth && s.nextForward < len(s.batch) && s.batch[s.nextForward].state == ready
}

func (s *Stage) canReceive() bool {
	s.nextReceive = s.skipAborted(s.nextReceive)
	return s.taken < s.depth && s.nextReceive < len(s.batch) && s.batch[s.nextReceive].state == arrived
}

// skipAborted moves a cursor past micro-batches that will not run any more.
func (s *Stage) skipAborted(at int) int {
	for at < len(s.batch) && s.batch[at].aborted && s.batch[at].state == done {
		at++
	}
	return at
}

// Finish ends an action that Next began.
func (s *Stage) Finish(a Action) error {
	if a.At != s.at || a.MicroBatch < 0 || a.MicroBatch >= len(s.batch) {
		return fmt.Errorf("%s finished on stage %s, which has %d micro-batches", a, s.at, len(s.batch))
	}
	m := &s.batch[a.MicroBatch]
	switch {
	case a.Kind == Receive && m.state == receiving:
		m.state = ready
		if m.aborted {
			s.taken--
			s.end(m)
		}
	case a.Kind == Forward && m.state == running:
		s.running--
		if s.role.TakesHidden {
			s.taken--
		}
		m.state = forwarded
		if m.aborted || !s.role.Answers {
			s.end(m)
		}
	case a.Kind == Flush && m.state == flushing:
		s.end(m)
	default:
		return fmt.Errorf("%s finished on stage %s, which had not begun it", a, s.at)
	}
	return nil
}

// Abort gives a micro-batch up: it is not begun any more. An action of it that is under way must still be
// finished. Aborting twice, or after the end, changes nothing.
func (s *Stage) Abort(mb int) error {
	if mb < 0 || mb >= len(s.batch) {
		return fmt.Errorf("abort of micro-batch %d on stage %s, which has %d", mb, s.at, len(s.batch))
	}
	m := &s.batch[mb]
	if m.state == done {
		return nil
	}
	m.aborted = true
	switch m.state {
	case waiting, arrived, forwarded:
		s.end(m)
	case ready:
		if s.role.TakesHidden {
			s.taken--
		}
		s.end(m)
	}
	return nil
}

// AllBegun reports whether every micro-batch has been forwarded, is being forwarded, or was given up.
func (s *Stage) AllBegun() bool {
	s.nextForward = s.skipAborted(s.nextForward)
	return s.nextForward == len(s.batch)
}

// Finished reports whether nothing is left to do or under way.
func (s *Stage) Finished() bool { return s.left == 0 }

// Aborted reports whether micro-batch mb was given up.
func (s *Stage) Aborted(mb int) bool { return s.batch[mb].aborted }

func (s *Stage) end(m *microBatch) {
	m.state = done
	s.left--
}
