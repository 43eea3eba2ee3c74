package bringup

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
	"google.golang.org/grpc"
)

// Status is what a node tells of itself. A coordinator tells of all stages, a peer of its own.
type Status struct {
	Cluster string        `json:"cluster"`
	Node    string        `json:"node"`
	Version string        `json:"version"`
	Role    string        `json:"role"` // "coordinator" or "stage"
	Phase   Phase         `json:"phase"`
	Epoch   uint64        `json:"epoch"`
	Model   string        `json:"model"` // folder, or the model's type on a coordinator without a copy
	Failure string        `json:"failure,omitempty"`
	Stages  []StageStatus `json:"stages"`
}

// StageStatus is one stage of a Status.
type StageStatus struct {
	Stage         int            `json:"stage"`
	Node          string         `json:"node"`     // id in the cluster's TOML
	Address       string         `json:"address"`  // as the operator gave it
	Answered      string         `json:"answered"` // that it answered the coordinator at, which alone knows; empty before
	Layers        sdk.LayerRange `json:"layers"`   // half-open
	Plugin        string         `json:"plugin"`
	Phase         Phase          `json:"phase"`
	Health        string         `json:"health"`       // "ok", or what is wrong
	BudgetBytes   int64          `json:"budget_bytes"` // of its memory, which a coordinator shares out and a peer takes for its own; 0 where nothing limits it
	WeightBytes   int64          `json:"weight_bytes"`
	KVBudget      int64          `json:"kv_budget"`     // bytes; 0 where nothing limits it
	RoundTrip     time.Duration  `json:"round_trip_ns"` // coordinator to stage and back
	LinkAddress   string         `json:"link_address"`  // at which the next stage answered; empty on the last
	LinkRoundTrip time.Duration  `json:"link_round_trip_ns"`
	Sent          int64          `json:"bytes_sent"` // over the links to other stages
	Received      int64          `json:"bytes_received"`
	BusyFraction  float64        `json:"busy_fraction"` // of the last interval that the stage computed
	Loaded        int64          `json:"loaded_bytes"`
	LoadTotal     int64          `json:"load_total_bytes"`
}

func (s Status) message() *pb.NodeStatus {
	return &pb.NodeStatus{
		Cluster: s.Cluster, Node: s.Node, Version: s.Version, Role: s.Role, Phase: string(s.Phase), Epoch: s.Epoch, Model: s.Model, Failure: clip(s.Failure),
		Stages: each(s.Stages, func(t StageStatus) *pb.StageStatus {
			return &pb.StageStatus{
				Stage: int64(t.Stage), Node: t.Node, Address: t.Address, Answered: t.Answered, Start: int64(t.Layers.Start), End: int64(t.Layers.End),
				Plugin: t.Plugin, Phase: string(t.Phase), Health: clip(t.Health), BudgetBytes: t.BudgetBytes, WeightBytes: t.WeightBytes, KvBudget: t.KVBudget,
				RoundTripNanos: int64(t.RoundTrip), LinkAddress: t.LinkAddress, LinkRoundTripNanos: int64(t.LinkRoundTrip),
				BytesSent: t.Sent, BytesReceived: t.Received, BusyFraction: t.BusyFraction, LoadedBytes: t.Loaded, LoadTotalBytes: t.LoadTotal,
			}
		}),
	}
}

func statusFrom(m *pb.NodeStatus) Status {
	return Status{
		Cluster: m.GetCluster(), Node: m.GetNode(), Version: m.GetVersion(), Role: m.GetRole(), Phase: Phase(m.GetPhase()), Epoch: m.GetEpoch(),
		Model: m.GetModel(), Failure: m.GetFailure(),
		Stages: each(m.GetStages(), func(t *pb.StageStatus) StageStatus {
			return StageStatus{
				Stage: int(t.GetStage()), Node: t.GetNode(), Address: t.GetAddress(), Answered: t.GetAnswered(),
				Layers: sdk.LayerRange{Start: int(t.GetStart()), End: int(t.GetEnd())}, Plugin: t.GetPlugin(), Phase: Phase(t.GetPhase()), Health: t.GetHealth(),
				BudgetBytes: t.GetBudgetBytes(), WeightBytes: t.GetWeightBytes(), KVBudget: t.GetKvBudget(),
				RoundTrip: time.Duration(t.GetRoundTripNanos()), LinkAddress: t.GetLinkAddress(), LinkRoundTrip: time.Duration(t.GetLinkRoundTripNanos()),
				Sent: t.GetBytesSent(), Received: t.GetBytesReceived(), BusyFraction: t.GetBusyFraction(), Loaded: t.GetLoadedBytes(), LoadTotal: t.GetLoadTotalBytes(),
			}
		}),
	}
}

// statusServer answers tools.
type statusServer struct {
	pb.UnimplementedStatusServer
	status func() Status
}

func (s *statusServer) Get(context.Context, *pb.StatusRequest) (*pb.NodeStatus, error) {
	return s.status().message(), nil
}

func (s *statusServer) Echo(_ context.Context, r *pb.EchoRequest) (*pb.EchoReply, error) {
	return &pb.EchoReply{Payload: r.GetPayload(), UnixNanos: time.Now().UnixNano()}, nil
}

// serveStatus serves one status connection, until the tool or ctx ends it.
func serveStatus(ctx context.Context, c *transport.Conn, status func() Status) {
	server := serveRPC(c, maxAsk, maxStatus, func(g *grpc.Server) { pb.RegisterStatusServer(g, &statusServer{status: status}) })
	select {
	case <-server.closed():
	case <-ctx.Done():
	}
	server.stop(ctx.Err() != nil)
}

// ServeStatus answers tools at a coordinator's --cluster-control-addr until ctx ends, which is no error. Self's role is set.
func ServeStatus(ctx context.Context, cfg securelink.ListenerConfig, l net.Listener, status func() Status) error {
	cfg.Self.Role = securelink.RoleCoordinator
	cfg.Decide = func(id securelink.Identity) *securelink.Refusal {
		if id.Role != securelink.RoleTool {
			return &securelink.Refusal{Code: securelink.RefusedRole, Text: fmt.Sprintf("this is a coordinator, which a %s does not dial", id.Role)}
		}
		return admit(cfg.Self, id)
	}
	secured, err := securelink.NewListener(l, cfg)
	if err != nil {
		return err
	}
	return transport.Serve(ctx, secured, transport.Handlers{
		transport.KindStatus: func(ctx context.Context, c *transport.Conn) { serveStatus(ctx, c, status) },
	}, cfg.OnRefused)
}

// Answer is what a tool learns of a node.
type Answer struct {
	Status
	Address   string        // that answered
	RoundTrip time.Duration // of an empty call, the fastest of a few
	Skew      time.Duration // the node's clock minus this one's, within half the round trip
}

// Ask gets a node's status; d's Self is that of a tool, with the cluster's name. The error is a *transport.DialError where the node can't be
// reached, and holds a handshake's errors.
func Ask(ctx context.Context, d transport.Dialer, address string) (*Answer, error) {
	d.Secure.Self.Role = securelink.RoleTool
	c, err := d.Connect(ctx, []string{address}, transport.Opening{Kind: transport.KindStatus}, nil)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	rpc, err := dialRPC(c, maxAsk, maxStatus)
	if err != nil {
		return nil, err
	}
	defer rpc.Close()
	client := pb.NewStatusClient(rpc)
	m, err := client.Get(ctx, &pb.StatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask %s for its status: %w", address, fromStatus(err))
	}
	out := &Answer{Status: statusFrom(m), Address: address}
	for i := range 5 {
		start := time.Now()
		echo, err := client.Echo(ctx, &pb.EchoRequest{})
		if err != nil {
			return nil, fmt.Errorf("measure the round trip to %s: %w", address, fromStatus(err))
		}
		if trip := time.Since(start); i == 0 || trip < out.RoundTrip {
			out.RoundTrip, out.Skew = trip, time.Unix(0, echo.GetUnixNanos()).Sub(start.Add(trip/2))
		}
	}
	return out, nil
}
