package serve

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/discovery"
	"github.com/mlxcel/mlxcel/host/securelink"
)

// runPeer serves one stage after the other until a signal.
func runPeer(ctx context.Context, cfg *Config, signals <-chan os.Signal, errOut io.Writer) (err error) {
	logger, closeLog, err := newLogger(cfg, errOut)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeLog()) }()
	stop := newStop(ctx, signals)
	defer stop.wait()
	secret, err := cfg.Cluster.Secret()
	if err != nil {
		return err
	}
	for _, n := range cfg.Cluster.Notices {
		logger.Info(n)
	}
	listener, err := listenPeer(cfg)
	if err != nil {
		return err
	}
	self := securelink.Identity{NodeID: peerID(cfg, listener.Addr()), Cluster: cfg.Cluster.Name, Version: cfg.Version}
	var busy atomic.Bool
	peer, err := bringup.NewPeer(bringup.PeerConfig{
		Secure: securelink.Config{Secret: secret, Self: self}, Listener: listener,
		Model: modelOf(cfg), Open: func(context.Context) (bringup.Runtime, error) { return openLocal(cfg, logger) },
		OnPhase:  func(phase bringup.Phase) { busy.Store(phase != bringup.PhaseWaiting) },
		SavePlan: func(node string, raw []byte) error { return savePlan(cfg, node, raw) },
		Logger:   logger.Named("peer"),
	})
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	beacons := cfg.Cluster.Announcement(secret, self, netip.MustParseAddrPort(listener.Addr().String()), logger.Named("discovery"))
	beacons.Waiting = func() bool { return !busy.Load() }
	announced := announce(stop.gentle, cfg, beacons)
	err = peer.Run(stop.gentle)
	stop.end()
	return errors.Join(err, announced())
}

// listenPeer opens the port that the coordinator and the stage before dial.
func listenPeer(cfg *Config) (net.Listener, error) {
	address, from := cfg.Cluster.PeerAddress()
	if address == "" {
		return nil, fmt.Errorf("--pp-peer with --cluster-discovery=static needs a port that --cluster-peers of the coordinator names: give --cluster-control-addr HOST:PORT")
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", from, address, err)
	}
	return l, nil
}

// peerID names this peer until it has a stage: by the file, by the operator, or by host and port, which stay the same over restarts,
// and a few digits that tell hosts of one name apart.
func peerID(cfg *Config, at net.Addr) string {
	if id := cfg.Cluster.NodeID; id != "" {
		return id
	}
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "peer"
	}
	port := netip.MustParseAddrPort(at.String()).Port()
	sum := sha256.Sum256([]byte(bringup.MachineID() + " " + at.String()))
	suffix := fmt.Sprintf("-%d-%x", port, sum[:3])
	return host[:min(len(host), cluster.MaxNameLength-len(suffix))] + suffix
}

func modelOf(cfg *Config) bringup.ModelConfig {
	return bringup.ModelConfig{Dir: cfg.Engine.Model, Dtype: cfg.Engine.Dtype, Threads: cfg.Engine.Threads}
}

func openLocal(cfg *Config, logger hclog.Logger) (*bringup.Local, error) {
	plugins := cfg.Engine.Plugins
	plugins.Logger = logger.Named("executor")
	return bringup.OpenLocal(bringup.LocalConfig{Model: modelOf(cfg), Version: cfg.Version, Verify: cfg.Cluster.Verify, Plugins: plugins})
}

// savePlan keeps the cluster that this peer was made a stage of.
func savePlan(cfg *Config, node string, raw []byte) error {
	path := cfg.Cluster.ConfigOut
	if path == "" {
		path = filepath.Join(filepath.Dir(cluster.DefaultConfigOut), "cluster-"+node+".toml")
	}
	plan, err := cluster.Parse(raw, path)
	if err != nil {
		return err
	}
	return cluster.WriteFile(path, plan)
}

// announce sends beacons until ctx ends; what it returns waits for that.
func announce(ctx context.Context, cfg *Config, beacons discovery.AnnounceConfig) func() error {
	if !cfg.Cluster.MDNS {
		return func() error { return nil }
	}
	var err error
	var wait sync.WaitGroup
	wait.Go(func() {
		if err = discovery.Announce(ctx, beacons); err != nil {
			beacons.Log.Error("this peer can't announce itself", "error", err)
		}
	})
	return func() error { wait.Wait(); return err }
}
