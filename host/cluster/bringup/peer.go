package bringup

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"google.golang.org/grpc"
)

// PeerConfig is what a peer is made of.
type PeerConfig struct {
	Secure    securelink.Config                               // Self is this peer: its node id, the cluster's name, the program's version; the role is set
	Listener  net.Listener                                    // on --cluster-control-addr; Run owns it
	Addresses []string                                        // host:port candidates for other stages; default those of the usable interfaces
	Machine   string                                          // default MachineID()
	Model     ModelConfig                                     // what the runtime inspects
	Open      func(ctx context.Context) (Runtime, error)      // what the machine has; asked once
	SavePlan  func(node string, config []byte) error          // writes the cluster's TOML that came with a stage; nil writes none
	OnPhase   func(Phase)                                     // told of every change of phase, in order, and must return at once; nil for none
	Headroom  *partition.Headroom                             // --memory-headroom; nil is the default
	Heartbeat transport.HeartbeatConfig                       // default 500 ms and 2.5 s
	Dial      func(context.Context, string) (net.Conn, error) // default TCP
	Rand      io.Reader                                       // of the links' self-tests; default crypto/rand
	Logger    hclog.Logger                                    // default none
}

func (c PeerConfig) withDefaults() (PeerConfig, error) {
	c.Secure.Self.Role = securelink.RoleStage
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.Machine == "" {
		c.Machine = MachineID()
	}
	if c.Rand == nil {
		c.Rand = rand.Reader
	}
	c.Heartbeat = c.Heartbeat.WithDefaults()
	if c.Addresses == nil {
		at, err := netip.ParseAddrPort(c.Listener.Addr().String())
		if err != nil {
			return c, fmt.Errorf("listening address: %w", err)
		}
		interfaces, err := transport.Interfaces()
		if err != nil {
			c.Logger.Warn("some network interfaces can't be used", "error", err) // the others are there
		}
		for _, a := range transport.Candidates(at, interfaces) {
			c.Addresses = append(c.Addresses, a.String())
		}
	}
	return c, nil
}

func (c PeerConfig) headroom() partition.Headroom { return Demand{Headroom: c.Headroom}.headroom() }

// Peer waits for a coordinator and serves the stage that it gives, then waits for the next.
type Peer struct {
	cfg  PeerConfig
	log  hclog.Logger
	dial transport.Dialer

	runtime Runtime
	have    *Inspection

	mu         sync.Mutex
	assignment *assignment
	session    *session // nil when waiting
	failure    string   // why the last stage ended, where nobody asked for that
}

// NewPeer checks the configuration.
func NewPeer(cfg PeerConfig) (*Peer, error) {
	if cfg.Open == nil || cfg.Listener == nil {
		return nil, errors.New("a peer needs a listener and a runtime")
	}
	cfg, err := cfg.withDefaults()
	if err == nil {
		cfg.Model.Dir, err = filepath.Abs(cfg.Model.Dir)
	}
	if err != nil {
		return nil, err
	}
	return &Peer{cfg: cfg, log: cfg.Logger, dial: transport.Dialer{Secure: cfg.Secure, Dial: cfg.Dial}, assignment: newAssignment()}, nil
}

// Run serves until ctx ends, which is no error. Nothing is left of it when it returns.
func (p *Peer) Run(ctx context.Context) (err error) {
	listening := false
	defer func() {
		if !listening {
			err = errors.Join(err, p.cfg.Listener.Close())
		}
	}()
	if p.runtime, err = p.cfg.Open(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.closeRuntime(ctx)) }()
	if p.have, err = p.runtime.Inspect(ctx); err != nil {
		return err
	}
	if p.have.Problem != "" {
		p.log.Warn("no executor for the model: coordinators will be told", "error", p.have.Problem)
	}
	l, err := securelink.NewListener(p.cfg.Listener, securelink.ListenerConfig{Config: p.cfg.Secure, Decide: p.decide, OnRefused: p.refused})
	if err != nil {
		return err
	}
	listening = true
	p.log.Info("waiting for a coordinator", "listen", l.Addr(), "cluster", p.cfg.Secure.Self.Cluster, "addresses", p.cfg.Addresses)
	return transport.Serve(ctx, l, transport.Handlers{
		transport.KindControl:   p.serveControl,
		transport.KindHeartbeat: p.serveHeartbeat,
		transport.KindData:      p.serveData,
		transport.KindLink:      p.serveLink,
		transport.KindStatus:    func(ctx context.Context, c *transport.Conn) { serveStatus(ctx, c, p.Status) },
	}, p.refused)
}

func (p *Peer) closeRuntime(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runtimeStopTimeout)
	defer cancel()
	return p.runtime.Close(ctx)
}

// decide is the verdict of a handshake.
func (p *Peer) decide(id securelink.Identity) *securelink.Refusal {
	if r := admit(p.cfg.Secure.Self, id); r != nil || id.Role != securelink.RoleCoordinator {
		return r
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.assignment.admits(id.NodeID); err != nil {
		return &securelink.Refusal{Code: securelink.RefusedBusy, Text: err.Error()}
	}
	return nil
}

// admit refuses nodes of other clusters and other versions.
func admit(self, id securelink.Identity) *securelink.Refusal {
	switch {
	case id.Cluster != self.Cluster:
		return &securelink.Refusal{Code: securelink.RefusedCluster, Text: cluster.RefuseCluster(self.Cluster, id.Cluster).Error()}
	case id.Version != self.Version:
		return &securelink.Refusal{Code: securelink.RefusedVersion, Text: cluster.RefuseVersion(self.Version, id.Version).Error()}
	}
	return nil
}

func (p *Peer) refused(addr net.Addr, err error) {
	p.log.Warn("refused a connection", "from", addr, "error", err)
}

// Status tells what the peer does.
func (p *Peer) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{
		Cluster: p.cfg.Secure.Self.Cluster, Node: p.cfg.Secure.Self.NodeID, Version: p.cfg.Secure.Self.Version, Role: "stage",
		Phase: p.assignment.phase, Epoch: p.assignment.epoch, Model: p.cfg.Model.Dir, Failure: p.failure,
	}
	if p.session != nil {
		s.Stages = p.session.status()
	}
	return s
}

// changed tells of the phase; p.mu is held, so that the calls are in order.
func (p *Peer) changed() {
	p.log.Debug("phase", "phase", p.assignment.phase, "epoch", p.assignment.epoch)
	if p.cfg.OnPhase != nil {
		p.cfg.OnPhase(p.assignment.phase)
	}
}

// serveControl serves a coordinator's control connection. The session that it opens ends with it.
func (p *Peer) serveControl(ctx context.Context, c *transport.Conn) {
	defer c.Close()
	if id := c.Peer(); id.Role != securelink.RoleCoordinator {
		p.refused(c.RemoteAddr(), &transport.NotServedError{Kind: c.Opening.Kind, Peer: id})
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := newSession(ctx, p, c)
	server := serveRPC(c, maxOffer, maxAnswer, func(g *grpc.Server) { pb.RegisterPeerServer(g, &controlServer{s: s}) })
	silent := time.AfterFunc(learnTimeout, s.loseUnopened)
	defer silent.Stop()
	select {
	case <-server.closed():
		s.lose(errCoordinatorGone)
	case <-ctx.Done():
		s.lose(errPeerStops)
	case <-s.ctx.Done():
	}
	s.end()
	server.stop(!errors.Is(context.Cause(s.ctx), errCoordinatorGone))
}

// of returns the session that a further connection belongs to, nil where there is none: the connection is then closed.
func (p *Peer) of(c *transport.Conn, role securelink.Role) *session {
	p.mu.Lock()
	s := p.session
	known := s != nil && s.id == c.Opening.Session
	p.mu.Unlock()
	if known && c.Peer().Role == role && s.begin() {
		return s
	}
	p.log.Debug("dropped a connection of no assignment here", "kind", c.Opening.Kind, "from", c.RemoteAddr())
	_ = c.Close()
	return nil
}

func (p *Peer) serveHeartbeat(_ context.Context, c *transport.Conn) {
	role := c.Peer().Role
	if role != securelink.RoleStage {
		role = securelink.RoleCoordinator
	}
	s := p.of(c, role)
	if s == nil {
		return
	}
	defer s.work.Done()
	if role == securelink.RoleStage {
		s.beatPrevious(c)
		return
	}
	if err := s.heartbeat.Run(s.ctx, c); s.ctx.Err() == nil {
		p.log.Debug("heartbeat connection", "error", err)
		s.lose(errCoordinatorGone)
	}
}

func (p *Peer) serveData(_ context.Context, c *transport.Conn) {
	s := p.of(c, securelink.RoleCoordinator)
	if s == nil {
		return
	}
	defer s.work.Done()
	s.hand(s.data, c)
}

// serveLink answers the self-test of the stage before, then hands the connection to the stage.
func (p *Peer) serveLink(_ context.Context, c *transport.Conn) {
	s := p.of(c, securelink.RoleStage)
	if s == nil {
		return
	}
	defer s.work.Done()
	if err := s.answerLink(c); err != nil {
		p.log.Warn("link from the stage before", "from", c.RemoteAddr(), "error", err)
		_ = c.Close()
		return
	}
	s.hand(s.previous, c)
}

// learnTimeout is how long a coordinator may be connected without a word.
const learnTimeout = 5 * time.Second

// sessionTimeout bounds the ordered end of a stage; past it its executor is killed.
const sessionTimeout = 10 * time.Second
