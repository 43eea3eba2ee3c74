package sdk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/mlxcel/mlxcel/sdk/internal/pb"
	"google.golang.org/grpc"
)

// The environment of an executor process, beside what go-plugin sets itself.
const (
	EnvCookie     = "MLXCEL_EXECUTOR"    // the handshake's magic cookie
	EnvRegionFD   = "MLXCEL_REGION_FD"   // number of the inherited descriptor of the Region; unset means none
	EnvLifelineFD = "MLXCEL_LIFELINE_FD" // number of the inherited reading end of the Lifeline; unset means none
	EnvChannelFD  = "MLXCEL_CHANNEL_FD"  // number of the inherited end of the SideChannel; unset means none
	EnvLogLevel   = "MLXCEL_LOG_LEVEL"   // hclog level of the executor's logger; unset means info
)

// cookieValue keeps an executor that is started by hand from waiting for a host. It is no secret.
const cookieValue = "a8d1c04e5f0b4a7e9c1d6b2f"

// pluginName is the one thing that an executor dispenses.
const pluginName = "executor"

// maxMessage bounds a message either way. Bulk lies in the Region or in descriptors; the largest messages left are a
// prompt's token ids and the tensor list of an import.
const maxMessage = 16 << 20

// Handshake is go-plugin's handshake of an executor.
func Handshake() plugin.HandshakeConfig {
	return plugin.HandshakeConfig{
		ProtocolVersion:  ContractVersion,
		MagicCookieKey:   EnvCookie,
		MagicCookieValue: cookieValue,
	}
}

// Launched tells whether this process was started by a host to be an executor.
func Launched() bool { return os.Getenv(EnvCookie) == cookieValue }

// ClientConfig is go-plugin's configuration for one executor process on the host's side: gRPC with AutoMTLS,
// this contract's version only, and nothing of the host's environment beyond cmd.Env. The caller may set the
// fields that it leaves alone: StartTimeout, SecureConfig, SyncStdout, and so on. cmd should have been through
// Inherit. Nil region and channel serve Describe, Inspect, Import and Stats only.
func ClientConfig(cmd *exec.Cmd, region *Region, channel *SideChannel, logger hclog.Logger) *plugin.ClientConfig {
	return &plugin.ClientConfig{
		HandshakeConfig:  Handshake(),
		VersionedPlugins: versionedPlugins(&grpcPlugin{region: region, channel: channel}),
		Cmd:              cmd,
		SkipHostEnv:      true,
		AutoMTLS:         true,
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		Logger:           logger,
	}
}

// Dispense starts the process behind c, unless it runs already, and returns the typed client to it.
func Dispense(c *plugin.Client) (*Client, error) {
	protocol, err := c.Client()
	if err != nil {
		return nil, fmt.Errorf("start the executor: %w", err)
	}
	raw, err := protocol.Dispense(pluginName)
	if err != nil {
		return nil, fmt.Errorf("connect to the executor: %w", err)
	}
	return raw.(*Client), nil
}

// Inherit makes cmd hand the region, the reading end of a lifeline and the far end of a side channel to the executor, and
// tells it by the environment which descriptors they are. Each may be nil. It must be the only one to add ExtraFiles.
func Inherit(cmd *exec.Cmd, region *Region, lifeline *Lifeline, channel *SideChannel) {
	pass := func(key string, f *os.File) {
		const firstExtra = 3 // after stdin, stdout and stderr
		cmd.Env = append(cmd.Env, key+"="+strconv.Itoa(firstExtra+len(cmd.ExtraFiles)))
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	if region != nil {
		pass(EnvRegionFD, region.File())
	}
	if lifeline != nil {
		pass(EnvLifelineFD, lifeline.reader)
	}
	if channel != nil {
		pass(EnvChannelFD, channel.far)
	}
}

// Lifeline is a pipe whose closing tells an executor that its host died, however it died. Nothing is ever
// written to it.
type Lifeline struct {
	reader, writer *os.File
}

// NewLifeline opens a lifeline. One may serve any number of executors.
func NewLifeline() (*Lifeline, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("open a lifeline: %w", err)
	}
	return &Lifeline{reader: r, writer: w}, nil
}

// Close ends every executor that holds the lifeline's other end.
func (l *Lifeline) Close() error { return errors.Join(l.writer.Close(), l.reader.Close()) }

// grpcPlugin ties the contract to go-plugin, for both sides.
type grpcPlugin struct {
	plugin.NetRPCUnsupportedPlugin
	server  *server // the executor's side
	region  *Region // the host's side
	channel *SideChannel
}

func versionedPlugins(p *grpcPlugin) map[int]plugin.PluginSet {
	return map[int]plugin.PluginSet{ContractVersion: {pluginName: p}}
}

func (p *grpcPlugin) GRPCServer(_ *plugin.GRPCBroker, s *grpc.Server) error {
	pb.RegisterExecutorServer(s, p.server)
	return nil
}

func (p *grpcPlugin) GRPCClient(_ context.Context, _ *plugin.GRPCBroker, conn *grpc.ClientConn) (any, error) {
	return NewClient(conn, p.region, p.channel), nil
}
