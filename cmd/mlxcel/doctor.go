package main

import (
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/doctor"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/urfave/cli/v2"
)

func doctorCommand() *cli.Command {
	flags := append(pluginFlags(), modelFlag(), dtypeFlag(),
		&cli.StringFlag{Name: "host", Value: "127.0.0.1", Usage: "`ADDRESS` that the server would listen on for HTTP; checked with --port"},
		&cli.IntFlag{Name: "port", Usage: "`PORT` that the server would listen on for HTTP", DefaultText: "not checked"},
		&cli.BoolFlag{Name: "json", Usage: "print one JSON object"})
	return &cli.Command{
		Name:   "doctor",
		Usage:  "check what a node needs: addresses, ports, secret, peers, executors, model",
		Flags:  append(flags, clusterflags.DoctorFlags()...),
		Action: runDoctor,
	}
}

func runDoctor(c *cli.Context) error {
	if c.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; see --help", c.Args().First())
	}
	tool, err := clusterflags.ReadTool(c)
	if err != nil {
		return err
	}
	engineCfg := engineConfig(c)
	if c.String("model") != "" {
		if err := setModel(c, &engineCfg); err != nil {
			return err
		}
	}
	probes := doctor.System(doctor.SystemConfig{
		Self: toolIdentity(tool.Name), DiscoveryPort: tool.Port, DiscoveryTimeout: tool.Timeout, Engine: engineCfg,
	})
	report, err := doctor.Run(c.Context, doctorConfig(c, tool), probes)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		err = printJSON(c.App.Writer, reportJSON(report))
	} else {
		printReport(c.App.Writer, report)
	}
	if err == nil && report.Count(doctor.Failure) > 0 {
		err = exitCode(1)
	}
	return err
}

// toolIdentity is what this program says of itself to nodes; who dials sets the role.
func toolIdentity(clusterName string) securelink.Identity {
	return securelink.Identity{Role: securelink.RoleTool, NodeID: "mlxcel", Cluster: clusterName, Version: version}
}

func doctorConfig(c *cli.Context, tool *clusterflags.Tool) doctor.Config {
	cfg := doctor.Config{
		Clustered: tool.Clustered, File: tool.File, FileErr: tool.FileErr, Topology: tool.Topology, Own: tool.ControlAddr,
		MDNS: tool.MDNS, Secret: tool.Secret, Model: c.String("model"),
		Coordinator: len(tool.Peers) > 0, // only a coordinator names its peers
	}
	for _, peer := range tool.Peers {
		cfg.Peers = append(cfg.Peers, doctor.Peer{ID: peer, Address: peer})
	}
	if tool.FileErr == nil && tool.Topology != nil {
		placeInFile(&cfg, tool)
	} else {
		control := tool.ControlAddr
		if control == "" {
			control = net.JoinHostPort("127.0.0.1", strconv.Itoa(cluster.DefaultControlPort))
		}
		cfg.Endpoints = append(cfg.Endpoints, doctor.Endpoint{Network: "tcp", Address: control, Flag: cluster.FlagControlAddr, Node: true})
	}
	if tool.MDNS {
		beacons := net.JoinHostPort("0.0.0.0", strconv.Itoa(tool.Port))
		cfg.Endpoints = append(cfg.Endpoints, doctor.Endpoint{Network: "udp", Address: beacons, Flag: "--cluster-discovery-port"})
	}
	if c.IsSet("port") {
		http := net.JoinHostPort(strings.Trim(c.String("host"), "[]"), strconv.Itoa(c.Int("port")))
		cfg.Endpoints = append(cfg.Endpoints, doctor.Endpoint{Network: "tcp", Address: http, Flag: cluster.FlagPort})
	}
	return cfg
}

// placeInFile takes this node and its peers from the cluster's TOML. Where nothing says which node this is, every address that is
// this machine's counts.
func placeInFile(cfg *doctor.Config, tool *clusterflags.Tool) {
	if tool.Node != nil {
		cfg.Node, cfg.Coordinator = tool.Node.ID, tool.Node.Role == cluster.RoleHybrid
		if cfg.Own == "" {
			cfg.Own = tool.Node.Address
		}
		cfg.Endpoints = append(cfg.Endpoints, doctor.Endpoint{Network: "tcp", Address: cfg.Own, Flag: tool.File, Node: true})
	}
	for _, n := range tool.Topology.Nodes {
		if n.ID == cfg.Node {
			continue
		}
		if tool.Node == nil {
			cfg.Endpoints = append(cfg.Endpoints, doctor.Endpoint{Network: "tcp", Address: n.Address, Flag: tool.File, Node: true, Anywhere: true})
		}
		// Nobody dials the coordinator, so it may start last.
		cfg.Peers = append(cfg.Peers, doctor.Peer{ID: n.ID, Address: n.Address, Optional: n.Role == cluster.RoleHybrid})
	}
}

// levelMarks are the levels as a reader sees them.
var levelMarks = map[doctor.Level]string{doctor.OK: "ok", doctor.Warning: "WARNING", doctor.Failure: "FAILURE"}

// printReport writes one line for each finding, and its remedy below.
func printReport(w io.Writer, report doctor.Report) {
	width := 0
	for _, f := range report {
		width = max(width, len(f.Name))
	}
	indent := strings.Repeat(" ", 9+width+2)
	for _, f := range report {
		fmt.Fprintf(w, "%-9s%-*s  %s\n", levelMarks[f.Level], width, f.Name, indented(f.Text, indent))
		if f.Remedy != "" {
			fmt.Fprintf(w, "%sremedy: %s\n", indent, indented(f.Remedy, indent))
		}
	}
	fmt.Fprintf(w, "\n%s, %s\n", counted(report.Count(doctor.Failure), "failure"), counted(report.Count(doctor.Warning), "warning"))
}

func indented(text, indent string) string { return strings.ReplaceAll(text, "\n", "\n"+indent) }

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func reportJSON(report doctor.Report) map[string]any {
	return map[string]any{
		"findings": report, "failures": report.Count(doctor.Failure), "warnings": report.Count(doctor.Warning),
	}
}
