package clusterflags

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/urfave/cli/v2"
)

// listenSeconds is how long doctor listens for beacons, which come each second.
const listenSeconds = 5

// DoctorFlags returns those that say which cluster a node is to be in.
func DoctorFlags() []cli.Flag {
	timeout := &cli.IntFlag{Name: "cluster-discovery-timeout", Category: group, Value: listenSeconds, Usage: "`SECONDS` that beacons are listened for"}
	flags := named(append(bringUpFlags(), fileFlags()...),
		"cluster-peers", "cluster-discovery", "cluster-discovery-port", "distributed-config", "node-id", "cluster-control-addr")
	return append(append(flags, timeout), secretFlags()...)
}

// StatusFlags returns those that say which node is asked.
func StatusFlags() []cli.Flag {
	address := &cli.StringFlag{
		Name: "cluster-control-addr", Category: group, Usage: "`ADDRESS` of the node to ask, host:port",
		DefaultText: "the file's coordinator, or --node-id in it; without a file " + defaultControl(),
	}
	return append(append(named(fileFlags(), "distributed-config", "node-id"), address), secretFlags()...)
}

func named(flags []cli.Flag, names ...string) []cli.Flag {
	return slices.DeleteFunc(flags, func(f cli.Flag) bool { return !slices.Contains(names, f.Names()[0]) })
}

func defaultControl() string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(cluster.DefaultControlPort))
}

// Tool is what the flags say to a command that looks at a cluster and is no node of it.
type Tool struct {
	Name        string // of the cluster
	File        string // --distributed-config; empty for none
	FileErr     error  // what is wrong with it, or with --node-id
	Topology    *cluster.Config
	Node        *cluster.Node // --node-id's in Topology; nil where it was not given
	ControlAddr string        // --cluster-control-addr; empty where not given
	Peers       []string      // --cluster-peers
	MDNS        bool
	Port        int           // UDP, of beacons
	Timeout     time.Duration // of listening for beacons
	Secret      cluster.SecretSource
	Clustered   bool // a flag or variable says that there is a cluster
}

// ReadTool takes the flags to a Tool. A file that is no good is FileErr, so that the rest can be looked at.
func ReadTool(c *cli.Context) (*Tool, error) {
	t := &Tool{
		Name: c.String("cluster-name"), File: c.String("distributed-config"), ControlAddr: c.String("cluster-control-addr"),
		Port: c.Int("cluster-discovery-port"), Timeout: time.Duration(c.Int("cluster-discovery-timeout")) * time.Second,
		MDNS: c.String("cluster-discovery") == "mdns", Secret: secretSource(c),
	}
	if text := c.String("cluster-peers"); text != "" {
		for peer := range strings.SplitSeq(text, ",") {
			t.Peers = append(t.Peers, strings.TrimSpace(peer))
		}
	}
	t.Clustered = t.File != "" || t.ControlAddr != "" || t.MDNS || len(t.Peers) > 0 || t.Secret != cluster.SecretSource{AllowLoose: t.Secret.AllowLoose}
	if err := t.validate(c); err != nil {
		return nil, err
	}
	t.readFile(c.String("node-id"))
	return t, nil
}

func (t *Tool) validate(c *cli.Context) error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if mode := c.String("cluster-discovery"); mode != "" && mode != "mdns" && mode != "static" {
		fault("--cluster-discovery %q: want static or mdns", mode)
	}
	if t.MDNS && (t.Port < 1 || t.Port > 65535) {
		fault("--cluster-discovery-port %d: want 1 to 65535", t.Port)
	}
	if t.MDNS && t.Timeout <= 0 {
		fault("--cluster-discovery-timeout %d: want 1 or more seconds", c.Int("cluster-discovery-timeout"))
	}
	if t.File == "" && c.IsSet("node-id") {
		fault("--node-id has no effect without --distributed-config")
	}
	if len(t.Name) > cluster.MaxNameLength {
		fault("--cluster-name may have %d bytes at most", cluster.MaxNameLength)
	}
	for _, address := range append([]string{t.ControlAddr}, t.Peers...) {
		if _, err := cluster.ParseAddress(address); address != "" && err != nil {
			faults = append(faults, err)
		}
	}
	return errors.Join(faults...)
}

func (t *Tool) readFile(nodeID string) {
	if t.File == "" {
		return
	}
	if t.Topology, t.FileErr = cluster.Load(t.File); t.FileErr != nil {
		return
	}
	t.Name, t.Secret.TOMLFile = t.Topology.Name, t.Topology.SecretPath()
	if nodeID == cluster.CoordinatorID && t.ControlAddr != "" {
		full, err := t.Topology.WithCoordinator(t.ControlAddr)
		if err != nil {
			t.FileErr = err
			return
		}
		t.Topology = full
	}
	if nodeID != "" {
		node, _, err := t.Topology.Locate(cluster.Self{ID: nodeID})
		if t.FileErr = err; err == nil {
			t.Node = &node
		}
	}
}

// Ask returns the address of the node that status asks.
func (t *Tool) Ask() (string, error) {
	switch {
	case t.ControlAddr != "":
		return t.ControlAddr, nil
	case t.FileErr != nil:
		return "", t.FileErr
	case t.Node != nil:
		return t.Node.Address, nil
	case t.Topology != nil:
		if n, ok := t.Topology.Coordinator(); ok {
			return n.Address, nil
		}
		return "", fmt.Errorf("%s has no coordinator: give its address with --cluster-control-addr, or a node of the file with --node-id", t.File)
	}
	return defaultControl(), nil
}

// secretSource is where the flags and the environment say that the secret is. A file's own is added by who reads one.
func secretSource(c *cli.Context) cluster.SecretSource {
	return cluster.SecretSource{
		File: c.String("cluster-secret-file"), EnvFile: os.Getenv(cluster.EnvSecretFile), EnvValue: os.Getenv(cluster.EnvSecret),
		AllowLoose: c.Bool("allow-loose-secret"),
	}
}
