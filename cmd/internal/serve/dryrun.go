package serve

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
)

// probeTimeout bounds the question to one node: a dry run is no wait for peers that are not up.
const probeTimeout = 3 * time.Second

// dryRun plans the cluster and starts nothing.
func dryRun(ctx context.Context, cfg *Config, out, errOut io.Writer) (err error) {
	logger, closeLog, err := newLogger(cfg, errOut)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeLog()) }()
	return cfg.Cluster.RunDry(ctx, logger, func(secret securelink.Secret) cluster.Probe { return probe(cfg, secret) }, out)
}

// probe asks who listens at an address. A node that answers and refuses this program is a *cluster.Refusal.
func probe(cfg *Config, secret securelink.Secret) cluster.Probe {
	d := transport.Dialer{Timeout: probeTimeout, Secure: securelink.Config{
		Secret: secret,
		Self:   securelink.Identity{NodeID: "dry-run", Cluster: cfg.Cluster.Name, Version: cfg.Version},
	}}
	return func(ctx context.Context, address string) (securelink.Identity, error) {
		answer, err := bringup.Ask(ctx, d, address)
		if err != nil {
			if r := cluster.FromHandshake(err); r != nil {
				return securelink.Identity{}, r
			}
			return securelink.Identity{}, err
		}
		role := securelink.RoleStage
		if answer.Role == "coordinator" {
			role = securelink.RoleCoordinator
		}
		return securelink.Identity{Role: role, NodeID: answer.Node, Cluster: answer.Cluster, Version: answer.Version}, nil
	}
}
