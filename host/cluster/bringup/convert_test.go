package bringup

import (
	"reflect"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/sdk"
	"google.golang.org/protobuf/proto"
)

// fill sets every field that v has, deeply, to a value of its own, so that one that is lost on the wire shows.
func fill(v reflect.Value, next *int) {
	*next++
	switch v.Kind() {
	case reflect.String:
		v.SetString(string(rune('a' + *next%26)))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*next))
	case reflect.Uint64:
		v.SetUint(uint64(*next))
	case reflect.Uint8:
		v.SetUint(uint64(*next % 256))
	case reflect.Float64:
		v.SetFloat(float64(*next) / 2)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), next)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), next)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), next)
		}
	default:
		panic("no value for a field of kind " + v.Kind().String())
	}
}

func filled[T any](t *testing.T) T {
	t.Helper()
	var v T
	n := 0
	fill(reflect.ValueOf(&v).Elem(), &n)
	return v
}

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
	learned := filled[Learned](t)
	learned.Reached = "" // the coordinator's own observation
	learned.Profile.Adjacency = []sdk.AdjacencyGroup{{Source: 0, Consumer: 1, Reason: "r"}}
	learned.Profile.Boundary.Dtype = sdk.DtypeFloat16
	message, err := learned.message()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := learnedFrom(overTheWire[pb.LearnReply](t, message)); err != nil || !reflect.DeepEqual(got, learned) {
		t.Errorf("learned\n%+v, %v, want\n%+v", got, err, learned)
	}
	status := filled[Status](t)
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
	o := &offer{
		epoch: 1, cluster: "c", version: "v", identity: filled[Learned](t).Identity, family: "f", accelerator: "cpu", stage: 1, config: []byte("toml"),
		stages: []offeredStage{{node: "n", address: "a", candidates: []string{"x", "y"}, peer: "p", memory: 3, kvBudget: 4}, {node: "m", address: "b"}},
		shape:  Shape{PrefillChunk: 5, MicroBatch: 6, Slots: 7},
	}
	o.stages[0].layers.Start, o.stages[0].layers.End = 8, 9
	o.demand.Context, o.demand.Sequences = 10, 11
	if got := offerFrom(overTheWire[pb.OfferRequest](t, o.message())); !reflect.DeepEqual(got, o) {
		t.Errorf("offer\n%+v, want\n%+v", got, o)
	}
}
