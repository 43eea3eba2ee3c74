package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/mlxcel/mlxcel/cmd/internal/clusterflags"
	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup"
	"github.com/mlxcel/mlxcel/host/doctor"
	"github.com/mlxcel/mlxcel/host/partition"
	"github.com/mlxcel/mlxcel/host/securelink"
	"github.com/mlxcel/mlxcel/host/transport"
	"github.com/mlxcel/mlxcel/sdk"
	"github.com/urfave/cli/v2"
)

// statusTimeout bounds the whole question.
const statusTimeout = 10 * time.Second

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:   "status",
		Usage:  "ask a coordinator, or a peer, for its view of the cluster",
		Flags:  append(clusterflags.StatusFlags(), &cli.BoolFlag{Name: "json", Usage: "print one JSON object"}),
		Action: runStatus,
	}
}

func runStatus(c *cli.Context) error {
	if c.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: name the node with --cluster-control-addr", c.Args().First())
	}
	tool, err := clusterflags.ReadTool(c)
	if err != nil {
		return err
	}
	address, err := tool.Ask()
	if err != nil {
		return err
	}
	secret, err := cluster.LoadSecret(tool.Secret)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(c.Context, statusTimeout)
	defer cancel()
	answer, err := bringup.Ask(ctx, transport.Dialer{Secure: securelink.Config{Secret: secret, Self: toolIdentity(tool.Name)}}, doctor.Reachable(address))
	if err != nil {
		if c.Context.Err() != nil {
			return context.Cause(c.Context)
		}
		if ctx.Err() != nil {
			err = ctx.Err() // whatever noticed it first
		}
		why := doctor.Unreachable("", address, err)
		return fmt.Errorf("%s: %s", why.Text, why.Remedy)
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, statusJSONOf(answer))
	}
	return printStatus(c.App.Writer, answer)
}

// statusJSON is the output of cluster status --json.
type statusJSON struct {
	Asked     string        `json:"asked"` // address
	RoundTrip time.Duration `json:"round_trip_ns"`
	Skew      time.Duration `json:"clock_skew_ns"` // the node's clock minus this one's
	bringup.Status
	Stages []stageJSON `json:"stages"`
}

// stageJSON spells the layers as plan and generate do.
type stageJSON struct {
	bringup.StageStatus
	Layers string `json:"layers"` // inclusive
	Start  int    `json:"start"`  // half-open
	End    int    `json:"end"`
}

func statusJSONOf(a *bringup.Answer) statusJSON {
	out := statusJSON{Asked: a.Address, RoundTrip: a.RoundTrip, Skew: a.Skew, Status: a.Status, Stages: []stageJSON{}}
	for _, s := range a.Stages {
		out.Stages = append(out.Stages, stageJSON{s, layersText(s.Layers), s.Layers.Start, s.Layers.End})
	}
	return out
}

func layersText(r sdk.LayerRange) string {
	if r.End <= r.Start {
		return "-"
	}
	return partition.FormatRanges([]sdk.LayerRange{r})
}

func printStatus(w io.Writer, a *bringup.Answer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "cluster\t%s\n", a.Cluster)
	fmt.Fprintf(table, "node\t%s, %s at %s, version %s\n", a.Node, a.Role, a.Address, a.Version)
	fmt.Fprintf(table, "phase\t%s, bring-up %d\n", a.Phase, a.Epoch)
	fmt.Fprintf(table, "model\t%s\n", orDash(a.Model))
	fmt.Fprintf(table, "round trip\t%s, clock %s off\n", short(a.RoundTrip), short(a.Skew.Abs()))
	if a.Failure != "" {
		fmt.Fprintf(table, "failure\t%s\n", indented(a.Failure, "            "))
	}
	if err := table.Flush(); err != nil || len(a.Stages) == 0 {
		return err
	}
	fmt.Fprintln(w)
	fmt.Fprintln(table, "STAGE\tNODE\tADDRESS\tLAYERS\tPHASE\tHEALTH\tWEIGHTS\tKV BUDGET\tMEMORY\tROUND TRIP\tLINK TO NEXT\tSENT\tRECEIVED\tBUSY")
	for _, s := range a.Stages {
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%.0f%%\n",
			s.Stage, s.Node, addressText(s), layersText(s.Layers), phaseText(s), orDash(s.Health), partition.FormatSize(s.WeightBytes),
			limitText(s.KVBudget), limitText(s.BudgetBytes), short(s.RoundTrip), linkText(s), partition.FormatSize(s.Sent),
			partition.FormatSize(s.Received), 100*s.BusyFraction)
	}
	return table.Flush()
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

// addressText is the address that the operator gave, with the one that answered where that is another.
func addressText(s bringup.StageStatus) string {
	if s.Answered == "" || s.Answered == s.Address {
		return orDash(s.Address)
	}
	return fmt.Sprintf("%s (%s)", s.Address, s.Answered)
}

func phaseText(s bringup.StageStatus) string {
	if s.Phase == bringup.PhaseLoading && s.LoadTotal > 0 {
		return fmt.Sprintf("%s %d%%", s.Phase, 100*s.Loaded/s.LoadTotal)
	}
	return string(s.Phase)
}

func limitText(n int64) string {
	if n == 0 {
		return "-"
	}
	return partition.FormatSize(n)
}

func linkText(s bringup.StageStatus) string {
	if s.LinkAddress == "" {
		return "-"
	}
	return fmt.Sprintf("%s %s", s.LinkAddress, short(s.LinkRoundTrip))
}

// short writes a duration with as many digits as a reader needs; 0 is not measured yet.
func short(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(10 * time.Microsecond).String()
	}
	return d.Round(10 * time.Millisecond).String()
}
