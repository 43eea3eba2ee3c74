package bringup

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/transport"
)

// script is a cluster of state machines without a network: the file's commands are what happens, its expectations what
// the machines make of it.
type script struct {
	roster *roster
	peers  []*assignment
	epoch  uint64
	run    byte // names the coordinator's session
	out    strings.Builder
}

// TestMachines runs testdata/machines:
//
//	peers N              N peers that have just started
//	coordinator NAME     a run of a coordinator begins
//	reach PHASE P...     the coordinator's message brings peers P to the phase, and their answers arrive
//	refuse P REASON      peer P refuses or fails
//	lose P               the connection between the coordinator and peer P breaks, and both notice
//	stopped P...         the peers have ended what they ran
//	ask NAME P           another coordinator's run asks for peer P
//	late PHASE P EPOCH   a message of another epoch arrives at peer P
func TestMachines(t *testing.T) {
	s := &script{}
	datadriven.RunTest(t, "testdata/machines", func(t *testing.T, d *datadriven.TestData) string {
		s.out.Reset()
		for line := range strings.Lines(d.Input) {
			words := strings.Fields(line)
			s.carryOut(t, words[0], words[1:])
		}
		return s.out.String()
	})
}

func (s *script) say(format string, args ...any) { fmt.Fprintf(&s.out, format+"\n", args...) }

func (s *script) session() transport.Session { return transport.Session{s.run} }

func (s *script) carryOut(t *testing.T, command string, words []string) {
	switch command {
	case "peers":
		s.peers = nil
		for range number(t, words[0]) {
			s.peers = append(s.peers, newAssignment())
		}
	case "coordinator":
		s.run++
		s.roster = newRoster(len(s.peers))
		s.epoch = 0
		s.say("session %d of %s", s.run, words[0])
	case "reach":
		for _, w := range words[1:] {
			s.reach(number(t, w), Phase(words[0]))
		}
	case "refuse":
		s.react(s.roster.failed(number(t, words[0]), errors.New(strings.Join(words[1:], " "))))
	case "lose":
		i := number(t, words[0])
		s.endPeer(i)
		if s.roster.left(i) {
			s.say("coordinator: dial peer %d again", i)
		} else {
			s.react(s.roster.failed(i, errors.New("connection lost")))
		}
	case "stopped":
		for _, w := range words {
			i := number(t, w)
			s.peers[i].stopped()
			s.say("peer %d: %s", i, s.peers[i].phase)
		}
	case "ask":
		i := number(t, words[1])
		switch err := s.peers[i].admits(words[0]); {
		case err != nil:
			s.say("peer %d: %v", i, err)
		case s.peers[i].yieldsTo(words[0]):
			s.say("peer %d: goes over to %s", i, words[0])
		default:
			s.say("peer %d: is free for %s", i, words[0])
		}
	case "late":
		i := number(t, words[1])
		s.say("peer %d: %v; stays %s", i, s.message(i, Phase(words[0]), uint64(number(t, words[2]))), s.peers[i].phase)
	default:
		t.Fatalf("unknown command %q", command)
	}
}

func number(t *testing.T, word string) int {
	n, err := strconv.Atoi(word)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (s *script) message(i int, p Phase, epoch uint64) error {
	switch p {
	case PhaseLearned:
		return s.peers[i].open(s.session(), fmt.Sprintf("%c", 'a'+s.run-1))
	case PhaseOffered:
		return s.peers[i].offer(epoch)
	}
	return s.peers[i].advance(epoch, p)
}

func (s *script) reach(i int, p Phase) {
	if err := s.message(i, p, s.epoch); err != nil {
		s.say("peer %d: %v", i, err)
		if !errors.Is(err, &cluster.Refusal{Code: cluster.CodeBusy}) { // a busy one is asked again
			s.react(s.roster.failed(i, err))
		}
		return
	}
	next, err := s.roster.reached(i, p)
	if err != nil {
		s.say("coordinator: %v", err)
	}
	s.react(next)
}

// react does what the coordinator is told to.
func (s *script) react(next step) {
	switch next {
	case stepWait:
		return
	case stepOffer:
		for _, p := range s.peers {
			s.epoch = max(s.epoch, p.seen)
		}
		s.epoch++
		s.say("coordinator: offer epoch %d", s.epoch)
	case stepAbort:
		s.say("coordinator: abort, peer %d: %v", s.roster.culprit, s.roster.cause)
		for i := range s.peers {
			s.endPeer(i)
		}
	default:
		s.say("coordinator: %s", next)
	}
}

func (s *script) endPeer(i int) {
	if s.peers[i].stop(s.session()) {
		s.say("peer %d: stopping", i)
	}
}
