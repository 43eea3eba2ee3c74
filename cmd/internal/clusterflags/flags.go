// Package clusterflags owns the flags that name a cluster, and what they resolve to. The server, generate, status and doctor share it.
package clusterflags

import (
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/discovery"
	"github.com/urfave/cli/v2"
)

// group is the flags' group in --help.
const group = "cluster"

const defaultDiscoveryTimeout = 30 // seconds

// Flags returns every flag of a cluster, for the server.
func Flags() []cli.Flag {
	return append(bringUpFlags(), append(fileFlags(), secretFlags()...)...)
}

// FileFlags returns those of a command that joins a cluster whose file exists.
func FileFlags() []cli.Flag { return append(fileFlags(), secretFlags()...) }

func bringUpFlags() []cli.Flag {
	return []cli.Flag{
		&cli.IntFlag{Name: "pp-auto", Category: group, Usage: "coordinate a pipeline of `N` stages, one on each peer; this process runs none"},
		&cli.BoolFlag{Name: "pp-peer", Category: group, Usage: "wait for a coordinator's assignment and serve that stage"},
		&cli.StringFlag{Name: "cluster-discovery", Category: group, Value: "static", Usage: "how peers are found: static (--cluster-peers) or mdns (signed UDP beacons)"},
		&cli.StringFlag{Name: "cluster-peers", Category: group, Usage: "`ADDRESSES` of the peers, host:port, separated by commas"},
		&cli.IntFlag{Name: "cluster-discovery-port", Category: group, Value: discovery.DefaultPort, Usage: "UDP `PORT` of the beacons"},
		&cli.StringFlag{Name: "cluster-discovery-target", Category: group, Value: discovery.Broadcast.String(), Usage: "`IP` that a peer sends its beacons to: a broadcast address, or the coordinator's where broadcast is dropped"},
		&cli.IntFlag{Name: "cluster-discovery-timeout", Category: group, Value: defaultDiscoveryTimeout, Usage: "`SECONDS` that --dry-run waits for beacons"},
		&cli.StringFlag{Name: "cluster-config-out", Category: group, Usage: "write the cluster's TOML to `FILE`", DefaultText: "coordinator: " + cluster.DefaultConfigOut + ", peer: .mlxcel/cluster-<node-id>.toml"},
		&cli.StringFlag{Name: "stage-memory", Category: group, Usage: "`BYTES` that each stage may use, one for all or one for each, e.g. 8GiB,16GiB", DefaultText: "what each peer's device reports"},
		&cli.BoolFlag{Name: "verify", Category: group, Usage: "compare the weights' contents as well, which reads every byte of them"},
		&cli.BoolFlag{Name: "no-auto-restart", Category: group, Usage: "stay down after a stage was lost, instead of waiting for it and starting anew"},
		&cli.BoolFlag{Name: "dry-run", Category: group, Usage: "plan the cluster, print it, write its TOML and exit; not zero where something is in the way"},
	}
}

func fileFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "distributed-config", Category: group, Usage: "the cluster's TOML `FILE`, in place of --pp-auto"},
		&cli.StringFlag{Name: "node-id", Category: group, Usage: "which node of the TOML this process is"},
		&cli.StringFlag{Name: "node-role", Category: group, Usage: "role that the TOML must give this node; a mismatch is an error"},
		&cli.StringFlag{Name: "peers", Category: group, Usage: "`ADDRESSES` of the other nodes; each must be in the TOML"},
		&cli.StringFlag{Name: "cluster-control-addr", Category: group, Usage: "`ADDRESS` of this node in the cluster, host:port", DefaultText: "coordinator: the --host IP on port 19000"},
	}
}

func secretFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "cluster-name", Category: group, Value: cluster.DefaultName, Usage: "`NAME` that all nodes share"},
		&cli.StringFlag{Name: "cluster-secret-file", Category: group, Usage: "`FILE` with the secret that all nodes share; mlxcel cluster secret new FILE makes one"},
		&cli.BoolFlag{Name: "allow-loose-secret", Category: group, Usage: "take a secret file that other users of the machine can read"},
	}
}
