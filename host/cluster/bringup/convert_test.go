package bringup

import (
	"reflect"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/internal/filltest"
	"github.com/mlxcel/mlxcel/sdk"
	"google.golang.org/protobuf/proto"
)

func overTheWire[M any, P interface {
	*M
	proto.Message
}](t *testing.T, m P) P {
	t.Helper()
	raw, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	out := P(new(M))
	if err := proto.Unmarshal(raw, out); err != nil {
		t.Fatal(err)
	}
	return out
}

// Everything that messages are made of arrives.
func TestMessagesLoseNothing(t *testing.T) {
	learned := filltest.Of[Learned](sdk.StateRecurrent, sdk.DtypeFloat16)
	learned.Reached = "" // the coordinator's own observation
	learned.Profile.Adjacency = []sdk.AdjacencyGroup{{Source: 0, Consumer: 1, Reason: "r"}}
	message, err := learned.message()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := learnedFrom(overTheWire[pb.LearnReply](t, message)); err != nil || !reflect.DeepEqual(got, learned) {
		t.Errorf("learned\n%+v, %v, want\n%+v", got, err, learned)
	}
	status := filltest.Of[Status]()
	if got := statusFrom(overTheWire[pb.NodeStatus](t, status.message())); !reflect.DeepEqual(got, status) {
		t.Errorf("status\n%+v, want\n%+v", got, status)
	}
}

// What the sdk refuses to read is refused for good: the peer would say it again.
func TestSenselessAnswers(t *testing.T) {
	for what, spoil := range map[string]func(*pb.LearnReply){
		"device":      func(m *pb.LearnReply) { m.Device = []byte{0xff} },
		"family":      func(m *pb.LearnReply) { m.Family = []byte{0xff} },
		"profile":     func(m *pb.LearnReply) { m.Profile = []byte{0xff} },
		"description": func(m *pb.LearnReply) { m.Executors = [][]byte{{}, {0xff}} },
	} {
		m, err := Learned{}.message()
		if err != nil {
			t.Fatal(err)
		}
		if l, err := learnedFrom(overTheWire[pb.LearnReply](t, m)); err != nil || l.Profile != nil {
			t.Fatalf("an empty answer: %+v, %v", l, err)
		}
		spoil(m)
		if _, err := learnedFrom(m); err == nil || !hopeless(err) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestOfferLosesNothing(t *testing.T) {
	o := filltest.Of[*offer]()
	if got := offerFrom(overTheWire[pb.OfferRequest](t, o.message())); !reflect.DeepEqual(got, o) {
		t.Errorf("offer\n%+v, want\n%+v", got, o)
	}
}
