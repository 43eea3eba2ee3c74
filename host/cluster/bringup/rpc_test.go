package bringup

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/internal/tcptest"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// largestCluster has as many stages as a TOML can name, long names, many addresses, and a model of many files.
func largestCluster(t *testing.T) (*offer, Learned, Status) {
	const stages = cluster.MaxNodes - 1
	hash := strings.Repeat("f", 64)
	id := cluster.Identity{Version: "v1.2.3-456-g0123456789ab-dirty", ConfigHash: hash, Layers: 1000}
	for i := range 1000 {
		id.Weights = append(id.Weights, cluster.WeightFile{Name: fmt.Sprintf("model-%05d-of-01000.safetensors", i), Size: math.MaxInt64, Hash: hash})
	}
	l := Learned{
		Node: strings.Repeat("n", securelink.MaxNodeID), Machine: hash, LastEpoch: math.MaxUint64,
		Inspection: Inspection{ModelType: "llama", Identity: id, Folders: []string{"/opt/mlxcel/plugins"}, Plugin: "llama", Profile: &sdk.ModelProfile{}},
	}
	for i := range 8 {
		l.Addresses = append(l.Addresses, fmt.Sprintf("[2001:db8:1111:2222:3333:4444:5555:%04x]:19000", i))
		l.Executors = append(l.Executors, sdk.Description{Name: "llama", Version: id.Version, Families: make([]sdk.Family, 20)})
		for j := range 20 {
			l.Executors[i].Families[j] = sdk.Family{
				Name: "qwen3-moe", ModelTypes: []string{"qwen3_moe", "qwen3_next"}, Pipeline: true, Quantizations: []string{"none", "affine-4", "affine-8", "mxfp4"},
			}
		}
	}
	for range 1000 {
		l.Profile.Layers = append(l.Profile.Layers, sdk.LayerProfile{Kind: "sliding-attention", Weights: 1 << 40, States: []sdk.StateProfile{
			{Kind: sdk.StateKV, BytesPerPosition: 1 << 20, Window: 1 << 12, Block: 1 << 8},
		}})
	}
	at := make([]string, stages)
	learned := make([]Learned, stages)
	plan := &Plan{Plan: &partition.Plan{Stages: make([]partition.StageAssignment, stages)}, KVBudgets: make([]int64, stages), Identity: id}
	s := Status{Failure: strings.Repeat("no route to host. ", 100_000)}
	for i := range at {
		at[i], learned[i], plan.KVBudgets[i] = fmt.Sprintf("%s-%04d.example.org:19000", strings.Repeat("h", 64), i), l, math.MaxInt64
		s.Stages = append(s.Stages, StageStatus{
			Stage: i, Node: l.Node, Address: at[i], Answered: l.Addresses[0], Plugin: "llama", Phase: PhaseCommitted, Health: "not reached",
			BudgetBytes: math.MaxInt64, WeightBytes: math.MaxInt64, KVBudget: math.MaxInt64, RoundTrip: math.MaxInt64,
			LinkAddress: l.Addresses[0], LinkRoundTrip: math.MaxInt64, Sent: math.MaxInt64, Received: math.MaxInt64, BusyFraction: 0.5,
		})
	}
	return offers(math.MaxUint64, id.Version, topology(at...), plan, learned, Shape{}, true)[stages-1], l, s
}

func TestLargestMessagesFit(t *testing.T) {
	o, l, s := largestCluster(t)
	answer, err := l.message()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		message proto.Message
		limit   int
	}{{"offer", o.message(), maxOffer}, {"answer", answer, maxAnswer}, {"status", s.message(), maxStatus}} {
		if size := proto.Size(c.message); size > c.limit || size < c.limit/4 {
			t.Errorf("the largest %s takes %d bytes, the limit is %d", c.name, size, c.limit)
		}
	}
}

// A node reads no message that is larger than any of its kind need be, and goes on.
func TestMessagesHaveLimits(t *testing.T) {
	peer := startPeer(t, "peer", testModel(t), "127.0.0.1:0", nil)
	dial := func(role securelink.Role, kind transport.Kind) *grpc.ClientConn {
		d := testDialer(t)
		d.Secure.Self.Role = role
		c, err := d.Connect(t.Context(), []string{peer.address}, transport.Opening{Kind: kind}, nil)
		if err != nil {
			t.Fatal(err)
		}
		rpc, err := dialRPC(c, math.MaxInt32, math.MaxInt32)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { rpc.Close(); c.Close() })
		return rpc
	}
	control := pb.NewPeerClient(dial(securelink.RoleCoordinator, transport.KindControl))
	tool := pb.NewStatusClient(dial(securelink.RoleTool, transport.KindStatus))
	for name, c := range map[string]struct {
		limit int
		call  func([]byte) error
		want  codes.Code // of a message within the limit
	}{
		"offer": {maxOffer, func(b []byte) error {
			_, err := control.Offer(t.Context(), &pb.OfferRequest{Config: b})
			return err
		}, codes.FailedPrecondition}, // before a word
		"ask": {maxAsk, func(b []byte) error {
			_, err := tool.Echo(t.Context(), &pb.EchoRequest{Payload: b})
			return err
		}, codes.OK},
	} {
		if err := c.call(make([]byte, c.limit)); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%s: more than %d bytes: %v", name, c.limit, err)
		}
		if err := c.call(make([]byte, c.limit-16)); status.Code(err) != c.want {
			t.Errorf("%s: less than %d bytes: %v", name, c.limit, err)
		}
	}
}

// A coordinator reads no more of a peer than an answer has.
func TestAnswersHaveLimits(t *testing.T) {
	near, far := tcptest.Pair(t)
	server := serveRPC(far, maxOffer, math.MaxInt32, func(g *grpc.Server) {
		pb.RegisterStatusServer(g, &statusServer{status: func() Status { return Status{Model: strings.Repeat("x", maxAnswer)} }})
	})
	defer server.stop(false)
	rpc, err := dialRPC(near, maxOffer, maxAnswer)
	if err != nil {
		t.Fatal(err)
	}
	defer rpc.Close()
	if _, err := pb.NewStatusClient(rpc).Get(t.Context(), &pb.StatusRequest{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v", err)
	}
}
